/* Convolutions of images with their channels innermost, by all channels or by one each, and what
   follows them: a tensor that is added, a slope below 0, and bounds.

   A convolution by all channels is the product of panels.c, whose rows are what positions of the result
   see. These are not copied: for each tap of the kernel, or each row of taps where channels are few, a
   table has the address of what a position sees, or of zeros outside of the image. In one by each channel,
   each vector of channels is multiplied by one of weights, at the same addresses. What has gaps in memory,
   or a row of taps that is partly outside, is copied first.

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast -fno-tree-loop-distribute-patterns
#include "images.h"
#include "panels.h"
#include "programs.h"

enum { COPIED = 14336, MOST_CHANNELS = 8192, ADDRESSES = 4096 };
enum { TILE = 6, WIDE = BY_WIDTH(4, 2, 2) }; /* positions and vectors that are computed together */

/* Of both kernels. */
struct image_convolution {
    const float *x, *weights, *bias;
    const float *slopes, *addend; /* or NULL */
    float *y;
    const axis *rows, *columns;
    double gate, offset, factor, term, low, high;
    int64_t images, groups, channels, filters; /* channels and filters of a group */
    int64_t block;                             /* positions of an item */
    int64_t together; /* taps that are seen as one part: those of a row of the kernel, or 1 */
    const steps *x_steps, *addend_steps, *y_steps;
    int64_t follows;            /* a program: 1, whose rows are filters; 2, positions of one; 0, none */
    struct elementwise program; /* of y, in place */
};

/* What is outside of an image. */
static float zeros[MOST_CHANNELS];

/* Some channels of what positions see: where each part of it lies, [part][apart]. */
typedef struct {
    int64_t first, channels, apart;
    const float **rows;
    float *copy; /* where parts are copied to that have gaps, or are partly outside of the image */
} view;

/* Copy the part of a window that is seen in an image's row from `column` on; returns where. */
static const float *copy_part(const struct image_convolution *a, const float *line, int64_t column,
                              view *seen)
{
    const int64_t step = a->x_steps->channel, channels = seen->channels;
    const float *const part = seen->copy;
    for (int64_t k = 0; k < a->together; k++, column++, seen->copy += channels) {
        float *restrict to = seen->copy;
        const float *from = line + column * a->x_steps->column;
        const int outside = column < 0 || column >= a->columns->size;
        if (step == 1 && !outside)
            copy_floats(to, from, channels);
        else
            for (int64_t i = 0; i < channels; i++)
                to[i] = outside ? 0 : from[i * step];
    }
    return part;
}

/* Of `count` positions from column `j` of the result on, those that see the image with a tap, or with all of
   a row of the kernel, and where the first would see it. */
typedef struct {
    int64_t start, low, high;
} stretch;

static inline stretch inside(const struct image_convolution *a, int64_t tap, int64_t j, int64_t count)
{
    const axis *v = a->columns;
    const int dense =
        a->x_steps->channel == 1 && (a->together == 1 || a->x_steps->column == a->channels);
    const int64_t start = j * v->stride - v->begin + tap * v->dilation, step = v->stride;
    const int64_t room = v->size - a->together - start, before = start < 0 ? -start : 0;
    const int64_t low = smaller(step == 1 ? before : (before + step - 1) / step, count);
    int64_t high = dense && room >= 0 ? smaller((step == 1 ? room : room / step) + 1, count) : 0;
    return (stretch){start, low, high < low ? low : high};
}

/* Find where each part of what `count` positions from `first` on see lies. */
static void find_rows(const struct image_convolution *a, int64_t first, int64_t count, view seen)
{
    const axis *u = a->rows, *v = a->columns;
    const int64_t parts = v->kernel / a->together, step = v->stride * a->x_steps->column;
    const int copied = a->together > 1 || a->x_steps->channel != 1;
    for (int64_t r = 0, some; r < count; r += some) {
        const int64_t j = (first + r) % v->count, i = (first + r) / v->count;
        const float *image =
            a->x + i / u->count * a->x_steps->image + seen.first * a->x_steps->channel;
        const int64_t above = i % u->count * u->stride - u->begin;
        some = smaller(v->count - j, count - r);
        for (int64_t tap = 0; tap < parts; tap++) {
            const stretch s = inside(a, tap, j, some);
            for (int64_t ky = 0, row = above; ky < u->kernel; ky++, row += u->dilation) {
                const float **to = seen.rows + (ky * parts + tap) * seen.apart + r;
                const int missing = row < 0 || row >= u->size;
                const float *line = image + row * a->x_steps->row;
                const int64_t low = missing ? some : s.low, high = missing ? some : s.high;
                for (int64_t p = low; p < high; p++)
                    to[p] = line + s.start * a->x_steps->column + p * step;
                for (int64_t p = low > 0 ? 0 : high; p < some; p = p + 1 == low ? high : p + 1)
                    to[p] = copied && !missing ? copy_part(a, line, s.start + p * v->stride, &seen)
                                               : zeros;
            }
        }
    }
}

/* Elements from one position of an image to the next; 0 if not all are so far apart. */
static int64_t step_of(const steps *x, int64_t rows, int64_t columns)
{
    return x->channel == 1 && x->row == columns * x->column && x->image == rows * x->row ? x->column : 0;
}

/* Write the sums of `rows` positions from `first` on, of some filters, to an image of any strides. */
static void put_positions(const struct image_convolution *a, int64_t first, int64_t rows, int64_t filter,
                          const float *sums, activation f, int64_t count)
{
    const int64_t height = a->rows->count, columns = a->columns->count;
    const steps *of_y = a->y_steps, *of_addend = a->addend_steps;
    float addend[PANEL], part[PANEL];
    for (int64_t r = 0; r < rows; r++, sums += PANEL) {
        const int64_t j = (first + r) % columns, i = (first + r) / columns % height;
        const int64_t n = (first + r) / columns / height;
        for (int64_t e = 0; a->addend && e < count; e++)
            addend[e] = a->addend[n * of_addend->image + i * of_addend->row + j * of_addend->column +
                                  (filter + e) * of_addend->channel];
        put_floats((target){part, 0, NULL, a->addend ? addend : NULL, 0, f}, sums, count);
        float *y = a->y + n * of_y->image + i * of_y->row + j * of_y->column + filter * of_y->channel;
        for (int64_t e = 0; e < count; e++)
            y[e * of_y->channel] = part[e];
    }
}

/* Where the result's positions from `first` on are, from `filter` on, whose bias and slopes are at `column`;
   `y` is NULL for images with gaps. */
static target target_of(const struct image_convolution *a, int64_t first, int64_t filter, int64_t column)
{
    const int64_t height = a->rows->count, width = a->columns->count;
    const int64_t step = step_of(a->y_steps, height, width);
    const int64_t addend_step = a->addend ? step_of(a->addend_steps, height, width) : 0;
    const int direct = step && (!a->addend || addend_step);
    const activation f = {moved(a->slopes, column), (float)a->gate, (float)a->offset, (float)a->factor,
                          (float)a->term, (float)a->low, (float)a->high};
    return (target){direct ? a->y + first * step + filter : NULL, step, a->bias + column,
                    moved(a->addend, first * addend_step + filter), addend_step, f};
}

/* Run the program behind for some positions and filters of the result. */
static void follow(const struct image_convolution *a, int64_t first, int64_t count, int64_t filter,
                   int64_t filters, int64_t all)
{
    const int64_t plane = a->rows->count * a->columns->count;
    struct elementwise program = a->program;
    program.inputs[0] = program.output = a->y;
    if (a->follows == 1)
        run_in_rows(&program, first, count, filter, filter + filters);
    for (int64_t p = first, some; p < first + count && a->follows == 2; p += some) {
        some = smaller(first + count - p, plane - p % plane);
        run_in_rows(&program, p / plane * all + filter, filters, p % plane, p % plane + some);
    }
}

static int image_convolution(const void *arguments, int64_t begin, int64_t end)
{
    const struct image_convolution *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const int64_t filters = a->filters, positions = a->images * u->count * v->count;
    const int64_t parts = u->kernel * v->kernel / a->together, depth = a->together * a->channels;
    const int64_t k = parts * depth, panels = (filters + PANEL - 1) / PANEL;
    const int64_t padded = (filters + GRAIN - 1) / GRAIN * GRAIN;
    const int dense = a->x_steps->channel == 1;
    _Alignas(64) float copy[COPIED], sums[BLOCK * PANEL];
    const float *rows[ADDRESSES];
    int64_t known = -1, seen = 0; /* which rows have been found; filters before those to follow */
    for (int64_t item = begin; item < end; item++) {
        const int64_t panel = item % panels, group = item / panels % a->groups;
        const int64_t first = item / panels / a->groups * a->block;
        const int64_t count = smaller(a->block, positions - first), column = panel * PANEL;
        const int64_t width = smaller(PANEL, padded - column);
        const int64_t some = smaller(width, filters - column), filter = group * filters + column;
        const float *w = a->weights + (group * padded + column) * k;
        /* Copies are of one group, addresses are those of the first one. */
        const int64_t channel = group * a->channels, of = dense ? first : first * a->groups + group;
        if (of != known)
            find_rows(a, first, count,
                      (view){dense ? 0 : channel, a->channels, a->block, rows, copy});
        known = of;
        const target y = target_of(a, first, filter, group * padded + column);
        const target apart = {sums, PANEL, y.bias, NULL, 0, NO_ACTIVATION};
        const int direct = y.y != NULL;
        multiply_panel((operands){rows, zeros, a->block, parts, dense ? channel : 0, depth}, count, w, width,
                       item + 1 < end ? w + width * k : a->weights, direct ? &y : &apart, some);
        if (!direct)
            put_positions(a, first, count, filter, sums, y.activation, some);
        const int64_t ready = filter + some;
        seen = panel && item > begin ? seen : filter;
        if (a->follows && (panel + 1 == panels || item + 1 == end || ready - seen == a->program.tile)) {
            follow(a, first, count, seen, ready - seen, a->groups * filters);
            seen = ready;
        }
    }
    return 0;
}

/* The sums of channels from `c` on, `vectors` vectors of them or, as one, `count`; of `positions`, which see
   channel 0 at `from`. Positions and vectors are constants. */
INLINED void add_taps(const float *const *rows, int64_t apart, int64_t n_taps, int64_t from,
                      const float *w, int64_t channels, int64_t c, int64_t count, const target *to,
                      int positions, int vectors)
{
    vector sums[TILE * WIDE];
#define EACH                                                                                       \
    _Pragma("GCC unroll 8") for (int p = 0; p < positions; p++)                                    \
        _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)
#define LOADED(from) (vectors == 1 ? load_some(from, count) : loaded((from) + j * LANES))
    EACH sums[p * vectors + j] = LOADED(to->bias + c);
    for (int64_t t = 0; t < n_taps; t++, w += channels, rows += apart) {
        if (all_at(zeros, rows, positions))
            continue;
        vector weights[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            weights[j] = LOADED(w + c);
        EACH sums[p * vectors + j] += LOADED(rows[p] + from + c) * weights[j];
    }
    if (to->addend)
        EACH sums[p * vectors + j] += LOADED(to->addend + p * to->addend_step + c);
    const activation f = to->activation;
    if (f.slopes)
        EACH sums[p * vectors + j] = sloped(sums[p * vectors + j], LOADED(f.slopes + c));
    if (f.gate)
        EACH sums[p * vectors + j] = gated(sums[p * vectors + j], f);
    if (f.low > -INFINITY || f.high < INFINITY)
        EACH sums[p * vectors + j] = bounded(sums[p * vectors + j], f.low, f.high);
    float *const y = to->y + c;
    const int64_t step = to->step;
    EACH store_some(y + p * step + j * LANES, sums[p * vectors + j], vectors == 1 ? count : LANES);
#undef EACH
#undef LOADED
}

/* As `add_taps`, for any number of channels: the last vectors may have some of those before again. */
INLINED void add_channels(const float *const *rows, int64_t apart, int64_t n_taps, int64_t from,
                          const float *w, int64_t channels, int64_t count, const target *to,
                          int positions)
{
    for (int64_t c = 0, some; c < count; c += some) {
        const int64_t left = count - c;
        some = WIDE > 2 && count >= WIDE * LANES && left > 2 * LANES ? WIDE * LANES
               : count >= 2 * LANES && left > LANES                  ? 2 * LANES
                                                                     : smaller(count, LANES);
        c = smaller(c, count - some);
        if (some > 2 * LANES)
            add_taps(rows, apart, n_taps, from, w, channels, c, some, to, positions, WIDE);
        else if (some == 2 * LANES)
            add_taps(rows, apart, n_taps, from, w, channels, c, some, to, positions, 2);
        else
            add_taps(rows, apart, n_taps, from, w, channels, c, some, to, positions, 1);
    }
}

/* Here `filters` are the channels of an item; weights are [tap][channel]. */
static int image_depthwise(const void *arguments, int64_t begin, int64_t end)
{
    const struct image_convolution *a = arguments;
    const axis *u = a->rows, *v = a->columns;
    const int64_t channels = a->channels, chunks = (channels + a->filters - 1) / a->filters;
    const int64_t positions = a->images * u->count * v->count, n_taps = u->kernel * v->kernel;
    const int dense = a->x_steps->channel == 1;
    _Alignas(64) float copy[COPIED], sums[TILE * PANEL];
    const float *rows[ADDRESSES];
    int64_t known = -1;
    for (int64_t item = begin; item < end; item++) {
        const int64_t channel = item % chunks * a->filters, first = item / chunks * a->block;
        const int64_t some = smaller(a->filters, channels - channel);
        const int64_t count = smaller(a->block, positions - first);
        const int64_t of = dense ? first : item;
        if (of != known)
            find_rows(a, first, count, (view){dense ? 0 : channel, some, a->block, rows, copy});
        known = of;
        const target all = target_of(a, first, channel, channel);
        const int64_t once = all.y ? some : smaller(some, PANEL);
        for (int64_t c = 0, now = 0; c < some; c += now)
            /* The last tile may have some positions of the one before again. */
            for (int64_t p = 0, tile; p < count; p += tile) {
                tile = count < TILE ? 1 : TILE;
                p = smaller(p, count - tile), now = smaller(once, some - c);
                const target direct = part_of(&all, p, c);
                const target apart = {sums, PANEL, direct.bias, NULL, 0, NO_ACTIVATION};
                const target *y = all.y ? &direct : &apart;
                const int64_t from = (dense ? channel : 0) + c;
                const float *w = a->weights + channel + c;
                if (tile == 1)
                    add_channels(rows + p, a->block, n_taps, from, w, channels, now, y, 1);
                else
                    add_channels(rows + p, a->block, n_taps, from, w, channels, now, y, TILE);
                if (!all.y)
                    put_positions(a, first + p, tile, channel + c, sums, direct.activation, now);
            }
        if (a->follows)
            follow(a, first, count, channel, some, channels);
    }
    return 0;
}

const kernel_entry image_convolution_kernels[] = {
    KERNEL(image_convolution, image_convolution),
    KERNEL(image_depthwise, image_convolution),
    END_OF_KERNELS,
};
