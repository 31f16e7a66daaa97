/* The widest vectors that the processor has, for types with the attribute vector_size. */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif

#endif
