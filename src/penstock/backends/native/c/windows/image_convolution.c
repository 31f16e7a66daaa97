/* Convolutions and transposed ones of images with their channels innermost, over one to three axes, by
   all channels or by one each, and what follows them: a tensor that is added, a slope below 0, and bounds.

   A convolution by all channels is the product of panels.c, whose rows are what positions of the result
   see. These are not copied: for each tap of the kernel, or each row of taps where channels are few, a
   table has the address of what a position sees, or of zeros outside of the image. In one by each channel,
   the table has what each row of taps sees of a line; a vector of channels is loaded once for all positions
   that see it. Of few channels, a line is one run of elements, and weights repeat. What has gaps in memory, or
   a row of taps that is partly outside, is copied first.

   The result of a transposed convolution is made of as many phases as it has strides, each of which is a
   convolution of stride 1 by some of the taps:

       kernel 3, stride 2:    y0 = x0 w0    y1 = x0 w1    y2 = x1 w0 + x0 w2    y3 = x1 w1    ...

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include <stdlib.h>
#include "images.h"
#include "panels.h"
#include "programs.h"

enum { COPIED = 14336, MOST_CHANNELS = 8192, ADDRESSES = 4096, AXES = 3, LEAST_LINE = 24, MOST_ROWS = 64 };
enum { LEAST_CHANNELS = 8 }; /* of taps that are parts of their own, if three are multiplied at once */
enum { TILE = 8, WIDE = BY_WIDTH(2, 1, 1) }; /* positions and vectors that are computed together */

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

static phase phase_of(const struct image_convolution *a, int64_t number)
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

static int64_t phases_of(const struct image_convolution *a)
{
    return a->axes[0]->phases * a->axes[1]->phases * a->axes[2]->phases;
}

/* Positions of a phase that lie in a line of the result, `some` of them from here on. */
typedef struct {
    int64_t image, at[AXES], some;
} line;

/* The first line of `count` positions from `first` on. */
static line line_of(const phase *f, int64_t first, int64_t count)
{
    line l;
    for (int i = AXES - 1; i >= 0; i--)
        l.at[i] = first % f->counts[i], first /= f->counts[i];
    l.image = first;
    l.some = smaller(f->counts[AXES - 1] - l.at[AXES - 1], count);
    return l;
}

/* Go to the line behind, of which `count` positions are left. */
static void next_line(const phase *f, line *l, int64_t count)
{
    l->at[AXES - 1] += l->some;
    for (int i = AXES - 1; i >= 0 && l->at[i] == f->counts[i]; i--) {
        l->at[i] = 0;
        *(i ? &l->at[i - 1] : &l->image) += 1;
    }
    l->some = smaller(f->counts[AXES - 1] - l->at[AXES - 1], count);
}

/* Where the first position of a line is in the result, or in what is added to it. */
static int64_t place_of(const struct image_convolution *a, const phase *f, const line *l, const steps *y)
{
    const int64_t each[] = {y->slice, y->row, y->column};
    int64_t place = l->image * y->image;
    for (int i = 0; i < AXES; i++)
        place += (l->at[i] * a->axes[i]->phases + f->first[i]) * each[i];
    return place;
}

/* Whether all positions of an image are equally far apart. */
static int is_uniform(const struct image_convolution *a, const steps *x)
{
    const int64_t row = a->axes[2]->count * x->column, slice = a->axes[1]->count * row;
    const int64_t image = a->axes[0]->count * slice;
    return phases_of(a) == 1 && x->row == row && x->slice == slice && x->image == image;
}

/* Some channels of what positions see: where each part of it lies, [part][apart]. */
typedef struct {
    int64_t first, channels, apart;
    const float **rows;
    float *copy; /* where parts are copied to that have gaps, or are partly outside of the image */
} view;

/* What row `row` of the taps, of slice `slice` of them, sees of the first position's image: NULL if that is outside. */
static const float *seen_row(const struct image_convolution *a, const phase *f, const line *l,
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
static const float *copy_part(const struct image_convolution *a, const float *row, int64_t column,
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
static void find_line(const struct image_convolution *a, const float *row, int64_t start, int64_t stride,
                      int64_t count, int64_t wide, view *seen, const float **to)
{
    const int64_t size = a->axes[2]->size, step = a->x_steps->column;
    const int64_t room = size - wide - start, before = start < 0 ? -start : 0;
    const int flat = a->x_steps->channel == 1 && (wide == 1 || step == a->channels);
    /* Those that see only columns that there are. */
    const int64_t low = row ? smaller(strides_in(before + stride - 1, stride), count) : count;
    int64_t high = flat && room >= 0 ? smaller(strides_in(room, stride) + 1, count) : 0;
    high = high < low ? low : high;
    const float *inside = row + (start + low * stride) * step;
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

static int64_t rows_back(const struct image_convolution *a, const phase *f)
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
static int is_seen_again(seen_rows *before, const float *from, int64_t row, const line *l)
{
    const int64_t other = row + before->back;
    const int begins = other < before->known && l->at[2] == 0 && l->some == before->count;
    const int again = begins && from && from == before->rows[other];
    if (row < MOST_ROWS)
        before->rows[row] = from;
    return again;
}

/* Whether each position sees its own element alone, all of them equally far apart. */
static int is_product(const struct image_convolution *a, const phase *f)
{
    int own = a->x_steps->channel == 1 && is_uniform(a, a->x_steps);
    for (int i = 0; i < AXES && own; i++)
        own = f->n_taps[i] == 1 && !f->taps[i][0] && a->axes[i]->stride == 1 && a->axes[i]->size == a->axes[i]->count;
    return own;
}

/* The taps of a row that a product of a single vector of filters has at once, 3 or 1; 3 are parts of their own. */
static int64_t taps_at_once(const struct image_convolution *a, const phase *f)
{
    const int64_t *const taps = f->taps[2], all = f->n_taps[0] * f->n_taps[1] * f->n_taps[2];
    const int is_row = f->n_taps[2] == 3 && a->axes[2]->stride == 1 && taps[2] == taps[1] + 1 && taps[1] == taps[0] + 1;
    const int is_narrow = BY_WIDTH(a->filters <= LANES && a->channels >= LEAST_CHANNELS, 0, 0);
    return is_row && is_narrow && all * a->block <= ADDRESSES ? 3 : 1;
}

/* The taps of a row that are one part. */
static int64_t taps_of_part(const struct image_convolution *a, const phase *f)
{
    return a->adjacent && taps_at_once(a, f) == 1 ? f->n_taps[2] : 1;
}

/* Find where each part of what `count` positions from `first` on see lies. */
static void find_rows(const struct image_convolution *a, const phase *f, int64_t first, int64_t count, view seen)
{
    const int64_t wide = taps_of_part(a, f), parts = f->n_taps[2] / wide, stride = a->axes[2]->stride;
    seen_rows before;
    no_rows(&before, a, f);
    const int64_t own = is_product(a, f) ? count : 0;
    for (int64_t r = 0; r < own; r++)
        seen.rows[r] = a->x + (first + r) * a->x_steps->column;
    line l = line_of(f, first + own, count - own);
    for (int64_t r = own; r < count; next_line(f, &l, count - r)) {
        for (int64_t row = 0, slice = 0, of_slice = 0; row < f->n_taps[0] * f->n_taps[1]; row++, of_slice++) {
            if (of_slice == f->n_taps[1])
                of_slice = 0, slice++;
            const float *from = seen_row(a, f, &l, &seen, slice, of_slice);
            const float **to = seen.rows + row * parts * seen.apart + r;
            const int again = is_seen_again(&before, from, row, &l);
            for (int64_t part = 0; part < parts; part++, to += seen.apart)
                if (again)
                    memcpy(to, to + before.back * parts * seen.apart - l.some, l.some * sizeof *to);
                else
                    find_line(a, from, l.at[2] * stride + f->taps[2][part], stride, l.some, wide, &seen, to);
        }
        r += l.some, before.count = l.at[2] ? 0 : l.some;
    }
}

/* Whether sums are written to the result's channels where they are. */
static int is_direct(const struct image_convolution *a)
{
    return a->y_steps->channel == 1 && (!a->addend || a->addend_steps->channel == 1);
}

/* Where the positions of a line are, from `filter` on, whose bias and slopes are at `column`. */
static target target_of(const struct image_convolution *a, const phase *f, const line *l, int64_t filter,
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
static void put_positions(const struct image_convolution *a, target to, int64_t rows, const float *sums,
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
static void follow(const struct image_convolution *a, int64_t first, int64_t count, int64_t filter,
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

CHECKED_ITEMS_OF(image_convolution, image_convolution)
{
    const int64_t filters = a->filters, panels = (filters + PANEL - 1) / PANEL, phases = phases_of(a);
    const int64_t padded = (filters + GRAIN - 1) / GRAIN * GRAIN;
    const int dense = a->x_steps->channel == 1, direct = is_direct(a);
    const int uniform = direct && is_uniform(a, a->y_steps) && (!a->addend || is_uniform(a, a->addend_steps));
    _Alignas(64) float nearby[COPIED], sums[BLOCK * PANEL];
    const float *rows[ADDRESSES];
    float *const copy = a->room > COPIED ? malloc(a->room * sizeof *copy) : nearby;
    if (!copy)
        return 1;
    int64_t known = -1, seen = 0; /* which rows have been found; filters before those to follow */
    for (int64_t item = begin; item < end; item++) {
        const int64_t panel = item % panels, group = item / panels % a->groups;
        const int64_t place = item / panels / a->groups, first = place / phases * a->block;
        const phase f = phase_of(a, place % phases);
        const int64_t count = smaller(a->block, f.positions - first), column = panel * PANEL;
        if (count <= 0)
            continue;
        const int64_t wide = taps_of_part(a, &f), depth = wide * a->channels;
        const int64_t parts = f.n_taps[0] * f.n_taps[1] * f.n_taps[2] / wide, k = parts * depth;
        const int64_t width = a->twos ? GRAIN / 2 : smaller(PANEL, padded - column);
        const int64_t some = smaller(width, filters - column), filter = group * filters + column;
        const float *w = f.weights + (a->twos ? group * width : group * padded + column) * k;
        /* Copies are of one group, addresses are those of the first one. */
        const int64_t channel = group * a->channels, of = dense ? place : item / panels;
        if (of != known)
            find_rows(a, &f, first, count, (view){dense ? 0 : channel, a->channels, a->block, rows, copy});
        known = of;
        const int64_t of_lines = parts > 1 && a->block % f.counts[2] == 0 ? f.counts[2] : 0;
        const operands x = {rows, zeros, a->block, parts, dense ? channel : 0, depth, a->pairs != NULL, of_lines,
                            taps_at_once(a, &f)};
        const float *next = k * padded * a->groups <= NEAR ? NULL : item + 1 < end ? w + width * k : a->weights;
        const target apart = {sums, PANEL, a->bias + group * padded + column, NULL, 0, NO_ACTIVATION, 0, 0};
        /* Where the positions of several lines are not equally far apart, each line is a product. */
        const int by_line = direct && f.counts[2] >= LEAST_LINE;
        if (!uniform && !by_line)
            multiply_panel(x, count, w, width, next, &apart, some);
        line l = line_of(&f, first, count);
        for (int64_t r = 0; r < count; r += l.some, next_line(&f, &l, count - r)) {
            l.some = uniform ? count : l.some;
            const target to = target_of(a, &f, &l, filter, group * padded + column);
            operands of_line = x;
            of_line.rows += r;
            of_line.line = by_line && parts > 1 && !uniform ? l.some : x.line;
            if (uniform || by_line)
                multiply_panel(of_line, l.some, w, width, next, &to, some);
            else
                put_positions(a, to, l.some, sums + r * PANEL, some, PANEL);
        }
        const int64_t ready = filter + some;
        seen = panel && item > begin ? seen : filter;
        if (a->follows && (panel + 1 == panels || item + 1 == end || ready - seen == a->program.tile)) {
            follow(a, first, count, seen, ready - seen, a->groups * filters);
            seen = ready;
        }
    }
    if (copy != nearby)
        free(copy);
    return 0;
}

/* Find where each column that a row of taps sees lies, of `count` positions from `first` on: [row][apart]. */
static void find_columns(const struct image_convolution *a, const phase *f, int64_t first, int64_t count,
                         view seen)
{
    const int64_t *taps = f->taps[2], reach = taps[f->n_taps[2] - 1] - taps[0], stride = a->axes[2]->stride;
    seen_rows before;
    no_rows(&before, a, f);
    line l = line_of(f, first, count);
    for (int64_t r = 0, at = 0; r < count; next_line(f, &l, count - r)) {
        const int64_t wide = (l.some - 1) * stride + reach + 1;
        for (int64_t row = 0, slice = 0, of_slice = 0; row < f->n_taps[0] * f->n_taps[1]; row++, of_slice++) {
            if (of_slice == f->n_taps[1])
                of_slice = 0, slice++;
            const float *from = seen_row(a, f, &l, &seen, slice, of_slice), **to = seen.rows + row * seen.apart + at;
            if (is_seen_again(&before, from, row, &l))
                memcpy(to, to + before.back * seen.apart - wide, wide * sizeof *to);
            else
                find_line(a, from, l.at[2] * stride + taps[0], 1, wide, 1, &seen, to);
        }
        r += l.some, at += wide, before.count = l.at[2] ? 0 : l.some;
    }
}

/* What some positions of a line see of some channels: [row of taps][apart] columns from the first one's on;
   weights are [row][tap][channels]. */
typedef struct {
    const float *const *columns;
    int64_t apart, n_rows, n_taps, stride, from;
    const int64_t *taps;
    const float *w;
    int64_t channels;
} sights;

/* The sums of channels from `c` on, `vectors` vectors of them or, for 0, `count`; of `positions` in a line.
   `stride` is 1 or 2 if taps see adjacent columns, so far apart, or 0. These three are constants. */
INLINED void add_taps(const sights *x, int64_t c, int64_t count, const target *to, int positions, int vectors,
                      int stride)
{
    const int wide = vectors ? vectors : 1;
    vector sums[TILE * WIDE];
#define LOADED(from) (vectors ? loaded((from) + j * LANES) : load_some(from, count))
/* Each column is loaded once for all positions that see it with one of some taps. */
#define ADD(some)                                                                                  \
    {                                                                                              \
        vector weights[some * WIDE];                                                               \
        UNROLLED(t, some)                                                                          \
            UNROLLED(j, wide)                                                                      \
                weights[t * wide + j] = LOADED(w + t * x->channels);                               \
        UNROLLED(i, (positions - 1) * stride + some)                                               \
        {                                                                                          \
            const float *const seen = columns[k + i] + from;                                       \
            UNROLLED(j, wide)                                                                      \
            {                                                                                      \
                const vector value = LOADED(seen);                                                 \
                UNROLLED(p, positions)                                                             \
                    if (i >= p * stride && i < p * stride + some)                                  \
                        sums[p * wide + j] += value * weights[(i - p * stride) * wide + j];        \
            }                                                                                      \
        }                                                                                          \
        w += some * x->channels;                                                                   \
    }
    const float *w = x->w + c;
    const int64_t from = x->from + c, n_taps = x->n_taps, *const taps = x->taps;
    EACH(positions, wide) sums[r * wide + j] = LOADED(to->bias + c);
    const float *const *columns = x->columns;
    for (int64_t row = 0; row < x->n_rows; row++, columns += x->apart) {
        if (all_at(zeros, columns, (int)((positions - 1) * x->stride + taps[n_taps - 1] - taps[0] + 1))) {
            w += n_taps * x->channels;
            continue;
        }
        int64_t k = 0;
        if (stride) {
            for (; k + 5 <= n_taps; k += 5)
                ADD(5)
            for (; k + 3 <= n_taps; k += 3)
                ADD(3)
        }
        for (; k < n_taps; k++, w += x->channels) {
            const int64_t at = taps[k] - taps[0];
            vector weights[WIDE];
            UNROLLED(j, wide)
                weights[j] = LOADED(w);
            EACH(positions, wide) sums[r * wide + j] += LOADED(columns[r * x->stride + at] + from) * weights[j];
        }
    }
    put_vectors(sums, to, to->y + c, moved(to->addend, c), c, vectors ? LANES : count, positions, wide);
#undef LOADED
#undef ADD
}

/* As `add_taps`, for any number of channels: the last vectors may have some of those before again. */
INLINED void add_channels(const sights *x, int64_t count, const target *to, int positions, int stride)
{
    if (!stride && count < LANES)
        add_taps(x, 0, count, to, positions, 0, 0);
    for (int64_t c = 0, some; c < count && count >= LANES; c += some) {
        some = count >= WIDE * LANES && count - c > (WIDE - 1) * LANES ? WIDE * LANES : LANES;
        c = smaller(c, count - some);
        if (some > LANES)
            add_taps(x, c, some, to, positions, WIDE, stride);
        else
            add_taps(x, c, some, to, positions, 1, stride);
    }
}

/* As `add_channels`; returns for how many positions of `count`. */
static int64_t add_some(const sights *x, int64_t channels, const target *to, int64_t count, int stride)
{
    const int64_t tiles = (count + TILE - 1) / TILE, positions = (count + tiles - 1) / tiles;
#define OF(number)                                                                                 \
    case number:                                                                                   \
        if (stride == 1)                                                                           \
            add_channels(x, channels, to, number, 1);                                              \
        else                                                                                       \
            add_channels(x, channels, to, number, 2);                                              \
        return number;
    switch (stride && channels >= LANES ? positions : 0) {
        OF(4) OF(5) OF(6) OF(7) OF(8)
    }
#undef OF
    if (count >= 8)
        return add_channels(x, channels, to, 8, 0), 8;
    if (count >= 4)
        return add_channels(x, channels, to, 4, 0), 4;
    return add_channels(x, channels, to, 1, 0), 1;
}

/* Rows of taps that a line sees, NULL outside of the image, as elements one channel after the other; weights are
   [row][tap][period], since they repeat. */
typedef struct {
    const float *rows[MOST_ROWS];
    int64_t n_rows, n_taps, period, taps[MOST_ROWS]; /* elements from the first tap on */
    const float *w;
} flat_line;

/* `vectors` vectors of sums a period apart, or the first `count` of one, from element `at` of a line on. */
INLINED void add_flat(const flat_line *x, int64_t at, int64_t place, int64_t count, const target *to, int vectors)
{
    vector sums[TILE];
    UNROLLED(j, vectors)
        sums[j] = loaded(to->bias + place);
    const float *w = x->w + place;
    for (int64_t row = 0; row < x->n_rows; row++, w += x->n_taps * x->period)
        for (int64_t k = 0; k < x->n_taps && x->rows[row]; k++) {
            const float *const seen = x->rows[row] + x->taps[k] + at;
            const vector weights = loaded(w + k * x->period);
            UNROLLED(j, vectors)
                sums[j] += (vectors > 1 ? loaded(seen + j * x->period) : load_some(seen, count)) * weights;
        }
    UNROLLED(j, vectors)
        put_vectors(sums + j, to, to->y + at + j * x->period, moved(to->addend, at + j * x->period), place,
                    vectors > 1 ? LANES : count, 1, 1);
}

static void add_line(const flat_line *x, int64_t count, const target *to)
{
    for (int64_t place = 0; place < smaller(x->period, count); place += LANES) {
        int64_t at = place;
        for (; at + (TILE - 1) * x->period + LANES <= count; at += TILE * x->period)
            add_flat(x, at, place, LANES, to, TILE);
        for (; at + x->period + LANES <= count; at += 2 * x->period)
            add_flat(x, at, place, LANES, to, 2);
        for (; at < count; at += x->period)
            add_flat(x, at, place, count - at, to, 1);
    }
}

/* As `image_depthwise`, of few channels, for which `filters` says the period of weights, bias and slopes. What is
   seen of the image is copied, with zeros around it. */
static int flat_depthwise(const struct image_convolution *a, int64_t begin, int64_t end)
{
    const span *u = a->axes[1], *v = a->axes[2];
    const phase f = phase_of(a, 0);
    const int64_t channels = a->channels, n_taps = f.n_taps[2], n_rows = f.n_taps[1], low = f.taps[2][0];
    const int64_t wide = v->count + f.taps[2][n_taps - 1] - low, slots = f.taps[1][n_rows - 1] - f.taps[1][0] + 1;
    /* Columns that there are, of those that are seen. */
    const int64_t first = smaller(low < 0 ? -low : 0, wide), last = smaller(v->size - low, wide);
    const int is_flat = is_direct(a) && a->y_steps->column == channels &&
                        (!a->addend || a->addend_steps->column == channels);
    _Alignas(64) float copy[COPIED], sums[ADDRESSES];
    const float *held[MOST_ROWS] = {0};
    flat_line x = {.n_rows = n_rows, .n_taps = n_taps, .period = a->filters, .w = f.weights};
    for (int64_t k = 0; k < n_taps; k++)
        x.taps[k] = (f.taps[2][k] - low) * channels;
    memset(copy, 0, slots * wide * channels * sizeof *copy);
    for (int64_t item = begin; item < end; item++) {
        const int64_t start = item * a->block, count = smaller(a->block, f.positions - start);
        line l = line_of(&f, start, count);
        for (int64_t r = 0; r < count; r += l.some, next_line(&f, &l, count - r)) {
            for (int64_t k = 0; k < n_rows; k++) {
                const float *from = seen_row(a, &f, &l, &(view){0}, 0, k);
                /* The next lines see the copy, too. */
                const int64_t slot = from ? (l.at[1] * u->stride + f.taps[1][k]) % slots : 0;
                float *const to = copy + slot * wide * channels;
                if (from && held[slot] != from && first < last)
                    copy_floats(to + first * channels, from + (low + first) * channels, (last - first) * channels);
                held[slot] = from ? from : held[slot];
                x.rows[k] = from ? to + l.at[2] * channels : NULL;
            }
            const target to = target_of(a, &f, &l, 0, 0), apart = {sums, 0, to.bias, NULL, 0, NO_ACTIVATION, 0, 0};
            add_line(&x, l.some * channels, is_flat ? &to : &apart);
            if (!is_flat)
                put_positions(a, to, l.some, sums, channels, channels);
        }
        if (a->follows)
            follow(a, start, count, 0, channels, channels);
    }
    return 0;
}

/* Here `filters` are the channels of an item; weights are [tap][channel]. */
CHECKED_ITEMS_OF(image_depthwise, image_convolution)
{
    if (a->filters > a->channels)
        return flat_depthwise(a, begin, end);
    const span *v = a->axes[2];
    const int64_t channels = a->channels, chunks = (channels + a->filters - 1) / a->filters;
    const int64_t phases = phases_of(a), stride = a->adjacent && v->stride < 3 ? v->stride : 0;
    const int dense = a->x_steps->channel == 1, direct = is_direct(a);
    _Alignas(64) float copy[COPIED], sums[TILE * PANEL];
    const float *columns[ADDRESSES];
    int64_t known = -1;
    for (int64_t item = begin; item < end; item++) {
        const int64_t channel = item % chunks * a->filters, place = item / chunks;
        const int64_t first = place / phases * a->block, some = smaller(a->filters, channels - channel);
        const phase f = phase_of(a, place % phases);
        const int64_t count = smaller(a->block, f.positions - first), n_rows = f.n_taps[0] * f.n_taps[1];
        if (count <= 0)
            continue;
        const int64_t of = dense ? place : item, apart = ADDRESSES / n_rows, n_taps = f.n_taps[2];
        if (of != known)
            find_columns(a, &f, first, count, (view){dense ? 0 : channel, some, apart, columns, copy});
        known = of;
        const int64_t once = direct ? some : smaller(some, PANEL), reach = f.taps[2][n_taps - 1] - f.taps[2][0];
        line l = line_of(&f, first, count);
        for (int64_t r = 0, at = 0; r < count; next_line(&f, &l, count - r)) {
            for (int64_t c = channel, now; c < channel + some; c += now) {
                now = smaller(once, channel + some - c);
                const target all = target_of(a, &f, &l, c, c);
                for (int64_t p = 0, tile; p < l.some; p += tile) {
                    const target to = part_of(&all, p, 0), own = {sums, PANEL, to.bias, NULL, 0, NO_ACTIVATION, 0, 0};
                    const sights x = {columns + at + p * v->stride, apart, n_rows, n_taps, v->stride,
                                      dense ? c : c - channel, f.taps[2], f.weights + c, channels};
                    tile = add_some(&x, now, direct ? &to : &own, l.some - p, (int)stride);
                    if (!direct)
                        put_positions(a, to, tile, sums, now, PANEL);
                }
            }
            r += l.some, at += (l.some - 1) * v->stride + reach + 1;
        }
        if (a->follows)
            follow(a, first, count, channel, some, channels);
    }
    return 0;
}

/* Pack what is given for a panel of a phase. */
static void pack_panel(const struct image_convolution *a, int64_t number)
{
    const int64_t padded = (a->filters + GRAIN - 1) / GRAIN * GRAIN, panels = (a->filters + PANEL - 1) / PANEL;
    const int64_t column = number % panels * PANEL, width = smaller(PANEL, padded - column);
    const int64_t group = number / panels % a->groups, phase = number / panels / a->groups;
    const int64_t row = a->groups * padded * a->channels, n_taps = (a->places[phase + 1] - a->places[phase]) / row;
    const int64_t *seen = a->source->taps + a->places[phase] / row;
    const int64_t each = a->filters / a->source->merged, channels = a->channels / a->source->merged;
    const int64_t depth = a->channels * n_taps, end = smaller(column + width, a->filters);
    float *const w = (float *)a->weights + a->places[phase] + (group * padded + column) * depth;
    /* Some rows of the panel at a time, in the order in which they are read. */
    float rows[PANEL * PANEL];
    int64_t from[PANEL], to[PANEL];
    for (int64_t first = 0, count; first < depth; first += count) {
        count = smaller(PANEL, depth - first);
        for (int64_t j = 0; j < count; j++) {
            const int64_t i = (first + j) / n_taps, t = (first + j) % n_taps;
            from[j] = i % channels * a->source->channel_step + seen[t];
            to[j] = (t * a->channels + i) * width;
        }
        memset(rows, 0, count * PANEL * sizeof *rows);
        for (int64_t e = column; e < end; e++) {
            const int64_t own = e / each, low = own * channels * n_taps - first;
            const int64_t high = smaller(low + channels * n_taps, count);
            const float *given = a->given + (group * a->source->merged + own) * each * channels * a->source->kernel +
                                 e % each * a->source->filter_step;
            for (int64_t j = low < 0 ? 0 : low; j < high; j++)
                rows[j * PANEL + e - column] = given[from[j]];
        }
        for (int64_t j = 0; j < count; j++)
            copy_floats(w + to[j], rows + j * PANEL, width);
    }
}

/* As `pack_panel`, of the channels of a phase. */
static void pack_channels(const struct image_convolution *a, int64_t phase)
{
    const int64_t *seen = a->source->taps + a->places[phase] / a->channels;
    for (int64_t t = 0; t < (a->places[phase + 1] - a->places[phase]) / a->channels; t++)
        for (int64_t c = 0; c < a->channels; c++)
            ((float *)a->weights)[a->places[phase] + t * a->channels + c] = a->given[c * a->source->kernel + seen[t]];
}

/* Pack what is given in the first stage, and convolve in the second. */
static int given_stage(const void *arguments, int64_t stage, int64_t first, int64_t last, int each_channel)
{
    struct image_convolution a = *(const struct image_convolution *)arguments;
    const int64_t filters = each_channel ? a.channels : a.filters, phases = phases_of(&a);
    const int64_t padded = each_channel ? filters : (filters + GRAIN - 1) / GRAIN * GRAIN;
    const int64_t packs = phases * (each_channel ? 1 : (filters + PANEL - 1) / PANEL * a.groups);
    float *const bias = (float *)a.weights + a.places[phases];
    a.bias = bias;
    if (stage % 2)
        return (each_channel ? image_depthwise : image_convolution)(&a, first, last);
    for (int64_t i = first * packs / a.items; i < last * packs / a.items; i++)
        (each_channel ? pack_channels : pack_panel)(&a, i);
    for (int64_t i = 0; i < a.groups * padded && first == 0; i++)
        bias[i] = a.given_bias && i % padded < filters ? a.given_bias[i / padded * filters + i % padded] : 0;
    return 0;
}

#define GIVEN_STAGE(name, each_channel)                                                           \
    static int name(const void *arguments, int64_t stage, int64_t first, int64_t last)            \
    {                                                                                             \
        return given_stage(arguments, stage, first, last, each_channel);                          \
    }
GIVEN_STAGE(given_convolution_stage, 0)
GIVEN_STAGE(given_depthwise_stage, 1)

/* Round images to pairs of channels in the first stage, and convolve these in the second. */
static int rounded_convolution_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    struct image_convolution a = *(const struct image_convolution *)arguments;
    const int64_t slices = a.axes[0]->size, rows = a.axes[1]->size, columns = a.axes[2]->size;
    const int64_t channels = a.groups * a.channels, pairs = channels / 2, line = columns * pairs;
    const int64_t plane = rows * line, all = a.images * slices * rows * columns;
    const steps *x = a.x_steps, rounded = {slices * plane, 1, line, pairs, plane};
    const int64_t end = last * all / a.items;
    for (int64_t i = first * all / a.items; !stage && i < end;) {
        const int64_t row = i / columns, slice = row / rows, some = smaller(i + columns - i % columns, end);
        const float *from = a.x + slice / slices * x->image + slice % slices * x->slice +
                            row % rows * x->row + i % columns * x->column;
        for (; i < some; i++, from += x->column)
            round_to_pairs(a.pairs + i * pairs, from, x->channel, channels);
    }
    a.x = a.pairs, a.x_steps = &rounded, a.channels /= 2;
    return stage ? image_convolution(&a, first, last) : 0;
}

KERNELS(image_convolution, KERNEL(image_convolution, image_convolution),
        KERNEL(image_depthwise, image_convolution),
        STAGED_KERNEL(given_convolution, image_convolution, NULL, given_convolution_stage),
        STAGED_KERNEL(given_depthwise, image_convolution, NULL, given_depthwise_stage),
        STAGED_KERNEL(rounded_convolution, image_convolution, NULL, rounded_convolution_stage))
