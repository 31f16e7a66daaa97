/* Products of float rows with an int8 matrix: the first stage quantizes each row over its own range, bit by bit as
   ops/tflite/layers.py says. A piece of the second stage is a block of rows and some panels of columns. */
#include "integers.h"
#include "native.h"

enum { MOST_ROWS = 32, GROUP_COLUMNS = GROUP * PANEL };

struct dynamic_range_rows {
    const float *x;
    const int8_t *weights;       /* panels of all columns */
    const int32_t *start, *sums; /* initial sums that correct for codes + 128; of columns */
    const float *scales, *bias;  /* per column, or NULL; scales `scale_step` apart */
    float *y;
    uint8_t *room; /* for codes + 128 of all rows, then their scales and zero points */
    int64_t scale_step, rows, columns, depth;
    int64_t size, deep, block, some, pieces; /* bytes of a row, quads of a tile; rows and panels of a piece */
    int64_t asymmetric;
    double low, high;
};

/* Round to the nearest integer, halves away from zero, and clamp; NaN becomes the lowest. The value added is the
   number just below a half: with a half itself, that number would be rounded to 1. */
INLINED int32_t code_of(float x, float low, float high)
{
    const float inside = WITHIN(x, low, high);
    return (int32_t)(inside + copysignf(0x1.fffffep-2f, inside));
}

/* Quantization parameters of rows, SIDE rows at once, to overlap the latency of divisions. */
enum { SIDE = 16 };
typedef struct {
    float low[SIDE], high[SIDE];
    float factor[SIDE], scale[SIDE];
    int32_t zero[SIDE];
} row_ranges;

static void set_scales(row_ranges *restrict r, int is_asymmetric)
{
    for (int i = 0; i < SIDE && is_asymmetric; i++) {
        const double low = r->low[i], high = r->high[i], step = (high - low) / 255;
        const double below = -128 - low / step, above = 127 - high / step;
        const double point = 128 + fabs(low / step) < 127 + fabs(high / step) ? below : above;
        const double inside = WITHIN(point, -128.0, 127.0);
        /* Round halves away from 0, as code_of does. */
        r->zero[i] = (int32_t)(inside + copysign(0x1.fffffffffffffp-2, inside));
        r->scale[i] = (float)step;
        r->factor[i] = 1.0f / (float)step;
    }
    for (int i = 0; i < SIDE && !is_asymmetric; i++) {
        const float most = -r->low[i] > r->high[i] ? -r->low[i] : r->high[i];
        r->zero[i] = 0;
        r->scale[i] = most / 127;
        r->factor[i] = 127 / most;
    }
}

/* Quantize at most SIDE rows from `first` on over their ranges to codes + 128; store scales and zero points. */
static void range_codes(const struct dynamic_range_rows *a, int64_t first, int64_t count, float *scales, int32_t *zeros)
{
    row_ranges ranges;
    int is_flat[SIDE];
    for (int64_t i = 0; i < SIDE; i++) {
        const range r = i < count ? range_of(a->x + (first + i) * a->depth, a->depth) : (range){0};
        is_flat[i] = r.low == r.high; /* as 0 is in the range, all are 0 */
        ranges.low[i] = r.low, ranges.high[i] = is_flat[i] ? 1 : r.high;
    }
    set_scales(&ranges, a->asymmetric != 0);
    const float least = a->asymmetric ? -128 : -127;
    for (int64_t i = 0; i < count; i++) {
        const float *restrict x = a->x + (first + i) * a->depth;
        uint8_t *restrict codes = a->room + (first + i) * a->size;
        const float factor = ranges.factor[i], point = (float)ranges.zero[i];
        zeros[first + i] = is_flat[i] ? 0 : ranges.zero[i];
        scales[first + i] = is_flat[i] ? 1 : ranges.scale[i];
        if (is_flat[i])
            memset(codes, 128, a->depth);
        else
            for (int64_t k = 0, depth = a->depth; k < depth; k++)
                codes[k] = (uint8_t)(code_of(point + x[k] * factor, least, 127) + 128);
        for (int64_t k = a->depth; k < a->size; k++)
            codes[k] = 0;
    }
}

static int dynamic_range_stage(const void *arguments, int64_t stage, int64_t begin, int64_t end)
{
    const struct dynamic_range_rows *a = arguments;
    const int64_t panels = CEIL_DIV(a->columns, PANEL), groups = CEIL_DIV(panels, a->some);
    const float low = (float)a->low, high = (float)a->high;
    float *const scales = (float *)(a->room + a->rows * a->size);
    int32_t *const zeros = (int32_t *)(scales + a->rows);
    const int64_t some_rows = end * a->rows / a->pieces;
    for (int64_t r = begin * a->rows / a->pieces; !stage && r < some_rows; r += SIDE)
        range_codes(a, r, smaller(SIDE, some_rows - r), scales, zeros);
    _Alignas(64) int32_t sums[MOST_ROWS * GROUP_COLUMNS];
    for (int64_t piece = begin; stage && piece < end; piece++) {
        const int64_t row = piece / groups * a->block, first = piece % groups * a->some;
        const int64_t n = smaller(a->block, a->rows - row), last = smaller(panels, first + a->some);
        for (int64_t p = first; p < last; p += GROUP) {
            const int64_t column = p * PANEL, count = smaller(a->columns, smaller(last, p + GROUP) * PANEL) - column;
            multiplication m = {sums, GROUP_COLUMNS, a->start + column, 0, a->room + row * a->size, a->size, ONE_PART,
                                1, a->size / QUAD, a->deep, a->weights + p * a->size * PANEL, a->size * PANEL, n,
                                count, NULL, 0};
            product_for(n)(&m);
            for (int64_t r = 0; r < n; r++) {
                const int32_t *of = sums + r * GROUP_COLUMNS, *of_codes = a->sums + column, zero = zeros[row + r];
                const float *own = a->scale_step ? a->scales + column : NULL, *bias = a->bias ? a->bias + column : NULL;
                const float scale = scales[row + r], one = scale * a->scales[0];
                float *restrict y = a->y + (row + r) * a->columns + column;
                for (int64_t j = 0; j < count; j++) {
                    float number = (float)(of[j] - zero * of_codes[j]) * (own ? scale * own[j] : one);
                    number = bias ? bias[j] + number : number;
                    number = number < low ? low : number; /* NaN is preserved */
                    y[j] = number > high ? high : number;
                }
            }
        }
    }
    return 0;
}

KERNELS(dynamic_range, STAGED_KERNEL(dynamic_range_rows, dynamic_range_rows, NULL, dynamic_range_stage))
