/* Features of classical models: rows that are scaled, filled up or normed, and columns of rows. An item
   is a row. */
#include <string.h>
#include <math.h>
#include "native.h"

struct columns {
    const void *x;
    const int64_t *places; /* in a row */
    void *y;
    int64_t width, count;
};

#define COLUMNS(name, type)                                                                       \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct columns *a = arguments;                                                      \
        const int64_t *restrict places = a->places;                                               \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * a->width;                         \
            type *restrict y = (type *)a->y + row * a->count;                                     \
            for (int64_t i = 0; i < a->count; i++) {                                              \
                const int64_t place = places[i];                                                  \
                if (place < 0 || place >= a->width)                                               \
                    return 1;                                                                     \
                y[i] = x[place];                                                                  \
            }                                                                                     \
        }                                                                                         \
        return 0;                                                                                 \
    }

COLUMNS(columns_1, uint8_t)
COLUMNS(columns_2, uint16_t)
COLUMNS(columns_4, uint32_t)
COLUMNS(columns_8, uint64_t)

struct lookup {
    const void *x;
    void *y;
    const void *keys;   /* ascending, NaN last, none twice */
    const void *values; /* of the keys; one more is for what is no key */
    int64_t count;
};

/* The place of a value among keys, or their number. */
#define FIND(name, type)                                                                          \
    static inline int64_t name(const type *keys, int64_t count, type value)                       \
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

#define LOOKUP(name, type, find, result)                                                          \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct lookup *a = arguments;                                                       \
        for (int64_t i = begin; i < end; i++)                                                     \
            ((result *)a->y)[i] = ((const result *)                                               \
                                       a->values)[find(a->keys, a->count, ((const type *)a->x)[i])]; \
        return 0;                                                                                 \
    }

FIND(find_float32, float)
FIND(find_float64, double)
FIND(find_int32, int32_t)
FIND(find_int64, int64_t)
LOOKUP(lookup_float32_4, float, find_float32, uint32_t)
LOOKUP(lookup_float32_8, float, find_float32, uint64_t)
LOOKUP(lookup_float64_4, double, find_float64, uint32_t)
LOOKUP(lookup_float64_8, double, find_float64, uint64_t)
LOOKUP(lookup_int32_4, int32_t, find_int32, uint32_t)
LOOKUP(lookup_int32_8, int32_t, find_int32, uint64_t)
LOOKUP(lookup_int64_4, int64_t, find_int64, uint32_t)
LOOKUP(lookup_int64_8, int64_t, find_int64, uint64_t)

struct one_hot {
    const int64_t *x;
    float *y;
    const int64_t *keys, *values; /* as of a lookup: the place of the one */
    int64_t count, width;
    int64_t lenient; /* what is no key gets zeros */
};

static int one_hot_int64(const void *arguments, int64_t begin, int64_t end)
{
    const struct one_hot *a = arguments;
    memset(a->y + begin * a->width, 0, (end - begin) * a->width * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        int64_t place = find_int64(a->keys, a->count, a->x[i]);
        if (place < a->count)
            a->y[i * a->width + a->values[place]] = 1;
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

#define SCALER(name, type, real)                                                                  \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct scaler *a = arguments;                                                       \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * a->width;                         \
            const float *restrict offset = a->offset, *restrict scale = a->scale;                 \
            float *restrict y = a->y + row * a->width;                                            \
            for (int64_t i = 0; i < a->width; i++)                                                \
                y[i] = (float)(((real)x[i] - (real)offset[i]) * (real)scale[i]);                  \
        }                                                                                         \
        return 0;                                                                                 \
    }

SCALER(scaler_float32, float, float)
SCALER(scaler_float64, double, double)
SCALER(scaler_int32, int32_t, float)
SCALER(scaler_int64, int64_t, float)

struct imputer {
    const void *x;
    void *y;
    const void *values;   /* of each column */
    const void *replaced; /* one value */
    int64_t width;
};

#define IMPUTER(name, type)                                                                       \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct imputer *a = arguments;                                                      \
        const type replaced = *(const type *)a->replaced;                                         \
        const int nan = replaced != replaced;                                                     \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * a->width;                         \
            const type *restrict values = a->values;                                              \
            type *restrict y = (type *)a->y + row * a->width;                                     \
            for (int64_t i = 0; i < a->width; i++)                                                \
                y[i] = (x[i] == replaced) | (nan & (x[i] != x[i])) ? values[i] : x[i];            \
        }                                                                                         \
        return 0;                                                                                 \
    }

IMPUTER(imputer_float32, float)
IMPUTER(imputer_float64, double)
IMPUTER(imputer_int32, int32_t)
IMPUTER(imputer_int64, int64_t)

struct normalizer {
    const void *x;
    float *y;
    int64_t width;
    int64_t norm;
};

enum { MAX, L1, L2, WIDTH = 8 };

#define NORMALIZER(name, type, real)                                                              \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct normalizer *a = arguments;                                                   \
        int64_t width = a->width, blocks = width - width % WIDTH;                                 \
        for (int64_t row = begin; row < end; row++) {                                             \
            const type *restrict x = (const type *)a->x + row * width;                            \
            float *restrict y = a->y + row * width;                                               \
            real most = -INFINITY;                                                                \
            double norm = 0, sums[WIDTH] = {0};                                                   \
            if (a->norm == MAX) {                                                                 \
                for (int64_t i = 0; i < width; i++) /* NaN stays */                               \
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
        return 0;                                                                                 \
    }

NORMALIZER(normalizer_float32, float, float)
NORMALIZER(normalizer_float64, double, double)
NORMALIZER(normalizer_int32, int32_t, float)
NORMALIZER(normalizer_int64, int64_t, float)

const kernel_entry features_kernels[] = {
    KERNEL(columns_1, columns),
    KERNEL(columns_2, columns),
    KERNEL(columns_4, columns),
    KERNEL(columns_8, columns),
    KERNEL(lookup_float32_4, lookup),
    KERNEL(lookup_float32_8, lookup),
    KERNEL(lookup_float64_4, lookup),
    KERNEL(lookup_float64_8, lookup),
    KERNEL(lookup_int32_4, lookup),
    KERNEL(lookup_int32_8, lookup),
    KERNEL(lookup_int64_4, lookup),
    KERNEL(lookup_int64_8, lookup),
    KERNEL(one_hot_int64, one_hot),
    KERNEL(scaler_float32, scaler),
    KERNEL(scaler_float64, scaler),
    KERNEL(scaler_int32, scaler),
    KERNEL(scaler_int64, scaler),
    KERNEL(imputer_float32, imputer),
    KERNEL(imputer_float64, imputer),
    KERNEL(imputer_int32, imputer),
    KERNEL(imputer_int64, imputer),
    KERNEL(normalizer_float32, normalizer),
    KERNEL(normalizer_float64, normalizer),
    KERNEL(normalizer_int32, normalizer),
    KERNEL(normalizer_int64, normalizer),
    END_OF_KERNELS,
};
