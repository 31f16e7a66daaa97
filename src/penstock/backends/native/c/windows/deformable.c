/* Deformable convolution: taps of the kernel are displaced by offsets. An item is a block of PANEL positions of one
   image, for at most FILTERS filters: the inputs of some channels are interpolated into the columns of a panel, and
   multiplied by the weights. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "math64.h"
#include "native.h"
#include "products.h"

enum { FILTERS = 256, TERMS = 192 };

#define REAL float
#define OF(name) name
#define FUSED fused32
#include "deformable_of.h"
#undef REAL
#undef OF
#undef FUSED
#define REAL double
#define OF(name) name##_float64
#define FUSED fused64
#include "deformable_of.h"

KERNELS(deformable, KERNEL(deformable, deformable), KERNEL(deformable_float64, deformable_float64))
