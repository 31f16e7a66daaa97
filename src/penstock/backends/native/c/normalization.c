/* Images standardized over groups of their channels, then scaled and shifted by channel, and rows
   standardized, scaled and shifted. An item is one group of one image; where channels lie innermost, as
   many groups as fit into a block; or a block of rows.

   Sums are of short blocks in float32 (float64), each in several lanes, added up in float64. */
#include <math.h>
#include <string.h>
#include "families.h"
#include "vectors.h"

struct group_normalization {
    const void *x, *scale, *bias;
    void *y;
    int64_t groups, channels; /* channels of a group */
    int64_t positions;
    int64_t block; /* groups of an item, if channels lie innermost */
    double epsilon;
};

struct layer_normalization {
    const void *x, *scale, *bias; /* bias: NULL if there is none */
    void *y, *means, *inverses;   /* means and inverse deviations of rows, NULL if not wanted */
    int64_t rows, width;
    int64_t block;   /* rows of an item */
    int64_t centred; /* the mean is subtracted */
    double epsilon;
};

enum { VECTORS = 4, RUN = 1024, ROWS = 64, MOST_CHANNELS = 1024 };

#define NORMALIZE(name, type)                                                                     \
    typedef type name##_lanes __attribute__((vector_size(VECTOR_BYTES)));                         \
                                                                                                  \
    INLINED double name##_sum(const type *restrict x, int64_t count, type shift, int square)      \
    {                                                                                             \
        enum { LANES = VECTOR_BYTES / sizeof(type), STEP = VECTORS * LANES };                     \
        double total = 0;                                                                         \
        for (int64_t from = 0; from < count; from += RUN) {                                       \
            int64_t to = from + RUN < count ? from + RUN : count, i = from;                       \
            name##_lanes sums[VECTORS] = {0};                                                     \
            for (; i + STEP <= to; i += STEP)                                                     \
                for (int j = 0; j < VECTORS; j++) {                                               \
                    name##_lanes d;                                                               \
                    memcpy(&d, x + i + j * LANES, sizeof d);                                      \
                    d -= shift;                                                                   \
                    sums[j] += square ? d * d : d;                                                \
                }                                                                                 \
            for (; i + LANES <= to; i += LANES) {                                                 \
                name##_lanes d;                                                                   \
                memcpy(&d, x + i, sizeof d);                                                      \
                d -= shift;                                                                       \
                sums[0] += square ? d * d : d;                                                    \
            }                                                                                     \
            for (; i < to; i++) {                                                                 \
                type d = x[i] - shift;                                                            \
                total += square ? d * d : d;                                                      \
            }                                                                                     \
            type parts[LANES];                                                                    \
            sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);                                  \
            memcpy(parts, sums, sizeof parts);                                                    \
            for (int half = LANES / 2; half; half /= 2)                                           \
                for (int j = 0; j < half; j++)                                                    \
                    parts[j] += parts[j + half];                                                  \
            total += parts[0];                                                                    \
        }                                                                                         \
        return total;                                                                             \
    }                                                                                             \
                                                                                                  \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct group_normalization *a = arguments;                                          \
        int64_t positions = a->positions, count = a->channels * positions;                        \
        for (int64_t item = begin; item < end; item++) {                                          \
            const type *x = (const type *)a->x + item * count;                                    \
            type *y = (type *)a->y + item * count;                                                \
            int64_t first = item % a->groups * a->channels;                                       \
            type mean = (type)(name##_sum(x, count, 0, 0) / count);                               \
            double variance = name##_sum(x, count, mean, 1) / count;                              \
            double inverse = 1 / sqrt(variance + a->epsilon);                                     \
            for (int64_t c = 0; c < a->channels; c++) {                                           \
                type factor = (type)(((const type *)a->scale)[first + c] * inverse);              \
                type bias = ((const type *)a->bias)[first + c];                                   \
                for (int64_t i = c * positions; i < (c + 1) * positions; i++)                     \
                    y[i] = (x[i] - mean) * factor + bias;                                         \
            }                                                                                     \
        }                                                                                         \
        return 0;                                                                                 \
    }                                                                                             \
                                                                                                  \
    /* Sums by channel of `width` channels that lie side by side, `step` numbers an image row. */ \
    INLINED void name##_sums(const type *restrict x, int64_t positions, int64_t step, int64_t width,\
                             const type *restrict shifts, int square, double *restrict totals)    \
    {                                                                                             \
        type sums[MOST_CHANNELS];                                                                 \
        for (int64_t c = 0; c < width; c++)                                                       \
            totals[c] = 0;                                                                        \
        for (int64_t from = 0; from < positions; from += ROWS) {                                  \
            int64_t to = from + ROWS < positions ? from + ROWS : positions;                       \
            for (int64_t c = 0; c < width; c++)                                                   \
                sums[c] = 0;                                                                      \
            for (int64_t i = from; i < to; i++)                                                   \
                for (int64_t c = 0; c < width; c++) {                                             \
                    type d = x[i * step + c] - shifts[c];                                         \
                    sums[c] += square ? d * d : d;                                                \
                }                                                                                 \
            for (int64_t c = 0; c < width; c++)                                                   \
                totals[c] += sums[c];                                                             \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* The mean of each group's totals, for each of its channels. */                              \
    static inline void name##_mean(const struct group_normalization *a, int64_t width,            \
                                   double *totals)                                                \
    {                                                                                             \
        for (int64_t from = 0; from < width; from += a->channels) {                               \
            double total = 0;                                                                     \
            for (int64_t c = from; c < from + a->channels; c++)                                   \
                total += totals[c];                                                               \
            for (int64_t c = from; c < from + a->channels; c++)                                   \
                totals[c] = total / (a->channels * a->positions);                                 \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static int name##_last(const void *arguments, int64_t begin, int64_t end)                     \
    {                                                                                             \
        const struct group_normalization *a = arguments;                                          \
        int64_t blocks = (a->groups + a->block - 1) / a->block, step = a->groups * a->channels;   \
        type means[MOST_CHANNELS], factors[MOST_CHANNELS];                                        \
        double totals[MOST_CHANNELS];                                                             \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t first = item % blocks * a->block * a->channels;                               \
            int64_t width = a->block * a->channels;                                               \
            width = step - first < width ? step - first : width;                                  \
            int64_t place = item / blocks * a->positions * step + first;                          \
            const type *x = (const type *)a->x + place;                                           \
            const type *bias = (const type *)a->bias + first;                                     \
            type *y = (type *)a->y + place;                                                       \
            for (int64_t c = 0; c < width; c++)                                                   \
                means[c] = 0;                                                                     \
            name##_sums(x, a->positions, step, width, means, 0, totals);                          \
            name##_mean(a, width, totals);                                                        \
            for (int64_t c = 0; c < width; c++)                                                   \
                means[c] = (type)totals[c];                                                       \
            name##_sums(x, a->positions, step, width, means, 1, totals);                          \
            name##_mean(a, width, totals);                                                        \
            for (int64_t c = 0; c < width; c++)                                                   \
                factors[c] = (type)(((const type *)a->scale)[first + c] /                         \
                                    sqrt(totals[c] + a->epsilon));                                \
            for (int64_t i = 0; i < a->positions; i++)                                            \
                for (int64_t c = 0; c < width; c++)                                               \
                    y[i * step + c] = (x[i * step + c] - means[c]) * factors[c] + bias[c];        \
        }                                                                                         \
        return 0;                                                                                 \
    }

NORMALIZE(group_normalization_float32, float)
NORMALIZE(group_normalization_float64, double)

#define LAYER(name, type, sum)                                                                    \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct layer_normalization *a = arguments;                                          \
        int64_t width = a->width, last = end * a->block < a->rows ? end * a->block : a->rows;     \
        const type *scale = a->scale, *bias = a->bias;                                            \
        for (int64_t row = begin * a->block; row < last; row++) {                                 \
            const type *x = (const type *)a->x + row * width;                                     \
            type *y = (type *)a->y + row * width;                                                 \
            type mean = a->centred ? (type)(sum(x, width, 0, 0) / width) : 0;                     \
            type inverse = (type)(1 / sqrt(sum(x, width, mean, 1) / width + a->epsilon));         \
            if (bias)                                                                             \
                _Pragma("GCC ivdep") for (int64_t i = 0; i < width; i++)                          \
                    y[i] = (x[i] - mean) * inverse * scale[i] + bias[i];                          \
            else                                                                                  \
                _Pragma("GCC ivdep") for (int64_t i = 0; i < width; i++)                          \
                    y[i] = (x[i] - mean) * inverse * scale[i];                                    \
            if (a->means)                                                                         \
                ((type *)a->means)[row] = mean;                                                   \
            if (a->inverses)                                                                      \
                ((type *)a->inverses)[row] = inverse;                                             \
        }                                                                                         \
        return 0;                                                                                 \
    }

LAYER(layer_normalization_float32, float, group_normalization_float32_sum)
LAYER(layer_normalization_float64, double, group_normalization_float64_sum)

const kernel_entry normalization_kernels[] = {
    KERNELS_OF_FLOATS(group_normalization, group_normalization),
    KERNEL(group_normalization_float32_last, group_normalization),
    KERNEL(group_normalization_float64_last, group_normalization),
    KERNELS_OF_FLOATS(layer_normalization, layer_normalization),
    END_OF_KERNELS,
};
