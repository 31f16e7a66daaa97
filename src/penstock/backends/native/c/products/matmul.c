/* Products y = alpha a b + beta c with any strides. An item is a group of rows and a strip of columns of one product:
   DEPTH rows of b, as many columns as fit in registers, are multiplied in place, or packed first if there are enough
   rows to repay that. Partial sums accumulate in y, which is set to beta c first. Compiled with contraction to fused
   multiply-add. */

// Compiler options: -ffp-contract=fast
#include "arguments.h"
#include "families.h"
#include "products.h"

/* Strip widths are multiples of UNIT bytes; at most DIRECT rows read b in place, and at most SHARED rows share a
   packed copy, whose source is prefetched AHEAD rows early. */
enum { DEPTH = 256, UNIT = 64, DIRECT = 64, FEW_ROWS = 4, AHEAD = 16, SHARED = 256 };

#define MOST_ROWS 12
#define REAL float
#define OF(name) name
#define INDEX int32_t
#define LANES_OF_REAL LANES_32
#include "matmul_of.h"
/* Integers wrap; most integer products are small. */
#undef MOST_ROWS
#define MOST_ROWS 4
#define REAL uint32_t
#define OF(name) name##_int32
#include "products_of.h"
#include "matmul_of.h"
#undef INDEX
#undef LANES_OF_REAL
#undef MOST_ROWS
#define MOST_ROWS 12
#define REAL double
#define OF(name) name##_float64
#define INDEX int64_t
#define LANES_OF_REAL LANES_64
#include "matmul_of.h"
#undef MOST_ROWS
#define MOST_ROWS 4
#define REAL uint64_t
#define OF(name) name##_int64
#include "products_of.h"
#include "matmul_of.h"

KERNELS(matmul, {"product_float32", product, sizeof(struct product) / 8, NULL}, KERNEL(product_float64, product),
        KERNEL(product_int32, product), KERNEL(product_int64, product))
