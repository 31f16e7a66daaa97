/* Functions of float64 that compilers can vectorize, as in math32.h. Errors are at most 3 ulp unless stated
   otherwise. */
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

/* e^r - 1 for the remainder r of x after n times log 2, and half of 2^n, as in math32.h, which is 0 where its
   exponent is not that of a normal number. A Taylor series on |r| < 0.35; the first omitted term is below 2^-58. */
static inline double exp_of_rest64(double x, double *half)
{
    double clipped = x < -708.39 ? -708.39 : x;
    clipped = clipped > 709.79 ? 710.0 : clipped;
    const double rounder = 6755399441055744.0; /* as ROUNDER of math32.h */
    double rounded = fused64(clipped, 1.4426950408889634, rounder), n = rounded - rounder;
    double r = fused64(n, -1.90821492927058770002e-10, fused64(n, -6.93147180369123816490e-01, clipped));
    double p = POLYNOMIAL_6(fused64, r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                            1.0 / 362880.0, 1.0 / 40320.0);
    p = POLYNOMIAL_7(fused64, r, p, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
    int64_t bits;
    memcpy(&bits, &rounded, 8);
    bits = (int64_t)((uint64_t)bits << 52) + ((int64_t)1022 << 52);
    memcpy(half, &bits, 8);
    return fused64(p * r, r, r);
}

/* Results below 2^-1021 are 0. */
static inline double exp64(double x)
{
    double half, rest = exp_of_rest64(x, &half);
    return (rest + 1.0) * half * 2.0;
}

static inline double expm164(double x)
{
    double half, rest = exp_of_rest64(x, &half);
    return fused64(half, rest, half - 0.5) * 2.0;
}

static inline double tanh64(double x)
{
    double twice = -2.0 * fabs(x), half;
    double rest = exp_of_rest64(twice, &half);
    double e = fused64(half, rest, half - 0.5); /* as tanh32 */
    return copysign(e / (1.0 + e), x);
}

/* For x = m 2^e with m between sqrt(1/2) and sqrt(2), by the atanh series of s = (m - 1) / (m + 1), whose first
   omitted term is relatively below 2^-60: log m = f - f^2 / 2 + s (f^2 / 2 + rest), where f = m - 1. */
static inline double log64(double x)
{
    const uint64_t root = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000;
    const int tiny = x < 2.2250738585072014e-308;
    const double scaled = tiny ? x * 18014398509481984.0 : x;
    uint64_t bits;
    memcpy(&bits, &scaled, 8);
    bits += one - root;
    /* The exponent as a float64: placed in the low bits of 2^52, which is subtracted. */
    const uint64_t exponent = bits >> 52 | 0x4330000000000000, part = (bits & 0x000fffffffffffff) + root;
    double e, m;
    memcpy(&e, &exponent, 8);
    memcpy(&m, &part, 8);
    e -= 4503599627370496.0 + 1023.0 + (tiny ? 54.0 : 0.0);
    const double f = m - 1.0, s = f / (m + 1.0), z = s * s, square = 0.5 * f * f;
    double p = POLYNOMIAL_4(fused64, z, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15);
    p = POLYNOMIAL_7(fused64, z, p, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3) * z;
    const double rest = fused64(e, 1.90821492927058770002e-10, s * (square + p));
    double result = fused64(e, 6.93147180369123816490e-01, f - (square - rest));
    result = x == 0.0 ? -INFINITY : result;
    result = x > 1.7976931348623157e308 ? x : result;
    return x < 0.0 || x != x ? NAN : result;
}

static inline double log1p64(double x)
{
    const double u = 1.0 + x, v = u - 1.0, exact = log64(u) * (x / v), result = v == 0.0 ? x : exact; /* as log1p32 */
    return x > 1.7976931348623157e308 ? x : result;
}

/* For x > 0 that is not subnormal; the relative error is at most 2^-42. The atanh series of (m - 1) / (m + 1), where
   m is between sqrt(1/2) and sqrt(2). */
static inline double log2_coarse64(double x)
{
    const uint64_t root = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000;
    uint64_t bits;
    memcpy(&bits, &x, 8);
    bits += one - root;
    /* The exponent as a float64: placed in the low bits of 2^52, which is subtracted. */
    const uint64_t exponent = bits >> 52 | 0x4330000000000000, rest = (bits & 0x000fffffffffffff) + root;
    double e, m;
    memcpy(&e, &exponent, 8);
    memcpy(&m, &rest, 8);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    const double p = POLYNOMIAL_7(fused64, z, 2.0 / 15, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3);
    return fused64(s * fused64(z, p, 2.0), 1.4426950408889634, e - (4503599627370496.0 + 1023.0));
}

/* For |x| < 1000, by a Taylor series; the relative error is at most 2^-34. */
static inline double exp2_coarse64(double x)
{
    const double rounder = 6755399441055744.0, rounded = x + rounder;
    const double r = (x - (rounded - rounder)) * 0.6931471805599453;
    double p = POLYNOMIAL_9(fused64, r, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
    uint64_t bits, own;
    memcpy(&bits, &rounded, 8);
    memcpy(&own, &p, 8);
    own += bits << 52;
    memcpy(&p, &own, 8);
    return p;
}

/* As powf, correctly rounded in all but about one of several thousand cases. */
static inline float pow32(float x, float y)
{
#ifdef __FMA__
    const double size = fabsf(x);
    double log = log2_coarse64(size);
    log = size == 0.0 ? -1e300 : log;
    log = size > 3.5e38 ? 1e300 : log;
    double t = y * log;
    t = t < -160.0 ? -160.0 : t;
    t = t > 160.0 ? 160.0 : t;
    float result = (float)exp2_coarse64(log == 0.0 ? 0.0 : t);
    const float half = y * 0.5f;
    const int whole = rintf(y) == y, odd = whole & (rintf(half) != half);
    result = odd && bits_of(x) < 0 ? -result : result;
    result = !whole && x < 0.0f && x > -INFINITY ? NAN : result;
    result = x != x || y != y ? x + y : result;
    return y == 0.0f || x == 1.0f ? 1.0f : result;
#else
    return powf(x, y); /* which is faster than vectors of two */
#endif
}

#endif
