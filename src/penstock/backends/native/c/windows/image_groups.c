/* Grouped convolutions and transposed convolutions of channels-last images with narrow groups: the filters of a group
   fit in one vector.

   As products, their panels would have too few columns to repay the setup of each tile. Here a tile of positions is
   computed for several groups, which read the same columns. Each channel of a column is multiplied for all positions
   that read it with a row of taps. With at most 8 filters, vectors of 16 lanes hold the products of two channels,
   which are added at the end.

   Compiled with contraction to fused multiply-add. */

// Its copies are too short for calls of memcpy and memset.
// Compiler options: -ffp-contract=fast
// GCC options: -fno-tree-loop-distribute-patterns
#if defined(__AVX2__)
#include "image_lines.h"

enum { TOGETHER = 128 }; /* channels of the groups of an item */
enum { TALL = BY_WIDTH(14, 8, 8), LEAST = 7 }; /* positions that are computed together */
/* Whether several taps are multiplied at once: with more filters than half of 16 lanes, products are faster. */
#define HAS_TAPS(what) BY_WIDTH((what) == EACH_PAIR, 1, 1)

/* Groups from `first` on: their number, the input channels of each, the steps over these (channels or pairs), and its
   filters, unpadded and padded; elements of the weights of a group. */
typedef struct {
    int64_t first, count, channels, elements, filters, padded, size;
} groups;

/* The sums of all groups for `positions` positions of a line from `column` on. `taps` taps are multiplied at once if
   positions are `stride` times as far apart; otherwise both are 0. The last four arguments are constants. */
INLINED void add_groups(const sights *x, const groups *g, int64_t column, const target *to, int positions, int stride,
                        int taps, int what)
{
    const int64_t n_taps = x->n_taps, apart = x->apart, step = apart * x->step, wide = (positions - 1) * stride + taps;
    const uint32_t inside = taps ? columns_inside(x, column, apart, wide) : 0;
    for (int64_t group = 0; group < g->count; group++) {
        const int64_t at = group * g->channels + column * x->step, filter = group * g->filters;
        const float *const w = x->w + group * g->size, *const bias = to->bias + group * g->padded;
        vector sums[TALL];
        UNROLLED(p, positions)
            sums[p] = what == EACH_PAIR ? (vector){0} : loaded(bias);
        if (taps)
            add_rows(sums, x, x->rows, x->n_rows, at, step, w, inside, g->elements, positions, stride, taps, what);
        for (int64_t k = taps; k < n_taps; k++)
            add_rows(sums, x, x->rows, x->n_rows, at + k * step, x->stride * x->step, w + k * x->of_tap,
                     columns_inside(x, column + k * apart, x->stride, positions), g->elements, positions, 1, 1, what);
#if defined(__AVX512F__)
        if (what == EACH_PAIR)
            UNROLLED(p, positions)
            {
                sums[p] += (vector)_mm512_permute_ps((__m512)sums[p], 0xb1);
                sums[p] = (vector)_mm512_maskz_compress_ps(0x5555, (__m512)sums[p]);
                sums[p] += load_some(bias, g->filters);
            }
#endif
        put_vectors(sums, to, to->y + filter, moved(to->addend, filter), group * g->padded, g->filters, positions, 1);
    }
}

/* Positions of a tile for a line of `count`: one of a few sizes, as each takes long to compile; the last tile of a
   line may overlap the one before. */
static int64_t positions_of(int64_t count, int taps)
{
    static const uint8_t forms[][5] = {{TALL, 7, 4, 1}, {TALL, BY_WIDTH(10, 7, 7), BY_WIDTH(8, 7, 7), 7, 1}};
    const uint8_t *form = forms[taps > 0];
    int64_t best = 1, least = 3 * count;
    for (; *form > 1; form++) {
        /* The start and end of each tile take as long as two positions. */
        const int64_t work = ((uint32_t)count + *form - 1) / *form * (*form + 2);
        if (*form <= count && work < least)
            best = *form, least = work;
    }
    return best;
}

/* Each form of `add_groups` is a function: GCC takes twice as long for a single one with all of them. */
#define PLAIN(X, what) X(TALL, 0, 0, what) X(7, 0, 0, what) X(4, 0, 0, what) X(1, 0, 0, what)
#define OF_TAPS(X, positions, what) X(positions, 1, 3, what) X(positions, 2, 3, what)
#if defined(__AVX512F__)
#define FORMS(X)                                                                                   \
    PLAIN(X, EACH_CHANNEL)                                                                         \
    PLAIN(X, EACH_PAIR)                                                                            \
    OF_TAPS(X, TALL, EACH_PAIR) OF_TAPS(X, 10, EACH_PAIR) OF_TAPS(X, 8, EACH_PAIR) OF_TAPS(X, 7, EACH_PAIR)
#else
#define FORMS(X) PLAIN(X, EACH_CHANNEL) OF_TAPS(X, TALL, EACH_CHANNEL) OF_TAPS(X, 7, EACH_CHANNEL)
#endif
#define FORM(positions, stride, taps, what)                                                        \
    static __attribute__((noinline)) void add_##positions##_##stride##_##what(                     \
        const sights *x, const groups *g, int64_t column, const target *to)                        \
    {                                                                                              \
        add_groups(x, g, column, to, positions, stride, taps, what);                               \
    }
FORMS(FORM)

static __typeof__(add_1_0_EACH_CHANNEL) *form_of(int64_t positions, int64_t stride, int what)
{
#define FORM_IF(some, step, taps, kind)                                                            \
    if (positions == some && stride == step && what == kind)                                       \
        return add_##some##_##step##_##kind;
    FORMS(FORM_IF)
    return add_1_0_EACH_CHANNEL;
}

/* Images are read and written in place. */
ITEMS_OF(image_groups, image_convolution)
{
    const int64_t phases = phases_of(a), most = TOGETHER / a->channels;
    const int64_t together = smaller(most ? most : 1, a->groups);
    const int64_t chunks = CEIL_DIV(a->groups, together), stride = a->axes[2]->stride;
    const int64_t padded = CEIL_DIV(a->filters, GRAIN) * GRAIN;
    groups g = {.channels = a->channels, .filters = a->filters, .padded = padded};
    g.elements = a->twos ? a->channels / 2 : a->channels;
    sights x;
    x.step = a->x_steps->column, x.stride = stride, x.of_tap = g.elements * GRAIN, x.from = 0;
    for (int64_t item = begin; item < end; item++) {
        const int64_t place = item / chunks, first = place / phases * a->block;
        g.first = item % chunks * together, g.count = smaller(together, a->groups - g.first);
        const phase f = phase_of(a, place % phases);
        const int64_t count = smaller(a->block, f.positions - first);
        if (count <= 0)
            continue;
        x.n_rows = f.n_taps[0] * f.n_taps[1], x.n_taps = f.n_taps[2];
        x.apart = x.n_taps > 1 ? f.taps[2][1] - f.taps[2][0] : stride;
        g.size = x.n_rows * x.n_taps * x.of_tap, x.w = f.weights + g.first * g.size;
        view seen = {g.first * a->channels, g.count * a->channels, 0, NULL, NULL};
        line l = line_of(&f, first, count);
        for (int64_t r = 0; r < count; r += l.some, next_line(&f, &l, count - r)) {
            see_line(&x, a, &f, &l, &seen, NULL);
            const target all = target_of(a, &f, &l, g.first * a->filters, g.first * padded);
            const int what = BY_WIDTH(a->twos, 0, 0) ? EACH_PAIR : EACH_CHANNEL;
            const int taps = HAS_TAPS(what) && l.some >= LEAST && taps_together(&x) == 3 ? 3 : 0;
            const int64_t positions = positions_of(l.some, taps);
            __typeof__(add_1_0_EACH_CHANNEL) *const add = form_of(positions, !taps ? 0 : stride == x.apart ? 1 : 2, what);
            for (int64_t p = 0; p < l.some; p += positions) {
                const int64_t at = smaller(p, l.some - positions);
                const target to = part_of(&all, at, 0);
                add(&x, &g, at * stride, &to);
            }
        }
        if (a->follows)
            follow(a, first, count, g.first * a->filters, g.count * a->filters, a->groups * a->filters);
    }
}

KERNELS(image_groups, KERNEL(image_groups, image_convolution))
#else
#include "native.h"

/* Shorter vectors cannot hold the filters of a group. */
KERNELS(image_groups, {NULL, NULL, 0, NULL})
#endif
