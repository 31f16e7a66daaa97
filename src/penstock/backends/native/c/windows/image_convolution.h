/* Convolutions of images with their channels innermost, over one to three axes: what those by all channels
   (image_convolution.c) and those by one each (image_depthwise.c) share. It is which elements of an image the
   positions of a result see, and what follows the sums: a tensor that is added, a slope below 0, bounds, a program.

   The result of a transposed convolution is made of as many phases as it has strides, each of which is a
   convolution of stride 1 by some of the taps:

       kernel 3, stride 2:    y0 = x0 w0    y1 = x0 w1    y2 = x1 w0 + x0 w2    y3 = x1 w1    ... */
#ifndef PENSTOCK_IMAGE_CONVOLUTION_H
#define PENSTOCK_IMAGE_CONVOLUTION_H

#include "images.h"
#include "panels.h"
#include "programs.h"

enum { COPIED = 14336, MOST_CHANNELS = 8192, ADDRESSES = 4096, AXES = 3, MOST_ROWS = 64 };

/* An axis: elements of the image and of the result; elements between what adjacent positions see; and for each
   phase of the result the number of its taps, and where its first position sees each, in order. */
typedef struct {
    int64_t size, count, stride, phases;
    int64_t taps[];
} span;

/* Weights as a run gives them: their elements for each filter of a channel, and from one filter and one channel of a
   group to the next; their groups that are one of the product's; where each tap of all phases is. */
typedef struct {
    int64_t kernel, filter_step, channel_step, merged;
    int64_t taps[];
} source;

/* Lines whose positions see of each part what is equally far apart: in the image, or if there are `copies`, in so many
   copies of `columns` of the image's rows each. `elements`: each element of what a position sees has an address. */
typedef struct {
    int64_t copies, columns, elements;
} even_lines;

/* Of all kernels here. */
struct image_convolution {
    const float *x, *weights, *bias;
    const float *slopes, *addend; /* or NULL */
    float *y;
    const span *axes[AXES];  /* slices, rows and columns */
    const int64_t *places;   /* of the weights of each phase */
    double gate, offset, factor, term, low, high;
    int64_t images, groups, channels, filters; /* channels and filters of a group */
    int64_t block;                             /* positions of an item */
    int64_t adjacent; /* taps of a row of the kernel see adjacent elements, and are one part of what is seen */
    int64_t room;     /* elements of copies */
    const even_lines *even; /* or NULL: what the positions of a line see is not equally far apart */
    int64_t twos;     /* panels of filters have those of two channels in turn */
    int64_t items;    /* of the product */
    float *pairs;     /* of bfloat16, that x is rounded to; or NULL */
    /* Weights and bias that a run gives are packed first, to where `weights` are and behind them. */
    const float *given, *given_bias;
    const source *source;
    const steps *x_steps, *addend_steps, *y_steps;
    int64_t follows;            /* a program: 1, whose rows are filters; 2, positions of one; 0, none */
    struct elementwise program; /* of y, in place */
};

/* What is outside of an image. */
static float zeros[MOST_CHANNELS];

/* A phase of the result: the taps of each axis; its first element along each, and positions from there on. */
typedef struct {
    const int64_t *taps[AXES];
    int64_t first[AXES], counts[AXES], n_taps[AXES], positions;
    const float *weights;
} phase;

static inline phase phase_of(const struct image_convolution *a, int64_t number)
{
    phase f = {.positions = a->images, .weights = a->weights + a->places[number]};
    for (int i = AXES - 1; i >= 0; i--) {
        const span *u = a->axes[i];
        f.first[i] = 0, f.counts[i] = u->count;
        if (u->phases > 1) { /* divisions take as long as the sums of some positions */
            f.first[i] = number % u->phases, number /= u->phases;
            f.counts[i] = (u->count - f.first[i] + u->phases - 1) / u->phases;
        }
        f.positions *= f.counts[i];
        const int64_t *taps = u->taps;
        for (int64_t p = 0; p < f.first[i]; p++)
            taps += *taps + 1;
        f.n_taps[i] = *taps, f.taps[i] = taps + 1;
    }
    return f;
}

static inline int64_t phases_of(const struct image_convolution *a)
{
    return a->axes[0]->phases * a->axes[1]->phases * a->axes[2]->phases;
}

/* Positions of a phase that lie in a line of the result, `some` of them from here on. */
typedef struct {
    int64_t image, at[AXES], some;
} line;

/* The first line of `count` positions from `first` on. */
static inline line line_of(const phase *f, int64_t first, int64_t count)
{
    line l;
    for (int i = AXES - 1; i >= 0; i--)
        l.at[i] = first % f->counts[i], first /= f->counts[i];
    l.image = first;
    l.some = smaller(f->counts[AXES - 1] - l.at[AXES - 1], count);
    return l;
}

/* Go to the line behind, of which `count` positions are left. */
static inline void next_line(const phase *f, line *l, int64_t count)
{
    l->at[AXES - 1] += l->some;
    for (int i = AXES - 1; i >= 0 && l->at[i] == f->counts[i]; i--) {
        l->at[i] = 0;
        *(i ? &l->at[i - 1] : &l->image) += 1;
    }
    l->some = smaller(f->counts[AXES - 1] - l->at[AXES - 1], count);
}

/* Where the first position of a line is in the result, or in what is added to it. */
static inline int64_t place_of(const struct image_convolution *a, const phase *f, const line *l, const steps *y)
{
    const int64_t each[] = {y->slice, y->row, y->column};
    int64_t place = l->image * y->image;
    for (int i = 0; i < AXES; i++)
        place += (l->at[i] * a->axes[i]->phases + f->first[i]) * each[i];
    return place;
}

/* Some channels of what positions see: where each part of it lies, [part][apart]. */
typedef struct {
    int64_t first, channels, apart;
    const float **rows;
    float *copy; /* where parts are copied to that have gaps, or are partly outside of the image */
} view;

/* What row `row` of the taps, of slice `slice` of them, sees of the first position's image: NULL if that is outside. */
static inline const float *seen_row(const struct image_convolution *a, const phase *f, const line *l,
                             const view *seen, int64_t slice, int64_t row)
{
    const steps *x = a->x_steps;
    const int64_t each[] = {x->slice, x->row}, seen_at[] = {f->taps[0][slice], f->taps[1][row]};
    const float *from = a->x + l->image * x->image + seen->first * x->channel;
    for (int i = 0; i < 2; i++) {
        const int64_t at = l->at[i] * a->axes[i]->stride + seen_at[i];
        if (at < 0 || at >= a->axes[i]->size)
            return NULL;
        from += at * each[i];
    }
    return from;
}

/* Copy what is seen in an image's row of `count` columns from `column` on; returns where. */
static inline const float *copy_part(const struct image_convolution *a, const float *row, int64_t column,
                              int64_t count, view *seen)
{
    const int64_t step = a->x_steps->channel, channels = seen->channels;
    const float *const part = seen->copy;
    for (int64_t k = 0; k < count; k++, column++, seen->copy += channels) {
        float *restrict to = seen->copy;
        const float *from = row + column * a->x_steps->column;
        const int outside = column < 0 || column >= a->axes[2]->size;
        if (step == 1 && !outside)
            copy_floats(to, from, channels);
        else
            for (int64_t i = 0; i < channels; i++)
                to[i] = outside ? 0 : from[i * step];
    }
    return part;
}

/* How many strides `elements` have room for; division takes as long as the sums of a position. */
static inline int64_t strides_in(int64_t elements, int64_t stride)
{
    return stride == 1 ? elements : stride == 2 ? elements >> 1 : elements / stride;
}

/* Find what `count` positions see of an image's row, or of none: `wide` columns, of the first from `start` on. */
static inline void find_line(const struct image_convolution *a, const float *row, int64_t start, int64_t stride,
                      int64_t count, int64_t wide, view *seen, const float **to)
{
    const int64_t size = a->axes[2]->size, step = a->x_steps->column;
    const int64_t room = size - wide - start, before = start < 0 ? -start : 0;
    const int flat = a->x_steps->channel == 1 && (wide == 1 || step == a->channels);
    /* Those that see only columns that there are. */
    const int64_t low = row ? smaller(strides_in(before + stride - 1, stride), count) : count;
    int64_t high = flat && room >= 0 ? smaller(strides_in(room, stride) + 1, count) : 0;
    high = high < low ? low : high;
    const float *inside = low < high ? row + (start + low * stride) * step : NULL;
    for (int64_t p = low; p < high; p++, inside += stride * step) {
        __asm__("" : "+r"(inside)); /* lines are short: vectors of addresses take longer */
        to[p] = inside;
    }
    for (int64_t p = low ? 0 : high; p < count; p = p + 1 == low ? high : p + 1) {
        const int64_t column = start + p * stride;
        const int outside = !row || column >= size || column + wide <= 0 || (wide == 1 && flat);
        to[p] = outside ? zeros : copy_part(a, row, column, wide, seen);
    }
}

/* Rows of the image that rows of taps see from `count` positions, a whole line or its begin, else 0; the next line
   sees them from rows of taps that are `back` before. */
typedef struct {
    const float *rows[MOST_ROWS]; /* of `known` rows of taps */
    int64_t known, back, count;
} seen_rows;

static inline int64_t rows_back(const struct image_convolution *a, const phase *f)
{
    int64_t back = 1;
    while (back < f->n_taps[1] && f->taps[1][back] - f->taps[1][0] != a->axes[1]->stride)
        back++;
    return back < f->n_taps[1] ? back : MOST_ROWS;
}

/* Before the first line. Rows are not set, which takes time, and are not read before they are. */
static inline void no_rows(seen_rows *before, const struct image_convolution *a, const phase *f)
{
    before->known = smaller(f->n_taps[0] * f->n_taps[1], MOST_ROWS);
    before->back = rows_back(a, f), before->count = 0;
}

/* Whether the line before saw what a row of taps sees of this one. */
static inline int is_seen_again(seen_rows *before, const float *from, int64_t row, const line *l)
{
    const int64_t other = row + before->back;
    const int begins = other < before->known && l->at[2] == 0 && l->some == before->count;
    const int again = begins && from && from == before->rows[other];
    if (row < MOST_ROWS)
        before->rows[row] = from;
    return again;
}

/* Whether sums are written to the result's channels where they are. */
static inline int is_direct(const struct image_convolution *a)
{
    return a->y_steps->channel == 1 && (!a->addend || a->addend_steps->channel == 1);
}

/* Where the positions of a line are, from `filter` on, whose bias and slopes are at `column`. */
static inline target target_of(const struct image_convolution *a, const phase *f, const line *l, int64_t filter,
                        int64_t column)
{
    const steps *y = a->y_steps, *added = a->addend_steps;
    const int64_t phases = a->axes[2]->phases;
    const activation active = {moved(a->slopes, column), (float)a->gate, (float)a->offset, (float)a->factor,
                               (float)a->term, (float)a->low, (float)a->high};
    target to = {a->y + place_of(a, f, l, y) + filter * y->channel, phases * y->column, a->bias + column,
                 NULL, 0, active, 0, 0};
    if (a->addend) {
        to.addend = a->addend + place_of(a, f, l, added) + filter * added->channel;
        to.addend_step = phases * added->column;
    }
    return to;
}

/* Write `count` sums of each of `rows` positions of a line, `apart` from one to the next, to images with gaps
   between channels or positions. */
static inline void put_positions(const struct image_convolution *a, target to, int64_t rows, const float *sums,
                          int64_t count, int64_t apart)
{
    const int64_t step = a->y_steps->channel, addend_step = a->addend ? a->addend_steps->channel : 1;
    float added[PANEL], part[PANEL];
    for (int64_t r = 0; r < rows; r++, sums += apart) {
        target own = part_of(&to, r, 0);
        for (int64_t e = 0; e < count && addend_step != 1; e++)
            added[e] = own.addend[e * addend_step];
        own.addend = addend_step == 1 ? own.addend : added;
        float *const y = own.y;
        own.y = step == 1 ? y : part;
        put_floats(&own, sums, count);
        for (int64_t e = 0; e < count && step != 1; e++)
            y[e * step] = part[e];
    }
}

/* Run the program behind for some positions and filters of the result. */
static inline void follow(const struct image_convolution *a, int64_t first, int64_t count, int64_t filter,
                   int64_t filters, int64_t all)
{
    const int64_t plane = a->axes[0]->count * a->axes[1]->count * a->axes[2]->count;
    struct elementwise program = a->program;
    program.inputs[0] = program.output = a->y;
    if (a->follows == 1)
        run_in_rows(&program, first, count, filter, filter + filters);
    for (int64_t p = first, some; p < first + count && a->follows == 2; p += some) {
        some = smaller(first + count - p, plane - p % plane);
        run_in_rows(&program, p / plane * all + filter, filters, p % plane, p % plane + some);
    }
}

/* Pack weights and bias that a run gives in the first stage, by `pack` in so many parts, and convolve in the second.
   There is a bias for each of `padded` filters of `filters`, of each group. */
static inline int given_stage(const void *arguments, int64_t stage, int64_t first, int64_t last, int64_t packs,
                              int64_t filters, int64_t padded,
                              void (*pack)(const struct image_convolution *, int64_t),
                              int (*convolve)(const void *, int64_t, int64_t))
{
    struct image_convolution a = *(const struct image_convolution *)arguments;
    float *const bias = (float *)a.weights + a.places[phases_of(&a)];
    a.bias = bias;
    if (stage % 2)
        return convolve(&a, first, last);
    for (int64_t i = first * packs / a.items; i < last * packs / a.items; i++)
        pack(&a, i);
    for (int64_t i = 0; i < a.groups * padded && first == 0; i++)
        bias[i] = a.given_bias && i % padded < filters ? a.given_bias[i / padded * filters + i % padded] : 0;
    return 0;
}

#endif
