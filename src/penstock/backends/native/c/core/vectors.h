/* The widest vectors that the processor has, for types with the attribute vector_size, and numbers that
   depend on them. */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif

/* One of three numbers, for vectors of 64, 32 and 16 bytes. */
#define BY_WIDTH(widest, wide, narrow) (VECTOR_BYTES == 64 ? widest : VECTOR_BYTES == 32 ? wide : narrow)

#endif
