/* The positions of a line with a vector of filters, or of channels (depthwise): shared by image_depthwise.c and
   image_groups.c. Each row of taps has a base address for the line, columns are strides from there, and a bit mask
   tells which columns are inside of the image. */
#ifndef PENSTOCK_IMAGE_LINES_H
#define PENSTOCK_IMAGE_LINES_H

#include "image_convolution.h"

enum { TILE = 8 }; /* positions that are computed together */
/* What is loaded from a column: a vector of channels, or a partial one; or each of several channels, or pairs of
   adjacent ones, broadcast to all lanes. */
enum { CHANNELS, SOME_CHANNELS, EACH_CHANNEL, EACH_PAIR };

/* Compilers would reload a vector for each of its products, and extract all bits before a loop, instead of keeping
   either in a register. */
#if defined(__x86_64__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(__aarch64__)
#define IN_REGISTER(value) __asm__("" : "+w"(value))
#else
#define IN_REGISTER(value)
#endif

/* The input of a line for some channels: where each row of taps reads the first column, NULL in the padding, and the
   range of columns inside of the image. Weights are [row][tap][...], with `of_tap` elements per tap. */
typedef struct {
    const float *rows[ADDRESSES];
    int64_t step, from; /* elements between columns, and up to the first of the channels */
    int64_t low, high;
    int64_t n_rows, n_taps, apart, stride; /* columns between taps, and between positions */
    const float *w;
    int64_t of_tap;
} sights;

/* Set the input of a line, or of an item's part of one; `before` are rows of copies, or NULL if there are none. */
static void see_line(sights *x, const struct image_convolution *a, const phase *f, const line *l, view *seen,
                     seen_rows *before)
{
    const int64_t stride = a->axes[2]->stride, start = l->at[2] * stride + f->taps[2][0];
    x->low = start < 0 ? -start : 0;
    x->high = smaller((l->some - 1) * stride + (x->n_taps - 1) * x->apart + 1, a->axes[2]->size - start);
    for (int64_t row = 0, slice = 0, of_slice = 0; row < x->n_rows; row++, of_slice++) {
        if (of_slice == f->n_taps[1])
            of_slice = 0, slice++;
        const float *from = x->low < x->high ? seen_row(a, f, l, seen, slice, of_slice) : NULL;
        if (!before)
            x->rows[row] = from ? from + start * x->step : NULL;
        else if (is_seen_again(before, from, row, l))
            x->rows[row] = x->rows[row + before->back];
        else
            x->rows[row] = from ? copy_part(a, from, start + x->low, x->high - x->low, seen) - x->low * x->step : NULL;
    }
    if (before)
        before->count = l->at[2] ? 0 : l->some;
}

/* The taps that are multiplied at once: all of three, or five at a time; 0 unless positions are as far apart as taps,
   or twice as far. */
static int taps_together(const sights *x)
{
    const int is_near = x->stride == x->apart || x->stride == 2 * x->apart;
    return is_near && x->n_taps >= 5 ? 5 : is_near && x->n_taps == 3 ? 3 : 0;
}

/* Load a column; `what` is a constant. */
INLINED vector column_of(const float *seen, int64_t count, int what)
{
#if defined(__AVX512F__)
    if (what == EACH_PAIR) {
        double pair;
        memcpy(&pair, seen, sizeof pair);
        return (vector)_mm512_set1_pd(pair);
    }
#endif
    if (what == EACH_CHANNEL)
        return *seen - (vector){0};
    return load_some(seen, what == SOME_CHANNELS ? count : LANES);
}

/* The bit mask of the columns inside of the image, of `count` columns from `first` on, `apart` from each other. Not
   inlined: compilers would take longer to read it in each form of a tile. */
__attribute__((noinline)) static uint32_t columns_inside(const sights *x, int64_t first, int64_t apart, int64_t count)
{
    if (first >= x->low && first + (count - 1) * apart < x->high)
        return ~0u;
    uint32_t inside = 0;
    for (int64_t i = 0; i < count; i++, first += apart)
        inside |= (uint32_t)(first >= x->low && first < x->high) << i;
    return inside;
}

/* Accumulate one row of taps after the other, `n_rows` of them, from `at` on for some positions. The columns of the `taps` taps are
   `step` apart, those of `positions` are `stride` times that apart. Each column is loaded once for all positions that
   read it. `count`: channels, or pairs of them; `all`: all columns are inside. The last five arguments are
   constants. */
INLINED void add_rows_of(vector *sums, const sights *x, const float *const *row, int64_t n_rows, int64_t at,
                         int64_t step, const float *w, uint32_t inside, int64_t count, int positions, int stride,
                         int taps, int what, int all)
{
    const int64_t of_tap = x->of_tap, of_row = x->n_taps * of_tap, elements = what < EACH_CHANNEL ? 1 : count;
    const float *const *const end = row + n_rows;
    for (; row < end; row++, w += of_row) {
        if (!*row)
            continue;
        const float *first = *row + at, *of_element = w;
        for (int64_t e = 0; e < elements; e++, first += what == EACH_PAIR ? 2 : 1, of_element += GRAIN) {
            const float *seen = first;
            vector weights[8];
            UNROLLED(t, taps)
                weights[t] = load_some(of_element + t * of_tap, what == SOME_CHANNELS ? count : LANES);
            ADVANCE(inside, 0); /* compilers would extract bits before the loop */
            UNROLLED(i, (positions - 1) * stride + taps)
            {
                if (all || __builtin_expect(inside >> i & 1, 1)) {
                    vector value = column_of(seen, count, what);
                    if (taps > 1)
                        IN_REGISTER(value);
                    UNROLLED(p, positions)
                        if (i >= p * stride && i < p * stride + taps)
                            sums[p] += value * weights[i - p * stride];
                }
                ADVANCE(seen, step);
            }
        }
    }
}

/* The same. A test for each column costs about a product: single taps of narrow groups skip it if all are inside. */
INLINED void add_rows(vector *sums, const sights *x, const float *const *row, int64_t n_rows, int64_t at, int64_t step,
                      const float *w, uint32_t inside, int64_t count, int positions, int stride, int taps, int what)
{
    if (taps == 1 && what >= EACH_CHANNEL && inside == ~0u)
        add_rows_of(sums, x, row, n_rows, at, step, w, inside, count, positions, stride, taps, what, 1);
    else
        add_rows_of(sums, x, row, n_rows, at, step, w, inside, count, positions, stride, taps, what, 0);
}

#endif
