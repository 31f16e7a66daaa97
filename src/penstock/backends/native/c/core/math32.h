/* Functions of float32 that compilers can vectorize: without branches, calls and tables. Errors are at most 2 ulp
   unless stated otherwise; NaNs are propagated.

   The polynomials of exp, log, tanh, sin, cos and asin are those of the Cephes library (S. Moshier, single
   precision); those of expm1 and erf are minimax fits. */
#ifndef PENSTOCK_MATH32_H
#define PENSTOCK_MATH32_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Convert to bfloat16, to nearest with ties to even; NaN is preserved. */
static inline uint16_t bfloat_of(float x)
{
    const uint32_t bits = (uint32_t)bits_of(x);
    return (uint16_t)(x != x ? (bits >> 16 & 0x8000) | 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* x y + z; rounded once where the processor has fused multiply-add. */
static inline float fused32(float x, float y, float z)
{
#ifdef __FMA__
    return __builtin_fmaf(x, y, z);
#else
    return x * y + z;
#endif
}

/* A polynomial of x by Horner's scheme, the coefficient of the highest power first. `fused` computes each step, such
   as `fused32`. */
#define POLYNOMIAL_2(fused, x, p, a) fused(p, x, a)
#define POLYNOMIAL_3(fused, x, p, a, ...) POLYNOMIAL_2(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_4(fused, x, p, a, ...) POLYNOMIAL_3(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_5(fused, x, p, a, ...) POLYNOMIAL_4(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_6(fused, x, p, a, ...) POLYNOMIAL_5(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_7(fused, x, p, a, ...) POLYNOMIAL_6(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_8(fused, x, p, a, ...) POLYNOMIAL_7(fused, x, fused(p, x, a), __VA_ARGS__)
#define POLYNOMIAL_9(fused, x, p, a, ...) POLYNOMIAL_8(fused, x, fused(p, x, a), __VA_ARGS__)

/* Adding this to |x| < 2^22 and subtracting it again rounds x to an integer, which is in the lowest bits of the
   sum. */
static const float ROUNDER = 12582912.0f;

/* e^r - 1 for the remainder r of x after n times log 2, and 2^(n + bias - 127), which is 0 where its exponent is not
   that of a normal number. The polynomial is a minimax fit of e^r, with an error of 3.1e-9. */
static inline float exp_of_rest(float x, int32_t bias, float *power)
{
    float rounded = fused32(x, 1.44269504f, ROUNDER), n = rounded - ROUNDER;
    float r = fused32(n, 2.12194440e-4f, fused32(n, -0.693359375f, x));
    float p = POLYNOMIAL_5(fused32, r, 1.38143204e-3f, 8.36885108e-3f, 4.16684011e-2f, 1.66665195e-1f,
                           4.99999934e-1f);
    *power = float_of((int32_t)((uint32_t)bits_of(rounded) << 23) + (bias << 23));
    return fused32(p * r, r, r);
}

/* Return half of 2^n: 2^n may overflow where the result is finite. */
static inline float exp_of_any_rest(float x, float *half)
{
    float clipped = x < -87.3f ? -87.3f : x;
    return exp_of_rest(clipped > 89.0f ? 89.0f : clipped, 126, half);
}

/* Results below 2^-125 are 0. */
static inline float exp32(float x)
{
    float half, rest = exp_of_any_rest(x, &half);
    return fused32(rest, half, half) * 2.0f;
}

/* For x <= 0; results below 2^-126 are 0. */
static inline float exp_negative32(float x)
{
    float power, rest = exp_of_rest(x < -88.0f ? -88.0f : x, 127, &power);
    return fused32(rest, power, power);
}

static inline float expm132(float x)
{
    float half, rest = exp_of_any_rest(x, &half);
    return fused32(half, rest, half - 0.5f) * 2.0f;
}

static inline float log32(float x)
{
    int tiny = x < 1.17549435e-38f;
    float scaled = tiny ? x * 8388608.0f : x;
    int32_t bits = bits_of(scaled);
    float e = (float)((bits >> 23) - 126 - (tiny ? 23 : 0));
    float m = float_of((bits & 0x007fffff) | 0x3f000000);
    int low = m < 0.707106781f;
    e -= low ? 1.0f : 0.0f;
    m = (low ? m + m : m) - 1.0f;
    float z = m * m;
    float p = POLYNOMIAL_9(fused32, m, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                           1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
    float y = fused32(e, -2.12194440e-4f, p * m * z);
    y = fused32(z, -0.5f, y);
    float result = fused32(e, 0.693359375f, m + y);
    result = x == 0.0f ? -INFINITY : result;
    result = x > 3.40282347e38f ? x : result;
    return x < 0.0f || x != x ? NAN : result;
}

/* log(1 + x): the factor x / (u - 1) corrects the rounding of u = 1 + x. */
static inline float log1p32(float x)
{
    float u = 1.0f + x, v = u - 1.0f;
    float exact = log32(u) * (x / v);
    float result = v == 0.0f ? x : exact;
    return x > 3.40282347e38f ? x : result;
}

/* (1 - e) / (1 + e), where e = exp(-2 |x|): accurate for small x, as e - 1 is. */
static inline float tanh32(float x)
{
    float twice = -2.0f * fabsf(x), half;
    float rest = exp_of_rest(twice < -20.0f ? -20.0f : twice, 126, &half); /* the result is 1 from there on */
    float e = fused32(half, rest, half - 0.5f); /* half of e - 1 */
    return copysignf(e / (1.0f + e), x);
}

static inline float sigmoid32(float x)
{
    return 1.0f / (1.0f + exp32(-x));
}

static inline float erf32(float x)
{
    float t = fabsf(x), s = x * x;
    float p = POLYNOMIAL_6(fused32, s, -6.22242281679064e-4f, 5.035872105509043e-3f, -2.6793954893946648e-2f,
                           1.1282524466514587e-1f, -3.761255741119385e-1f, 1.1283791065216064f);
    float near = p * x;
    t = t > 4.0f ? 4.0f : t; /* from there on the result rounds to 1 */
    float q = POLYNOMIAL_7(fused32, t, -2.0099576795473695e-4f, 3.0922882724553347e-3f, -2.2420203313231468e-2f,
                           1.043274775147438e-1f, 6.367372274398804e-1f, 1.1279361248016357f, 1.3357798161450773e-4f);
    float far = copysignf(1.0f - exp32(-q), x);
    float result = fabsf(x) < 0.875f ? near : far;
    return x != x ? x : result;
}

/* x times the normal cumulative distribution of x; the error is at most 1.2e-7 |x|. The distribution is e / 2 for
   negative x, and 1 - e / 2 for others, where e = 2^-q for a polynomial q of |x|, a minimax fit of the result; from
   5.5 on, e is 0. */
static inline float gelu32(float x)
{
    float t = fabsf(x), inside = t < 5.5f ? t : 5.5f;
    float q = POLYNOMIAL_8(fused32, inside, 2.334948860e-06f, -3.373781527e-05f, 1.612938329e-04f, 1.917035437e-04f,
                           -7.126865144e-03f, 5.253361313e-02f, 4.591982816e-01f, 1.151106042e+00f) * inside;
    float rounded = ROUNDER - q, r = (ROUNDER - rounded) - q;
    float p = POLYNOMIAL_7(fused32, r, 1.53458122e-4f, 1.33999314e-3f, 9.61848896e-3f, 5.55032878e-2f, 2.40226469e-1f,
                           6.93147206e-1f, 1.0f);
    float e = float_of(bits_of(p) + (int32_t)((uint32_t)bits_of(rounded) << 23));
    e = t < 5.5f ? e : 0.0f;
    return 0.5f * x * (x < 0.0f ? e : 2.0f - e);
}

/* For |x| <= LARGEST_ANGLE; shift is 0 for sin and 1 for cos. */
static const float LARGEST_ANGLE = 8192.0f;

static inline float sincos32(float x, int32_t shift)
{
    float rounded = fused32(x, 0.636619772f, ROUNDER), n = rounded - ROUNDER; /* quarter turns */
    float r = fused32(n, -1.5703125f, x);
    r = fused32(n, -4.837512969970703e-4f, r);
    r = fused32(n, -7.549789415861596e-8f, r);
    int32_t quarter = bits_of(rounded) + shift;
    float z = r * r;
    float sine = fused32(-1.9515295891e-4f, z, 8.3321608736e-3f);
    sine = fused32(fused32(sine, z, -1.6666654611e-1f) * z, r, r);
    float cosine = fused32(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    cosine = fused32(cosine, z, 4.166664568298827e-2f);
    cosine = fused32(cosine * z, z, fused32(z, -0.5f, 1.0f));
    float result = quarter & 1 ? cosine : sine;
    return quarter & 2 ? -result : result;
}

/* pi / 2 is HALF_PI - HALF_PI_REST. */
static const float HALF_PI = 1.57079637f, HALF_PI_REST = 4.37113883e-8f;

/* The arc sine of |x| or, where |x| > 0.5, of sqrt((1 - |x|) / 2): then asin |x| is pi / 2 minus twice the result. */
static inline float half_asin32(float x)
{
    float t = fabsf(x), z = t > 0.5f ? 0.5f - 0.5f * t : x * x, s = t > 0.5f ? sqrtf(z) : t;
    float p = POLYNOMIAL_5(fused32, z, 4.2163199048e-2f, 2.4181311049e-2f, 4.5470025998e-2f, 7.4953002686e-2f,
                           1.6666752422e-1f);
    return fused32(p * z, s, s);
}

/* The error is at most 2.4 ulp. */
static inline float asin32(float x)
{
    float y = half_asin32(x);
    return copysignf(fabsf(x) > 0.5f ? HALF_PI - (2.0f * y + HALF_PI_REST) : y, x);
}

static inline float acos32(float x)
{
    float y = half_asin32(x), far = x > 0.5f ? 2.0f * y : 2.0f * (HALF_PI - (y + HALF_PI_REST));
    return fabsf(x) > 0.5f ? far : HALF_PI - (copysignf(y, x) + HALF_PI_REST);
}

static inline float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    float scaled = float_of((int32_t)rest) * 5.192296858534828e33f; /* 2^112, exact for subnormals */
    uint32_t bits = rest >= 0x0f800000 ? rest | 0x7f800000 : (uint32_t)bits_of(scaled);
    bits |= rest > 0x0f800000 ? 0x00400000 : 0;
    return float_of((int32_t)(sign | bits));
}

static inline uint16_t half_of_float(float x)
{
    uint32_t all = (uint32_t)bits_of(x), sign = all >> 16 & 0x8000, bits = all & 0x7fffffff;
    /* Subnormals: adding 0.5 rounds to multiples of 2^-24. */
    uint32_t small = (uint32_t)bits_of(float_of((int32_t)bits) + 0.5f) - 0x3f000000;
    uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    uint32_t half = bits < 0x38800000 ? small : normal;
    half = bits >= 0x477ff000 ? 0x7c00 : half;
    half = bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 0x3ff) : half;
    return (uint16_t)(sign | half);
}

#endif
