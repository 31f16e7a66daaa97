/* Reductions of short rows: an item is a row, and gives one element. Sums of float32 are computed in
   float64, in the order of the elements; rows overlap. */
#include <math.h>
#include "native.h"

struct rows {
    const void *x;
    void *y;
    int64_t count; /* of a row, at least 1 */
    int64_t last;  /* of equal elements that are the highest, the last is chosen */
};

#define ROWS(name, type, wide, start, step, finish)                                               \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct rows *a = arguments;                                                         \
        const int64_t count = a->count;                                                           \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *x = (const type *)a->x + row * count;                                     \
            wide total = (wide)(start);                                                           \
            for (int64_t i = 0; i < count; i++) {                                                 \
                const wide value = (wide)x[i];                                                    \
                total = step;                                                                     \
            }                                                                                     \
            ((type *)a->y)[row] = (type)(finish);                                                 \
        }                                                                                         \
        return 0;                                                                                 \
    }

/* NaN beats all numbers, and nothing beats NaN. */
#define PLACES(name, type, operator)                                                              \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct rows *a = arguments;                                                         \
        const int64_t count = a->count, last = a->last;                                           \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *x = (const type *)a->x + row * count;                                     \
            int64_t place = last ? count - 1 : 0;                                                 \
            type best = x[place];                                                                 \
            for (int64_t i = 1; i < count; i++) {                                                 \
                int64_t other = last ? count - 1 - i : i;                                         \
                int beaten = !(x[other] operator best) && best == best;                           \
                place = beaten ? other : place;                                                   \
                best = beaten ? x[other] : best;                                                  \
            }                                                                                     \
            ((int64_t *)a->y)[row] = place;                                                       \
        }                                                                                         \
        return 0;                                                                                 \
    }

#define ANY(suffix, type, wide)                                                                   \
    ROWS(rows_sum_##suffix, type, wide, 0, total + value, total)                                  \
    ROWS(rows_sumsquare_##suffix, type, wide, 0, total + value * value, total)                    \
    ROWS(rows_prod_##suffix, type, wide, 1, total *value, total)                                  \
    ROWS(rows_max_##suffix, type, type, x[0], !(value <= total) && total == total ? value : total, total) \
    ROWS(rows_min_##suffix, type, type, x[0], !(value >= total) && total == total ? value : total, total) \
    PLACES(rows_argmax_##suffix, type, <=)                                                        \
    PLACES(rows_argmin_##suffix, type, >=)

#define FLOATS(suffix, type)                                                                      \
    ANY(suffix, type, double)                                                                     \
    ROWS(rows_mean_##suffix, type, double, 0, total + value, total / count)                       \
    ROWS(rows_l1_##suffix, type, double, 0, total + fabs(value), total)                           \
    ROWS(rows_l2_##suffix, type, double, 0, total + value * value, sqrt(total))                   \
    ROWS(rows_logsum_##suffix, type, double, 0, total + value, log(total))                        \
    static inline double sum_exp_##suffix(const type *x, int64_t count)                           \
    {                                                                                             \
        double most = x[0], total = 0;                                                            \
        for (int64_t i = 1; i < count; i++)                                                       \
            most = x[i] > most ? x[i] : most;                                                     \
        most = isfinite(most) ? most : 0;                                                         \
        for (int64_t i = 0; i < count; i++)                                                       \
            total += exp(x[i] - most);                                                            \
        return log(total) + most;                                                                 \
    }                                                                                             \
    static int rows_logsumexp_##suffix(const void *arguments, int64_t begin, int64_t end)         \
    {                                                                                             \
        const struct rows *a = arguments;                                                         \
        for (int64_t row = begin; row < end; row++)                                               \
            ((type *)a->y)[row] = (type)sum_exp_##suffix((const type *)a->x + row * a->count, a->count); \
        return 0;                                                                                 \
    }

FLOATS(float32, float)
FLOATS(float64, double)
ANY(int32, int32_t, int64_t)
ANY(int64, int64_t, int64_t)

#define ENTRIES(suffix)                                                                           \
    KERNEL(rows_sum_##suffix, rows), KERNEL(rows_sumsquare_##suffix, rows),                       \
        KERNEL(rows_prod_##suffix, rows), KERNEL(rows_max_##suffix, rows),                        \
        KERNEL(rows_min_##suffix, rows), KERNEL(rows_argmax_##suffix, rows),                      \
        KERNEL(rows_argmin_##suffix, rows)
#define FLOAT_ENTRIES(suffix)                                                                     \
    ENTRIES(suffix), KERNEL(rows_mean_##suffix, rows), KERNEL(rows_l1_##suffix, rows),            \
        KERNEL(rows_l2_##suffix, rows), KERNEL(rows_logsum_##suffix, rows),                       \
        KERNEL(rows_logsumexp_##suffix, rows)

const kernel_entry rows_kernels[] = {
    FLOAT_ENTRIES(float32), FLOAT_ENTRIES(float64), ENTRIES(int32), ENTRIES(int64), END_OF_KERNELS,
};
