/* Convolutions of images with their channels innermost, by all channels or by one each, and what
   follows them: a tensor that is added, a slope below 0, and bounds.

   Images may have any strides; they are read fast where their channels are innermost. Weights are in
   panels of PANEL filters on every instruction set. Compiled with contraction to fused multiply-add.

   Convolutions of all channels copy what each position of a block sees into a row of a matrix, unless
   the image is that matrix. Those of each channel copy the rows that a block sees, with zeros around
   them, divided by strides into splits, so that what a tap sees of adjacent positions is adjacent, and
   channels of adjacent positions are computed together, whatever their number: weights repeat
   themselves after `period` of them, a multiple of PANEL:

       stride 2, 1 zero before, of x0 x1 x2 x3 x4:    0  x1 x3    x0 x2 x4 */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast -fno-tree-loop-distribute-patterns
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include "floats.h"
#include "images.h"

enum { PANEL = 16, COPIED = 14336, MOST_TAPS = 256, ROWS = BY_WIDTH(8, 4, 2), PANELS = BY_WIDTH(2, 1, 1) };
enum { VECTORS = PANEL / LANES, LINES = VECTORS > 2 ? 2 : 4 };

struct image_convolution {
    const float *x, *weights, *bias; /* panels; a row of the matrix is of rows, columns, channels */
    const float *addend;             /* or NULL */
    float *y;
    const axis *rows, *columns;
    double slope, low, high;
    int64_t images, channels, filters, block;
    const steps *x_steps, *addend_steps, *y_steps;
};

struct image_depthwise {
    const float *x, *weights, *bias; /* [row][column][period] */
    const float *addend;
    float *y;
    const axis *rows, *columns;
    double slope, low, high;
    int64_t images, channels, period, block, chunk, reach; /* what a split has beside a chunk */
    const steps *x_steps, *addend_steps, *y_steps;
};

static inline void copy_floats(float *restrict to, const float *restrict from, int64_t count)
{
    for (; count >= LANES; count -= LANES, to += LANES, from += LANES)
        memcpy(to, from, VECTOR_BYTES);
#if defined(__AVX512F__)
    const __mmask16 some = (__mmask16)((1u << count) - 1);
    _mm512_mask_storeu_ps(to, some, _mm512_maskz_loadu_ps(some, from));
#else
    for (; count >= 4; count -= 4, to += 4, from += 4)
        memcpy(to, from, 16);
    for (; count > 0; count--)
        *to++ = *from++;
#endif
}

/* Returns the end of what is filled. */
static inline float *fill_zeros(float *restrict to, int64_t count)
{
    const vector zeros = {0};
    for (; count >= LANES; count -= LANES, to += LANES)
        memcpy(to, &zeros, VECTOR_BYTES);
    for (; count > 0; count--)
        *to++ = 0;
    return to;
}

/* What is done with sums: those below 0 are multiplied by a slope of at most 1, all are bounded. */
typedef struct {
    float slope, low, high;
} activation;

/* NaN stays. */
static inline float activated(float x, activation f)
{
    x = x < 0 ? x * f.slope : x;
    x = x < f.low ? f.low : x;
    return x > f.high ? f.high : x;
}

static inline vector all_activated(vector v, activation f)
{
#if defined(__AVX512F__)
#define LARGER(a, b) (vector) _mm512_max_ps((__m512)(a), (__m512)(b))
#define LESSER(a, b) (vector) _mm512_min_ps((__m512)(a), (__m512)(b))
#elif defined(__AVX__)
#define LARGER(a, b) (vector) _mm256_max_ps((__m256)(a), (__m256)(b))
#define LESSER(a, b) (vector) _mm256_min_ps((__m256)(a), (__m256)(b))
#elif defined(__SSE2__)
#define LARGER(a, b) (vector) _mm_max_ps((__m128)(a), (__m128)(b))
#define LESSER(a, b) (vector) _mm_min_ps((__m128)(a), (__m128)(b))
#endif
#ifdef LARGER
    const vector least = (vector){0} + f.low, most = (vector){0} + f.high;
    return LESSER(most, LARGER(least, LARGER(v * f.slope, v)));
#else
    for (int i = 0; i < LANES; i++)
        v[i] = activated(v[i], f);
    return v;
#endif
}

/* The first `count` lanes. */
static inline vector load_some(const float *from, int64_t count)
{
    vector v = {0};
    if (count >= LANES)
        memcpy(&v, from, VECTOR_BYTES);
    else {
#if defined(__AVX512F__)
        v = (vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
        float part[LANES] = {0};
        copy_floats(part, from, count);
        memcpy(&v, part, VECTOR_BYTES);
#endif
    }
    return v;
}

static inline void store_some(float *to, vector v, int64_t count)
{
    if (count >= LANES)
        memcpy(to, &v, VECTOR_BYTES);
    else {
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
        float part[LANES];
        memcpy(part, &v, VECTOR_BYTES);
        copy_floats(to, part, count);
#endif
    }
}

/* Write sums of `count` adjacent elements, at most PANEL, with what is added to them. */
static inline void put(float *y, const float *addend, const vector *sums, int64_t count, activation f)
{
    for (int v = 0; v < VECTORS && count > 0; v++, count -= LANES) {
        const vector value = addend ? sums[v] + load_some(addend + v * LANES, count) : sums[v];
        store_some(y + v * LANES, all_activated(value, f), count);
    }
}

/* As `put`, for elements that are `step` and `addend_step` apart. */
static void put_apart(float *y, int64_t step, const float *addend, int64_t addend_step,
                      const vector *sums, int64_t count, activation f)
{
    float part[PANEL];
    memcpy(part, sums, sizeof part);
    for (int64_t i = 0; i < count; i++)
        y[i * step] = activated(addend ? part[i] + addend[i * addend_step] : part[i], f);
}

/* What a position of the result sees of an image. */
static void copy_window(const struct image_convolution *a, const float *image, int64_t row,
                        int64_t column, float *restrict to)
{
    const axis *u = a->rows, *v = a->columns;
    const int64_t channels = a->channels, step = a->x_steps->channel;
    const int64_t width = v->kernel * channels, first = column * v->stride - v->begin;
    const int dense = step == 1 && a->x_steps->column == channels && v->dilation == 1;
    const int64_t low = smaller(first < 0 ? -first : 0, v->kernel);
    int64_t high = smaller(v->size - first, v->kernel);
    high = high < low ? low : high;
    for (int64_t ky = 0; ky < u->kernel; ky++) {
        const int64_t r = row * u->stride - u->begin + ky * u->dilation;
        const float *line = image + r * a->x_steps->row;
        if (r < 0 || r >= u->size)
            to = fill_zeros(to, width);
        else if (dense) {
            to = low ? fill_zeros(to, low * channels) : to;
            copy_floats(to, line + (first + low) * channels, (high - low) * channels);
            to += (high - low) * channels;
            to = high < v->kernel ? fill_zeros(to, (v->kernel - high) * channels) : to;
        }
        else
            for (int64_t kx = 0; kx < v->kernel; kx++, to += channels) {
                const int64_t c = first + kx * v->dilation;
                const int inside = c >= 0 && c < v->size;
                for (int64_t i = 0; i < channels; i++)
                    to[i] = inside ? line[c * a->x_steps->column + i * step] : 0;
            }
    }
}

/* Whether an image has its positions one after the other. */
static int is_flat(const steps *x, int64_t rows, int64_t columns, int64_t channels)
{
    return x->channel == 1 && x->column == channels && x->row == columns * x->column &&
           x->image == rows * x->row;
}

/* Whether each position sees itself alone. */
static int is_pointwise(const axis *u, const axis *v)
{
    return u->kernel == 1 && v->kernel == 1 && u->stride == 1 && v->stride == 1 && !u->begin &&
           !v->begin && u->count == u->size && v->count == v->size;
}

/* The sums of `panels` panels for `rows` rows of a matrix, by row; both numbers are constants. */
INLINED void multiply(const float *x, int64_t k, const float *w, const float *bias, vector *sums,
                      int rows, int panels)
{
    const int width = panels * VECTORS;
    vector own[ROWS * PANELS * VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * width; i++)
        memcpy(&own[i], bias + i % width * LANES, VECTOR_BYTES);
    for (int64_t i = 0; i < k; i++, w += PANEL) {
        vector weights[PANELS * VECTORS];
        for (int p = 0; p < panels; p++)
            memcpy(weights + p * VECTORS, w + p * k * PANEL, PANEL * sizeof *w);
#pragma GCC unroll 32
        for (int n = 0; n < rows * width; n++)
            own[n] += x[n / width * k + i] * weights[n % width];
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows * width; i++)
        sums[i] = own[i];
}

/* As `multiply`, for as many rows as it takes at once; returns their number. */
static int64_t multiply_some(const float *x, int64_t k, const float *w, const float *bias,
                             vector *sums, int64_t rows, int64_t panels)
{
#define MULTIPLY(number)                                       \
    if (number <= ROWS && rows >= number) {                    \
        if (panels < PANELS)                                   \
            multiply(x, k, w, bias, sums, number, 1);          \
        else                                                   \
            multiply(x, k, w, bias, sums, number, PANELS);     \
        return number;                                         \
    }
    MULTIPLY(8)
    MULTIPLY(4)
    MULTIPLY(2)
    MULTIPLY(1)
    return 0;
}

/* Write the sums of `rows` positions from `first` on, of one panel; a row has `vectors`. */
static void put_positions(const struct image_convolution *a, int64_t first, int64_t rows,
                          int64_t filter, const vector *sums, int64_t vectors)
{
    const int64_t height = a->rows->count, width = a->columns->count;
    const int64_t count = smaller(PANEL, a->filters - filter);
    const activation f = {(float)a->slope, (float)a->low, (float)a->high};
    const steps *of_y = a->y_steps, *of_addend = a->addend_steps;
    for (int64_t r = 0; r < rows; r++, sums += vectors) {
        const int64_t j = (first + r) % width, i = (first + r) / width % height;
        const int64_t n = (first + r) / width / height;
        float *y = a->y + n * of_y->image + i * of_y->row + j * of_y->column;
        const float *addend = a->addend;
        if (addend)
            addend += n * of_addend->image + i * of_addend->row + j * of_addend->column +
                      filter * of_addend->channel;
        put_apart(y + filter * of_y->channel, of_y->channel, addend,
                  addend ? of_addend->channel : 0, sums, count, f);
    }
}

static int image_convolution(const void *arguments, int64_t begin, int64_t end)
{
    const struct image_convolution *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const int64_t filters = a->filters, positions = a->images * u->count * v->count;
    const int64_t k = u->kernel * v->kernel * a->channels;
    const activation f = {(float)a->slope, (float)a->low, (float)a->high};
    const int matrix = is_pointwise(u, v) && is_flat(a->x_steps, u->size, v->size, a->channels);
    const int flat = is_flat(a->y_steps, u->count, v->count, filters) &&
                     (!a->addend || is_flat(a->addend_steps, u->count, v->count, filters));
    _Alignas(64) float copy[COPIED];
    vector sums[ROWS * PANELS * VECTORS];
    for (int64_t item = begin; item < end; item++) {
        const int64_t first = item * a->block, rows = smaller(a->block, positions - first);
        int64_t column = first % v->count, row = first / v->count % u->count;
        const float *x = a->x + first / v->count / u->count * a->x_steps->image;
        for (int64_t r = 0; r < rows && !matrix; r++) {
            copy_window(a, x, row, column, copy + r * k);
            if (++column == v->count && (column = 0, ++row == u->count))
                row = 0, x += a->x_steps->image;
        }
        const float *from = matrix ? a->x + first * k : copy;
        for (int64_t r = 0, some = 0; r < rows; r += some)
            for (int64_t filter = 0, panels; filter < filters; filter += panels * PANEL) {
                panels = filters - filter > (PANELS - 1) * PANEL ? PANELS : 1;
                some = multiply_some(from + r * k, k, a->weights + filter * k, a->bias + filter, sums,
                                     rows - r, panels);
                for (int64_t p = 0, at = filter; p < panels; p++, at += PANEL) {
                    const vector *own = sums + p * VECTORS;
                    const int64_t count = smaller(PANEL, filters - at);
                    const int64_t place = (first + r) * filters + at;
                    if (!flat)
                        put_positions(a, first + r, some, at, own, panels * VECTORS);
                    else
                        for (int64_t i = 0; i < some; i++, own += panels * VECTORS)
                            put(a->y + place + i * filters,
                                a->addend ? a->addend + place + i * filters : NULL, own, count, f);
                }
            }
    }
    return 0;
}

/* What the splits of a row have for `length` positions from column `first` on. */
static void copy_line(const struct image_depthwise *a, const float *line, int64_t first,
                      int64_t length, float *restrict to)
{
    const axis *v = a->columns;
    const int64_t channels = a->channels, step = a->x_steps->channel, column = a->x_steps->column;
    for (int64_t q = 0; q < v->stride; q++) {
        const int64_t start = first * v->stride + q - v->begin;
        int64_t low = start < 0 ? (-start + v->stride - 1) / v->stride : 0;
        int64_t high = v->size > start ? (v->size - start + v->stride - 1) / v->stride : 0;
        low = smaller(low, length), high = smaller(high, length);
        high = high < low ? low : high;
        to = fill_zeros(to, low * channels);
        if (v->stride == 1 && step == 1 && column == channels) {
            copy_floats(to, line + (start + low) * channels, (high - low) * channels);
            to += (high - low) * channels;
        }
        else
            for (int64_t j = low; j < high; j++, to += channels) {
                const float *from = line + (start + j * v->stride) * column;
                if (step == 1)
                    copy_floats(to, from, channels);
                else
                    for (int64_t i = 0; i < channels; i++)
                        to[i] = from[i * step];
            }
        to = fill_zeros(to, (length - high) * channels);
    }
}

/* The sums of PANEL elements of `lines` lines of the result, which see what is `apart` in the copy;
   their number is a constant. */
INLINED void add_taps(const float *x, int64_t apart, const int64_t *taps, int64_t n_taps,
                      const float *w, int64_t period, const float *bias, vector *sums, int lines)
{
    vector own[LINES * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < lines * VECTORS; i++)
        memcpy(&own[i], bias + i % VECTORS * LANES, VECTOR_BYTES);
    for (int64_t t = 0; t < n_taps; t++, w += period) {
        vector weights[VECTORS];
        memcpy(weights, w, sizeof weights);
#pragma GCC unroll 16
        for (int i = 0; i < lines * VECTORS; i++) {
            vector seen;
            memcpy(&seen, x + taps[t] + i / VECTORS * apart + i % VECTORS * LANES, VECTOR_BYTES);
            own[i] += seen * weights[i % VECTORS];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < lines * VECTORS; i++)
        sums[i] = own[i];
}

static int image_depthwise(const void *arguments, int64_t begin, int64_t end)
{
    const struct image_depthwise *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const steps *of_y = a->y_steps, *of_addend = a->addend_steps;
    const int64_t chunks = (v->count + a->chunk - 1) / a->chunk, channels = a->channels;
    const int64_t blocks = (u->count + a->block - 1) / a->block, n_taps = u->kernel * v->kernel;
    const activation f = {(float)a->slope, (float)a->low, (float)a->high};
    const int dense = of_y->channel == 1 && of_y->column == channels &&
                      (!a->addend || (of_addend->channel == 1 && of_addend->column == channels));
    _Alignas(64) float copy[COPIED + PANEL];
    vector sums[LINES * VECTORS];
    int64_t taps[MOST_TAPS];
    for (int64_t item = begin; item < end; item++) {
        const int64_t column = item % chunks * a->chunk, first = item / chunks % blocks * a->block;
        const int64_t image = item / chunks / blocks, columns = smaller(a->chunk, v->count - column);
        const int64_t rows = smaller(a->block, u->count - first), above = first * u->stride - u->begin;
        const int64_t tall = (rows - 1) * u->stride + (u->kernel - 1) * u->dilation + 1;
        const int64_t length = columns + a->reach, line = v->stride * length * channels;
        for (int64_t r = 0; r < tall; r++) {
            const float *x = a->x + image * a->x_steps->image + (above + r) * a->x_steps->row;
            if (above + r < 0 || above + r >= u->size)
                fill_zeros(copy + r * line, line);
            else
                copy_line(a, x, column, length, copy + r * line);
        }
        fill_zeros(copy + tall * line, PANEL); /* which the last sums see, and leave out */
        for (int64_t ky = 0, t = 0; ky < u->kernel; ky++)
            for (int64_t kx = 0; kx < v->kernel; kx++, t++) {
                const int64_t at = kx * v->dilation;
                taps[t] = ky * u->dilation * line +
                          (at % v->stride * length + at / v->stride) * channels;
            }
        for (int64_t r = 0, lines; r < rows; r += lines) {
            lines = rows - r >= LINES ? LINES : 1;
            for (int64_t i = 0, at = 0; i < columns * channels; i += PANEL, at += PANEL) {
                at = at < a->period ? at : 0;
                const float *x = copy + r * u->stride * line + i;
                if (lines == LINES)
                    add_taps(x, u->stride * line, taps, n_taps, a->weights + at, a->period,
                             a->bias + at, sums, LINES);
                else
                    add_taps(x, 0, taps, n_taps, a->weights + at, a->period, a->bias + at, sums, 1);
                const int64_t count = smaller(PANEL, columns * channels - i);
                for (int64_t l = 0; l < lines; l++) {
                    float *y = a->y + image * of_y->image + (first + r + l) * of_y->row +
                               column * of_y->column;
                    const float *addend = a->addend;
                    if (addend)
                        addend += image * of_addend->image + (first + r + l) * of_addend->row +
                                  column * of_addend->column;
                    if (dense)
                        put(y + i, addend ? addend + i : NULL, sums + l * VECTORS, count, f);
                    else
                        for (int64_t e = i; e < i + count; e++) {
                            const int64_t j = e / channels, c = e % channels;
                            const float more =
                                addend ? addend[j * of_addend->column + c * of_addend->channel] : 0;
                            const float sum = ((const float *)(sums + l * VECTORS))[e - i];
                            y[j * of_y->column + c * of_y->channel] =
                                activated(addend ? sum + more : sum, f);
                        }
                }
            }
        }
    }
    return 0;
}

const kernel_entry image_convolution_kernels[] = {
    KERNEL(image_convolution, image_convolution),
    KERNEL(image_depthwise, image_depthwise),
    END_OF_KERNELS,
};
