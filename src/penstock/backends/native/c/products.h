/* Products of a few rows with a matrix in panels of 32 columns, [panel][k][32], padded with zeros. Files
   that include this are compiled with contraction to fused multiply-add. */
#ifndef PENSTOCK_PRODUCTS_H
#define PENSTOCK_PRODUCTS_H

#include <stdint.h>
#include <string.h>
#include "native.h"
#include "vectors.h"

enum { PANEL = 32, ROWS_OF_FLOATS = BY_WIDTH(8, 2, 1) };

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
