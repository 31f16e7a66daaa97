/* The first header of files whose loops gain from the widest vectors, which GCC avoids by default. */
#ifndef PENSTOCK_WIDE_H
#define PENSTOCK_WIDE_H

#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#endif
