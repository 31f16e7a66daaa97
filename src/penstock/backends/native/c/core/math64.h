/* Functions of float64 that compilers can vectorize, as in math32.h. */
#ifndef PENSTOCK_MATH64_H
#define PENSTOCK_MATH64_H

#include "math32.h"

static inline double fused64(double x, double y, double z)
{
#ifdef __FMA__
    return __builtin_fma(x, y, z);
#else
    return x * y + z;
#endif
}

/* Taylor's series on |r| < 0.35, where the first term that is left out is below 2^-58. Results below
   2^-1021 are 0. */
static inline double exp64(double x)
{
    double clipped = x < -708.39 ? -708.39 : x;
    clipped = clipped > 709.79 ? 710.0 : clipped;
    const double rounder = 6755399441055744.0; /* as ROUNDER of math32.h */
    double rounded = fused64(clipped, 1.4426950408889634, rounder), n = rounded - rounder;
    double r = fused64(n, -1.90821492927058770002e-10, fused64(n, -6.93147180369123816490e-01, clipped));
    double p = POLYNOMIAL_6(fused64, r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                            1.0 / 362880.0, 1.0 / 40320.0);
    p = POLYNOMIAL_7(fused64, r, p, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
    p = fused64(p * r, r, r) + 1.0;
    int64_t bits;
    memcpy(&bits, &rounded, 8);
    bits = (int64_t)((uint64_t)bits << 52) + ((int64_t)1022 << 52);
    double power;
    memcpy(&power, &bits, 8);
    return p * power * 2.0;
}

#endif
