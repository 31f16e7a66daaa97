/* Inverses and determinants of small square matrices, by Gaussian elimination with partial pivoting. Compiled with
   contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include <math.h>
#include <string.h>
#include "families.h"

struct inverse {
    const void *x;
    void *y, *work;
    int64_t count, each, side; /* matrices in all, and per item */
};

enum { MOST_SIDE = 256 };

#define REAL float
#define OF(name) name##_float32
#include "inverse_of.h"
#undef REAL
#undef OF
#define REAL double
#define OF(name) name##_float64
#include "inverse_of.h"

KERNELS(inverse, KERNELS_OF_FLOATS(inverse, inverse), KERNELS_OF_FLOATS(det, inverse))
