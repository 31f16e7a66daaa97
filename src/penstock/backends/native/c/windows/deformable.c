/* Deformable convolution: taps of the kernel are displaced by offsets. An item is a block of PANEL positions of one
   image, for at most FILTERS filters: the inputs of some channels are interpolated into the columns of a panel, and
   multiplied by the weights. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "native.h"
#include "products.h"

enum { FILTERS = 256, TERMS = 192 };

#define REAL float
#define OF(name) name
#include "deformable_of.h"
#undef REAL
#undef OF
#define REAL double
#define OF(name) name##_float64
#include "deformable_of.h"

KERNELS(deformable, KERNEL(deformable, deformable), KERNEL(deformable_float64, deformable_float64))
