/* Products of tiles of matrices, and of a few rows with a matrix packed into panels of 32 columns, [panel][k][32],
   padded with zeros. Files that include this are compiled with contraction to fused multiply-add. */
#ifndef PENSTOCK_PRODUCTS_H
#define PENSTOCK_PRODUCTS_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "native.h"
#include "vectors.h"

/* Accumulators of a tile that fit in registers, and the most vectors of a tile. */
enum { PANEL = 32, TILE_SUMS = BY_WIDTH(24, 12, 12), TILE_VECTORS = 4 };

/* The mask of the first `count` lanes of a vector, or of all. */
#if defined(__AVX512F__)
#define SOME(count) (__mmask16)((1u << smaller(count, OF(LANES)) * sizeof(REAL) / 4) - 1)
#elif defined(__AVX2__)
#define SOME(count)                                                              \
    _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count) * (int)(sizeof(REAL) / 4)), \
                       _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#endif

/* Those of float have plain names. */
#define REAL float
#define OF(name) name
#include "products_of.h"
#undef REAL
#undef OF
#define REAL double
#define OF(name) name##_float64
#include "products_of.h"
#undef REAL
#undef OF

#endif
