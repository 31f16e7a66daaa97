/* Convolutions of 8-bit codes with constant weights, as bounded codes; those of all channels also as
   sums, and of weights of any zero point (integers.c has the formula).

   Images may have any strides; they are read fast where their channels are innermost. An item is a
   block of positions of the result. Convolutions of all channels copy what each position sees into
   a row of a matrix, with the zero point for padding, which the products of integers.h multiply.

   Depthwise ones copy each row that is seen, less the zero point, once for two taps of a kernel's row,
   so that all rows of the kernel find pairs of int16 at the same place. Channels of adjacent positions
   are adjacent, and so are computed together, whatever their number: weights and factors repeat
   themselves after `period` of them, a multiple of PANEL:

       columns x0 x1 x2 x3, taps 0 1 2:    (x0 x1) (x1 x2)    (x2 0) (x3 0) */
#include "images.h"
#include "integers.h"
#include "native.h"

enum { COPY = 65536, ROWS = 64, PAIRS_COPIED = 32768, MOST_CHANNELS = 4096 };

/* How sums become codes: zero + rint(sum * factor + offset), with that within low and high. */
typedef struct {
    double low, high;
    int64_t zero;
} bounds;

struct quantized_convolution {
    const uint8_t *x;
    const int8_t *weights; /* panels; a row of the matrix is of rows, columns and channels */
    const int32_t *terms, *zeros; /* by filter: what the sums begin with; zero points, null for 0 */
    const float *factors, *offsets; /* null for sums */
    void *y;                        /* codes, or sums in int32 */
    const axis *rows, *columns;
    const bounds *bounds;
    int64_t images, channels, filters, block, change, zero; /* codes are uint8 after ^ change */
    const steps *x_steps, *y_steps;
};

struct code_depthwise {
    const uint8_t *x;
    const int32_t *weights; /* [row][pair of columns][period], two int16 in each */
    const float *factors, *offsets;
    uint8_t *y;
    const axis *rows, *columns;
    const bounds *bounds;
    int64_t images, filters, multiplier, period, block, chunk, change, zero;
    const steps *x_steps, *y_steps;
};

static inline int64_t seen(const axis *v, int64_t o, int64_t k)
{
    int64_t at = o * v->stride - v->begin + k * v->dilation;
    return at < v->size ? at : -1;
}

/* The codes of PANEL sums. Loops that the compiler vectorizes have more than 16 iterations. */
static inline void codes_of(uint8_t *restrict codes, const int32_t *restrict sums,
                            const float *restrict factors, const float *restrict offsets,
                            const bounds *b)
{
    const float low = (float)b->low, high = (float)b->high;
    const int32_t zero = (int32_t)b->zero;
    int32_t whole[PANEL];
    for (int i = 0; i < PANEL; i++) {
        float number = (float)sums[i] * factors[i] + offsets[i];
        number = number > low ? number : low;
        number = number < high ? number : high;
        whole[i] = (int32_t)rintf(number) + zero;
    }
    for (int i = 0; i < PANEL; i++)
        codes[i] = (uint8_t)whole[i];
}

static inline void put(uint8_t *restrict y, const uint8_t *restrict codes, int64_t count)
{
    int64_t i = 0;
    if (count == PANEL) {
        memcpy(y, codes, PANEL);
        return;
    }
    for (; i + 8 <= count; i += 8)
        memcpy(y + i, codes + i, 8);
    for (; i < count; i++)
        y[i] = codes[i];
}

static inline void copy_few(uint8_t *restrict to, const uint8_t *restrict from, int64_t count)
{
    for (; count >= 16; count -= 16, to += 16, from += 16)
        memcpy(to, from, 16);
    if (count & 8)
        memcpy(to, from, 8), to += 8, from += 8;
    if (count & 4)
        memcpy(to, from, 4), to += 4, from += 4;
    for (count &= 3; count > 0; count--)
        *to++ = *from++;
}

static inline uint8_t *fill_few(uint8_t *to, uint8_t value, int64_t count)
{
    if (count > 64)
        memset(to, value, count);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = value;
    return to + count;
}

/* What a position of the result sees of an image. */
static void copy_window(const struct quantized_convolution *a, const uint8_t *image, int64_t row,
                        int64_t column, uint8_t *restrict to)
{
    const axis *u = a->rows, *v = a->columns;
    const int64_t channels = a->channels, width = v->kernel * channels;
    const int64_t step = a->x_steps->channel, first = column * v->stride - v->begin;
    const uint8_t zero = (uint8_t)a->zero;
    const int dense = step == 1 && a->x_steps->column == channels && v->dilation == 1;
    const int64_t low = smaller(first < 0 ? -first : 0, v->kernel);
    int64_t high = smaller(v->size - first, v->kernel);
    high = high < low ? low : high;
    for (int64_t ky = 0; ky < u->kernel; ky++) {
        const int64_t r = seen(u, row, ky);
        const uint8_t *line = image + r * a->x_steps->row;
        if (r < 0)
            to = fill_few(to, zero, width);
        else if (dense) {
            to = low ? fill_few(to, zero, low * channels) : to;
            copy_few(to, line + (first + low) * channels, (high - low) * channels);
            to += (high - low) * channels;
            to = high < v->kernel ? fill_few(to, zero, (v->kernel - high) * channels) : to;
        }
        else
            for (int64_t kx = 0; kx < v->kernel; kx++, to += channels) {
                const int64_t c = seen(v, column, kx);
                for (int64_t i = 0; i < channels; i++)
                    to[i] = c < 0 ? zero : line[c * a->x_steps->column + i * step];
            }
    }
}

/* Whether each position sees itself alone, and what all of them see lies in memory as they do. */
static int is_matrix(const struct quantized_convolution *a)
{
    const axis *u = a->rows, *v = a->columns;
    const steps *x = a->x_steps;
    return u->kernel == 1 && v->kernel == 1 && u->stride == 1 && v->stride == 1 && !u->begin &&
           !v->begin && u->count == u->size && v->count == v->size && x->channel == 1 &&
           x->column == a->channels && x->row == v->size * x->column &&
           x->image == u->size * x->row;
}

/* Sums of `count` filters from `filter` on at a position, of which the codes it sees have this sum. */
static inline void put_sums(const struct quantized_convolution *a, int32_t *restrict y, int32_t *restrict c,
                            int32_t of_codes, int64_t filter, int64_t count)
{
    if (of_codes)
        for (int64_t e = 0; e < count; e++)
            c[e] -= of_codes * a->zeros[filter + e];
    if (a->y_steps->channel == 1)
        memcpy(y, c, count * sizeof *y);
    else
        for (int64_t e = 0; e < count; e++)
            y[e * a->y_steps->channel] = c[e];
}

static int quantized_convolution(const void *arguments, int64_t begin, int64_t end)
{
    const struct quantized_convolution *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const int64_t k = u->kernel * v->kernel * a->channels, quads = (k + QUAD - 1) / QUAD;
    const int64_t unit = k < 64 ? QUAD : 64, step = (k + unit - 1) / unit * unit;
    const int64_t panels = (a->filters + PANEL - 1) / PANEL, positions = a->images * u->count * v->count;
    const int matrix = is_matrix(a) && step == k;
    uint8_t copy[COPY + ROWS], codes[PANEL];
    int32_t c[ROWS * GROUP * PANEL], seen_sums[ROWS];
    for (int64_t item = begin; item < end; item++) {
        const int64_t first = item * a->block, rows = smaller(a->block, positions - first);
        const int64_t column = first % v->count, row = first / v->count % u->count;
        const int64_t image = first / v->count / u->count;
        const uint8_t *x = a->x + image * a->x_steps->image;
        for (int64_t r = 0, i = row, j = column; r < rows && !matrix; r++) {
            copy_window(a, x, i, j, copy + r * step);
            if (++j == v->count && (j = 0, ++i == u->count)) {
                i = 0;
                x += a->x_steps->image;
            }
        }
        const uint8_t *from = matrix ? a->x + first * k : copy;
        if (a->change)
            for (int64_t i = 0; i < rows * step; i++)
                copy[i] = from[i] ^ 128;
        for (int64_t r = 0; r < rows && step > k && k > 64; r++)
            memset(copy + r * step + k, 0, step - k); /* tiles read on */
        for (int64_t r = 0; r < rows && a->zeros; r++)
            seen_sums[r] = sum_of((a->change ? copy : from) + r * step, k);
        product *multiply = product_for(k < 64 ? 1 : rows);
        for (int64_t panel = 0; panel < panels; panel += GROUP) {
            const int64_t group = smaller(GROUP, panels - panel);
            for (int64_t r = 0; r < rows; r++)
                memcpy(c + r * GROUP * PANEL, a->terms + panel * PANEL, group * PANEL * sizeof *c);
            multiply(c, a->change ? copy : from, step, a->weights + panel * quads * PANEL_BYTES, quads * PANEL_BYTES,
                     quads, rows, group);
            int64_t of_image = image * a->y_steps->image;
            for (int64_t r = 0, i = row, j = column; r < rows; r++) {
                const int64_t place = of_image + i * a->y_steps->row + j * a->y_steps->column;
                uint8_t *y = (uint8_t *)a->y + place;
                for (int64_t p = 0; p < group; p++) {
                    const int64_t filter = (panel + p) * PANEL;
                    const int64_t count = smaller(PANEL, a->filters - filter);
                    if (!a->factors) {
                        put_sums(a, (int32_t *)a->y + place + filter * a->y_steps->channel,
                                 c + (r * GROUP + p) * PANEL, a->zeros ? seen_sums[r] : 0, filter,
                                 count);
                        continue;
                    }
                    codes_of(codes, c + (r * GROUP + p) * PANEL, a->factors + filter,
                             a->offsets + filter, a->bounds);
                    if (a->y_steps->channel == 1)
                        put(y + filter, codes, count);
                    else
                        for (int64_t e = 0; e < count; e++)
                            y[(filter + e) * a->y_steps->channel] = codes[e];
                }
                if (++j == v->count && (j = 0, ++i == u->count)) {
                    i = 0;
                    of_image += a->y_steps->image;
                }
            }
        }
    }
    return 0;
}

/* Pairs of what two taps see of `columns` positions of a row from `column` on. Without a second tap,
   whose weights are 0, it may be anything. */
static void copy_pairs(const struct code_depthwise *a, const uint8_t *line, int64_t column,
                       int64_t columns, int64_t k, const uint8_t *padding, int32_t *restrict to)
{
    const axis *v = a->columns;
    const uint8_t change = (uint8_t)a->change;
    const int32_t zero = (uint8_t)a->zero ^ change;
    const int64_t filters = a->filters, step = a->x_steps->channel, multiplier = a->multiplier;
    const int simple = step == 1 && multiplier == 1;
    const int flat = simple && v->stride == 1 && a->x_steps->column == filters;
    for (int64_t o = column, n; o < column + columns; o += n, to += n * filters) {
        const int64_t p = seen(v, o, k), q = k + 1 < v->kernel ? seen(v, o, k + 1) : p;
        const uint8_t *x = p < 0 ? padding : line + p * a->x_steps->column;
        const uint8_t *y = q < 0 ? padding : line + q * a->x_steps->column;
        n = flat && p >= 0 && q >= 0 ? smaller(column + columns - o, v->size - q) : 1;
        if (simple)
            for (int64_t i = 0; i < n * filters; i++)
                to[i] = (((x[i] ^ change) - zero) & 0xffff) |
                        (int32_t)((uint32_t)((y[i] ^ change) - zero) << 16);
        else
            for (int64_t i = 0; i < filters; i++) {
                const int64_t at = i / multiplier * step;
                const int32_t low = p < 0 ? 0 : (x[at] ^ change) - zero;
                const int32_t high = q < 0 ? 0 : (y[at] ^ change) - zero;
                to[i] = (low & 0xffff) | (int32_t)((uint32_t)high << 16);
            }
    }
}

/* The sums of PANEL elements. Rows of x are `row` pairs apart, and pairs of columns `length`. */
static inline void add_pairs(const struct code_depthwise *a, const int32_t *x, int64_t row,
                             int64_t length, const int32_t *w, int32_t *restrict sums)
{
    const int64_t rows = a->rows->kernel, pairs_of_row = (a->columns->kernel + 1) / 2;
#if defined(__SSE2__)
    plain_sums s[PANEL * 4 / PAIRS] = {{0}};
    for (int64_t ky = 0; ky < rows; ky++)
        for (int64_t j = 0; j < pairs_of_row; j++, w += a->period)
            _Pragma("GCC unroll 8") for (int i = 0; i < PANEL * 4 / PAIRS; i++)
            {
                pairs from, weight;
                memcpy(&from, (const char *)(x + ky * row + j * length) + i * PAIRS, PAIRS);
                memcpy(&weight, (const char *)w + i * PAIRS, PAIRS);
                s[i] += (plain_sums)MADD(from, weight);
            }
    memcpy(sums, s, sizeof s);
#else
    memset(sums, 0, PANEL * sizeof *sums);
    for (int64_t ky = 0; ky < rows; ky++)
        for (int64_t j = 0; j < pairs_of_row; j++, w += a->period)
            for (int64_t i = 0; i < 2 * PANEL; i++)
                sums[i / 2] += ((const int16_t *)(x + ky * row + j * length))[i] *
                               ((const int16_t *)w)[i];
#endif
}

static int code_depthwise(const void *arguments, int64_t begin, int64_t end)
{
    const struct code_depthwise *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const int64_t chunks = (v->count + a->chunk - 1) / a->chunk;
    const int64_t blocks = (u->count + a->block - 1) / a->block;
    const int64_t lines = (v->kernel + 1) / 2, filters = a->filters;
    int32_t copy[PAIRS_COPIED + PANEL], sums[PANEL];
    uint8_t padding[MOST_CHANNELS], codes[PANEL];
    memset(padding, (uint8_t)a->zero, filters);
    memset(copy + PAIRS_COPIED, 0, PANEL * sizeof *copy);
    for (int64_t item = begin; item < end; item++) {
        const int64_t column = item % chunks * a->chunk, first = item / chunks % blocks * a->block;
        const int64_t image = item / chunks / blocks, columns = smaller(a->chunk, v->count - column);
        const int64_t rows = smaller(a->block, u->count - first), length = columns * filters;
        const int64_t above = first * u->stride - u->begin;
        const int64_t tall = (rows - 1) * u->stride + (u->kernel - 1) * u->dilation + 1;
        for (int64_t r = 0; r < tall; r++)
            for (int64_t j = 0; j < lines; j++) {
                int32_t *to = copy + (r * lines + j) * length;
                const uint8_t *x = a->x + image * a->x_steps->image + (above + r) * a->x_steps->row;
                if (above + r < 0 || above + r >= u->size)
                    memset(to, 0, length * sizeof *to);
                else
                    copy_pairs(a, x, column, columns, 2 * j, padding, to);
            }
        for (int64_t r = 0; r < rows; r++) {
            uint8_t *y = a->y + image * a->y_steps->image + (first + r) * a->y_steps->row +
                         column * a->y_steps->column;
            for (int64_t i = 0, at = 0; i < length; i += PANEL, at += PANEL) {
                at = at < a->period ? at : 0;
                add_pairs(a, copy + r * u->stride * lines * length + i,
                          u->dilation * lines * length, length, a->weights + at, sums);
                const int64_t count = smaller(PANEL, length - i);
                codes_of(codes, sums, a->factors + at, a->offsets + at, a->bounds);
                if (a->y_steps->channel == 1 && a->y_steps->column == filters)
                    put(y + i, codes, count);
                else
                    for (int64_t e = i; e < i + count; e++)
                        y[e / filters * a->y_steps->column + e % filters * a->y_steps->channel] =
                            codes[e - i];
            }
        }
    }
    return 0;
}

const kernel_entry quantized_convolution_kernels[] = {
    KERNEL(quantized_convolution, quantized_convolution),
    KERNEL(code_depthwise, code_depthwise),
    END_OF_KERNELS,
};
