/* Chains of elementwise operations in one pass: a program runs on one tile after another, so that
   intermediate results stay in the cache.

   A register is a tile of 2 KiB; register 0 is the result. An instruction reads up to three registers
   and writes one; each is a loop that the compiler vectorizes. Inputs laid out as the result are
   read in place, others are copied into a register; those that are the same for each tile only
   once. */
// GCC options: -fno-thread-jumps
#include "wide.h"
#include "families.h"
#include "math32.h"
#include "math64.h"
#include "native.h"
#include "programs.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

/* Conversions of float16 and float32, by the processor's instructions if it has them; NaNs become quiet. The arrays
   must not overlap. */
static inline void floats_of_halves(float *restrict to, const uint16_t *restrict from, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++)
        to[i] = float_of_half(from[i]);
}

static inline void halves_of_floats(uint16_t *restrict to, const float *restrict from, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < n; i++)
        to[i] = half_of_float(from[i]);
}

/* Operations as X(name, result type, operand type, expression of a, b and c). */
#define FLOATS(X)                                                                                 \
    BOTH(X, exp, exp32(a), exp64(a))                                                              \
    BOTH(X, expm1, expm132(a), expm164(a))                                                        \
    BOTH(X, log, log32(a), log64(a))                                                              \
    BOTH(X, log1p, log1p32(a), log1p64(a))                                                        \
    BOTH(X, tanh, tanh32(a), tanh64(a))                                                           \
    BOTH(X, sigmoid, sigmoid32(a), 1 / (1 + exp64(-a)))                                           \
    BOTH(X, asin, asin32(a), asin(a))                                                             \
    BOTH(X, acos, acos32(a), acos(a))                                                             \
    BOTH(X, erf, erf32(a), erf(a))                                                                \
    BOTH(X, sqrt, sqrtf(a), sqrt(a))                                                              \
    BOTH(X, floor, floorf(a), floor(a))                                                           \
    BOTH(X, ceil, ceilf(a), ceil(a))                                                              \
    BOTH(X, rint, rintf(a), rint(a))                                                              \
    BOTH(X, pow, pow32(a, b), pow(a, b))                                                          \
    BOTH(X, div, a / b, a / b)                                                                    \
    X(gelu_f4, float, float, gelu32(a))                                                           \
    X(gated_f4, float, float, a / (1.0f + exp32(-b)))                                             \
    X(leaky_f4, float, float, a < 0 ? a * b : a)                                                  \
    X(sin_f8, double, double, sin(a))                                                             \
    X(cos_f8, double, double, cos(a))                                                             \
    X(div_i4, int32_t, int32_t, b == 0 ? 0 : b == -1 ? 0 - a : (int32_t)((double)a / b))          \
    X(div_i8, int64_t, int64_t, b == 0 ? 0 : b == -1 ? 0 - a : a / b)                             \
    X(floordiv_i4, int32_t, int32_t, b == -1 ? 0 - a : (int32_t)floor((double)a / b))             \
    X(floordiv_i8, int64_t, int64_t, b == 0 ? 0 : b == -1 ? 0 - a : a / b - (a % b != 0 && (a ^ b) < 0)) \
    X(mod_i4, int32_t, int32_t, b == 0 ? 0 : (int32_t)(a - floor((double)a / b) * b))             \
    X(mod_i8, int64_t, int64_t, b == 0 || b == -1 ? 0 : a % b + (a % b != 0 && (a ^ b) < 0 ? b : 0)) \
    X(fmod_i4, int32_t, int32_t, b == 0 ? 0 : (int32_t)(a - trunc((double)a / b) * b))            \
    X(fmod_i8, int64_t, int64_t, b == 0 || b == -1 ? 0 : a % b)                                   \
    X(divisor_i4, int32_t, int32_t, (failed |= a == 0, a))                                        \
    X(divisor_i8, int64_t, int64_t, (failed |= a == 0, a))

/* A function of both float types, and its expression for each. */
#define BOTH(X, name, single, twice)                                                              \
    X(name##_f4, float, float, single)                                                            \
    X(name##_f8, double, double, twice)

#define ARITHMETIC(X, suffix, type)                                                               \
    COMPARABLE(X, suffix, type)                                                                   \
    X(sign_##suffix, type, type, a != a ? a : (type)((a > 0) - (a < 0)))

#define COMPARABLE(X, suffix, type)                                                               \
    X(add_##suffix, type, type, a + b)                                                            \
    X(sub_##suffix, type, type, a - b)                                                            \
    X(neg_##suffix, type, type, -a)                                                               \
    X(abs_##suffix, type, type, a > 0 ? a : 0 - a)                                                \
    X(mul_##suffix, type, type, a *b)                                                             \
    X(max_##suffix, type, type, a >= b || a != a ? a : b)                                         \
    X(min_##suffix, type, type, a <= b || a != a ? a : b)                                         \
    X(eq_##suffix, uint8_t, type, a == b)                                                         \
    X(lt_##suffix, uint8_t, type, a < b)                                                          \
    X(le_##suffix, uint8_t, type, a <= b)                                                         \
    X(nonzero_##suffix, uint8_t, type, a != 0)

#define CONVERSIONS(X)                                                                            \
    X(f4_f8, double, float, a)                                                                    \
    X(f8_f4, float, double, (float)a)                                                             \
    X(i4_i8, int64_t, int32_t, a)                                                                 \
    X(i8_i4, int32_t, int64_t, (int32_t)a)                                                        \
    TO_FLOATS(X, i4, int32_t)                                                                     \
    TO_FLOATS(X, i8, int64_t)                                                                     \
    X(f4_i4, int32_t, float, (int32_t)a)                                                          \
    X(f4_i8, int64_t, float, (int64_t)a)                                                          \
    X(f8_i4, int32_t, double, (int32_t)a)                                                         \
    X(f8_i8, int64_t, double, (int64_t)a)                                                         \
    TO_FLOATS(X, b1, uint8_t)                                                                     \
    X(b1_i4, int32_t, uint8_t, a)                                                                 \
    X(b1_i8, int64_t, uint8_t, a)                                                                 \
    X(bfloat_f4, float, uint16_t, float_of((int32_t)((uint32_t)a << 16)))                         \
    X(f4_bfloat, uint16_t, float, bfloat_of(a))                                                   \
    BOTH_WAYS(X, u1, uint8_t)                                                                     \
    BOTH_WAYS(X, s1, int8_t)                                                                      \
    BOTH_WAYS(X, u2, uint16_t)                                                                    \
    BOTH_WAYS(X, s2, int16_t)

#define TO_FLOATS(X, suffix, type)                                                                \
    X(suffix##_f4, float, type, (float)a)                                                         \
    X(suffix##_f8, double, type, (double)a)

#define BOTH_WAYS(X, suffix, type)                                                                \
    X(suffix##_i4, int32_t, type, a)                                                              \
    X(i4_##suffix, type, int32_t, (type)a)

#define LOGIC(X)                                                                                  \
    X(and_b1, uint8_t, uint8_t, a &b)                                                             \
    X(or_b1, uint8_t, uint8_t, a | b)                                                             \
    X(xor_b1, uint8_t, uint8_t, a ^ b)                                                            \
    X(not_b1, uint8_t, uint8_t, a ^ 1)

#define SIMPLE(X)                                                                                 \
    FLOATS(X)                                                                                     \
    ARITHMETIC(X, f4, float)                                                                      \
    ARITHMETIC(X, f8, double)                                                                     \
    ARITHMETIC(X, i4, int32_t)                                                                    \
    ARITHMETIC(X, i8, int64_t)                                                                    \
    COMPARABLE(X, u1, uint8_t)                                                                    \
    COMPARABLE(X, s1, int8_t)                                                                     \
    COMPARABLE(X, u2, uint16_t)                                                                   \
    COMPARABLE(X, s2, int16_t)                                                                    \
    CONVERSIONS(X)                                                                                \
    LOGIC(X)

/* Operations that are not an expression on elements of one type. */
#define SPECIAL(X)                                                                                \
    X(where_1) X(where_2) X(where_4) X(where_8) X(sin_f4) X(cos_f4) X(fmod_f4) X(mod_f4)          \
    X(muladd_f4) X(clip_f4) X(clip_f8) X(ramp_f4) X(half_f4) X(f4_half)                           \
    X(dequantize_u1) X(dequantize_s1) X(dequantize_u2) X(dequantize_s2)              \
    X(dequantize_i4) X(quantize_u1) X(quantize_s1) X(quantize_u2) X(quantize_s2)

#define NAME(name, ...) #name,
const char *const elementwise_operations[] = {SIMPLE(NAME) SPECIAL(NAME) NULL};

/* An output may alias an input element by element, which does not prevent vectorization. */
#define LOOP(...)                                                                                 \
    IVDEP for (int64_t i = 0; i < n; i++) __VA_ARGS__

/* Instructions return whether operands are invalid. */
#define INSTRUCTION(name) static int name(void *to, const void *x, const void *y, const void *z, int64_t n)

/* Floats out of range of an integer type convert as on the processor, as NumPy's do. */
#define DEFINE(name, to_type, type, expression)                                                   \
    __attribute__((no_sanitize("float-cast-overflow"))) INSTRUCTION(name)                         \
    {                                                                                             \
        to_type *d = to, failed = 0;                                                              \
        const type *xs = x, *ys = y;                                                              \
        LOOP({                                                                                    \
            type a = xs[i], b = ys[i];                                                            \
            (void)a, (void)b;                                                                     \
            d[i] = expression;                                                                    \
        });                                                                                       \
        return failed != 0;                                                                       \
    }
SIMPLE(DEFINE)

#define DEFINE_WHERE(size, type)                                                                  \
    INSTRUCTION(where_##size)                                                                     \
    {                                                                                             \
        type *d = to;                                                                             \
        const uint8_t *condition = x;                                                             \
        const type *a = y, *b = z;                                                                \
        LOOP(d[i] = condition[i] ? a[i] : b[i];);                                                 \
        return 0;                                                                                 \
    }
OF_SIZES(DEFINE_WHERE)

#define DEFINE_ANGLE(name, libm, shift)                                                           \
    INSTRUCTION(name)                                                                             \
    {                                                                                             \
        float *d = to;                                                                            \
        const float *a = x;                                                                       \
        int32_t large = 0;                                                                        \
        for (int64_t i = 0; i < n; i++)                                                           \
            large |= !(fabsf(a[i]) <= LARGEST_ANGLE);                                             \
        if (large)                                                                                \
            for (int64_t i = 0; i < n; i++)                                                       \
                d[i] = libm(a[i]);                                                                \
        else                                                                                      \
            LOOP(d[i] = sincos32(a[i], shift););                                                  \
        return 0;                                                                                 \
    }
DEFINE_ANGLE(sin_f4, sinf, 0)
DEFINE_ANGLE(cos_f4, cosf, 1)

/* For quotients below 2^28, products with y in float64 are accurate enough for the exact remainder. */
INSTRUCTION(fmod_f4)
{
    float *d = to, remainders[REGISTER_BYTES / sizeof(float)];
    const float *a = x, *b = y;
    int32_t unusual = 0;
    LOOP({
        double dividend = a[i], divisor = b[i], quotient = trunc(dividend / divisor);
        remainders[i] = copysignf((float)(dividend - quotient * divisor), a[i]);
        unusual |= !(fabs(quotient) < 268435456.0) | !(fabsf(b[i]) < INFINITY);
    });
    if (unusual)
        for (int64_t i = 0; i < n; i++)
            d[i] = fmodf(a[i], b[i]);
    else
        memcpy(d, remainders, n * sizeof(float));
    return 0;
}

/* With the sign of the divisor. */
INSTRUCTION(mod_f4)
{
    float *d = to, remainders[REGISTER_BYTES / sizeof(float)];
    const float *b = y;
    fmod_f4(remainders, x, y, z, n);
    LOOP({
        const float rest = remainders[i];
        d[i] = rest == 0 ? copysignf(0, b[i]) : (rest < 0) != (b[i] < 0) ? rest + b[i] : rest;
    });
    return 0;
}

/* With three operands; sums of products round twice, as a product and a sum. */
#define DEFINE_OF_THREE(name, type, ...)                                                          \
    INSTRUCTION(name)                                                                             \
    {                                                                                             \
        type *d = to;                                                                             \
        const type *xs = x, *ys = y, *zs = z;                                                     \
        LOOP({                                                                                    \
            const type a = xs[i], b = ys[i], c = zs[i];                                           \
            type t = 0;                                                                           \
            __VA_ARGS__;                                                                          \
            d[i] = t;                                                                             \
        });                                                                                       \
        return 0;                                                                                 \
    }
#define CLIPPED t = a < b ? b : a, t = b != b ? b : t, t = t > c ? c : t, t = c != c ? c : t
DEFINE_OF_THREE(muladd_f4, float, t = a * b + c)
DEFINE_OF_THREE(clip_f4, float, CLIPPED)
DEFINE_OF_THREE(clip_f8, double, CLIPPED)
DEFINE_OF_THREE(ramp_f4, float, t = a * b + c, t = t < 0 ? 0 : t, t = t > 1 ? 1 : t)

#define DEFINE_HALVES(name, converted)                                                            \
    INSTRUCTION(name)                                                                             \
    {                                                                                             \
        converted(to, x, n);                                                                      \
        return 0;                                                                                 \
    }
DEFINE_HALVES(half_f4, floats_of_halves)
DEFINE_HALVES(f4_half, halves_of_floats)

/* (x - zero point) * scale */
#define DEFINE_DEQUANTIZE(suffix, type, ...)                                                      \
    INSTRUCTION(dequantize_##suffix)                                                              \
    {                                                                                             \
        float *d = to;                                                                            \
        const type *code = x;                                                                     \
        const float *scale = y, *zero = z;                                                        \
        LOOP(d[i] = ((float)code[i] - zero[i]) * scale[i];);                                      \
        return 0;                                                                                 \
    }
OF_CODES(DEFINE_DEQUANTIZE)
DEFINE_DEQUANTIZE(i4, int32_t)

/* a / b for numbers of usual size. With fused multiply-add, the product with the inverse of b is corrected by the
   residual of a: this rounds as a division does, in half the time. */
static inline float quotient(float a, float b, float inverse)
{
#ifdef __FMA__
    float q = a * inverse;
    return __builtin_fmaf(__builtin_fmaf(-q, b, a), inverse, q);
#else
    return a / b;
#endif
}

/* x / scale + zero point, saturated, with a single scale; NaN becomes the lowest code. Quotients are clamped first,
   so that they fit integers. */
#define LARGEST_CODE 262144.0f
#define DEFINE_QUANTIZE(suffix, type, lowest, highest)                                            \
    INSTRUCTION(quantize_##suffix)                                                                \
    {                                                                                             \
        type *d = to;                                                                             \
        const float *a = x, *zero = z, scale = *(const float *)y, inverse = 1 / scale;            \
        float low = -LARGEST_CODE * scale, high = LARGEST_CODE * scale;                           \
        int usual = scale > 1e-30f && scale < 1e30f;                                              \
        for (int64_t i = 0; !usual && i < n; i++) {                                               \
            float code = rintf(a[i] / scale) + zero[i];                                           \
            d[i] = (type)(code > lowest ? code < highest ? code : highest : lowest);              \
        }                                                                                         \
        if (usual)                                                                                \
            LOOP({                                                                                \
                const float real = WITHIN(a[i], low, high);                                       \
                const int32_t code = TO_INT(quotient(real, scale, inverse)) + (int32_t)zero[i];   \
                d[i] = (type)WITHIN(code, lowest, highest);                                       \
            });                                                                                   \
        return 0;                                                                                 \
    }
OF_CODES(DEFINE_QUANTIZE)

typedef int (*loop)(void *, const void *, const void *, const void *, int64_t);
#define ITSELF(name, ...) name,
static const loop loops[] = {SIMPLE(ITSELF) SPECIAL(ITSELF)};

/* Copy n elements of an input, from element `at` of the result on, in the order of the result. */
#define DEFINE_GATHER(bytes, type)                                                                \
    static void gather_##bytes(void *to, const void *from, const int64_t *dims, const int64_t *strides, \
                     int64_t rank, int64_t at, int64_t n)                                         \
    {                                                                                             \
        type *restrict d = to;                                                                    \
        const type *restrict x = from;                                                            \
        int64_t index[PROGRAM_RANK], place = 0, last = rank - 1;                                     \
        for (int64_t axis = last; axis >= 0; axis--) {                                            \
            index[axis] = at % dims[axis];                                                        \
            at /= dims[axis];                                                                     \
            place += index[axis] * strides[axis];                                                 \
        }                                                                                         \
        int64_t inner = dims[last], step = strides[last];                                         \
        for (;;) {                                                                                \
            int64_t run = inner - index[last] < n ? inner - index[last] : n;                      \
            if (step == 0)                                                                        \
                for (int64_t i = 0; i < run; i++)                                                 \
                    d[i] = x[place];                                                              \
            else if (step == 1)                                                                   \
                for (int64_t i = 0; i < run; i++)                                                 \
                    d[i] = x[place + i];                                                          \
            else                                                                                  \
                for (int64_t i = 0; i < run; i++)                                                 \
                    d[i] = x[place + i * step];                                                   \
            d += run;                                                                             \
            n -= run;                                                                             \
            if (!n)                                                                               \
                return;                                                                           \
            place -= index[last] * step;                                                          \
            index[last] = 0;                                                                      \
            for (int64_t axis = last - 1; axis >= 0; axis--) {                                    \
                place += strides[axis];                                                           \
                if (++index[axis] < dims[axis])                                                   \
                    break;                                                                        \
                place -= strides[axis] * dims[axis];                                              \
                index[axis] = 0;                                                                  \
            }                                                                                     \
        }                                                                                         \
    }
OF_SIZES(DEFINE_GATHER)

static void gather(void *to, const void *from, const struct elementwise *a, const operand *input,
                   int64_t at, int64_t n)
{
    void (*copy)(void *, const void *, const int64_t *, const int64_t *, int64_t, int64_t, int64_t) =
        input->size == 1 ? gather_1 : input->size == 2 ? gather_2 : input->size == 4 ? gather_4 : gather_8;
    copy(to, from, a->dims, input->strides, a->rank, at, n);
}

static void spread(void *to, int32_t size, uint64_t bits, int64_t n)
{
    uint64_t *words = to;
    for (int32_t width = size; width < 8; width *= 2)
        bits |= bits << width * 8;
    for (int64_t i = 0; i < (n * size + 7) / 8; i++)
        words[i] = bits;
}

typedef struct {
    _Alignas(64) char memory[REGISTERS][REGISTER_BYTES];
    void *of[REGISTERS];
    int kept; /* inputs with one number per row are expanded to this many elements, or more */
} registers;

/* Return input i for a part of a row: in place if its elements are contiguous, else a copy. */
static void *part_of_row(registers *r, const struct elementwise *a, int64_t i, const int64_t *index,
                         int64_t at, int64_t n)
{
    const operand *input = &a->operands[i];
    const int64_t step = input->strides[a->rank - 1];
    void *copy = r->memory[input->to];
    int64_t place = 0;
    if (r->kept && !step)
        return copy;
    for (int64_t axis = 0; axis < a->rank; axis++)
        place += index[axis] * input->strides[axis];
    const char *from = (const char *)a->inputs[i] + place * input->size;
    if (step == 1)
        return (void *)from;
    if (step) {
        gather(copy, a->inputs[i], a, input, at, n);
        return copy;
    }
    uint64_t bits = 0;
    memcpy(&bits, from, input->size);
    spread(copy, input->size, bits, n);
    return copy;
}

/* Fill the registers that are the same for each tile. */
static void begin_program(const struct elementwise *a, registers *r)
{
    const int64_t n = a->tile < a->size ? a->tile : a->size;
    const constant *constants = a->constants;
    r->kept = 0;
    for (int i = 0; i < REGISTERS; i++)
        r->of[i] = r->memory[i];
    for (int64_t i = 0; i < a->n_constants; i++)
        spread(r->of[constants[i].to], constants[i].size, constants[i].bits, n);
    for (int64_t i = 0; i < a->n_inputs; i++) {
        const operand *input = &a->operands[i];
        if (input->mode == ONCE)
            gather(r->of[input->to], a->inputs[i], a, input, 0, n);
    }
}

/* Compute n elements from element `at` of the result on, which is at `index` if tiles end with rows. */
static int run_tile(const struct elementwise *a, registers *r, const int64_t *index, int64_t at, int64_t n)
{
    int failed = 0;
    r->of[0] = (char *)a->output + at * a->output_size;
    for (int64_t i = 0; i < a->n_inputs; i++) {
        const operand *input = &a->operands[i];
        if (input->mode == DIRECT)
            r->of[input->to] = (char *)a->inputs[i] + at * input->size;
        else if (input->mode == GATHERED && a->row)
            r->of[input->to] = part_of_row(r, a, i, index, at, n);
        else if (input->mode == GATHERED)
            gather(r->memory[input->to], a->inputs[i], a, input, at, n);
    }
    for (int64_t i = 0; i < a->n_instructions; i++) {
        const instruction *next = &a->instructions[i];
        failed |= loops[next->operation](r->of[next->to], r->of[next->a], r->of[next->b], r->of[next->c], n);
    }
    return failed;
}

/* Set the index of the first element of a row. */
static void find_row(const struct elementwise *a, int64_t row, int64_t *index)
{
    for (int64_t axis = a->rank - 2; axis >= 0; row /= a->dims[axis--])
        index[axis] = row % a->dims[axis];
    index[a->rank - 1] = 0;
}

CHECKED_ITEMS_OF(elementwise, elementwise)
{
    const int64_t tile = a->tile, last = a->rank - 1;
    const int64_t parts = a->row ? CEIL_DIV(a->row, tile) : 0;
    registers r;
    int64_t index[PROGRAM_RANK];
    begin_program(a, &r);
    if (parts) {
        find_row(a, begin / parts, index);
        index[last] = begin % parts * tile;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t at = parts ? item / parts * a->row + index[last] : item * tile;
        int64_t left = parts ? a->row - index[last] : a->size - at;
        if (run_tile(a, &r, index, at, left < tile ? left : tile))
            return 1;
        if (!parts)
            continue;
        index[last] += tile;
        r.kept = index[last] < a->dims[last];
        for (int64_t axis = last; index[axis] >= a->dims[axis] && axis; axis--) {
            index[axis] = 0;
            index[axis - 1]++;
        }
    }
    return 0;
}

void run_in_rows(const struct elementwise *a, int64_t first, int64_t rows, int64_t begin, int64_t end)
{
    registers r;
    int64_t index[PROGRAM_RANK];
    begin_program(a, &r);
    const int64_t last = a->rank - 1, length = end - begin;
    /* If all dims are merged into one, whole rows are contiguous. */
    if (!last && length == a->row) {
        for (index[0] = first * length; index[0] < (first + rows) * length; index[0] += a->tile)
            run_tile(a, &r, index, index[0], smaller(a->tile, (first + rows) * length - index[0]));
        return;
    }
    for (int64_t row = first; row < first + rows; row++) {
        find_row(a, row, index);
        index[last] = begin + (last ? 0 : row * a->row);
        run_tile(a, &r, index, row * a->row + begin, length);
    }
}

/* Sums and products of codes of one type as codes of that type (codes.py). 8-bit codes are computed in float32 as
   fixed-point numbers with PARTS fractional bits, within SLACK. Where one is within SLACK of a tie, its PIECE of the
   result is recomputed by the exact definition; and so is the rest of an item if most pieces are. */
enum { PARTS = 14, SLACK = 4, MOST_REPEATED = 4096, MOST_NEAR = 16 };
/* So that all of a piece is in registers. */
#if defined(__AVX512BW__) || !defined(__AVX2__)
enum { PIECE = 64 };
#else
enum { PIECE = 32 };
#endif
struct pair {
    const char *x, *y;
    char *to;
    const float *factors;   /* of x and y, or of x and its zero point; addend; by how much less than a half products
                               are rounded away from 0, or the addend of a sum of 0, all with PARTS fractional bits;
                               scales of x, y and the result, its inverse, and the largest number divided by it */
    const int32_t *numbers; /* of the exact definition, which may have x and y swapped */
    int64_t size, block;    /* elements, and those of an item */
    int64_t period, each;   /* y repeats after `period` elements, or has one for `each` elements of x; else 0 */
};
enum { TO_NEAREST, ALWAYS, TIES_AWAY }; /* EXACTLY: only near ties; always; never, with ties away from 0 */
enum { X_ZERO, Y_ZERO, ZERO, LOW, HIGH, EXACTLY, SWAPPED, X_SIGN, Y_SIGN, WHOLE, FRACTION, HALF, SHIFT, UP, BY, MORE,
       AWAY, DOWN };

/* Return y for `count` elements of x from `at` on, fewer where one of y or a period of it ends, of which `repeated` holds
   one and a PIECE. */
INLINED const void *of_y(const struct pair *p, int64_t at, int64_t *count, const char *repeated, void *filled, int size)
{
    if (p->period) {
        const int64_t place = at % p->period;
        *count = smaller(*count, p->period + PIECE - place);
        return repeated + place;
    }
    if (!p->each)
        return p->y + at * size;
    *count = smaller(smaller(*count, PIECE), p->each - at % p->each);
    return memset(filled, p->y[at / p->each], *count);
}

/* Compilers unpack bytes, and compute the upper halves of products, through half vectors, which takes longer than all
   other work on them. */
INLINED void ints_of_bytes(int32_t *to, const void *from, int is_signed, const int64_t n)
{
    const int8_t *const s = from;
    const uint8_t *const u = from;
#ifdef __AVX512BW__
    for (int64_t i = 0; n == PIECE && i < n; i += 16) {
        const __m128i codes = _mm_loadu_si128((const void *)(u + i));
        _mm512_storeu_si512(to + i, is_signed ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes));
    }
    if (n == PIECE)
        return;
#elif defined(__AVX2__)
    for (int64_t i = 0; n == PIECE && i < n; i += 8) {
        const __m128i codes = _mm_loadl_epi64((const void *)(u + i));
        _mm256_storeu_si256((void *)(to + i), is_signed ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
    }
    if (n == PIECE)
        return;
#endif
    LOOP(to[i] = is_signed ? s[i] : u[i];);
}

/* Clamp integers and store them as codes. */
INLINED void codes_of_ints(void *to, const int32_t *from, int32_t low, int32_t high, int is_signed, const int64_t n)
{
#ifdef __AVX512BW__
    if (n == PIECE) {
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        const __m512i least = _mm512_set1_epi8((char)low), most = _mm512_set1_epi8((char)high);
        __m512i halves[2];
        for (int i = 0; i < 2; i++)
            halves[i] = _mm512_packs_epi32(_mm512_loadu_si512(from + 32 * i), _mm512_loadu_si512(from + 32 * i + 16));
        __m512i codes = is_signed ? _mm512_packs_epi16(halves[0], halves[1]) : _mm512_packus_epi16(halves[0], halves[1]);
        codes = is_signed ? _mm512_max_epi8(_mm512_min_epi8(codes, most), least)
                          : _mm512_max_epu8(_mm512_min_epu8(codes, most), least);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, codes));
        return;
    }
#elif defined(__AVX2__)
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    const __m256i least = _mm256_set1_epi8((char)low), most = _mm256_set1_epi8((char)high);
    for (int64_t i = 0; n == PIECE && i < n; i += 32) {
        __m256i halves[2];
        UNROLLED(j, 2)
            halves[j] = _mm256_packs_epi32(_mm256_loadu_si256((const void *)(from + i + 16 * j)),
                                           _mm256_loadu_si256((const void *)(from + i + 16 * j + 8)));
        __m256i codes = is_signed ? _mm256_packs_epi16(halves[0], halves[1]) : _mm256_packus_epi16(halves[0], halves[1]);
        codes = is_signed ? _mm256_max_epi8(_mm256_min_epi8(codes, most), least)
                          : _mm256_max_epu8(_mm256_min_epu8(codes, most), least);
        _mm256_storeu_si256((void *)((uint8_t *)to + i), _mm256_permutevar8x32_epi32(codes, order));
    }
    if (n == PIECE)
        return;
#endif
    uint8_t *const d = to;
    LOOP(d[i] = (uint8_t)WITHIN(from[i], low, high););
}

/* Whether any of the fixed-point numbers is within SLACK of a tie. */
INLINED int is_any_near(const int32_t *parts, const int64_t n)
{
#ifdef __AVX512BW__
    const __m512i upper = _mm512_set1_epi32((1 << PARTS) - 2 * SLACK);
    __mmask16 near = 0;
    for (int64_t i = 0; n == PIECE && i < n; i += 16)
        near |= _mm512_testn_epi32_mask(_mm512_loadu_si512(parts + i), upper);
    if (n == PIECE)
        return near;
#elif defined(__AVX2__)
    const __m256i beyond = _mm256_set1_epi32((1 << PARTS) - 1);
    __m256i all = beyond;
    for (int64_t i = 0; n == PIECE && i < n; i += 8)
        all = _mm256_min_epu32(all, _mm256_and_si256(_mm256_loadu_si256((const void *)(parts + i)), beyond));
    if (n == PIECE)
        return _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_set1_epi32(2 * SLACK), all));
#endif
    uint32_t least = 2 * SLACK;
    LOOP({
        const uint32_t beyond = parts[i] & ((1 << PARTS) - 1);
        least = beyond < least ? beyond : least;
    });
    return least < 2 * SLACK;
}

INLINED void upper_halves(int32_t *x, int32_t by, const int64_t n)
{
#ifdef __AVX512BW__
    for (int64_t i = 0; n == PIECE && i < n; i += 16) {
        const __m512i odd = _mm512_set1_epi32(by), even = _mm512_loadu_si512(x + i);
        _mm512_storeu_si512(x + i, _mm512_mask_blend_epi32(
            0xAAAA, _mm512_srli_epi64(_mm512_mul_epi32(even, odd), 32),
            _mm512_mul_epi32(_mm512_srli_epi64(even, 32), odd)));
    }
    if (n == PIECE)
        return;
#elif defined(__AVX2__)
    for (int64_t i = 0; n == PIECE && i < n; i += 8) {
        const __m256i odd = _mm256_set1_epi32(by), even = _mm256_loadu_si256((const void *)(x + i));
        _mm256_storeu_si256((void *)(x + i), _mm256_blend_epi32(
            _mm256_srli_epi64(_mm256_mul_epi32(even, odd), 32),
            _mm256_mul_epi32(_mm256_srli_epi64(even, 32), odd), 0xAA));
    }
    if (n == PIECE)
        return;
#endif
    LOOP(x[i] = (int32_t)((int64_t)x[i] * by >> 32););
}

/* The two roundings of rescaled_integer(), on the upper half of a product with two more bits. */
#define ROUNDED ((total + by[MORE] + (total >> 31 & by[AWAY])) >> by[DOWN])
/* Return whether the piece was computed by the exact definition: TOTAL, of which integers take the upper half of a
   product. */
#define DEFINE_PAIR(name, type, REAL, TOTAL, by_integers)                                         \
    INLINED int name##_piece(const struct pair *g, type *d, const type *x, const type *y, const int64_t n, int exactly) \
    {                                                                                             \
        const float *const f = g->factors;                                                        \
        const int32_t *const by = g->numbers, low = by[LOW], high = by[HIGH];                     \
        _Alignas(64) int32_t xs[PIECE], ys[PIECE], whole[PIECE];                                  \
        if (sizeof(type) == 1) {                                                                  \
            ints_of_bytes(xs, x, (type)-1 < 0, n);                                                \
            ints_of_bytes(ys, y, (type)-1 < 0, n);                                                \
        } else                                                                                    \
            LOOP(xs[i] = x[i], ys[i] = y[i];);                                                    \
        if (sizeof(type) == 1 && !exactly) {                                                      \
            const int away = by_integers && by[EXACTLY] == TIES_AWAY;                             \
            const float below = away ? f[3] : -INFINITY;                                          \
            LOOP({                                                                                \
                const float a = (float)xs[i], b = (float)ys[i], real = REAL;                      \
                whole[i] = (int32_t)(real - (by_integers && real < below ? 2.0f * SLACK : 0));    \
            });                                                                                   \
            if (away || !is_any_near(whole, n)) {                                                 \
                LOOP(whole[i] >>= PARTS;);                                                        \
                codes_of_ints(d, whole, low, high, (type)-1 < 0, n);                              \
                return 0;                                                                         \
            }                                                                                     \
        }                                                                                         \
        const int32_t *const p = by[SWAPPED] ? ys : xs, *const q = by[SWAPPED] ? xs : ys;         \
        LOOP({                                                                                    \
            const int32_t a = p[i] - by[X_ZERO], b = q[i] - by[Y_ZERO], total = TOTAL;            \
            whole[i] = by_integers ? total : total + by[ZERO];                                    \
        });                                                                                       \
        if (by_integers) {                                                                        \
            upper_halves(whole, by[BY], n);                                                       \
            LOOP({                                                                                \
                const int32_t total = whole[i];                                                   \
                whole[i] = ROUNDED + by[ZERO];                                                    \
            });                                                                                   \
        }                                                                                         \
        if (sizeof(type) == 1)                                                                    \
            codes_of_ints(d, whole, low, high, (type)-1 < 0, n);                                  \
        else                                                                                      \
            LOOP(d[i] = (type)WITHIN(whole[i], low, high););                                      \
        return 1;                                                                                 \
    }                                                                                             \
    ITEMS_OF(name, pair)                                                                          \
    {                                                                                             \
        const int64_t last = smaller(end * a->block, a->size);                                    \
        char repeated[MOST_REPEATED + PIECE], filled[PIECE];                                      \
        for (int64_t i = 0; a->period && i < a->period + PIECE; i++)                              \
            repeated[i] = a->y[i % a->period];                                                    \
        int near = a->numbers[EXACTLY] == ALWAYS ? MOST_NEAR : 0;                                           \
        for (int64_t at = begin * a->block, count; at < last; at += count) {                      \
            count = last - at;                                                                    \
            const type *y = of_y(a, at, &count, repeated, filled, sizeof(type)), *x = (const type *)a->x + at; \
            type *d = (type *)a->to + at;                                                         \
            for (int64_t i = 0, n; i < count; i += n) {                                           \
                n = smaller(count - i, PIECE);                                                    \
                const int done = n == PIECE ? name##_piece(a, d + i, x + i, y + i, PIECE, near == MOST_NEAR) \
                                            : name##_piece(a, d + i, x + i, y + i, n, near == MOST_NEAR); \
                near += done ? near < MOST_NEAR : -(near > 0);                                    \
            }                                                                                     \
        }                                                                                         \
    }

/* In floats, as ONNX's QuantizeLinear of a sum or product of DequantizeLinear's results. */
#define DIVIDED(real)                                                                             \
    ({                                                                                            \
        const float u = (float)a * f[4], v = (float)b * f[5];                                     \
        TO_INT(quotient(WITHIN(real, -f[8], f[8]), f[6], f[7]));                                \
    })
#define ADD_CODES(suffix, type, ...)                                                              \
    DEFINE_PAIR(add_codes_##suffix, type, MULTIPLIED_ADDED(a, f[0], MULTIPLIED_ADDED(b, f[1], f[2])), DIVIDED(u + v), 0)
#define MUL_CODES(suffix, type, ...)                                                              \
    DEFINE_PAIR(mul_codes_##suffix, type, MULTIPLIED_ADDED(SCALED, b - (float)by[Y_ZERO], f[2]), DIVIDED(u *v), 0)
#define SCALED MULTIPLIED_ADDED(a, f[0], f[1])
#ifdef __FMA__
#define MULTIPLIED_ADDED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLIED_ADDED(a, b, c) ((a) * (b) + (c))
#endif
OF_CODES(ADD_CODES)
OF_CODES(MUL_CODES)

/* In integers only, as TFLite's reference kernels (ops/tflite/arrays.py). */
#define SIGNED(x, sign) (((x) ^ by[sign]) - by[sign])
#define SUM SIGNED(a * (1 << 19), X_SIGN) + SIGNED(TERM(b), Y_SIGN)
/* With the smaller scale, whose multiplier is split in two so that products fit in 32 bits. The larger scale's is a
   half. */
#define TERM(v)                                                                                   \
    ({                                                                                            \
        const int32_t term = v * by[WHOLE] + ((v * by[FRACTION] + 1024) >> 11);                   \
        (term + by[HALF] + (term >> 31)) >> by[SHIFT];                                            \
    })
#define DEFINE_INTEGER_PAIRS(suffix, type)                                                        \
    DEFINE_PAIR(integer_add_##suffix, type, MULTIPLIED_ADDED(a, f[0], MULTIPLIED_ADDED(b, f[1], f[2])),  \
                (SUM) * (1 << by[UP]), 1)                                                         \
    DEFINE_PAIR(integer_mul_##suffix, type,                                                       \
                ({ const float p = SCALED * (b - (float)by[Y_ZERO]); p + copysignf(f[3], p) + f[2]; }), \
                (a * b) * (1 << by[UP]), 1)
DEFINE_INTEGER_PAIRS(u1, uint8_t)
DEFINE_INTEGER_PAIRS(s1, int8_t)

/* A function of bytes, tabulated for all 256. */
struct table {
    const uint8_t *x;
    uint8_t *y;
    const uint8_t *table;
    int64_t size, block; /* elements, and those of an item */
};

#ifdef __AVX512BW__
__attribute__((target("avx512vbmi"))) static int64_t look_up_64(const struct table *a, int64_t at, int64_t end)
{
    __m512i parts[4];
    for (int i = 0; i < 4; i++)
        parts[i] = _mm512_loadu_si512(a->table + 64 * i);
    for (; at + 64 <= end; at += 64) {
        __m512i x = _mm512_loadu_si512(a->x + at);
        __m512i low = _mm512_permutex2var_epi8(parts[0], x, parts[1]);
        __m512i high = _mm512_permutex2var_epi8(parts[2], x, parts[3]);
        _mm512_storeu_si512(a->y + at, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high));
    }
    return at;
}
#endif

#if defined(__AVX2__)
enum { NIBBLES = 16, WORTH_PARTS = 128 };
/* Each 16 elements by the lower half of a code, which is less by 16 for each further ones; of a negative one, the
   instruction takes 0. What is taken are differences: for a code below 128, those up to its own 16 elements; for one
   from 128 on, which is negative until 128 is subtracted, the last eight of these. */
static int64_t look_up_32(const struct table *a, int64_t at, int64_t end)
{
    __m256i parts[NIBBLES], before = _mm256_setzero_si256();
    UNROLLED(i, NIBBLES) {
        const __m256i part = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(a->table + NIBBLES * i)));
        parts[i] = _mm256_xor_si256(part, before);
        before = part;
        if (i >= NIBBLES / 2)
            parts[i] = _mm256_xor_si256(parts[i], parts[i - NIBBLES / 2]);
    }
    const __m256i size = _mm256_set1_epi8(NIBBLES);
    for (; at + 32 <= end; at += 32) {
        __m256i x = _mm256_loadu_si256((const void *)(a->x + at)), y = _mm256_shuffle_epi8(parts[0], x);
        UNROLLED(i, NIBBLES - 1) {
            x = i < NIBBLES / 2 ? _mm256_sub_epi8(x, size) : _mm256_subs_epi8(x, size);
            y = _mm256_xor_si256(y, _mm256_shuffle_epi8(parts[i + 1], x));
        }
        _mm256_storeu_si256((void *)(a->y + at), y);
    }
    return at;
}
#endif

ITEMS_OF(table, table)
{
    int64_t at = begin * a->block, last = end * a->block < a->size ? end * a->block : a->size;
#ifdef __AVX512BW__
    if (features & AVX512_VBMI)
        at = look_up_64(a, at, last);
#endif
#ifdef __AVX2__
    if (last - at >= WORTH_PARTS)
        at = look_up_32(a, at, last);
#endif
    for (; at < last; at++)
        a->y[at] = a->table[a->x[at]];
}

/* The same for pairs of bytes. */
ITEMS_OF(wide_table, table)
{
    const uint16_t *x = (const uint16_t *)a->x, *table = (const uint16_t *)a->table;
    for (int64_t at = begin * a->block, last = smaller(end * a->block, a->size); at < last; at++)
        ((uint16_t *)a->y)[at] = table[x[at]];
}

KERNELS(elementwise, KERNEL(elementwise, elementwise), KERNEL(table, table), KERNEL(wide_table, table),
        KERNELS_OF_CODES(add_codes, pair),
        KERNELS_OF_CODES(mul_codes, pair), KERNEL(integer_add_u1, pair), KERNEL(integer_add_s1, pair),
        KERNEL(integer_mul_u1, pair), KERNEL(integer_mul_s1, pair))
