/* Convolution of images with kernels whose elements are displaced by offsets. An item is a block of
   PANEL positions of one image, for at most FILTERS filters: what they see of some channels is
   interpolated, as the columns of a panel, and multiplied by the weights. Compiled with contraction to
   fused multiply-add. */
#include <math.h>
#include "native.h"
#include "products.h"

struct deformable {
    const float *x, *weights, *offsets, *bias, *masks; /* bias and masks may be null */
    float *y;
    int64_t channels, filters, groups, displaced; /* groups of filters, and of offsets */
    int64_t height, width, rows, columns;         /* of images and results */
    int64_t tall, wide, stride_y, stride_x, dilation_y, dilation_x, top, left;
};

enum { FILTERS = 256, TERMS = 192 };

/* Positions without the place of a kernel's element, the elements around them and their weights. */
typedef struct {
    float y[PANEL], x[PANEL];
    int32_t places[4][PANEL];
    float weights[4][PANEL];
} corners;

/* The neighbour of a coordinate, `next` of the lower one by 0 or 1: its place, and its weight. */
static inline int32_t neighbour(float at, int next, int64_t size, float *weight)
{
    float low = floorf(at), place = low + (float)next;
    int inside = (place >= 0) & (place < (float)size);
    *weight = (next ? at - low : 1 - (at - low)) * (float)inside;
    return (int32_t)(inside ? place : 0);
}

static void place_corners(const struct deformable *a, int64_t group, int64_t tap, int64_t first,
                          int64_t count, corners *c)
{
    int64_t positions = a->rows * a->columns, at = group * a->tall * a->wide + tap;
    const float *down = a->offsets + 2 * at * positions + first, *across = down + positions;
    float y[PANEL] = {0}, x[PANEL] = {0}, shares[PANEL];
    float y0 = (float)(tap / a->wide * a->dilation_y), x0 = (float)(tap % a->wide * a->dilation_x);
    for (int64_t j = 0; j < count; j++) {
        y[j] = (c->y[j] + y0) + down[j], x[j] = (c->x[j] + x0) + across[j];
        shares[j] = a->masks ? a->masks[at * positions + first + j] : 1;
    }
    for (int64_t j = count; j < PANEL; j++)
        shares[j] = 0;
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < PANEL; j++) {
            float of_row, of_column;
            int32_t row = neighbour(y[j], i / 2, a->height, &of_row);
            c->places[i][j] = row * (int32_t)a->width + neighbour(x[j], i % 2, a->width, &of_column);
            c->weights[i][j] = of_row * of_column * shares[j];
        }
}

/* What the positions see of channels `from` up to `to` of an image, as rows of a panel. */
static void see(const struct deformable *a, int64_t image, int64_t from, int64_t to, int64_t first,
                int64_t count, corners *c, float *panel)
{
    int64_t taps = a->tall * a->wide, pixels = a->height * a->width;
    int64_t group = image * a->displaced + from / (a->channels / a->displaced);
    for (int64_t tap = 0; tap < taps; tap++) {
        place_corners(a, group, tap, first, count, c);
        for (int64_t channel = from; channel < to; channel++) {
            const float *x = a->x + (image * a->channels + channel) * pixels;
            float *row = panel + ((channel - from) * taps + tap) * PANEL;
            for (int64_t j = 0; j < PANEL; j++)
                row[j] = x[c->places[0][j]] * c->weights[0][j] + x[c->places[1][j]] * c->weights[1][j] +
                         x[c->places[2][j]] * c->weights[2][j] + x[c->places[3][j]] * c->weights[3][j];
        }
    }
}

static int deformable(const void *arguments, int64_t begin, int64_t end)
{
    const struct deformable *a = arguments;
    int64_t positions = a->rows * a->columns, taps = a->tall * a->wide, most = TERMS / taps;
    int64_t depth = a->channels / a->groups, together = a->channels / a->displaced;
    int64_t own = a->filters / a->groups, parts = (own + FILTERS - 1) / FILTERS;
    int64_t blocks = (positions + PANEL - 1) / PANEL;
    float panel[TERMS * PANEL], sums[FILTERS * PANEL];
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item % blocks * PANEL, part = item / blocks % parts * FILTERS;
        int64_t group = item / blocks / parts % a->groups, image = item / blocks / parts / a->groups;
        int64_t count = positions - first < PANEL ? positions - first : PANEL;
        int64_t filters = own - part < FILTERS ? own - part : FILTERS;
        int64_t filter = group * own + part, stop = (group + 1) * depth;
        corners c;
        for (int64_t j = 0; j < count; j++) {
            c.y[j] = (float)((first + j) / a->columns * a->stride_y - a->top);
            c.x[j] = (float)((first + j) % a->columns * a->stride_x - a->left);
        }
        memset(sums, 0, sizeof(float) * PANEL * filters);
        for (int64_t from = group * depth, to; from < stop; from = to) {
            int64_t boundary = (from / together + 1) * together;
            to = boundary < stop ? boundary : stop;
            to = from + most < to ? from + most : to;
            see(a, image, from, to, first, count, &c, panel);
            const float *weights = a->weights + (filter * depth + from - group * depth) * taps;
            add_product(sums, PANEL, weights, depth * taps, panel, (to - from) * taps, filters, 1);
        }
        for (int64_t i = 0; i < filters; i++) {
            float *y = a->y + (image * a->filters + filter + i) * positions + first;
            for (int64_t j = 0; j < count; j++)
                y[j] = sums[i * PANEL + j] + (a->bias ? a->bias[filter + i] : 0);
        }
    }
    return 0;
}

const kernel_entry deformable_kernels[] = {KERNEL(deformable, deformable), END_OF_KERNELS};
