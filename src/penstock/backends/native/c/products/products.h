/* Products of tiles of matrices, and of a few rows with a matrix in panels of 32 columns, [panel][k][32],
   padded with zeros. Files that include this are compiled with contraction to fused multiply-add. */
#ifndef PENSTOCK_PRODUCTS_H
#define PENSTOCK_PRODUCTS_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include "native.h"
#include "vectors.h"

/* Registers have room for so many sums of a tile, of so many vectors at most. */
enum { PANEL = 32, TILE_SUMS = BY_WIDTH(24, 12, 12), TILE_VECTORS = 4 };

/* Those of float have plain names. */
#define MOST_ROWS 8
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
#undef MOST_ROWS

#endif
