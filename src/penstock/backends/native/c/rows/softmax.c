/* Softmax and log-softmax along one axis. An item is a block of rows if the axis is the last one, else a block of
   adjacent columns. If an element is NaN, or the largest one is infinite, the sum is NaN, and so are all results. */
// Compiler options: -ffp-contract=fast
// GCC options: -fno-thread-jumps
#include "wide.h"
#include <string.h>
#include "arguments.h"
#include "math32.h"
#include "math64.h"
#include "families.h"
#include "rescaling.h"
#include "vectors.h"

enum { BLOCK = 2048, COLUMNS = 256 };

/* Combine the parts of each column, `width` elements in all, and broadcast the results to that width. */
#define JOIN_PARTS(parts, JOIN)                                                                   \
    for (int64_t half = width / 2; half >= columns; half /= 2)                                    \
        for (int64_t j = 0; j < half; j++)                                                        \
            parts[j] = JOIN(parts[j], parts[j + half])
#define REPEAT_COLUMNS(parts)                                                                     \
    for (int64_t done = columns; done < width; done *= 2)                                         \
        memcpy(parts + done, parts, done * sizeof *parts)

#define DEFINE(name, type, integer, EXP, LOG)                                                     \
    typedef type name##_lanes __attribute__((vector_size(VECTOR_BYTES)));                         \
    typedef integer name##_mask __attribute__((vector_size(VECTOR_BYTES)));                       \
    enum { name##_LANES = VECTOR_BYTES / sizeof(type), name##_WIDE = SUM_BYTES / sizeof(type) };   \
                                                                                                  \
    static inline name##_lanes name##_read(const type *x)                                         \
    {                                                                                             \
        name##_lanes lanes;                                                                       \
        memcpy(&lanes, x, sizeof lanes);                                                          \
        return lanes;                                                                             \
    }                                                                                             \
                                                                                                  \
    static inline name##_lanes name##_higher(name##_lanes a, name##_lanes b)                      \
    {                                                                                             \
        name##_mask higher = a > b;                                                               \
        return (name##_lanes)(((name##_mask)a & higher) | ((name##_mask)b & ~higher));            \
    }                                                                                             \
                                                                                                  \
    static inline type name##_highest(const type *x, int64_t n)                                   \
    {                                                                                             \
        enum { LANES = name##_LANES };                                                            \
        type parts[LANES] = {x[0]};                                                               \
        if (n < LANES) {                                                                          \
            for (int64_t i = 1; i < n; i++)                                                       \
                parts[0] = x[i] > parts[0] ? x[i] : parts[0];                                     \
            return parts[0];                                                                      \
        }                                                                                         \
        name##_lanes tops = name##_read(x + n - LANES), others = tops;                            \
        int64_t i = 0;                                                                            \
        for (; i + 2 * LANES <= n; i += 2 * LANES) {                                              \
            tops = name##_higher(name##_read(x + i), tops);                                       \
            others = name##_higher(name##_read(x + i + LANES), others);                           \
        }                                                                                         \
        if (i + LANES <= n)                                                                       \
            tops = name##_higher(name##_read(x + i), tops);                                       \
        tops = name##_higher(tops, others);                                                       \
        memcpy(parts, &tops, sizeof parts);                                                       \
        HALVE(parts, LANES, LARGEST_OF);                                                          \
        return parts[0];                                                                          \
    }                                                                                             \
                                                                                                  \
    static inline type name##_sum(const type *x, int64_t n)                                       \
    {                                                                                             \
        enum { LANES = name##_LANES, WIDE = name##_WIDE, PAIR = 2 * SUM_VECTORS };                \
        type parts[WIDE] = {x[0]};                                                                \
        name##_lanes sums[PAIR] = {0};                                                            \
        int64_t i = 0;                                                                            \
        if (n < WIDE) {                                                                           \
            for (i = 1; i < n; i++)                                                               \
                parts[0] += x[i];                                                                 \
            return parts[0];                                                                      \
        }                                                                                         \
        for (; i + 2 * WIDE <= n; i += 2 * WIDE)                                                  \
            UNROLLED(j, PAIR)                                                                     \
                sums[j] += name##_read(x + i + j * LANES);                                        \
        /* The last vectors may begin before `i`: elements that were added already become 0. */   \
        for (; i < n; i += WIDE)                                                                  \
            UNROLLED(j, SUM_VECTORS) {                                                            \
                const int64_t place = i + WIDE <= n ? i : n - WIDE;                               \
                name##_mask lanes;                                                                \
                for (int l = 0; l < LANES; l++)                                                   \
                    lanes[l] = j * LANES + l;                                                     \
                const name##_mask own = (name##_mask)name##_read(x + place + j * LANES);          \
                sums[j] += (name##_lanes)(own & (lanes >= (integer)(i - place)));                 \
            }                                                                                     \
        UNROLLED(j, SUM_VECTORS)                                                                  \
            sums[j] += sums[SUM_VECTORS + j];                                                     \
        memcpy(parts, sums, sizeof parts);                                                        \
        HALVE(parts, WIDE, SUM_OF);                                                               \
        return parts[0];                                                                          \
    }                                                                                             \
    static inline void name##_finish(type *y, int64_t n, type total, int64_t logarithm)           \
    {                                                                                             \
        total = logarithm ? LOG(total) : 1 / total;                                               \
        for (int64_t i = 0; i < n; i++)                                                           \
            y[i] = logarithm ? y[i] - total : y[i] * total;                                       \
    }                                                                                             \
                                                                                                  \
    /* Write x - top, or its exponential, to y, and return the sum of exponentials. The last vector of a row\
       may overlap the one before, and is computed first: y may alias x. */                       \
    static inline type name##_powers(const type *x, type *y, int64_t n, type top, int64_t logarithm)\
    {                                                                                             \
        enum { LANES = name##_WIDE, MANY = 4 * LANES };                                           \
        type parts[MANY] = {0}, last[LANES];                                                      \
        const int64_t rest = n % LANES;                                                           \
        if (rest)                                                                                 \
            IVDEP for (int64_t j = 0; j < LANES; j++) {                                           \
                type less = x[n - LANES + j] - top, power = EXP(less);                            \
                last[j] = logarithm ? less : power;                                               \
                parts[j] = j < LANES - rest ? 0 : power;                                          \
            }                                                                                     \
        int64_t i = 0;                                                                            \
        for (; i + MANY <= n; i += MANY) {                                                        \
            for (int64_t line = 0; line < MANY; line += 64 / sizeof(type))                        \
                __builtin_prefetch(x + n + i + line); /* of the next row */                       \
            IVDEP for (int64_t j = 0; j < MANY; j++) {                                            \
                type less = x[i + j] - top, power = EXP(less);                                    \
                y[i + j] = logarithm ? less : power;                                              \
                parts[j] += power;                                                                \
            }                                                                                     \
        }                                                                                         \
        for (; i + LANES <= n; i += LANES)                                                        \
            IVDEP for (int64_t j = 0; j < LANES; j++) {                                           \
                type less = x[i + j] - top, power = EXP(less);                                    \
                y[i + j] = logarithm ? less : power;                                              \
                parts[j] += power;                                                                \
            }                                                                                     \
        if (rest)                                                                                 \
            memcpy(y + n - LANES, last, sizeof last);                                             \
        HALVE(parts, MANY, SUM_OF);                                                               \
        return parts[0];                                                                          \
    }                                                                                             \
                                                                                                  \
    /* Long rows one by one, each finished after the exponentials of the next, which need not wait for its sum;\
       shorter rows, of at most BLOCK elements, together. */                                      \
    static inline void name##_rows(const type *x, type *y, int64_t rows, int64_t length, int64_t logarithm)\
    {                                                                                             \
        enum { LONG = 8 * name##_WIDE };                                                          \
        type spare[BLOCK], *powers = logarithm ? spare : y, total = 0;                            \
        for (int64_t row = 0; row < rows; row++) {                                                \
            const type *from = x + row * length, top = name##_highest(from, length), before = total;\
            type *to = y + row * length;                                                          \
            if (length >= LONG)                                                                   \
                total = name##_powers(from, to, length, top, logarithm);                          \
            else                                                                                  \
                IVDEP for (int64_t i = 0; i < length; i++)                                        \
                    to[i] = from[i] - top;                                                        \
            if (length >= LONG && row)                                                            \
                name##_finish(to - length, length, before, logarithm);                            \
        }                                                                                         \
        if (length >= LONG) {                                                                     \
            name##_finish(y + (rows - 1) * length, length, total, logarithm);                     \
            return;                                                                               \
        }                                                                                         \
        IVDEP for (int64_t i = 0; i < rows * length; i++)                                         \
            powers[i] = EXP(y[i]);                                                                \
        for (int64_t i = 0; i < rows * length; i += length)                                       \
            name##_finish(y + i, length, name##_sum(powers + i, length), logarithm);              \
    }                                                                                             \
    /* If columns are few, several rows are computed as one of `width` elements, whose parts are joined. */\
    static inline void name##_columns(const type *x, type *y, int64_t columns, int64_t length,    \
                                      int64_t step, int64_t logarithm)                            \
    {                                                                                             \
        type tops[COLUMNS], totals[COLUMNS];                                                      \
        int64_t width = columns;                                                                  \
        while (columns == step && 2 * width <= smaller(COLUMNS, length * columns))                \
            width *= 2;                                                                           \
        const int64_t all = length * step, stride = columns == step ? width : step;               \
        for (int64_t j = 0; j < width; j++)                                                       \
            tops[j] = x[j], totals[j] = 0;                                                        \
        for (int64_t i = stride; i < all; i += stride)                                            \
            for (int64_t j = 0; j < smaller(width, all - i); j++)                                 \
                tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];                                \
        JOIN_PARTS(tops, LARGEST_OF);                                                             \
        REPEAT_COLUMNS(tops);                                                                     \
        for (int64_t i = 0; i < all; i += stride)                                                 \
            IVDEP for (int64_t j = 0; j < smaller(width, all - i); j++) {                         \
                type less = x[i + j] - tops[j], power = EXP(less);                                \
                totals[j] += power;                                                               \
                y[i + j] = logarithm ? less : power;                                              \
            }                                                                                     \
        JOIN_PARTS(totals, SUM_OF);                                                               \
        for (int64_t j = 0; j < columns; j++)                                                     \
            totals[j] = logarithm ? LOG(totals[j]) : 1 / totals[j];                               \
        REPEAT_COLUMNS(totals);                                                                   \
        for (int64_t i = 0; i < all; i += stride)                                                 \
            IVDEP for (int64_t j = 0; j < smaller(width, all - i); j++)                           \
                y[i + j] = logarithm ? y[i + j] - totals[j] : y[i + j] * totals[j];               \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, softmax)                                                                       \
    {                                                                                             \
        const type *x = a->x;                                                                     \
        type *y = a->y;                                                                           \
        int64_t blocks = CEIL_DIV(a->inner, a->block);                                            \
        for (int64_t item = begin; item < end; item++) {                                          \
            if (a->inner == 1) {                                                                  \
                int64_t row = item * a->block, rest = a->outer - row;                             \
                name##_rows(x + row * a->length, y + row * a->length,                             \
                            rest < a->block ? rest : a->block, a->length, a->logarithm);          \
                continue;                                                                         \
            }                                                                                     \
            int64_t j = item % blocks * a->block, rest = a->inner - j;                            \
            int64_t at = item / blocks * a->length * a->inner + j;                                \
            name##_columns(x + at, y + at, rest < a->block ? rest : a->block, a->length,          \
                           a->inner, a->logarithm);                                               \
        }                                                                                         \
    }

DEFINE(softmax_float32, float, int32_t, exp_negative32, log32)
DEFINE(softmax_float64, double, int64_t, exp64, log)

/* For rows of codes, as ops/tflite/arrays.py defines it. */
struct softmax_of_codes {
    const int16_t *x;
    int16_t *y;
    const int16_t *points; /* of exp(x) and of 1 / (1 + x) */
    int64_t rows, length, block, multiplier, shift;
};
enum { POINTS = 513 };

/* Interpolate linearly between two points. */
static inline int32_t on_line(const int16_t *points, int64_t code)
{
    const int32_t bounded_code = bounded((int32_t)WITHIN(code, -65536, 65535));
    const int16_t *at = points + 256 + (bounded_code >> 7);
    return (int16_t)(at[0] + (((int16_t)(at[1] - at[0]) * (bounded_code & 127) + 64) >> 7));
}

ITEMS_OF(softmax_int16, softmax_of_codes)
{
    for (int64_t row = begin * a->block; row < smaller(end * a->block, a->rows); row++) {
        const int16_t *restrict x = a->x + row * a->length;
        int16_t *restrict y = a->y + row * a->length, top = x[0];
        int64_t total = 0;
        for (int64_t i = 1; i < a->length; i++)
            top = x[i] > top ? x[i] : top;
        for (int64_t i = 0; i < a->length; i++) {
            const int32_t less = rescaled_integer(x[i] - top, (int32_t)a->multiplier, (int32_t)a->shift);
            y[i] = (int16_t)on_line(a->points, (int64_t)less + 32767);
            total += y[i];
        }
        const int shift = __builtin_clzll((uint64_t)total) - 33, right = 30 - shift;
        const int64_t rest = ((shift < 0 ? total >> -shift : total << shift) + (1 << 13)) >> 14;
        const int64_t inverse = on_line(a->points + POINTS, rest - (1 << 16) - (1 << 15));
        for (int64_t i = 0; i < a->length; i++) {
            const int64_t code = (y[i] * inverse + ((int64_t)1 << right >> 1)) >> right;
            y[i] = (int16_t)WITHIN(code, 0, 32767);
        }
    }
}

KERNELS(softmax, KERNELS_OF_FLOATS(softmax, softmax), KERNEL(softmax_int16, softmax_of_codes))
