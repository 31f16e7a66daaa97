/* Depthwise convolutions and transposed convolutions of channels-last images.

   A vector of a column's channels is loaded once for all positions that read it with a row of taps. If the dilation
   exceeds the stride, positions that are a dilation apart are computed together, since they read the same columns. If
   there are few channels, a line is one run of elements, and the weights repeat.

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#include "image_lines.h"

/* Compute all channels of `positions` positions of a line whose input begins at `column`. `taps` taps are multiplied
   at once if positions are `stride` times as far apart as taps; otherwise both are 0. The last four arguments are
   constants. The last vector may overlap the one before, unless there are fewer channels than lanes. */
INLINED void add_channels(const sights *x, int64_t column, int64_t count, const target *to, int positions, int stride,
                          int taps, int what)
{
    const int64_t n_taps = x->n_taps, apart = x->apart, step = apart * x->step, wide = (positions - 1) * stride + taps;
    const int64_t from = x->from + column * x->step;
    const uint32_t inside = taps ? columns_inside(x, column, apart, wide) : 0;
    const float *const weights = x->w;
    for (int64_t channel = 0; channel < count; channel += LANES) {
        const int64_t c = what == SOME_CHANNELS ? 0 : smaller(channel, count - LANES);
        const float *const w = weights + c, *const bias = to->bias + c;
        vector sums[TILE];
        UNROLLED(p, positions)
            sums[p] = column_of(bias, count, what);
        if (taps == 3)
            add_rows(sums, x, x->rows, x->n_rows, from + c, step, w, inside, count, positions, stride, 3, what);
        int64_t k = taps == 3 ? n_taps : 0;
        for (; taps == 5 && k + 5 <= n_taps; k += 5)
            add_rows(sums, x, x->rows, x->n_rows, from + c + k * step, step, w + k * x->of_tap,
                     k ? columns_inside(x, column + k * apart, apart, wide) : inside, count, positions, stride, 5, what);
        /* In the order of those above: of a row, three or five taps that could be multiplied at once follow each
           other. */
        for (int64_t some; taps != 3 && k < n_taps; k += some) {
            some = n_taps == 3 ? 3 : k + 5 <= n_taps ? 5 : 1;
            const int64_t n_rows = some > 1 ? 1 : x->n_rows;
            uint32_t own[5];
            for (int64_t t = 0; t < some; t++)
                own[t] = columns_inside(x, column + (k + t) * apart, x->stride, positions);
            for (int64_t row = 0; row < x->n_rows; row += n_rows)
                for (int64_t t = 0; t < some; t++)
                    add_rows(sums, x, x->rows + row, n_rows, from + c + (k + t) * step, x->stride * x->step,
                             w + (row * n_taps + k + t) * x->of_tap, own[t], count, positions, 1, 1, what);
        }
        put_vectors(sums, to, to->y + c, moved(to->addend, c), c, what == SOME_CHANNELS ? count : LANES, positions, 1);
    }
}

/* Each form of `add_channels` is a function: one with all of them would take longer to compile. With short vectors,
   partial vectors are rare, and get one form. */
#define OF_TAPS(X, number) X(number, 1, 3, CHANNELS) X(number, 2, 3, CHANNELS) X(number, 1, 5, CHANNELS) X(number, 2, 5, CHANNELS)
#define FORMS_OF_TAPS(X)                                                                           \
    OF_TAPS(X, 1) OF_TAPS(X, 2) OF_TAPS(X, 3) OF_TAPS(X, 4)                                        \
    OF_TAPS(X, 5) OF_TAPS(X, 6) OF_TAPS(X, 7) OF_TAPS(X, 8)
#define OTHERS(X, what) X(8, 0, 0, what) X(4, 0, 0, what) X(1, 0, 0, what)
#define FORM(positions, stride, taps, what)                                                        \
    static __attribute__((noinline)) int64_t add_##positions##_##stride##_##taps##_##what(         \
        const sights *x, int64_t column, int64_t channels, const target *to)                       \
    {                                                                                              \
        if (what == CHANNELS || positions == 1 || BY_WIDTH(1, 0, 0))                               \
            add_channels(x, column, channels, to, positions, stride, taps, what);                  \
        return positions;                                                                          \
    }
FORMS_OF_TAPS(FORM)
OTHERS(FORM, CHANNELS)
OTHERS(FORM, SOME_CHANNELS)

/* As `add_channels`; return how many of `count` positions were computed. `taps` is 0 for less than a vector of
   channels. */
static int64_t add_some(const sights *x, int64_t column, int64_t channels, const target *to, int64_t count, int taps)
{
#define ADDRESS(number, stride, taps, what) add_##number##_##stride##_##taps##_##what,
    static __typeof__(add_1_0_0_CHANNELS) *const forms[] = {FORMS_OF_TAPS(ADDRESS)}, *const others[] = {
        OTHERS(ADDRESS, CHANNELS) OTHERS(ADDRESS, SOME_CHANNELS)};
    const int64_t tiles = CEIL_DIV(count, TILE), positions = tiles < 2 ? count : CEIL_DIV(count, tiles);
    const int few = channels < LANES, size = few && !BY_WIDTH(1, 0, 0) ? 2 : count >= 8 ? 0 : count >= 4 ? 1 : 2;
    if (taps)
        return forms[positions * 4 - 4 + taps / 5 * 2 + (x->stride != x->apart)](x, column, channels, to);
    return others[3 * few + size](x, column, channels, to);
}

/* The rows of taps of a line, NULL in the padding, as a flat run of elements; weights are repeated to
   [row][tap][period]. */
typedef struct {
    const float *rows[MOST_ROWS];
    int64_t n_rows, n_taps, period, taps[MOST_ROWS]; /* taps: in elements from the first tap on */
    const float *w;
} flat_line;

/* `vectors` vectors of sums a period apart, or the first `count` lanes of one, from element `at` of a line on. */
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

/* As `image_depthwise`, for few channels; `filters` is the period of weights, bias and slopes. The input is copied
   and padded with zeros. */
static int flat_depthwise(const struct image_convolution *a, int64_t begin, int64_t end)
{
    const span *u = a->axes[1], *v = a->axes[2];
    const phase f = phase_of(a, 0);
    const int64_t channels = a->channels, n_taps = f.n_taps[2], n_rows = f.n_taps[1], low = f.taps[2][0];
    const int64_t wide = v->count + f.taps[2][n_taps - 1] - low, slots = f.taps[1][n_rows - 1] - f.taps[1][0] + 1;
    /* The columns of the input that are inside of the image. */
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
                /* The next lines read the same copy. */
                const int64_t slot = from ? (l.at[1] * u->stride + f.taps[1][k]) % slots : 0;
                float *const to = copy + slot * wide * channels;
                if (from && held[slot] != from && first < last)
                    copy_floats(to + first * channels, from + (low + first) * channels, (last - first) * channels);
                held[slot] = from ? from : held[slot];
                x.rows[k] = from ? to + l.at[2] * channels : NULL;
            }
            const target to = target_of(a, &f, &l, 0, 0), apart = {sums, 0, to.bias, NULL, 0, NO_ACTIVATION, 0, 0, 0};
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
    const int64_t channels = a->channels, chunks = CEIL_DIV(channels, a->filters);
    const int64_t phases = phases_of(a);
    const int dense = a->x_steps->channel == 1, direct = is_direct(a);
    _Alignas(64) float copy[COPIED], sums[TILE * PANEL];
    sights x;
    x.of_tap = channels;
    for (int64_t item = begin; item < end; item++) {
        const int64_t channel = item % chunks * a->filters, place = item / chunks;
        const int64_t first = place / phases * a->block, some = smaller(a->filters, channels - channel);
        const phase f = phase_of(a, place % phases);
        const int64_t count = smaller(a->block, f.positions - first);
        if (count <= 0)
            continue;
        view seen = {channel, some, 0, NULL, copy};
        seen_rows before;
        no_rows(&before, a, &f);
        x.n_rows = f.n_taps[0] * f.n_taps[1], x.n_taps = f.n_taps[2];
        x.apart = x.n_taps > 1 ? f.taps[2][1] - f.taps[2][0] : v->stride;
        x.step = dense ? a->x_steps->column : some;
        const int64_t once = direct ? some : smaller(some, PANEL);
        line l = line_of(&f, first, count);
        for (int64_t r = 0; r < count; r += l.some, next_line(&f, &l, count - r)) {
            see_line(&x, a, &f, &l, &seen, dense ? NULL : &before);
            /* Positions a dilation apart are computed together, if there are enough. */
            int64_t ways = x.apart > v->stride && x.apart % v->stride == 0 ? x.apart / v->stride : 1;
            ways = ways * (TILE / 2) > l.some ? 1 : ways;
            x.stride = ways * v->stride;
            for (int64_t c = channel, now; c < channel + some; c += now) {
                now = smaller(once, channel + some - c);
                x.w = f.weights + c, x.from = c - channel;
                const int taps = now < LANES ? 0 : taps_together(&x);
                const target all = target_of(a, &f, &l, c, c);
                const target own = {sums, PANEL, all.bias, NULL, 0, NO_ACTIVATION, 0, 0, 0};
                for (int64_t way = 0; way < ways; way++) {
                    target to = part_of(&all, way, 0);
                    to.step *= ways, to.addend_step *= ways;
                    int64_t column = way * v->stride, left = CEIL_DIV(l.some - way, ways);
                    for (int64_t tile; left; left -= tile, column += tile * x.stride) {
                        tile = add_some(&x, column, now, direct ? &to : &own, left, taps);
                        if (!direct)
                            put_positions(a, to, tile, sums, now, PANEL);
                        to.y += tile * to.step, to.addend = moved(to.addend, tile * to.addend_step);
                    }
                }
            }
        }
        if (a->follows)
            follow(a, first, count, channel, some, channels);
    }
    return 0;
}

/* Pack the given weights of the channels of a phase. */
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
