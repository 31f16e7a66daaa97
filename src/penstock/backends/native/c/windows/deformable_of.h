/* DeformConv in the type REAL, with functions named OF(name): deformable.c includes this once for each type. */
#include <tgmath.h>

struct OF(deformable) {
    const REAL *x, *weights, *offsets, *bias, *masks; /* bias and masks may be NULL */
    REAL *y;
    int64_t channels, filters, groups, displaced; /* groups of filters, and of offsets */
    int64_t height, width, rows, columns;         /* of images and results */
    int64_t tall, wide, stride_y, stride_x, dilation_y, dilation_x, top, left;
};

/* Sampling positions relative to the kernel tap, and the indices and weights of their four neighbours. */
typedef struct {
    REAL y[PANEL], x[PANEL];
    int32_t places[4][PANEL];
    REAL weights[4][PANEL];
} OF(corners);

/* The lower (`next` 0) or upper (1) neighbour of a coordinate: its index, and its weight. */
static inline int32_t OF(neighbour)(REAL at, int next, int64_t size, REAL *weight)
{
    REAL low = floor(at), place = low + (REAL)next;
    int inside = (place >= 0) & (place < (REAL)size);
    *weight = (next ? at - low : 1 - (at - low)) * (REAL)inside;
    return (int32_t)(inside ? place : 0);
}

static void OF(place_corners)(const struct OF(deformable) *a, int64_t group, int64_t tap,
                              int64_t first, int64_t count, OF(corners) *c)
{
    int64_t positions = a->rows * a->columns, at = group * a->tall * a->wide + tap;
    const REAL *down = a->offsets + 2 * at * positions + first, *across = down + positions;
    REAL y[PANEL] = {0}, x[PANEL] = {0}, shares[PANEL];
    REAL y0 = (REAL)(tap / a->wide * a->dilation_y), x0 = (REAL)(tap % a->wide * a->dilation_x);
    for (int64_t j = 0; j < count; j++) {
        y[j] = (c->y[j] + y0) + down[j], x[j] = (c->x[j] + x0) + across[j];
        shares[j] = a->masks ? a->masks[at * positions + first + j] : 1;
    }
    for (int64_t j = count; j < PANEL; j++)
        shares[j] = 0;
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < PANEL; j++) {
            REAL of_row, of_column;
            int32_t row = OF(neighbour)(y[j], i / 2, a->height, &of_row);
            c->places[i][j] = row * (int32_t)a->width + OF(neighbour)(x[j], i % 2, a->width, &of_column);
            c->weights[i][j] = of_row * of_column * shares[j];
        }
}

/* Interpolate channels `from` up to `to` of an image at the positions, into rows of a panel. */
static void OF(see)(const struct OF(deformable) *a, int64_t image, int64_t from, int64_t to,
                    int64_t first, int64_t count, OF(corners) *c, REAL *panel)
{
    int64_t taps = a->tall * a->wide, pixels = a->height * a->width;
    int64_t group = image * a->displaced + from / (a->channels / a->displaced);
    for (int64_t tap = 0; tap < taps; tap++) {
        OF(place_corners)(a, group, tap, first, count, c);
        for (int64_t channel = from; channel < to; channel++) {
            const REAL *x = a->x + (image * a->channels + channel) * pixels;
            REAL *row = panel + ((channel - from) * taps + tap) * PANEL;
            for (int64_t j = 0; j < PANEL; j++)
                row[j] = FUSED(x[c->places[3][j]], c->weights[3][j],
                               FUSED(x[c->places[2][j]], c->weights[2][j],
                                     FUSED(x[c->places[1][j]], c->weights[1][j],
                                           x[c->places[0][j]] * c->weights[0][j])));
        }
    }
}

ITEMS_OF(OF(deformable), OF(deformable))
{
    int64_t positions = a->rows * a->columns, taps = a->tall * a->wide, most = TERMS / taps;
    int64_t depth = a->channels / a->groups, together = a->channels / a->displaced;
    int64_t own = a->filters / a->groups, parts = CEIL_DIV(own, FILTERS);
    int64_t blocks = CEIL_DIV(positions, PANEL);
    REAL panel[TERMS * PANEL], sums[FILTERS * PANEL];
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item % blocks * PANEL, part = item / blocks % parts * FILTERS;
        int64_t group = item / blocks / parts % a->groups, image = item / blocks / parts / a->groups;
        int64_t count = positions - first < PANEL ? positions - first : PANEL;
        int64_t filters = own - part < FILTERS ? own - part : FILTERS;
        int64_t filter = group * own + part, stop = (group + 1) * depth;
        OF(corners) c;
        for (int64_t j = 0; j < count; j++) {
            c.y[j] = (REAL)((first + j) / a->columns * a->stride_y - a->top);
            c.x[j] = (REAL)((first + j) % a->columns * a->stride_x - a->left);
        }
        memset(sums, 0, sizeof(REAL) * PANEL * filters);
        for (int64_t from = group * depth, to; from < stop; from = to) {
            int64_t boundary = (from / together + 1) * together;
            to = boundary < stop ? boundary : stop;
            to = from + most < to ? from + most : to;
            OF(see)(a, image, from, to, first, count, &c, panel);
            const REAL *weights = a->weights + (filter * depth + from - group * depth) * taps;
            OF(add_product)(sums, PANEL, weights, depth * taps, panel, (to - from) * taps, filters, 1);
        }
        for (int64_t i = 0; i < filters; i++) {
            REAL *y = a->y + (image * a->filters + filter + i) * positions + first;
            for (int64_t j = 0; j < count; j++)
                y[j] = sums[i * PANEL + j] + (a->bias ? a->bias[filter + i] : 0);
        }
    }
}
