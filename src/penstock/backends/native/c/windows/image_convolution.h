/* Convolutions of channels-last images over one to three axes: what those over all channels (image_convolution.c) and
   depthwise ones (image_depthwise.c) share, which is the addressing of the input of each output position, and the
   epilogue: an addend, slopes for negative values, bounds, and a program.

   The result of a transposed convolution is split into as many phases as the stride; each phase is a convolution of
   stride 1 with a subset of the taps:

       kernel 3, stride 2:    y0 = x0 w0    y1 = x0 w1    y2 = x1 w0 + x0 w2    y3 = x1 w1    ... */
#ifndef PENSTOCK_IMAGE_CONVOLUTION_H
#define PENSTOCK_IMAGE_CONVOLUTION_H

#include "images.h"
#include "panels.h"
#include "programs.h"

enum { COPIED = 14336, MOST_CHANNELS = 8192, ADDRESSES = 4096, AXES = 3, MOST_ROWS = 64 };

/* An axis: the sizes of the image and of the result; the input stride between adjacent positions; and for each phase
   of the result its number of taps, and the input offset of each tap for the first position, in order. */
typedef struct {
    int64_t size, count, stride, phases;
    int64_t taps[];
} span;

/* Weights given at run time: elements of a kernel (per filter and channel), strides between filters and between
   channels of a group; how many of their groups make one group of the product; and the offset of each tap of all
   phases. */
typedef struct {
    int64_t kernel, filter_step, channel_step, merged;
    int64_t taps[];
} source;

/* Lines whose inputs are evenly spaced in each part: in the image itself, or, with `copies`, in that many copies of
   image rows of `columns` columns each. `elements`: each input element of a position has its own address, in the image
   or in the copies. */
typedef struct {
    int64_t copies, columns, elements;
} even_lines;

/* Arguments of all kernels here. */
struct image_convolution {
    const float *x, *weights, *bias;
    const float *slopes, *addend; /* or NULL */
    float *y;
    const span *axes[AXES];  /* slices, rows and columns */
    const int64_t *places;   /* of the weights of each phase */
    double gate, offset, factor, term, low, high;
    int64_t images, groups, channels, filters; /* channels and filters of a group */
    int64_t block;                             /* positions of an item */
    int64_t adjacent; /* the taps of a kernel row read adjacent elements, and form one part of the input */
    int64_t room;     /* elements of the copies */
    const even_lines *even; /* or NULL: the inputs of a line are not evenly spaced */
    int64_t twos;     /* panels of filters interleave pairs of channels */
    int64_t at_once;  /* three taps of a row may be multiplied together, in another order of sums */
    int64_t items;    /* of the product */
    float *pairs;     /* room to round x to bfloat16; or NULL */
    /* Weights and bias given at run time are packed first, to `weights` and behind them. */
    const float *given, *given_bias;
    const source *source;
    const steps *x_steps, *addend_steps, *y_steps;
    int64_t follows;            /* a program: 1, on rows of filters; 2, on rows of positions; 0, none */
    struct elementwise program; /* on y, in place */
};

/* The padding outside of an image. */
static float zeros[MOST_CHANNELS];

/* A phase of the result: the taps of each axis; its first element along each, and the number of positions. */
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
            f.counts[i] = CEIL_DIV(u->count - f.first[i], u->phases);
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

/* Positions of a phase in one line (row) of the result, `some` of them from here on. */
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

/* Advance to the next line; `count` positions are left. */
static inline void next_line(const phase *f, line *l, int64_t count)
{
    l->at[AXES - 1] += l->some;
    for (int i = AXES - 1; i >= 0 && l->at[i] == f->counts[i]; i--) {
        l->at[i] = 0;
        *(i ? &l->at[i - 1] : &l->image) += 1;
    }
    l->some = smaller(f->counts[AXES - 1] - l->at[AXES - 1], count);
}

/* The offset of a line's first position in the result, or in the addend. */
static inline int64_t place_of(const struct image_convolution *a, const phase *f, const line *l, const steps *y)
{
    const int64_t each[] = {y->slice, y->row, y->column};
    int64_t place = l->image * y->image;
    for (int i = 0; i < AXES; i++)
        place += (l->at[i] * a->axes[i]->phases + f->first[i]) * each[i];
    return place;
}

/* The input of some channels for a block of positions: the address of each part, [part][apart]. */
typedef struct {
    int64_t first, channels, apart;
    const float **rows;
    float *copy; /* where parts are copied that have gaps, or are partly outside of the image */
} view;

/* The image row that tap row `row` of tap slice `slice` reads for the line's first position: NULL if it is
   padding. */
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

/* Copy `count` columns of an image row from `column` on, padded with zeros; return the address of the copy. */
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

/* The number of whole strides in `elements`; a division takes as long as the sums of a position. */
static inline int64_t strides_in(int64_t elements, int64_t stride)
{
    return stride == 1 ? elements : stride == 2 ? elements >> 1 : elements / stride;
}

/* Find the addresses of `wide` columns of an image row (NULL: padding) for each of `count` positions, from `start`
   on. */
static inline void find_line(const struct image_convolution *a, const float *row, int64_t start, int64_t stride,
                      int64_t count, int64_t wide, view *seen, const float **to)
{
    const int64_t size = a->axes[2]->size, step = a->x_steps->column;
    const int64_t room = size - wide - start, before = start < 0 ? -start : 0;
    const int flat = a->x_steps->channel == 1 && (wide == 1 || step == a->channels);
    /* Positions whose columns are all inside of the image. */
    const int64_t low = row ? smaller(strides_in(before + stride - 1, stride), count) : count;
    int64_t high = flat && room >= 0 ? smaller(strides_in(room, stride) + 1, count) : 0;
    high = high < low ? low : high;
    const float *inside = low < high ? row + (start + low * stride) * step : NULL;
    for (int64_t p = low; p < high; p++, inside += stride * step) {
        __asm__("" : "+r"(inside)); /* lines are short: vectorized address arithmetic takes longer */
        to[p] = inside;
    }
    for (int64_t p = low ? 0 : high; p < count; p = p + 1 == low ? high : p + 1) {
        const int64_t column = start + p * stride;
        const int outside = !row || column >= size || column + wide <= 0 || (wide == 1 && flat);
        to[p] = outside ? zeros : copy_part(a, row, column, wide, seen);
    }
}

/* Image rows that each row of taps reads for a line that starts at column 0 and has `count` positions, else 0; the
   next line reads the same rows through rows of taps that are `back` earlier. */
typedef struct {
    const float *rows[MOST_ROWS]; /* for `known` rows of taps */
    int64_t known, back, count;
} seen_rows;

static inline int64_t rows_back(const struct image_convolution *a, const phase *f)
{
    int64_t back = 1;
    while (back < f->n_taps[1] && f->taps[1][back] - f->taps[1][0] != a->axes[1]->stride)
        back++;
    return back < f->n_taps[1] ? back : MOST_ROWS;
}

/* The state before the first line. Rows are left unset, to save time: they are not read before they are set. */
static inline void no_rows(seen_rows *before, const struct image_convolution *a, const phase *f)
{
    before->known = smaller(f->n_taps[0] * f->n_taps[1], MOST_ROWS);
    before->back = rows_back(a, f), before->count = 0;
}

/* Whether the previous line already read what a row of taps reads for this one. */
static inline int is_seen_again(seen_rows *before, const float *from, int64_t row, const line *l)
{
    const int64_t other = row + before->back;
    const int begins = other < before->known && l->at[2] == 0 && l->some == before->count;
    const int again = begins && from && from == before->rows[other];
    if (row < MOST_ROWS)
        before->rows[row] = from;
    return again;
}

/* Whether sums are written directly to the channels of the result. */
static inline int is_direct(const struct image_convolution *a)
{
    return a->y_steps->channel == 1 && (!a->addend || a->addend_steps->channel == 1);
}

/* The target of a line's positions from `filter` on; `column` is where their bias and slopes are. */
static inline target target_of(const struct image_convolution *a, const phase *f, const line *l, int64_t filter,
                        int64_t column)
{
    const steps *y = a->y_steps, *added = a->addend_steps;
    const int64_t phases = a->axes[2]->phases;
    const activation active = {moved(a->slopes, column), (float)a->gate, (float)a->offset, (float)a->factor,
                               (float)a->term, (float)a->low, (float)a->high};
    target to = {a->y + place_of(a, f, l, y) + filter * y->channel, phases * y->column, a->bias + column,
                 NULL, 0, active, 0, 0, 0};
    if (a->addend) {
        to.addend = a->addend + place_of(a, f, l, added) + filter * added->channel;
        to.addend_step = phases * added->column;
    }
    return to;
}

/* Write `count` sums of each of `rows` positions of a line, `apart` elements apart, to images whose channels or
   positions are not contiguous. */
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

/* Run the fused program on some positions and filters of the result. */
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

/* Pack weights and bias given at run time in the first stage, in `packs` calls of `pack`, and convolve in the second.
   The `filters` biases of each group are padded to `padded`. */
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
