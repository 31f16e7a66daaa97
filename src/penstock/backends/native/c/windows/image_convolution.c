/* Convolutions and transposed ones by all channels of images with their channels innermost.

   One is the product of panels.c, whose rows are what positions of the result see. These are not copied: for each
   tap of the kernel, or each row of taps where channels are few, a table has the address of what a position sees, or
   of zeros outside of the image. What has gaps in memory, or a row of taps that is partly outside, is copied first.

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include <stdlib.h>
#include "image_convolution.h"

enum { LEAST_LINE = 24 };
enum { LEAST_CHANNELS = 8 }; /* of taps that are parts of their own, if three are multiplied at once */

/* Whether all positions of an image are equally far apart. */
static int is_uniform(const struct image_convolution *a, const steps *x)
{
    const int64_t row = a->axes[2]->count * x->column, slice = a->axes[1]->count * row;
    const int64_t image = a->axes[0]->count * slice;
    return phases_of(a) == 1 && x->row == row && x->slice == slice && x->image == image;
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

static int given_convolution_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    const struct image_convolution *const a = arguments;
    const int64_t padded = (a->filters + GRAIN - 1) / GRAIN * GRAIN, panels = (a->filters + PANEL - 1) / PANEL;
    return given_stage(a, stage, first, last, phases_of(a) * panels * a->groups, a->filters, padded, pack_panel,
                       image_convolution);
}

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
        STAGED_KERNEL(given_convolution, image_convolution, NULL, given_convolution_stage),
        STAGED_KERNEL(rounded_convolution, image_convolution, NULL, rounded_convolution_stage))
