/* Reductions along one axis, argmin and argmax, and Hardmax. An item is a block of rows if the axis is the last one,
   else a block of adjacent columns.

   Floats are reduced in parts, of PART elements in LANES of a row or ROWS of a column; parts, and rows of few
   elements, are combined in float64. Short rows are reduced side by side, and with few columns several rows are
   reduced together, so that there is enough parallel work. */
// GCC options: -O2 -ftree-vectorize -fvect-cost-model=dynamic --param=max-inline-insns-single=200
#include <float.h>
#include <stdlib.h>
#include "families.h"
#include "math32.h"
#include "math64.h"
#include "rescaling.h"

struct reduction {
    const void *x;
    void *y;
    int64_t outer, length, inner; /* elements before the axis, along it and after it */
    int64_t block;                /* rows or columns of an item */
    /* Of places: whether of the lowest elements, whether of the last of equal ones, whether they are int32, and
       whether those of NaN are skipped, as TensorFlow does. */
    int64_t lowest, last, narrow, skips;
};

struct mean_of_codes {
    struct reduction of;
    int64_t zero, multiplier, shift, result_zero, low, high;
    double ratio; /* between the scales of the result and of x, if there is no multiplier */
};

enum { LANES = 16, PART = 512, ROWS = 64, COLUMNS = 256, SEVERAL = 192, SHORT = 160, CACHED = 4096 };

static inline int32_t code_of_sum(const struct reduction *a, int32_t sum)
{
    const struct mean_of_codes *m = (const struct mean_of_codes *)a;
    const int32_t rest = sum - (int32_t)(m->zero * a->length);
    const float real = rintf((float)((double)rest / (double)a->length) / (float)m->ratio);
    const int32_t step = m->multiplier ? rescaled_integer(rest, (int32_t)m->multiplier, (int32_t)m->shift)
                                       : (int32_t)WITHIN(real, -1024, 1024);
    return WITHIN(step + (int32_t)m->result_zero, (int32_t)m->low, (int32_t)m->high);
}

/* Return how many rows of a matrix to reduce as one, a power of 2; their columns are combined afterwards. */
static inline int64_t folds(const struct reduction *a, int64_t columns)
{
    int64_t count = 1;
    while (columns == a->inner && 2 * count * columns <= COLUMNS && 4 * count <= a->length)
        count *= 2;
    return count;
}

#define ITEMS(name, by_rows, by_columns)                                                          \
    ITEMS_OF(name, reduction)                                                                     \
    {                                                                                             \
        int64_t blocks = CEIL_DIV(a->inner, a->block);                                            \
        if (a->inner == 1) {                                                                      \
            int64_t first = begin * a->block, stop = end * a->block;                              \
            by_rows(a, first, stop < a->outer ? stop : a->outer);                                 \
            return;                                                                               \
        }                                                                                         \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t i = item / blocks, j = item % blocks * a->block, rest = a->inner - j;         \
            by_columns(a, i * a->length * a->inner + j, rest < a->block ? rest : a->block,        \
                       i * a->inner + j);                                                         \
        }                                                                                         \
    }

#define FEW(name, number)                                                                         \
    if (a->length == number)                                                                      \
        return name##_few(x, rows, number, totals);

/* The sum of codes; `lowest` is 128 for signed codes. */
static inline int32_t sum_of_codes(const uint8_t *x, int64_t length, uint8_t lowest)
{
    uint8_t none = 0;
    int32_t total = 0;
    __asm__("" : "+r"(none)); /* Compilers know instructions for sums of absolute differences, not of bytes. */
    for (int64_t i = 0; i < length; i++)
        total += abs((uint8_t)(x[i] ^ lowest) - none);
    return total - (int32_t)length * lowest;
}

/* Totals of elements: COMBINE(total, value) is computed in type `lane` within parts, and in type `wide` between
   parts. At most ROWS rows, or COLUMNS columns. */
#define ROW_TOTALS(name, type, lane, wide, start, COMBINE, MAP)                                   \
    static inline wide name##_folded(const type *x, int64_t length)                               \
    {                                                                                             \
        wide total = start;                                                                       \
        if (length < LANES)                                                                       \
            for (int64_t i = 0; i < length; i++)                                                  \
                total = COMBINE(total, MAP((wide)x[i], 0));                                       \
        if (sizeof(lane) == 2 && sizeof(type) == 1)                                               \
            return sum_of_codes((const uint8_t *)x, length, (type)-1 < 0 ? 128 : 0);              \
        for (int64_t rest = length < LANES ? 0 : length; rest > 0; rest -= PART, x += PART) {     \
            const int64_t n = rest < PART ? rest : PART;                                          \
            lane lanes[LANES];                                                                    \
            FILL(lanes, LANES, start);                                                            \
            int64_t i = 0;                                                                        \
            for (; i + LANES <= n; i += LANES)                                                    \
                NOT_UNROLLED for (int l = 0; l < LANES; l++)                                      \
                    lanes[l] = COMBINE(lanes[l], MAP((lane)x[i + l], 0));                         \
            /* Halve the lanes, and each time add as many of the remaining elements. */           \
            _Pragma("GCC unroll 4") for (int half = LANES / 2; half; half /= 2) {                 \
                for (int l = 0; l < half; l++)                                                    \
                    lanes[l] = COMBINE(lanes[l], lanes[l + half]);                                \
                if (n & half) {                                                                   \
                    for (int l = 0; l < half; l++)                                                \
                        lanes[l] = COMBINE(lanes[l], MAP((lane)x[i + l], 0));                     \
                    i += half;                                                                    \
                }                                                                                 \
            }                                                                                     \
            total = COMBINE(total, (wide)lanes[0]);                                               \
        }                                                                                         \
        return total;                                                                             \
    }                                                                                             \
    /* For rows so short that joining lanes would dominate: eight lanes, then four. */            \
    static inline wide name##_short(const type *x, int64_t length)                                \
    {                                                                                             \
        lane lanes[8];                                                                            \
        FILL(lanes, 8, start);                                                                    \
        int64_t i = 0;                                                                            \
        for (; i + 8 <= length; i += 8)                                                           \
            NOT_UNROLLED for (int l = 0; l < 8; l++)                                              \
                lanes[l] = COMBINE(lanes[l], MAP((lane)x[i + l], 0));                             \
        for (int l = 0; l < 4; l++)                                                               \
            lanes[l] = COMBINE(lanes[l], lanes[l + 4]);                                           \
        if (length & 4) {                                                                         \
            for (int l = 0; l < 4; l++)                                                           \
                lanes[l] = COMBINE(lanes[l], MAP((lane)x[i + l], 0));                             \
            i += 4;                                                                               \
        }                                                                                         \
        wide total = COMBINE(COMBINE((wide)lanes[0], (wide)lanes[1]),                             \
                             COMBINE((wide)lanes[2], (wide)lanes[3]));                            \
        for (; i < length; i++)                                                                   \
            total = COMBINE(total, MAP((wide)x[i], 0));                                           \
        return total;                                                                             \
    }                                                                                             \
    /* Several very short rows at once. */                                                        \
    INLINED void name##_few(const type *x, int64_t rows, const int64_t length, wide *restrict totals)\
    {                                                                                             \
        FILL(totals, rows, start);                                                                \
        for (int64_t i = 0; i < length; i++)                                                      \
            for (int64_t j = 0; j < rows; j++)                                                    \
                totals[j] = COMBINE(totals[j], MAP((wide)x[j * length + i], 0));                  \
    }                                                                                             \
    static __attribute__((noinline)) void name##_of_rows(const struct reduction *a, int64_t first,\
                                                         int64_t rows, wide *restrict totals)     \
    {                                                                                             \
        const type *x = (const type *)a->x + first * a->length;                                   \
        FEW(name, 2)                                                                              \
        FEW(name, 3)                                                                              \
        FEW(name, 4)                                                                              \
        /* Several rows at once are summed in a wider type, with fewer lanes per vector. */       \
        if (a->length < (sizeof(lane) == 4 && sizeof(wide) == 8 ? 8 : LANES))                     \
            return name##_few(x, rows, a->length, totals);                                        \
        if (a->length < SHORT && sizeof(lane) > 2) {                                              \
            for (int64_t j = 0; j < rows; j++, x += a->length)                                    \
                totals[j] = name##_short(x, a->length);                                           \
            return;                                                                               \
        }                                                                                         \
        for (int64_t i = 0; i < rows; i++)                                                        \
            totals[i] = name##_folded(x + i * a->length, a->length);                              \
    }

/* The same for columns; MAP takes each element relative to the top of its column, if there are tops. AT_ONCE rows, at
   most four, are added to totals in one pass over these. */
#define COLUMN_TOTALS(name, type, lane, wide, start, COMBINE, MAP, AT_ONCE)                       \
    static __attribute__((noinline)) void name##_of_columns(const struct reduction *a, int64_t first,\
                                                            int64_t columns, wide *restrict totals,\
                                                            const lane *restrict tops)            \
    {                                                                                             \
        const type *restrict x = (const type *)a->x + first;                                      \
        const int64_t count = folds(a, columns), width = count * columns, step = count * a->inner;\
        const int64_t length = a->length / count;                                                 \
        lane part[COLUMNS];                                                                       \
        FILL(totals, width, start);                                                               \
        for (int64_t i = 0; i < length;) {                                                        \
            const int64_t end = length - i < ROWS ? length : i + ROWS;                            \
            for (int64_t j = 0; j < width; j++)                                                   \
                part[j] = MAP((lane)x[j], tops[j]);                                               \
            for (i++, x += step; i + AT_ONCE <= end; i += AT_ONCE, x += AT_ONCE * step)           \
                for (int64_t j = 0; j < width; j++) {                                             \
                    lane reduced = part[j];                                                       \
                    _Pragma("GCC unroll 4") for (int k = 0; k < AT_ONCE; k++)                     \
                        reduced = COMBINE(reduced, MAP((lane)x[k * step + j], tops[j]));          \
                    part[j] = reduced;                                                            \
                }                                                                                 \
            for (; i < end; i++, x += step)                                                       \
                for (int64_t j = 0; j < width; j++)                                               \
                    part[j] = COMBINE(part[j], MAP((lane)x[j], tops[j]));                         \
            for (int64_t j = 0; j < width; j++)                                                   \
                totals[j] = COMBINE(totals[j], (wide)part[j]);                                    \
        }                                                                                         \
        for (int64_t j = 0; j < a->length % count * columns; j++)                                 \
            totals[j] = COMBINE(totals[j], MAP((wide)x[j], tops[j]));                             \
        for (int64_t half = width / 2; half >= columns; half /= 2)                                \
            for (int64_t j = 0; j < half; j++)                                                    \
                totals[j] = COMBINE(totals[j], totals[j + half]);                                 \
    }

#define TOTALS(name, ...) ROW_TOTALS(name, __VA_ARGS__) COLUMN_TOTALS(name, __VA_ARGS__, 4)

/* A kernel whose results are computed from such totals. */
#define FINISHED(name, totals_of, type, wide, FINISH)                                             \
    static inline void name##_rows(const struct reduction *a, int64_t first, int64_t end)         \
    {                                                                                             \
        wide totals[ROWS];                                                                        \
        for (int64_t row = first, rows; row < end; row += rows) {                                 \
            rows = end - row < ROWS ? end - row : ROWS;                                           \
            totals_of##_of_rows(a, row, rows, totals);                                            \
            for (int64_t j = 0; j < rows; j++)                                                    \
                ((type *)a->y)[row + j] = (type)FINISH(totals[j], a->length);                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void name##_columns(const struct reduction *a, int64_t first, int64_t columns, int64_t at)\
    {                                                                                             \
        wide totals[COLUMNS];                                                                     \
        type *const y = (type *)a->y + at;                                                        \
        totals_of##_of_columns(a, first, columns, totals, NULL);                                  \
        for (int64_t j = 0; j < columns; j++)                                                     \
            y[j] = (type)FINISH(totals[j], a->length);                                            \
    }                                                                                             \
                                                                                                  \
    ITEMS(name, name##_rows, name##_columns)

#define REDUCTION(name, type, lane, wide, start, COMBINE, MAP)                                    \
    TOTALS(name, type, lane, wide, start, COMBINE, MAP)                                           \
    FINISHED(name, name, type, wide, TOTAL)

static inline void put_place(const struct reduction *a, int64_t at, int64_t place)
{
    if (a->narrow)
        ((int32_t *)a->y)[at] = (int32_t)place;
    else
        ((int64_t *)a->y)[at] = place;
}

static void put_places(const struct reduction *a, int64_t at, const int32_t *places, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        put_place(a, at + j, places[j]);
}

/* NaN wins against all numbers: so the index of the extreme, which is NaN if any element is, is the first or last of
   the elements equal to it, or that are NaN. The lowest element is the highest one if all are negated, or integers
   complemented: where each is `x MIRROR -1` instead of `x MIRROR same`. If NaN is skipped, it and infinity of the
   wrong sign count as the worst finite number, `least`: where TensorFlow starts to compare. */
#define COUNTED(x, least) (a->skips && !((x) > (least)) ? (least) : (x))
#define PLACES(suffix, type, worst, least, MIRROR, same)                                                 \
    /* The place of `best`, the extreme of a row. */                                              \
    static inline int64_t place_##suffix##_of(const struct reduction *a, int64_t row, const type best)\
    {                                                                                             \
        const type *x = (const type *)a->x + row * a->length;                                     \
        const int64_t step = a->last ? -1 : 1;                                                    \
        int64_t place = a->last ? a->length - 1 : 0, i = 1;                                       \
        /* Skip blocks that lack it: compilers vectorize the comparison of a block. */            \
        for (int any = 0; i + LANES <= a->length; i += LANES, place += step * LANES) {            \
            const type *block = x + place - (a->last ? LANES - 1 : 0);                            \
            for (int l = 0; l < LANES; l++)                                                       \
                any |= best == best ? block[l] == best : block[l] != block[l];                    \
            if (any)                                                                              \
                break;                                                                            \
        }                                                                                         \
        /* Another thread may have changed the elements meanwhile. */                             \
        for (; i < a->length; i++, place += step)                                                 \
            if (best == best ? x[place] == best : x[place] != x[place])                           \
                break;                                                                            \
        return place;                                                                             \
    }                                                                                             \
                                                                                                  \
    /* Several rows of at most SEVERAL elements at once. */                                       \
    static __attribute__((noinline)) void place_##suffix##_few(const struct reduction *a, int64_t first,\
                                                               int64_t rows, int32_t *restrict places)\
    {                                                                                             \
        const type *restrict x = (const type *)a->x + first * a->length;                          \
        const type mirror = a->lowest ? (type)-1 : same;                                          \
        type best[ROWS];                                                                          \
        for (int64_t i = 0; i < a->length; i++) {                                                 \
            const int32_t place = (int32_t)(a->last ? a->length - 1 - i : i);                     \
            for (int64_t j = 0; j < rows; j++) {                                                  \
                const type element = x[j * a->length + place] MIRROR mirror;                      \
                const type own = COUNTED(element, (type)least);                                   \
                const int beaten = (!i) | ((!(own <= best[j])) & (best[j] == best[j]));           \
                places[j] = beaten ? place : places[j];                                           \
                best[j] = beaten ? own : best[j];                                                 \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void place_##suffix##_rows(const struct reduction *a, int64_t first, int64_t end)\
    {                                                                                             \
        int32_t places[ROWS];                                                                     \
        type best[ROWS];                                                                          \
        const int64_t most = a->length < SEVERAL ? ROWS : CEIL_DIV(CACHED, a->length);            \
        for (int64_t row = first, rows; row < end; row += rows) {                                 \
            rows = smaller(most, end - row);                                                      \
            if (a->length < SEVERAL) {                                                            \
                place_##suffix##_few(a, row, rows, places);                                       \
                put_places(a, row, places, rows);                                                 \
                continue;                                                                         \
            }                                                                                     \
            (a->lowest ? min_##suffix##_of_rows : max_##suffix##_of_rows)(a, row, rows, best);    \
            for (int64_t j = 0; j < rows; j++) {                                                  \
                const type top = best[j] MIRROR (a->lowest ? (type)-1 : same);                    \
                /* Rows with NaN, or no number above the least, are seldom. */                    \
                if (a->skips && !(top > (type)least)) {                                           \
                    place_##suffix##_few(a, row + j, 1, places);                                  \
                    put_place(a, row + j, places[0]);                                             \
                } else {                                                                          \
                    put_place(a, row + j, place_##suffix##_of(a, row + j, best[j]));              \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static __attribute__((noinline)) void place_##suffix##_of_columns(const struct reduction *a, int64_t first,\
                                                                      int64_t columns, int32_t *restrict places)\
    {                                                                                             \
        const type *from = (const type *)a->x + first, mirror = a->lowest ? (type)-1 : same;      \
        const int64_t count = folds(a, columns), width = count * columns, end = a->length - 1;    \
        type best[COLUMNS];                                                                       \
        FILL(best, width, worst);                                                                 \
        for (int64_t part = 0; part < count; part++) {                                            \
            const int64_t lasts = end / count * count - (part > end % count ? count : 0);         \
            FILL(places + part * columns, columns, (int32_t)(a->last ? lasts : 0));               \
        }                                                                                         \
        for (int64_t i = 0; i <= end; i += count) {                                               \
            const int32_t place = (int32_t)(a->last ? end / count * count - i : i);               \
            const type *restrict x = from + place * a->inner;                                     \
            const int64_t n = smaller(count, a->length - place) * columns;                        \
            for (int64_t j = 0; j < n; j++) {                                                     \
                const type element = x[j] MIRROR mirror, own = COUNTED(element, (type)least);     \
                const int beaten = (!(own <= best[j])) & (best[j] == best[j]);                    \
                places[j] = beaten ? place : places[j];                                           \
                best[j] = beaten ? own : best[j];                                                 \
            }                                                                                     \
        }                                                                                         \
        for (int64_t part = 1; part < count; part++)                                              \
            for (int64_t j = 0; j < columns; j++)                                                 \
                places[part * columns + j] += (int32_t)part;                                      \
        for (int64_t half = width / 2; half >= columns; half /= 2)                                \
            for (int64_t j = 0; j < half; j++) {                                                  \
                const type own = best[j], other = best[j + half];                                 \
                const int32_t place = places[j], its_place = places[j + half];                    \
                const int equal = (own == other) | ((own != own) & (other != other));             \
                const int nearer = a->last ? its_place > place : its_place < place;               \
                const int beaten = ((!(other <= own)) & (own == own)) | (equal & nearer);         \
                places[j] = beaten ? its_place : place;                                           \
                best[j] = beaten ? other : own;                                                   \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    static inline void place_##suffix##_columns(const struct reduction *a, int64_t first, int64_t columns,\
                                                int64_t at)                                       \
    {                                                                                             \
        int32_t places[COLUMNS];                                                                  \
        place_##suffix##_of_columns(a, first, columns, places);                                   \
        put_places(a, at, places, columns);                                                       \
    }                                                                                             \
                                                                                                  \
    ITEMS(place_##suffix, place_##suffix##_rows, place_##suffix##_columns)

#define SUM(a, b) ((a) + (b))
#define PRODUCT(a, b) ((a) * (b))
/* Two selections, which compilers keep without branches. */
#define EXTREME(a, b, operator)                                                                   \
    ({                                                                                            \
        const __typeof__(a) own = (a), other = (b);                                               \
        const __typeof__(a) more = other operator own ? other : own;                              \
        other != other ? other : more;                                                            \
    })
#define HIGHER(a, b) EXTREME(a, b, >)
#define LOWER(a, b) EXTREME(a, b, <)
#define SAME(x, top) (x)
#define SQUARE(x, top) ((x) * (x))
#define ABSOLUTE(x, top) ((x) < 0 ? -(x) : (x))
#define TOTAL(total, n) (total)
#define MEAN_float32(total, n) ((total) * (1 / (double)(n)))
#define MEAN_float64(total, n) ((total) / (double)(n))
#define ROOT(total, n) sqrt(total)
#define LOGARITHM(total, n) log(total)
#define CODE(total, n) code_of_sum(a, total)
#define QUOTIENT(total, n) ((int64_t)(total) / (n))
#define POWER_float32(x, top) exp32((x) - (top))
#define POWER_float64(x, top) exp64((x) - (top))

/* Integers wrap around. */
#define ANY(suffix, type, sum, wide)                                                              \
    REDUCTION(sum_##suffix, type, sum, wide, 0, SUM, SAME)                                        \
    REDUCTION(prod_##suffix, type, wide, wide, 1, PRODUCT, SAME)

#define EXTREMES(suffix, type, low, high, least, MIRROR, same)                                           \
    REDUCTION(max_##suffix, type, type, type, low, HIGHER, SAME)                                  \
    REDUCTION(min_##suffix, type, type, type, high, LOWER, SAME)                                  \
    PLACES(suffix, type, low, least, MIRROR, same)

/* The logarithm of a sum of exponentials, relative to the highest element; infinities are relative to 0. */
#define LOGSUMEXP(suffix, type)                                                                   \
    COLUMN_TOTALS(powers_##suffix, type, type, double, 0, SUM, POWER_##suffix, 2)                 \
                                                                                                  \
    static inline type relative_##suffix(type highest)                                            \
    {                                                                                             \
        return isfinite(highest) ? highest : 0;                                                   \
    }                                                                                             \
                                                                                                  \
    static inline void logsumexp_##suffix##_rows(const struct reduction *a, int64_t first, int64_t end)\
    {                                                                                             \
        const int64_t length = a->length, many = length < PART ? PART / length : 1;               \
        type powers[PART];                                                                        \
        for (int64_t row = first; row < end; row += many) {                                       \
            const int64_t rows = end - row < many ? end - row : many;                             \
            const type *x = (const type *)a->x + row * length;                                    \
            type tops[PART];                                                                      \
            double total = 0;                                                                     \
            max_##suffix##_of_rows(a, row, rows, tops);                                           \
            for (int64_t at = 0; at < rows * length; at += PART) {                                \
                const int64_t n = rows * length - at < PART ? rows * length - at : PART;          \
                for (int64_t j = 0; j < rows; j++)                                                \
                    for (int64_t i = 0; i < (rows == 1 ? n : length); i++)                        \
                        powers[j * length + i] = x[at + j * length + i] - relative_##suffix(tops[j]);\
                for (int64_t i = 0; i < n; i++)                                                   \
                    powers[i] = POWER_##suffix(powers[i], 0);                                     \
                if (rows == 1)                                                                    \
                    total += sum_##suffix##_folded(powers, n);                                    \
            }                                                                                     \
            for (int64_t j = 0; j < rows; j++) {                                                  \
                if (rows > 1)                                                                     \
                    total = sum_##suffix##_folded(powers + j * length, length);                   \
                ((type *)a->y)[row + j] = (type)(log(total) + (double)relative_##suffix(tops[j]));\
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void logsumexp_##suffix##_columns(const struct reduction *a, int64_t first, int64_t columns,\
                                                    int64_t at)                                   \
    {                                                                                             \
        double totals[COLUMNS];                                                                   \
        type tops[COLUMNS], *const y = (type *)a->y + at;                                         \
        max_##suffix##_of_columns(a, first, columns, tops, NULL);                                 \
        for (int64_t j = 0; j < folds(a, columns) * columns; j++)                                 \
            tops[j] = relative_##suffix(tops[j % columns]);                                       \
        powers_##suffix##_of_columns(a, first, columns, totals, tops);                            \
        for (int64_t j = 0; j < columns; j++)                                                     \
            y[j] = (type)(log(totals[j]) + (double)tops[j]);                                      \
    }                                                                                             \
                                                                                                  \
    ITEMS(logsumexp_##suffix, logsumexp_##suffix##_rows, logsumexp_##suffix##_columns)

#define FLOATS(suffix, type, least)                                                                      \
    ANY(suffix, type, type, double)                                                               \
    EXTREMES(suffix, type, -INFINITY, INFINITY, least, *, 1)                                      \
    REDUCTION(sumsquare_##suffix, type, type, double, 0, SUM, SQUARE)                             \
    FINISHED(mean_##suffix, sum_##suffix, type, double, MEAN_##suffix)                            \
    REDUCTION(l1_##suffix, type, type, double, 0, SUM, ABSOLUTE)                                  \
    FINISHED(l2_##suffix, sumsquare_##suffix, type, double, ROOT)                                 \
    FINISHED(logsum_##suffix, sum_##suffix, type, double, LOGARITHM)                              \
    LOGSUMEXP(suffix, type)

/* Means are exact. */
#define INTEGERS(suffix, type, sum, exact, low, high)                                             \
    ANY(suffix, type, sum, sum)                                                                   \
    EXTREMES(suffix, type, low, high, low, ^, 0)                                                  \
    FINISHED(mean_##suffix, exact##_##suffix, type, __typeof__(exact##_##suffix##_folded(NULL, 0)), QUOTIENT)

/* 1 at the first maximum, or the first NaN, and 0 elsewhere. */
#define HARDMAX(suffix, type)                                                                     \
    static inline void hardmax_##suffix##_rows(const struct reduction *a, int64_t first, int64_t end)\
    {                                                                                             \
        type *y = (type *)a->y + first * a->length;                                               \
        for (int64_t row = first; row < end; row++, y += a->length) {                             \
            type best;                                                                            \
            max_##suffix##_of_rows(a, row, 1, &best);                                             \
            const int64_t place = place_##suffix##_of(a, row, best);                              \
            memset(y, 0, a->length * sizeof(type)); /* all bits are 0 in 0.0 */                   \
            y[place] = 1;                                                                         \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void hardmax_##suffix##_columns(const struct reduction *a, int64_t first, int64_t columns,\
                                                  int64_t at)                                     \
    {                                                                                             \
        int32_t places[COLUMNS];                                                                  \
        place_##suffix##_of_columns(a, first, columns, places);                                   \
        type *const y = (type *)a->y + first;                                                     \
        const int64_t all = a->length * a->inner, width = columns == a->inner ? all : columns;    \
        for (int64_t i = 0; i < all; i += columns == a->inner ? all : a->inner)                   \
            memset(y + i, 0, width * sizeof(type));                                               \
        for (int64_t j = 0; j < columns; j++)                                                     \
            y[places[j] * a->inner + j] = 1;                                                      \
    }                                                                                             \
                                                                                                  \
    ITEMS(hardmax_##suffix, hardmax_##suffix##_rows, hardmax_##suffix##_columns)

FLOATS(float32, float, -FLT_MAX)
FLOATS(float64, double, -DBL_MAX)
TOTALS(exact_int32, int32_t, int64_t, int64_t, 0, SUM, SAME)
INTEGERS(int32, int32_t, uint32_t, exact, INT32_MIN, INT32_MAX)
INTEGERS(int64, int64_t, uint64_t, sum, INT64_MIN, INT64_MAX)
#define MEANS_OF_CODES(suffix, type, low, high)                                                   \
    EXTREMES(suffix, type, low, high, low, ^, 0)                                                  \
    TOTALS(codes_##suffix, type, int16_t, int32_t, 0, SUM, SAME)                                  \
    FINISHED(mean_##suffix, codes_##suffix, type, int32_t, CODE)
MEANS_OF_CODES(int8, int8_t, INT8_MIN, INT8_MAX)
MEANS_OF_CODES(uint8, uint8_t, 0, UINT8_MAX)
EXTREMES(int16, int16_t, INT16_MIN, INT16_MAX, INT16_MIN, ^, 0)
HARDMAX(float32, float)
HARDMAX(float64, double)

#define EXTREME_ENTRIES(suffix)                                                                   \
    KERNEL(max_##suffix, reduction), KERNEL(min_##suffix, reduction), KERNEL(place_##suffix, reduction)
#define ENTRIES(suffix)                                                                           \
    EXTREME_ENTRIES(suffix), KERNEL(sum_##suffix, reduction), KERNEL(prod_##suffix, reduction),   \
        KERNEL(mean_##suffix, reduction)
#define ENTRIES_OF_FLOATS(suffix)                                                                 \
    ENTRIES(suffix), KERNEL(sumsquare_##suffix, reduction), KERNEL(l1_##suffix, reduction),       \
        KERNEL(l2_##suffix, reduction), KERNEL(logsum_##suffix, reduction),                       \
        KERNEL(logsumexp_##suffix, reduction)

/* Products of codes, rescaled after each factor: `multiplier` has 15 fractional bits, which `shift` includes. Some
   chains, with `step` between elements and `apart` between chains, are multiplied together to hide latency. */
enum { CHAINS = 32 };
static inline int32_t rescaled_product(const struct mean_of_codes *m, int64_t x)
{
    return (int32_t)((x * m->multiplier + ((int64_t)1 << (m->shift - 1))) >> m->shift);
}
#define PRODUCTS_OF_CODES(type)                                                                   \
    static void product_chains_##type(const struct mean_of_codes *m, const type##_t *x, type##_t *y, \
                                      int64_t count, int64_t apart, int64_t step)                 \
    {                                                                                             \
        const int32_t zero = (int32_t)m->zero;                                                    \
        int32_t products[CHAINS];                                                                 \
        for (int64_t j = 0; j < count; j++)                                                       \
            products[j] = x[j * apart] - zero;                                                    \
        for (int64_t i = 1; i < m->of.length; i++)                                                \
            for (int64_t j = 0; j < count; j++)                                                   \
                products[j] = rescaled_product(m, (int64_t)products[j] * (x[i * step + j * apart] - zero)); \
        for (int64_t j = 0; j < count; j++) {                                                     \
            const int64_t code = (int64_t)rescaled_product(m, products[j]) + m->result_zero;      \
            y[j] = (type##_t)WITHIN(code, m->low, m->high);                                       \
        }                                                                                         \
    }                                                                                             \
    ITEMS_OF(product_##type, mean_of_codes)                                                       \
    {                                                                                             \
        const struct reduction *r = &a->of;                                                       \
        const int64_t inner = r->inner, blocks = CEIL_DIV(inner, r->block);                       \
        for (int64_t item = begin; item < end; item++) {                                          \
            const int64_t row = inner > 1 ? item / blocks : item * r->block;                      \
            const int64_t column = inner > 1 ? item % blocks * r->block : 0;                      \
            const int64_t count = smaller(r->block, inner > 1 ? inner - column : r->outer - row); \
            const int64_t apart = inner > 1 ? 1 : r->length;                                      \
            const type##_t *x = (const type##_t *)r->x + row * r->length * inner + column;        \
            for (int64_t j = 0; j < count; j += CHAINS)                                           \
                product_chains_##type(a, x + j * apart, (type##_t *)r->y + row * inner + column + j, \
                                      smaller(CHAINS, count - j), apart, inner);                  \
        }                                                                                         \
    }
PRODUCTS_OF_CODES(int8)
PRODUCTS_OF_CODES(int16)

KERNELS(reduce, ENTRIES_OF_FLOATS(float32), ENTRIES_OF_FLOATS(float64), ENTRIES(int32), ENTRIES(int64),
        EXTREME_ENTRIES(int8), EXTREME_ENTRIES(uint8), EXTREME_ENTRIES(int16), KERNEL(mean_int8, mean_of_codes), KERNEL(mean_uint8, mean_of_codes),
        KERNEL(product_int8, mean_of_codes), KERNEL(product_int16, mean_of_codes),
        KERNELS_OF_FLOATS(hardmax, reduction))
