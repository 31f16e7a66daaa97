/* Features of classical models: rows that are scaled, imputed or normalized, and columns of rows. An item is a
   row. */
#include <string.h>
#include <math.h>
#include "families.h"

struct columns {
    const void *x;
    const int64_t *places; /* column indices */
    void *y;
    int64_t width, count;
};

enum { TOGETHER = 4 }; /* rows per load of an index */

#define COLUMNS(size, type)                                                                       \
    CHECKED_ITEMS_OF(columns_##size, columns)                                                     \
    {                                                                                             \
        const int64_t *restrict places = a->places;                                               \
        int64_t bad = 0;                                                                          \
        for (int64_t i = 0; i < a->count; i++)                                                    \
            bad |= places[i] | (a->width - 1 - places[i]); /* negative if one is */               \
        for (int64_t row = begin; bad >= 0 && row < end; row += TOGETHER) {                       \
            const type *x = (const type *)a->x + row * a->width;                                  \
            type *y = (type *)a->y + row * a->count;                                              \
            const int64_t last = end - 1 - row; /* copied again if there are fewer rows */        \
            for (int64_t i = 0; i < a->count; i++)                                                \
                for (int64_t j = 0; j < TOGETHER; j++)                                            \
                    y[smaller(j, last) * a->count + i] = x[smaller(j, last) * a->width + places[i]];\
        }                                                                                         \
        return bad < 0;                                                                           \
    }

OF_SIZES(COLUMNS)

struct lookup {
    const void *x;
    void *y;
    const void *keys;   /* ascending, NaN last, distinct */
    const void *values; /* of the keys; the last one is the default */
    int64_t count;
};

/* The index of a value among keys, or the number of keys if it is missing. */
#define FIND(suffix, type, real)                                                                  \
    static inline int64_t find_##suffix(const type *keys, int64_t count, type value)              \
    {                                                                                             \
        int64_t low = 0, high = count;                                                            \
        if (value != value)                                                                       \
            return count && keys[count - 1] != keys[count - 1] ? count - 1 : count;               \
        while (low < high) {                                                                      \
            int64_t middle = (low + high) / 2;                                                    \
            if (keys[middle] < value)                                                             \
                low = middle + 1;                                                                 \
            else                                                                                  \
                high = middle;                                                                    \
        }                                                                                         \
        return low < count && keys[low] == value ? low : count;                                   \
    }

#define LOOKUP(suffix, type, size, result)                                                        \
    ITEMS_OF(lookup_##suffix##_##size, lookup)                                                    \
    {                                                                                             \
        const type *x = a->x;                                                                     \
        const result *values = a->values;                                                         \
        for (int64_t i = begin; i < end; i++)                                                     \
            ((result *)a->y)[i] = values[find_##suffix(a->keys, a->count, x[i])];                 \
    }
#define LOOKUPS(suffix, type, real) LOOKUP(suffix, type, 4, uint32_t) LOOKUP(suffix, type, 8, uint64_t)

OF_NUMBERS(FIND)
OF_NUMBERS(LOOKUPS)

struct one_hot {
    const int64_t *x;
    float *y;
    const int64_t *keys, *values; /* as in a lookup: the index of the 1, -1 for none */
    const int64_t *places;        /* those of `span` integers from `low` on, if keys are dense */
    int64_t count, width;
    int64_t lenient; /* values that are no key get zeros */
    int64_t low, span;
};

CHECKED_ITEMS_OF(one_hot_int64, one_hot)
{
    memset(a->y + begin * a->width, 0, (end - begin) * a->width * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        const uint64_t from_low = (uint64_t)a->x[i] - (uint64_t)a->low;
        const int64_t place = !a->span                       ? a->values[find_int64(a->keys, a->count, a->x[i])]
                              : from_low < (uint64_t)a->span ? a->places[from_low]
                                                             : -1;
        if (place >= 0)
            a->y[i * a->width + place] = 1;
        else if (!a->lenient)
            return 1;
    }
    return 0;
}

struct scaler {
    const void *x;
    float *y;
    const float *offset, *scale;
    int64_t width;
};

#define SCALER(suffix, type, real)                                                                \
    ITEMS_OF(scaler_##suffix, scaler)                                                             \
    {                                                                                             \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * a->width;                         \
            const float *restrict offset = a->offset, *restrict scale = a->scale;                 \
            float *restrict y = a->y + row * a->width;                                            \
            for (int64_t i = 0; i < a->width; i++)                                                \
                y[i] = (float)(((real)x[i] - (real)offset[i]) * (real)scale[i]);                  \
        }                                                                                         \
    }

OF_NUMBERS(SCALER)

struct imputer {
    const void *x;
    void *y;
    const void *values;   /* of each column */
    const void *replaced; /* one value */
    int64_t width;
};

#define IMPUTER(suffix, type, real)                                                               \
    ITEMS_OF(imputer_##suffix, imputer)                                                           \
    {                                                                                             \
        const type replaced = *(const type *)a->replaced;                                         \
        const int nan = replaced != replaced;                                                     \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * a->width;                         \
            const type *restrict values = a->values;                                              \
            type *restrict y = (type *)a->y + row * a->width;                                     \
            for (int64_t i = 0; i < a->width; i++)                                                \
                y[i] = (x[i] == replaced) | (nan & (x[i] != x[i])) ? values[i] : x[i];            \
        }                                                                                         \
    }

OF_NUMBERS(IMPUTER)

struct normalizer {
    const void *x;
    float *y;
    int64_t width;
    int64_t norm;
};

enum { MAX, L1, L2, WIDTH = 8 };

#define NORMALIZER(suffix, type, real)                                                            \
    ITEMS_OF(normalizer_##suffix, normalizer)                                                     \
    {                                                                                             \
        int64_t width = a->width, blocks = width - width % WIDTH;                                 \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * width;                            \
            float *restrict y = a->y + row * width;                                               \
            real most = -INFINITY;                                                                \
            double norm = 0, sums[WIDTH] = {0};                                                   \
            if (a->norm == MAX) {                                                                 \
                for (int64_t i = 0; i < width; i++) /* NaN is preserved */                        \
                    most = (real)x[i] <= most || most != most ? most : (real)x[i];                \
                norm = most;                                                                      \
            }                                                                                     \
            else {                                                                                \
                for (int64_t i = 0; i < blocks; i += WIDTH)                                       \
                    for (int64_t j = 0; j < WIDTH; j++) {                                         \
                        double value = (real)x[i + j];                                            \
                        sums[j] += a->norm == L1 ? fabs(value) : value * value;                   \
                    }                                                                             \
                for (int64_t i = blocks; i < width; i++) {                                        \
                    double value = (real)x[i];                                                    \
                    norm += a->norm == L1 ? fabs(value) : value * value;                          \
                }                                                                                 \
                for (int64_t j = 0; j < WIDTH; j++)                                               \
                    norm += sums[j];                                                              \
                norm = a->norm == L1 ? norm : sqrt(norm);                                         \
            }                                                                                     \
            real divisor = (real)norm == 0 ? 1 : (real)norm;                                      \
            for (int64_t i = 0; i < width; i++)                                                   \
                y[i] = (float)((real)x[i] / divisor);                                             \
        }                                                                                         \
    }

OF_NUMBERS(NORMALIZER)

#define LOOKUP_ENTRIES(suffix, type, real)                                                        \
    KERNEL(lookup_##suffix##_4, lookup), KERNEL(lookup_##suffix##_8, lookup),
KERNELS(features, KERNELS_OF_SIZES(columns, columns), OF_NUMBERS(LOOKUP_ENTRIES) KERNEL(one_hot_int64, one_hot),
        KERNELS_OF_NUMBERS(scaler, scaler), KERNELS_OF_NUMBERS(imputer, imputer),
        KERNELS_OF_NUMBERS(normalizer, normalizer))
