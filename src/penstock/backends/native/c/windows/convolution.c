/* Convolutions and transposed convolutions of few channels, with images in channels-first layout.

   An item is a band of rows and columns of the result, for one group of one image. Its input is first copied, padded
   with zeros, and split by stride into `splits` along rows and columns, so that the inputs of a tap for successive
   positions are contiguous, at a constant distance from those of the other taps:

       stride 2, 1 zero before, of x0 x1 x2 x3 x4:    0  x1 x3    x0 x2 x4

   Short rows are computed in one loop, including a few columns between them that are discarded. The result of a
   transposed convolution has as many `phases` as the stride; each phase uses other taps. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include "floats.h"
#include "images.h"

enum { BUFFER = 10240, LINES = 8192, SLACK = 64, MOST_SLICES = 32, BLOCK = 4, WIDE = BY_WIDTH(4, 2, 2) };

typedef struct {
    int64_t size, count;                  /* elements of the input and of the result */
    int64_t phases, splits, lead, length; /* of the copy: zeros before it, and elements of a split */
    int64_t block;                        /* elements of a phase in an item */
} spread;

struct convolution {
    const float *x, *w, *bias;
    float *y;
    const axis *depth;
    const spread *rows, *columns;
    const int64_t *taps; /* of each phase: their number, and the offset of each in the copy */
    int64_t transposed;
    int64_t groups, channels, filters; /* channels and filters of a group */
    int64_t positions;                 /* of the kernel in one slice */
};

/* The input of one tap of the kernel's slice `k`, channel 0. */
typedef struct {
    const float *x;
    int64_t k;
} slice;

/* The input element that kernel position k reads for element o of the result, -1 for padding. */
static inline int64_t seen(const axis *v, int64_t transposed, int64_t o, int64_t k)
{
    int64_t at = transposed ? o + v->begin - k * v->dilation : o * v->stride - v->begin + k * v->dilation;
    if (transposed && (at < 0 || at % v->stride))
        return -1;
    at = transposed ? at / v->stride : at;
    return at < v->size ? at : -1;
}

#define EVEN_PLACE(n, l, unused) 2 * (l)
#define ODD_PLACE(n, l, unused) 2 * (l) + 1

/* Copy a line of `count` elements: those of x from `low` to `high`, padded with zeros. */
static inline void copy_line(const float *x, int64_t low, int64_t high, int64_t count, float *restrict to)
{
    for (int64_t i = 0; i < low; i++)
        to[i] = 0;
    copy_floats(to + low, x + low, high - low);
    for (int64_t i = high; i < count; i++)
        to[i] = 0;
}

/* The same, split into `count` even and `count` odd elements. */
static inline void split_line(const float *x, int64_t low, int64_t high, int64_t count, float *restrict even,
                              float *restrict odd)
{
    typedef int32_t lanes __attribute__((vector_size(VECTOR_BYTES)));
    int64_t i = (low + 1) / 2;
    for (int64_t j = 0; j < i; j++)
        even[j] = odd[j] = 0;
    if (low % 2)
        odd[i - 1] = x[low];
    for (; 2 * (i + LANES) <= high; i += LANES) {
        const vector first = loaded(x + 2 * i), second = loaded(x + 2 * i + LANES);
        const vector own[] = {SHUFFLE(lanes, first, second, LANES_32(EVEN_PLACE, 0)),
                              SHUFFLE(lanes, first, second, LANES_32(ODD_PLACE, 0))};
        memcpy(even + i, &own[0], sizeof(vector));
        memcpy(odd + i, &own[1], sizeof(vector));
    }
    for (; i < count; i += LANES) {
        const int64_t left = high - 2 * i;
        const vector none = {0}, first = left > 0 ? load_some(x + 2 * i, left) : none;
        const vector second = left > LANES ? load_some(x + 2 * i + LANES, left - LANES) : none;
        store_some(even + i, SHUFFLE(lanes, first, second, LANES_32(EVEN_PLACE, 0)), count - i);
        store_some(odd + i, SHUFFLE(lanes, first, second, LANES_32(ODD_PLACE, 0)), count - i);
    }
}

/* Copy the part of a plane that the item at this row and column reads. Rows that are split more than two ways are
   first copied to `flat`, which has room for all, and split together. */
static void copy_plane(const struct convolution *a, const float *x, int64_t row, int64_t column,
                       float *restrict to, float *restrict flat)
{
    const spread *u = a->rows, *v = a->columns;
    const int64_t step = v->splits, size = u->length * v->length, line = step * v->length;
    const int64_t start = column * step - v->lead, low = smaller(start < 0 ? -start : 0, line);
    const int64_t end = smaller(v->size - start, line), high = end < low ? low : end;
    for (int64_t p = 0; p < u->splits; p++, to += step * size) {
        float *restrict lines = step < 3 ? to : flat;
        for (int64_t i = 0; i < u->length; i++) {
            const int64_t r = (row + i) * u->splits + p - u->lead;
            const int is_inside = r >= 0 && r < u->size && low < high;
            const float *const from = is_inside ? x + r * v->size + start : x;
            const int64_t first = is_inside ? low : line, last = is_inside ? high : line;
            if (step == 2)
                split_line(from, first, last, v->length, lines + i * v->length, lines + size + i * v->length);
            else
                copy_line(from, first, last, line, lines + i * line);
        }
        for (int64_t q = 0; step > 2 && q < step; q++)
            for (int64_t j = 0; j < size; j++)
                to[q * size + j] = flat[step * j + q];
    }
}

/* `vectors` vectors of `filters` lines, `step` apart; the last vector has `rest` lanes; both counts are constants. */
INLINED void add_taps(const struct convolution *a, const slice *slices, int64_t n_slices,
                      const int64_t *taps, int64_t n_taps, const float *w, const float *bias,
                      int64_t copied, int64_t at, float *to, int64_t step, int64_t rest, int filters, int vectors)
{
    vector sums[BLOCK * 4];
    UNROLLED(f, filters)
        UNROLLED(v, vectors)
            sums[f * vectors + v] = (vector){0} + (bias ? bias[f] : 0);
    for (int64_t s = 0; s < n_slices; s++) {
        const float *weight = w + slices[s].k * n_taps * a->channels * filters;
        const float *x = slices[s].x + at;
        for (int64_t c = 0; c < a->channels; c++, x += copied)
            for (int64_t t = 0; t < n_taps; t++, weight += filters) {
                vector values[4];
                UNROLLED(v, vectors)
                    memcpy(&values[v], x + taps[t] + v * LANES, sizeof(vector));
                UNROLLED(f, filters)
                    UNROLLED(v, vectors)
                        sums[f * vectors + v] += weight[f] * values[v];
            }
    }
    if (rest >= LANES)
        UNROLLED(f, filters)
            UNROLLED(v, vectors)
                memcpy(to + f * step + v * LANES, &sums[f * vectors + v], sizeof(vector));
    else
        UNROLLED(f, filters)
            UNROLLED(v, vectors)
                store_some(to + f * step + v * LANES, sums[f * vectors + v], v + 1 < vectors ? LANES : rest);
}

#define TAPS(filters, vectors)                                                                    \
    add_taps(a, slices, n_slices, taps, n_taps, w, bias, copied, from + at, to + at, step,        \
             end - at - (vectors - 1) * LANES, filters, vectors),                                 \
        at += vectors * LANES

#define FILTERS(number)                                                                           \
    static void add_##number(const struct convolution *a, const slice *slices, int64_t n_slices,  \
                             const int64_t *taps, int64_t n_taps, const float *w,                 \
                             const float *bias, int64_t copied, int64_t from, int64_t end,        \
                             float *to, int64_t step)                                             \
    {                                                                                             \
        for (int64_t at = 0; at < end;)                                                           \
            if (end - at > (WIDE - 1) * LANES)                                                    \
                TAPS(number, WIDE);                                                               \
            else if (WIDE > 2 && end - at > 2 * LANES)                                            \
                TAPS(number, 3);                                                                  \
            else if (WIDE > 2 && end - at > LANES)                                                \
                TAPS(number, 2);                                                                  \
            else                                                                                  \
                TAPS(number, 1);                                                                  \
    }

FILTERS(1)
FILTERS(2)
FILTERS(3)
FILTERS(4)

static inline void interleave(const float *restrict lines, int64_t line, float *restrict y,
                              int64_t phases, int64_t count)
{
    const float *restrict odd = lines + line;
    if (phases == 1)
        copy_floats(y, lines, count);
    else if (phases == 2) {
        for (int64_t j = 0; j < count / 2; j++) {
            y[2 * j] = lines[j];
            y[2 * j + 1] = odd[j];
        }
        if (count % 2)
            y[count - 1] = lines[count / 2];
    } else
        for (int64_t p = 0; p < phases; p++)
            for (int64_t j = 0; j * phases + p < count; j++)
                y[j * phases + p] = lines[p * line + j];
}

ITEMS_OF(convolution, convolution)
{
    const axis *d = a->depth;
    const spread *u = a->rows, *v = a->columns;
    const int64_t bands = CEIL_DIV(CEIL_DIV(u->count, u->phases), u->block);
    const int64_t chunks = CEIL_DIV(CEIL_DIV(v->count, v->phases), v->block);
    const int64_t plane = d->size * u->size * v->size, y_plane = d->count * u->count * v->count;
    const int64_t copied = u->splits * v->splits * u->length * v->length; /* elements of a slice */
    float copy[BUFFER + SLACK], lines[BUFFER + SLACK];
    for (int64_t item = begin; item < end; item++) {
        const int64_t column = item % chunks * v->block, row = item / chunks % bands * u->block;
        const int64_t at = item / chunks / bands, o = at % d->count, image = at / d->count;
        const int64_t group = image % a->groups, first = row * u->phases;
        const int64_t n_rows = smaller(u->block, CEIL_DIV(u->count - first, u->phases));
        const int64_t n_columns = smaller(v->block * v->phases, v->count - column * v->phases);
        slice slices[MOST_SLICES];
        int64_t n_slices = 0;
        for (int64_t k = 0; k < d->kernel; k++) {
            const int64_t s = seen(d, a->transposed, o, k);
            if (s < 0)
                continue;
            float *to = copy + n_slices * a->channels * copied;
            slices[n_slices++] = (slice){to, k};
            for (int64_t c = 0; c < a->channels; c++)
                copy_plane(a, a->x + (image * a->channels + c) * plane + s * u->size * v->size, row,
                           column, to + c * copied, lines);
        }
        const float *w = a->w + group * a->filters * a->channels * d->kernel * a->positions;
        float *y = a->y + (image * a->filters * d->count + o) * u->count * v->count;
        const int64_t *of_row = a->taps, *taps = a->taps;
        const int64_t length = (n_rows - 1) * v->length + CEIL_DIV(n_columns, v->phases);
        /* Rows that (nearly) fill whole vectors are computed in place. */
        const int direct = u->phases * v->phases == 1 && n_columns >= 2 * LANES &&
                           CEIL_DIV(n_columns, LANES) * LANES <= v->length + LANES / 4;
        for (int64_t p = 0; p < u->phases; p++, of_row = taps)
            for (int64_t f = 0; f < a->filters; f += BLOCK) {
                const int64_t block = smaller(BLOCK, a->filters - f);
                const float *bias = a->bias ? a->bias + group * a->filters + f : NULL;
                taps = of_row;
                for (int64_t q = 0; q < v->phases; q++) {
                    const int64_t n_taps = *taps++;
                    for (int64_t r = 0; r < (direct ? n_rows : 1); r++)
                        (block == 4 ? add_4 : block == 3 ? add_3 : block == 2 ? add_2 : add_1)(
                            a, slices, n_slices, taps, n_taps, w, bias, copied, r * v->length,
                            direct ? n_columns : length,
                            direct ? y + f * y_plane + (first + r) * v->count + column
                                   : lines + q * (LINES / BLOCK / v->phases),
                            direct ? y_plane : LINES / BLOCK);
                    w += d->kernel * a->channels * n_taps * block;
                    taps += n_taps;
                }
                for (int64_t i = 0; i < block && !direct; i++)
                    for (int64_t r = 0; r < n_rows; r++)
                        if (first + r * u->phases + p < u->count)
                            interleave(lines + i * (LINES / BLOCK) + r * v->length, LINES / BLOCK / v->phases,
                                       y + (f + i) * y_plane + (first + r * u->phases + p) * v->count +
                                           column * v->phases,
                                       v->phases, n_columns);
            }
    }
}

KERNELS(convolution, KERNEL(convolution, convolution))
