/* Group normalization of images (standardized over groups of channels, then scaled and shifted per channel), and
   layer normalization of rows. An item is one group of one image; as many groups as fit in a block if images are
   channels-last; or a block of rows. Other kernels scale and shift images per channel, or divide them by a power of a
   sum over adjacent channels (LRN).

   Short blocks are summed in float32 (float64) in several lanes, and their sums in float64. */
// Compiler options: -ffp-contract=fast
#include "wide.h"
#include <math.h>
#include <string.h>
#include "families.h"
#include "math64.h"
#include "vectors.h"

struct group_normalization {
    const void *x, *scale, *bias;
    void *y;
    int64_t groups, channels; /* channels of a group */
    int64_t positions;
    int64_t block; /* groups of an item, if images are channels-last */
    double epsilon;
};

struct layer_normalization {
    const void *x, *scale, *bias; /* bias: NULL if there is none */
    void *y, *means, *inverses;   /* means and inverse deviations of rows, NULL if not requested */
    int64_t rows, width;
    int64_t block;   /* rows of an item */
    int64_t centred; /* whether the mean is subtracted */
    double epsilon;
};

enum { VECTORS = 4, RUN = 1024, ROWS = 64, MOST_CHANNELS = 1024, SHORT = 64 };
enum { LRN_LANES = VECTOR_BYTES / 4, LRN_VECTORS = 4, MOST_ROW = 8192, MOST_AROUND = 64 };

#define NORMALIZE(name, type, integer)                                                            \
    typedef type name##_lanes __attribute__((vector_size(VECTOR_BYTES)));                         \
    typedef integer name##_mask __attribute__((vector_size(VECTOR_BYTES)));                       \
                                                                                                  \
    INLINED double name##_sum(const type *restrict x, int64_t count, type shift, int square)      \
    {                                                                                             \
        enum { LANES = VECTOR_BYTES / sizeof(type), WIDE = SUM_BYTES / sizeof(type), STEP = VECTORS * WIDE };\
        double total = 0;                                                                         \
        for (int64_t from = 0; from < count; from += RUN) {                                       \
            int64_t to = from + RUN < count ? from + RUN : count, i = from;                       \
            name##_lanes sums[VECTORS * SUM_VECTORS] = {0};                                       \
            for (; i + STEP <= to; i += STEP)                                                     \
                UNROLLED(j, VECTORS * SUM_VECTORS) {                                              \
                    name##_lanes d;                                                               \
                    memcpy(&d, x + i + j * LANES, sizeof d);                                      \
                    d -= shift;                                                                   \
                    sums[j] += square ? d * d : d;                                                \
                }                                                                                 \
            /* The last vectors may begin before `i`: elements that were added already become 0. */\
            for (; i < to && count >= WIDE; i += WIDE)                                            \
                UNROLLED(j, SUM_VECTORS) {                                                        \
                    const int64_t place = i + WIDE <= to ? i : to - WIDE;                         \
                    name##_lanes d;                                                               \
                    name##_mask lanes;                                                            \
                    for (int l = 0; l < LANES; l++)                                               \
                        lanes[l] = j * LANES + l;                                                 \
                    memcpy(&d, x + place + j * LANES, sizeof d);                                  \
                    d -= shift;                                                                   \
                    d = (name##_lanes)((name##_mask)d & (lanes >= (integer)(i - place)));         \
                    sums[j] += square ? d * d : d;                                                \
                }                                                                                 \
            for (; i < to && count < WIDE; i++) {                                                 \
                type d = x[i] - shift;                                                            \
                total = fused64(d, square ? d : 1, total);                                        \
            }                                                                                     \
            type parts[WIDE];                                                                     \
            UNROLLED(j, SUM_VECTORS)                                                              \
                sums[j] = (sums[j] + sums[SUM_VECTORS + j]) + (sums[2 * SUM_VECTORS + j] + sums[3 * SUM_VECTORS + j]);\
            memcpy(parts, sums, sizeof parts);                                                    \
            HALVE(parts, WIDE, SUM_OF);                                                           \
            total += parts[0];                                                                    \
        }                                                                                         \
        return total;                                                                             \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, group_normalization)                                                           \
    {                                                                                             \
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
    }                                                                                             \
                                                                                                  \
    /* Per-channel sums of `width` adjacent channels; image rows are `step` elements apart. */    \
    INLINED void name##_sums(const type *restrict x, int64_t positions, int64_t step, int64_t width,\
                             const type *restrict shifts, int square, double *restrict totals)    \
    {                                                                                             \
        type sums[MOST_CHANNELS];                                                                 \
        FILL(totals, width, 0);                                                                   \
        for (int64_t from = 0; from < positions; from += ROWS) {                                  \
            int64_t to = from + ROWS < positions ? from + ROWS : positions;                       \
            FILL(sums, width, 0);                                                                 \
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
    static inline void name##_mean(const struct group_normalization *a, int64_t width, double *totals)\
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
    ITEMS_OF(name##_last, group_normalization)                                                    \
    {                                                                                             \
        int64_t blocks = CEIL_DIV(a->groups, a->block), step = a->groups * a->channels;           \
        type means[MOST_CHANNELS], factors[MOST_CHANNELS];                                        \
        double totals[MOST_CHANNELS];                                                             \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t first = item % blocks * a->block * a->channels;                               \
            int64_t width = smaller(step - first, a->block * a->channels);                        \
            int64_t place = item / blocks * a->positions * step + first;                          \
            const type *x = (const type *)a->x + place;                                           \
            const type *bias = (const type *)a->bias + first;                                     \
            type *y = (type *)a->y + place;                                                       \
            FILL(means, width, 0);                                                                \
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
    }

NORMALIZE(group_normalization_float32, float, int32_t)
NORMALIZE(group_normalization_float64, double, int64_t)

#define LAYER(name, type, of)                                                                     \
    /* The sum of a row less `shift`, or of its squares, of which no lanes are added up; `inside`: the lanes of its last\
       vectors. */                                                                                \
    INLINED of##_lanes name##_part(const type *row, int64_t width, type shift, const of##_mask *inside, int square)\
    {                                                                                             \
        enum { LANES = VECTOR_BYTES / sizeof(type), WIDE = SUM_BYTES / sizeof(type) };            \
        of##_lanes sums[SUM_VECTORS] = {0};                                                       \
        for (int64_t i = 0; i < width; i += WIDE)                                                 \
            UNROLLED(j, SUM_VECTORS) {                                                            \
                of##_lanes d;                                                                     \
                memcpy(&d, row + i + j * LANES, sizeof d);                                        \
                d -= shift;                                                                       \
                if (i + WIDE > width)                                                             \
                    d = (of##_lanes)((of##_mask)d & inside[j]);                                   \
                sums[j] += square ? d * d : d;                                                    \
            }                                                                                     \
        HALVE(sums, SUM_VECTORS, SUM_OF);                                                         \
        return sums[0];                                                                           \
    }                                                                                             \
                                                                                                  \
    /* The sums of the lanes of each of as many vectors as these have lanes, in the order of HALVE. */\
    static inline of##_lanes name##_totals(of##_lanes *parts)                                     \
    {                                                                                             \
        enum { LANES = VECTOR_BYTES / sizeof(type) };                                             \
        _Pragma("GCC unroll 4") for (int half = LANES / 2; half; half /= 2)                       \
            UNROLLED(r, half) {                                                                   \
                of##_mask at;                                                                     \
                for (int l = 0; l < LANES; l++)                                                   \
                    at[l] = (l % (2 * half) < half ? 0 : LANES) + l / (2 * half) * 2 * half + l % half;\
                const of##_lanes one = parts[r], two = parts[r + half];                           \
                parts[r] = OF_TWO(LANES, one, two, at) + OF_TWO(LANES, one, two, at + half);      \
            }                                                                                     \
        return parts[0];                                                                          \
    }                                                                                             \
                                                                                                  \
    /* Short rows, as many at a time as vectors have lanes. They are copied, as vectors read past their ends, and\
       write there what the next row replaces. */                                                 \
    static void name##_short(const struct layer_normalization *a, int64_t first, int64_t last)    \
    {                                                                                             \
        enum { LANES = VECTOR_BYTES / sizeof(type), WIDE = SUM_BYTES / sizeof(type) };            \
        const int64_t width = a->width;                                                           \
        type rows[LANES * SHORT + WIDE], scales[SHORT + WIDE] = {0}, biases[SHORT + WIDE] = {0};              \
        of##_lanes parts[LANES], means = {0}, inverses;                                           \
        of##_mask inside[SUM_VECTORS];                                                            \
        for (int64_t l = 0; l < WIDE; l++)                                                        \
            inside[l / LANES][l % LANES] = l < (width - 1) % WIDE + 1 ? -1 : 0;                   \
        memcpy(scales, a->scale, width * sizeof(type));                                           \
        if (a->bias)                                                                              \
            memcpy(biases, a->bias, width * sizeof(type));                                        \
        for (int64_t row = first, n; row < last; row += n) {                                      \
            n = smaller(last - row, LANES);                                                       \
            const int64_t count = n * width;                                                      \
            memcpy(rows, (const type *)a->x + row * width, count * sizeof(type));                 \
            memset(rows + count, 0, WIDE * sizeof(type));                                         \
            memset(parts, 0, sizeof parts);                                                       \
            for (int64_t r = 0; a->centred && r < n; r++)                                         \
                parts[r] = name##_part(rows + r * width, width, 0, inside, 0);                    \
            means = name##_totals(parts) / (type)width;                                           \
            for (int64_t r = 0; r < n; r++)                                                       \
                parts[r] = name##_part(rows + r * width, width, means[r], inside, 1);             \
            parts[0] = name##_totals(parts);                                                      \
            for (int l = 0; l < LANES; l++)                                                       \
                inverses[l] = (type)(1 / sqrt((double)parts[0][l] / width + a->epsilon));         \
            for (int64_t r = 0; r < n; r++)                                                       \
                for (int64_t i = 0; i < width; i += LANES) {                                      \
                    of##_lanes d, factor, term;                                                   \
                    const int64_t at = r * width + i;                                             \
                    memcpy(&d, rows + at, sizeof d);                                              \
                    memcpy(&factor, scales + i, sizeof d);                                        \
                    memcpy(&term, biases + i, sizeof d);                                          \
                    d = (d - means[r]) * inverses[r] * factor;                                    \
                    d = a->bias ? d + term : d;                                                   \
                    type *to = (type *)a->y + row * width + at;                                   \
                    if (at + LANES <= count)                                                      \
                        memcpy(to, &d, sizeof d);                                                 \
                    else                                                                          \
                        memcpy(to, &d, smaller(width - i, LANES) * sizeof(type));                 \
                }                                                                                 \
            if (a->means)                                                                         \
                memcpy((type *)a->means + row, &means, n * sizeof(type));                         \
            if (a->inverses)                                                                      \
                memcpy((type *)a->inverses + row, &inverses, n * sizeof(type));                   \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, layer_normalization)                                                           \
    {                                                                                             \
        int64_t width = a->width, last = end * a->block < a->rows ? end * a->block : a->rows;     \
        const type *scale = a->scale, *bias = a->bias;                                            \
        if (width <= SHORT) {                                                                     \
            name##_short(a, begin * a->block, last);                                              \
            return;                                                                               \
        }                                                                                         \
        for (int64_t row = begin * a->block; row < last; row++) {                                 \
            const type *x = (const type *)a->x + row * width;                                     \
            type *y = (type *)a->y + row * width;                                                 \
            type mean = a->centred ? (type)(of##_sum(x, width, 0, 0) / width) : 0;                \
            type inverse = (type)(1 / sqrt(of##_sum(x, width, mean, 1) / width + a->epsilon));    \
            if (bias)                                                                             \
                IVDEP for (int64_t i = 0; i < width; i++)                                         \
                    y[i] = (x[i] - mean) * inverse * scale[i] + bias[i];                          \
            else                                                                                  \
                IVDEP for (int64_t i = 0; i < width; i++)                                         \
                    y[i] = (x[i] - mean) * inverse * scale[i];                                    \
            if (a->means)                                                                         \
                ((type *)a->means)[row] = mean;                                                   \
            if (a->inverses)                                                                      \
                ((type *)a->inverses)[row] = inverse;                                             \
        }                                                                                         \
    }

LAYER(layer_normalization_float32, float, group_normalization_float32)
LAYER(layer_normalization_float64, double, group_normalization_float64)

/* y = x * factor + term, both per channel; at least `low`. Without variances, scale and bias are factors and terms;
   otherwise they apply after standardization by means and variances. */
struct batch_normalization {
    const void *x, *scale, *bias, *means, *variances;
    void *y;
    int64_t rows, channels, inner; /* inner: positions of a channel, 1 for channels-last */
    int64_t block;                 /* rows of channels of an item; where inner > 1, channels */
    double epsilon, low;
};

#define BATCH(name, type)                                                                         \
    static inline type name##_factor(const struct batch_normalization *a, int64_t c, type *term)  \
    {                                                                                             \
        const type *scale = a->scale, *bias = a->bias, *means = a->means, *variances = a->variances;\
        const double factor = variances ? scale[c] / sqrt(variances[c] + a->epsilon) : (double)scale[c];\
        *term = (type)(variances ? bias[c] - means[c] * factor : (double)bias[c]);                \
        return (type)factor;                                                                      \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, batch_normalization)                                                           \
    {                                                                                             \
        const int64_t channels = a->channels, inner = a->inner;                                   \
        const type low = (type)a->low, *x = a->x;                                                 \
        type factors[MOST_CHANNELS], terms[MOST_CHANNELS], *y = a->y;                             \
        const int64_t last = smaller(end * a->block, inner > 1 ? a->rows * channels : a->rows);   \
        for (int64_t plane = begin * a->block; inner > 1 && plane < last; plane++) {              \
            type term, factor = name##_factor(a, plane % channels, &term);                        \
            IVDEP for (int64_t i = plane * inner; i < (plane + 1) * inner; i++) {                 \
                const type value = x[i] * factor + term;                                          \
                y[i] = value < low ? low : value;                                                 \
            }                                                                                     \
        }                                                                                         \
        for (int64_t first = 0; inner == 1 && first < channels; first += MOST_CHANNELS) {         \
            const int64_t count = smaller(channels - first, MOST_CHANNELS);                       \
            for (int64_t c = 0; c < count; c++)                                                   \
                factors[c] = name##_factor(a, first + c, terms + c);                              \
            for (int64_t row = begin * a->block; row < last; row++) {                             \
                const type *from = x + row * channels + first;                                    \
                type *to = y + row * channels + first;                                            \
                IVDEP for (int64_t c = 0; c < count; c++) {                                       \
                    const type value = from[c] * factors[c] + terms[c];                           \
                    to[c] = value < low ? low : value;                                            \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }

BATCH(batch_normalization_float32, float)
BATCH(batch_normalization_float64, double)

struct lrn {
    const float *x;
    float *y;
    int64_t rows, channels, inner; /* as in batch_normalization */
    int64_t before, after;         /* channels on each side */
    int64_t block;                 /* rows of an item, if images are channels-last; else it is a channel */
    double alpha, beta, bias;
};

typedef float lrn_lanes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t lrn_bits __attribute__((vector_size(VECTOR_BYTES)));

/* y = x / (bias + alpha * the sum of the squares of taps)^beta, for `many` adjacent vectors or `count` elements of
   one. `roots`: beta is 3/4, and the power is a bitwise estimate of the inverse fourth root, refined by two
   iterations; `odd` is set in lanes whose sum is too small or large for that, or NaN. */
INLINED void lrn_piece(float *y, const float *x, const float *from, int64_t taps, int64_t step, float alpha,
                       float beta, float bias, const int64_t count, const int many, const int roots,
                       const int squared, lrn_bits *odd)
{
    lrn_lanes total[LRN_VECTORS] = {0}, own[LRN_VECTORS] = {0}, result[LRN_VECTORS], tap = {0};
    _Pragma("GCC unroll 5") for (int64_t k = 0; k < taps; k++)
        UNROLLED(v, many) {
            memcpy(&tap, from + k * step + v * LRN_LANES, count * sizeof(float));
            total[v] += squared ? tap : tap * tap;
        }
    UNROLLED(v, many) {
        total[v] = bias + alpha * total[v];
        *odd |= (lrn_bits)((lrn_bits)total[v] - 0x03800000 > 0x78000000);
        memcpy(own + v, x + v * LRN_LANES, count * sizeof(float));
        lrn_lanes root = (lrn_lanes)(0x4F540000 - ((lrn_bits)total[v] >> 2)), square = root * root;
        root += root * (0.278f * (1 - total[v] * (square * square)));
        square = root * root;
        const lrn_lanes less = 1 - total[v] * (square * square), near = square * (own[v] * root);
        result[v] = near + near * (less * (0.75f + less * (0.65625f + 0.6015625f * less)));
    }
    if (!roots) {
        float powers[LRN_LANES];
        memcpy(powers, total, sizeof powers);
        for (int j = 0; j < LRN_LANES; j++)
            powers[j] = exp32(beta * log32(powers[j]));
        memcpy(total, powers, sizeof powers);
        result[0] = own[0] / total[0];
    }
    UNROLLED(v, many) memcpy(y + v * LRN_LANES, result + v, count * sizeof(float));
}

/* The last piece may overlap the one before. Return whether any lane was odd. */
INLINED int lrn_pieces(float *y, const float *x, const float *from, int64_t taps, int64_t step,
                       const struct lrn *a, int64_t length, const int roots, const int squared)
{
    const float alpha = (float)a->alpha, beta = (float)a->beta, bias = (float)a->bias;
    lrn_bits odd = {0};
    if (length < LRN_LANES)
        lrn_piece(y, x, from, taps, step, alpha, beta, bias, length, 1, roots, squared, &odd);
    int64_t i = 0;
    for (const int64_t n = LRN_LANES, many = LRN_VECTORS; roots && i + n * many <= length; i += n * many)
        lrn_piece(y + i, x + i, from + i, taps, step, alpha, beta, bias, n, LRN_VECTORS, roots, squared, &odd);
    for (; i < length && length >= LRN_LANES; i += LRN_LANES) {
        const int64_t j = smaller(i, length - LRN_LANES);
        lrn_piece(y + j, x + j, from + j, taps, step, alpha, beta, bias, LRN_LANES, 1, roots, squared, &odd);
    }
    const lrn_bits none = {0};
    return memcmp(&odd, &none, sizeof odd) != 0;
}

INLINED void lrn_row(float *y, const float *x, const float *from, int64_t taps, int64_t step, const struct lrn *a,
                     int64_t length, const int squared)
{
    if (a->beta != 0.75 || (taps == 5 ? lrn_pieces(y, x, from, 5, step, a, length, 1, squared) /* often */
                                      : lrn_pieces(y, x, from, taps, step, a, length, 1, squared)))
        lrn_pieces(y, x, from, taps, step, a, length, 0, squared);
}

ITEMS_OF(lrn, lrn)
{
    const int64_t channels = a->channels, inner = a->inner;
    for (int64_t plane = begin; inner > 1 && plane < end; plane++) {
        const int64_t c = plane % channels, first = c < a->before ? 0 : c - a->before;
        const float *x = a->x + plane * inner;
        lrn_row(a->y + plane * inner, x, x - (c - first) * inner, smaller(c + a->after, channels - 1) - first + 1,
                inner, a, inner, 0);
    }
    /* Squares of rows, padded with zeros; several buffers, to avoid reading one just after it was written. */
    float around[MOST_ROW + 2 * MOST_AROUND];
    const int64_t last = inner > 1 ? 0 : smaller(end * a->block, a->rows), others = a->before + a->after;
    const int64_t pitch = channels + others, most = (MOST_ROW + 2 * MOST_AROUND) / pitch;
    memset(around, 0, smaller(most, a->block) * pitch * sizeof(float));
    for (int64_t row = begin * a->block, count; row < last; row += count) {
        count = smaller(last - row, smaller(most, a->block));
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < channels; c++)
                around[i * pitch + a->before + c] = powf(a->x[(row + i) * channels + c], 2);
        for (int64_t i = 0; i < count; i++)
            lrn_row(a->y + (row + i) * channels, a->x + (row + i) * channels, around + i * pitch, others + 1, 1, a,
                    channels, 1);
    }
}

KERNELS(normalization, KERNELS_OF_FLOATS(group_normalization, group_normalization),
        KERNEL(group_normalization_float32_last, group_normalization),
        KERNEL(group_normalization_float64_last, group_normalization),
        KERNELS_OF_FLOATS(layer_normalization, layer_normalization),
        KERNELS_OF_FLOATS(batch_normalization, batch_normalization), KERNEL(lrn, lrn))
