/* Convolutions and transposed ones by one channel each of images with their channels innermost.

   A table has what each row of taps sees of a line; a vector of channels is loaded once for all positions that see
   it. Of few channels, a line is one run of elements, and weights repeat.

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include "image_convolution.h"

enum { TILE = 8, WIDE = BY_WIDTH(2, 1, 1) }; /* positions and vectors that are computed together */

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

/* Pack what is given for the channels of a phase. */
static void pack_channels(const struct image_convolution *a, int64_t phase)
{
    const int64_t *seen = a->source->taps + a->places[phase] / a->channels;
    for (int64_t t = 0; t < (a->places[phase + 1] - a->places[phase]) / a->channels; t++)
        for (int64_t c = 0; c < a->channels; c++)
            ((float *)a->weights)[a->places[phase] + t * a->channels + c] = a->given[c * a->source->kernel + seen[t]];
}

static int given_depthwise_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    const struct image_convolution *const a = arguments;
    return given_stage(a, stage, first, last, phases_of(a), a->channels, a->channels, pack_channels, image_depthwise);
}

KERNELS(image_depthwise, KERNEL(image_depthwise, image_convolution),
        STAGED_KERNEL(given_depthwise, image_convolution, NULL, given_depthwise_stage))
