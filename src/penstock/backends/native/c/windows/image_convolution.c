/* Convolutions and transposed convolutions over all channels of channels-last images.

   Each is a product of panels.c whose rows are the inputs of the output positions (an implicit im2col). Inputs are
   not copied: for each tap of the kernel, or each row of taps if channels are few, an indirection table has the input
   address of each position, or that of zeros for padding. What has gaps in memory, or a row of taps partly in
   padding, is copied.

   The inputs of a line's positions are evenly spaced, except for positions at its ends that read only padding, and
   unless a part is a row of taps that is partly in padding; they also are in copies of image rows padded with zeros.
   Then the table has only the first position of each line. Where rows of taps are so short that a part would have few
   elements, each element of the first position has an address (elements.c).

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include <stdlib.h>
#include "copies.h"
#include "image_convolution.h"

enum { LEAST_LINE = 24 };
/* Elements of a position up to which loads may take longer than the products, and rows of a tile. */
enum { MOST_FETCHED = 64, MOST_TILE = 16 };
enum { LEAST_CHANNELS = 8 }; /* of a tap that is a part of its own, where three taps are multiplied at once */
enum { MOST_ELEMENTS = 192 }; /* of a position, as in image_convolution.py */

/* Whether all positions of an image are evenly spaced. */
static int is_uniform(const struct image_convolution *a, const steps *x)
{
    const int64_t row = a->axes[2]->count * x->column, slice = a->axes[1]->count * row;
    const int64_t image = a->axes[0]->count * slice;
    return phases_of(a) == 1 && x->row == row && x->slice == slice && x->image == image;
}

/* Whether each position reads exactly one input element (a 1 x 1 kernel), evenly spaced. */
static int is_product(const struct image_convolution *a, const phase *f)
{
    int own = a->x_steps->channel == 1 && is_uniform(a, a->x_steps);
    for (int i = 0; i < AXES && own; i++)
        own = f->n_taps[i] == 1 && !f->taps[i][0] && a->axes[i]->stride == 1 && a->axes[i]->size == a->axes[i]->count;
    return own;
}

/* The taps of a row that a product with one vector of filters processes at once: 3, each a part of its own, or 1. */
static int64_t taps_at_once(const struct image_convolution *a, const phase *f)
{
    const int64_t *const taps = f->taps[2], all = f->n_taps[0] * f->n_taps[1] * f->n_taps[2];
    const int is_row = f->n_taps[2] == 3 && a->axes[2]->stride == 1 && taps[2] == taps[1] + 1 && taps[1] == taps[0] + 1;
    const int is_narrow = BY_WIDTH(a->at_once && a->filters <= LANES && a->channels >= LEAST_CHANNELS, 0, 0);
    return is_row && is_narrow && all * a->block <= ADDRESSES ? 3 : 1;
}

/* The taps of a row that form one part. */
static int64_t taps_of_part(const struct image_convolution *a, const phase *f)
{
    return a->adjacent && taps_at_once(a, f) == 1 ? f->n_taps[2] : 1;
}

/* Find the address of each part of the input for `count` positions from `first` on. */
static void find_rows(const struct image_convolution *a, const phase *f, int64_t first, int64_t count, view seen)
{
    const int64_t wide = taps_of_part(a, f), parts = f->n_taps[2] / wide, stride = a->axes[2]->stride;
    seen_rows before;
    no_rows(&before, a, f);
    line l = line_of(f, first, count);
    for (int64_t r = 0; r < count; next_line(f, &l, count - r)) {
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

/* Copy a matrix, given the row and column steps of destination and source. */
static void copy_matrix(float *to, const float *from, int64_t rows, int64_t columns, int64_t row_step,
                        int64_t column_step, int64_t from_row_step, int64_t from_column_step)
{
    copy_plan plan;
    plan.rank = 2, plan.size = sizeof *to;
    plan.dims[0] = rows, plan.to[0] = row_step * plan.size, plan.from[0] = from_row_step * plan.size;
    plan.dims[1] = columns, plan.to[1] = column_step * plan.size, plan.from[1] = from_column_step * plan.size;
    copy_elements(&plan, (const char *)from, (char *)to);
}

/* Copies of image rows from a start column on, the item that last used each of them, and which copy each row of taps
   read for the last line. */
typedef struct {
    const float *rows[MOST_ROWS];
    int64_t starts[MOST_ROWS], items[MOST_ROWS], last, seen[MOST_ROWS];
} line_copies;

/* Return the index of a copy of `row` from column `start` on. It is reused if the row of taps `other` (-1: none) read
   it for the previous line; else `*is_new` is set, and it replaces one of the `count` copies that this item has not
   used. */
static int64_t place_of_copy(line_copies *copies, const float *row, int64_t start, int64_t other, int64_t item,
                             int64_t count, int *is_new)
{
    int64_t i = other < 0 ? copies->last : copies->seen[other];
    *is_new = other < 0 || copies->rows[i] != row || copies->starts[i] != start;
    if (*is_new) {
        for (i = copies->last; copies->items[i] == item;)
            i = i + 1 < count ? i + 1 : 0;
        copies->last = i;
    }
    copies->rows[i] = row, copies->starts[i] = start, copies->items[i] = item;
    return i;
}

/* Copy some columns of a row from column `start` on; columns outside of the image become zeros. */
static void copy_line(const struct image_convolution *a, const float *row, int64_t start, int64_t channels, float *copy)
{
    const int64_t columns = a->even->columns, column_step = a->x_steps->column, size = a->axes[2]->size;
    const int64_t low = start < 0 ? smaller(-start, columns) : 0, end = smaller(size - start, columns);
    const int64_t high = end < low ? low : end, count = high - low;
    memset(copy, 0, low * channels * sizeof *copy);
    memset(copy + high * channels, 0, (columns - high) * channels * sizeof *copy);
    float *const to = copy + low * channels;
    const float *const from = count ? row + (start + low) * column_step : row;
    if (a->x_steps->channel == 1 && column_step == channels)
        copy_floats(to, from, count * channels);
    else
        copy_matrix(to, from, count, channels, channels, 1, column_step, a->x_steps->channel);
}

/* Find the address of each part of the input of the first position of each line, or of the very first position if all
   positions are one line. `copies`: the row copies to use, or NULL to read the image. */
static void find_lines(const struct image_convolution *a, const phase *f, int64_t first, int64_t count, view seen,
                       line_copies *copies, int64_t item)
{
    const int64_t wide = taps_of_part(a, f), parts = f->n_taps[2] / wide, stride = a->axes[2]->stride;
    const int64_t step = copies ? a->channels : a->x_steps->column, *const taps = f->taps[2];
    const int64_t back = rows_back(a, f);
    line l = line_of(f, first, count);
    for (int64_t r = 0; r < count; r += l.some, next_line(f, &l, count - r), seen.rows++) {
        const float **to = seen.rows;
        const int64_t start = l.at[2] * stride + taps[0];
        for (int64_t slice = 0, tap = 0; slice < f->n_taps[0]; slice++)
            for (int64_t row = 0; row < f->n_taps[1]; row++, tap++) {
                const float *from = seen_row(a, f, &l, &seen, slice, row);
                if (from && copies) {
                    int is_new;
                    const int64_t other = row + back < f->n_taps[1] ? tap + back : -1, all = a->even->copies;
                    const int64_t place = place_of_copy(copies, from, start, other, item, all, &is_new);
                    copies->seen[tap] = place;
                    float *const copy = seen.copy + place * a->even->columns * seen.channels;
                    if (is_new)
                        copy_line(a, from, start, seen.channels, copy);
                    from = copy;
                }
                for (int64_t part = 0; part < parts; part++, to += seen.apart)
                    *to = !from ? zeros : from + (taps[part] - (copies ? taps[0] : -l.at[2] * stride)) * step;
            }
    }
}

/* Addresses of the elements of the last line, for each position that reads columns of padding, and for the first of the
   other positions. The first few are kept: those of the next line are at the same distance from them if no row of taps
   of both is in the padding. */
enum { KEPT = 8 };
typedef struct {
    const float **addresses; /* of `KEPT` positions, and of one more */
    const float *row;        /* of the first row of taps of the last line, NULL if a row of taps is padding */
    int64_t at, some;        /* its first position, and their number */
} line_elements;

/* Find the address of each input element of position `at` of a line, with the channels of a tap in order: `zeros` for
   columns in the padding, NULL for rows in the padding. */
static void find_elements(const struct image_convolution *a, const phase *f, const line *l, const view *seen,
                          int64_t at, const float **elements)
{
    const int64_t column_step = a->x_steps->column, channel_step = a->x_steps->channel, *const taps = f->taps[2];
    const int64_t start = at * a->axes[2]->stride;
    for (int64_t slice = 0; slice < f->n_taps[0]; slice++)
        for (int64_t row = 0; row < f->n_taps[1]; row++) {
            const float *const from = seen_row(a, f, l, seen, slice, row);
            for (int64_t i = 0; i < f->n_taps[2]; i++, elements += a->channels) {
                const int64_t column = start + taps[i];
                const int inside = column >= 0 && column < a->axes[2]->size;
                const float *const of_tap = !from || inside ? from : zeros;
                const int64_t place = inside ? column * column_step : 0, step = inside ? channel_step : 0;
                for (int64_t c = 0; c < a->channels; c++)
                    elements[c] = from ? of_tap + place + c * step : NULL;
            }
        }
}

/* The image row of the first row of taps for a line; NULL if the first or the last row of taps is padding. */
static const float *first_row(const struct image_convolution *a, const phase *f, const line *l, const view *seen)
{
    const float *const last = seen_row(a, f, l, seen, f->n_taps[0] - 1, f->n_taps[1] - 1);
    return last ? seen_row(a, f, l, seen, 0, 0) : NULL;
}

/* Multiply the inputs of a line's positions by a panel of weights through addresses of elements. The few positions
   that read columns of padding are products of their own. */
static void multiply_line(const struct image_convolution *a, const phase *f, const line *l, const view *seen,
                          line_elements *kept, const float *w, int64_t width, const target *y, int64_t count)
{
    const int64_t stride = a->axes[2]->stride, size = a->axes[2]->size, *const taps = f->taps[2], at = l->at[2];
    const int64_t depth = f->n_taps[0] * f->n_taps[1] * f->n_taps[2] * a->channels;
    const int64_t reach = size - 1 - taps[f->n_taps[2] - 1], end = at + l->some;
    const int64_t before = taps[0] < 0 ? strides_in(stride - 1 - taps[0], stride) : 0;
    /* Lines of which each position sees its own element alone may follow one another. */
    const int64_t behind = end > f->counts[2] ? end : reach < 0 ? 0 : strides_in(reach, stride) + 1;
    const int64_t low = before < at ? at : smaller(before, end), high = behind < low ? low : smaller(behind, end);
    const float *const row = first_row(a, f, l, seen);
    const int is_known = row && kept->row && kept->at == at && kept->some == l->some;
    const int64_t moved_by = is_known ? row - kept->row : 0;
    const float **elements = kept->addresses;
    for (int64_t p = at, some, number = 0; p < end; p += some, number++) {
        some = p == low && low < high ? high - low : 1;
        if (is_known && number < KEPT)
            for (int64_t k = 0; k < depth; k++)
                elements[k] = elements[k] == zeros ? zeros : elements[k] + moved_by;
        else
            find_elements(a, f, l, seen, p, elements);
        const target to = part_of(y, p - at, 0);
        multiply_elements(elements, depth, stride * a->x_steps->column, some, w, width, &to, count);
        elements += number < KEPT ? depth : 0;
    }
    *kept = (line_elements){kept->addresses, row, at, l->some};
}

/* The same through copies of image rows padded with zeros, where the first position reads `parts` parts of `depth`
   elements, whose addresses are `apart` apart. */
static void multiply_copied_line(const float *const *rows, int64_t apart, int64_t parts, int64_t depth, int64_t step,
                                 int64_t positions, const float *w, int64_t width, const target *y, int64_t count)
{
    const float *elements[MOST_ELEMENTS];
    for (int64_t part = 0; part < parts; part++)
        for (int64_t k = 0; k < depth; k++) {
            const float *const from = rows[part * apart];
            elements[part * depth + k] = from == zeros ? NULL : from + k;
        }
    multiply_elements(elements, parts * depth, step, positions, w, width, y, count);
}

/* Find for each part (a tap) which positions of a line read the image; return whether some read padding. */
static int find_ends(const struct image_convolution *a, const phase *f, line_ends *ends)
{
    const int64_t stride = a->axes[2]->stride, size = a->axes[2]->size, count = f->counts[2];
    const int64_t columns = f->n_taps[2], parts = f->n_taps[0] * f->n_taps[1] * columns;
    int some = 0;
    for (int64_t i = 0; i < parts; i++, ends++) {
        const int64_t tap = f->taps[2][i % columns];
        ends->low = (int32_t)smaller(tap < 0 ? strides_in(stride - 1 - tap, stride) : 0, count);
        ends->high = (int32_t)smaller(tap < size ? strides_in(size - tap + stride - 1, stride) : 0, count);
        some |= ends->low > 0 || ends->high < count;
    }
    return some;
}

CHECKED_ITEMS_OF(image_convolution, image_convolution)
{
    const int64_t filters = a->filters, panels = CEIL_DIV(filters, PANEL), phases = phases_of(a);
    const int64_t padded = CEIL_DIV(filters, GRAIN) * GRAIN;
    const int is_copied = a->even && a->even->copies, has_elements = a->even && a->even->elements;
    const int dense = a->x_steps->channel == 1 && !is_copied, in_place = has_elements && !is_copied;
    /* Planar results are written to scratch memory, and transposed from there. */
    const int direct = is_direct(a), is_turned = a->y_steps->channel != 1 && !a->addend;
    const activation none = NO_ACTIVATION;
    const int uniform = direct && is_uniform(a, a->y_steps) && (!a->addend || is_uniform(a, a->addend_steps));
    _Alignas(64) float nearby[COPIED], sums[BLOCK * PANEL];
    const float *rows[ADDRESSES];
    line_ends ends[ADDRESSES];
    float *const copy = a->room > COPIED ? malloc(a->room * sizeof *copy) : nearby;
    if (!copy)
        return 1;
    line_copies copies; /* set where it is used, as it is large */
    if (is_copied)
        memset(&copies, 0, sizeof copies);
    line_elements kept = {.addresses = rows};
    int64_t known = -1, seen = 0; /* block whose table is current; first filter that the program has not processed */
    int has_ends = 0;
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
        /* Copies hold one group; addresses are those of the first group. */
        const int64_t channel = group * a->channels, of = dense ? place : item / panels;
        const view images = {dense && !in_place ? 0 : channel, a->channels, a->block, rows, copy};
        const int own = !a->pairs && !is_copied && !has_elements && is_product(a, &f), even = own || a->even;
        const int is_new = of != known && !in_place;
        if (is_new && even)
            find_lines(a, &f, first, own ? 1 : count, images, is_copied ? &copies : NULL, item + 1);
        else if (is_new)
            find_rows(a, &f, first, count, images);
        if (is_new)
            has_ends = even && !own && !is_copied && find_ends(a, &f, ends);
        known = of;
        const int has_lines = a->block % f.counts[2] == 0; /* else parts of lines */
        const int64_t of_lines = own ? count : has_lines && (parts > 1 || even) ? f.counts[2] : 0;
        const int64_t step = even ? a->axes[2]->stride * (is_copied ? a->channels : a->x_steps->column) : 0;
        operands x = {rows, zeros, a->block, parts, dense ? channel : 0, depth, a->pairs != NULL, of_lines,
                            taps_at_once(a, &f), step, 0, NULL, 0, has_ends ? ends : NULL, 0};
        if (own && step == depth && depth <= MOST_FETCHED)
            x.ahead = rows[0] + x.begin + MOST_TILE * step, x.ahead_step = step;
        const float *next = k * padded * a->groups <= NEAR ? NULL : item + 1 < end ? w + width * k : a->weights;
        /* Where positions of several lines are not evenly spaced, each line is a product of its own. */
        const int by_line =
            has_elements || (even && !own && !has_lines) || (direct && !uniform && f.counts[2] >= LEAST_LINE);
        line l = line_of(&f, first, count);
        if (in_place && uniform && is_product(a, &f))
            l.some = count;
        const target all = target_of(a, &f, &l, filter, group * padded + column);
        const target apart = {sums, SUMS_STEP(width), all.bias, NULL, 0, is_turned ? all.activation : none, 0, 0, 0};
        if (!by_line)
            multiply_panel(x, count, w, width, next, uniform ? &all : &apart, some);
        const int64_t left = uniform && !by_line ? 0 : count;
        for (int64_t r = 0, number = 0; r < left; r += l.some, next_line(&f, &l, left - r), number++) {
            const target to = target_of(a, &f, &l, filter, group * padded + column), part = part_of(&apart, r, 0);
            operands of_line = x;
            of_line.begin += own ? r * step : 0;
            of_line.ahead += x.ahead_step ? r * x.ahead_step : 0;
            of_line.rows += own ? 0 : even ? number : r;
            of_line.line = even || parts > 1 ? l.some : x.line;
            of_line.first = l.at[2];
            if (in_place)
                multiply_line(a, &f, &l, &images, &kept, w, width, direct ? &to : &part, some);
            else if (has_elements)
                multiply_copied_line(rows + number, a->block, parts, depth, step, l.some, w, width,
                                     direct ? &to : &part, some);
            else if (by_line)
                multiply_panel(of_line, l.some, w, width, next, direct ? &to : &part, some);
            /* Few channels at a time: writing to many pages in turn takes longer. */
            for (int64_t e = 0; e < some && is_turned; e += GRAIN)
                copy_matrix(to.y + e * a->y_steps->channel, part.y + e, l.some, smaller(GRAIN, some - e), to.step,
                            a->y_steps->channel, apart.step, 1);
            if (is_turned)
                continue;
            if (!by_line || !direct)
                put_positions(a, to, l.some, part.y, some, apart.step);
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

/* Pack the given weights of one panel of a phase. */
static void pack_panel(const struct image_convolution *a, int64_t number)
{
    const int64_t padded = CEIL_DIV(a->filters, GRAIN) * GRAIN, panels = CEIL_DIV(a->filters, PANEL);
    const int64_t column = number % panels * PANEL, width = smaller(PANEL, padded - column);
    const int64_t group = number / panels % a->groups, phase = number / panels / a->groups;
    const int64_t row = a->groups * padded * a->channels, n_taps = (a->places[phase + 1] - a->places[phase]) / row;
    const int64_t *seen = a->source->taps + a->places[phase] / row;
    const int64_t each = a->filters / a->source->merged, channels = a->channels / a->source->merged;
    const int64_t depth = a->channels * n_taps, end = smaller(column + width, a->filters);
    float *const w = (float *)a->weights + a->places[phase] + (group * padded + column) * depth;
    /* Some rows of the panel at a time, in the order of the source. */
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
    const int64_t padded = CEIL_DIV(a->filters, GRAIN) * GRAIN, panels = CEIL_DIV(a->filters, PANEL);
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
