/* Products of rows of real numbers with a matrix of int8: each row becomes codes over its own range, as
   ops/tflite/layers.py says, bit by bit. An item is a block of rows and some panels of columns. */
#include "integers.h"
#include "native.h"

enum { MOST_ROWS = 32, ROW_BYTES = 32768, GROUP_COLUMNS = GROUP * PANEL };

struct dynamic_range_rows {
    const float *x;
    const int8_t *weights;       /* panels of all columns */
    const int32_t *start, *sums; /* what sums of products with codes + 128 begin with; of columns */
    const float *scales, *bias;  /* of columns, or null; scales `scale_step` apart */
    float *y;
    int64_t scale_step, rows, columns, depth;
    int64_t size, deep, block, some; /* bytes of a row, quads of a tile; rows and panels of an item */
    int64_t asymmetric;
    double low, high;
};

/* The nearest integer, of two the one further from zero, within bounds; NaN becomes the lowest. What is added is the
   number before a half: with a half itself, the number before it would become 1. */
INLINED int32_t code_of(float x, float low, float high)
{
    const float inside = WITHIN(x, low, high);
    return (int32_t)(inside + copysignf(0x1.fffffep-2f, inside));
}

/* Codes + 128 of a row over its range; return their scale, and set their zero point. */
static float range_codes(const struct dynamic_range_rows *a, const float *restrict x, uint8_t *restrict codes, int32_t *zero)
{
    const range r = range_of(x, a->depth);
    const float low = r.low[0], high = r.high[0];
    float scale, factor;
    *zero = 0;
    if (low == high) {
        memset(codes, 128, a->depth);
        return 1;
    }
    if (a->asymmetric) {
        const double step = ((double)high - low) / 255, below = -128 - low / step, above = 127 - high / step;
        const double point = 128 + fabs(low / step) < 127 + fabs(high / step) ? below : above;
        *zero = point <= -128 ? -128 : point >= 127 ? 127 : (int32_t)round(point);
        scale = (float)step;
        factor = 1.0f / scale;
    } else {
        const float most = -low > high ? -low : high;
        scale = most / 127;
        factor = 127 / most;
    }
    const float least = a->asymmetric ? -128 : -127, point = (float)*zero;
    for (int64_t i = 0, depth = a->depth; i < depth; i++)
        codes[i] = (uint8_t)(code_of(point + x[i] * factor, least, 127) + 128);
    return scale;
}

ITEMS_OF(dynamic_range_rows, dynamic_range_rows)
{
    const int64_t panels = (a->columns + PANEL - 1) / PANEL, groups = (panels + a->some - 1) / a->some;
    const float low = (float)a->low, high = (float)a->high;
    _Alignas(64) uint8_t codes[ROW_BYTES + TILE * QUAD];
    _Alignas(64) int32_t sums[MOST_ROWS * GROUP_COLUMNS];
    float scales[MOST_ROWS] = {0};
    int32_t zeros[MOST_ROWS] = {0};
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / groups * a->block, first = item % groups * a->some;
        const int64_t n = smaller(a->block, a->rows - row), last = smaller(panels, first + a->some);
        memset(codes, 0, n * a->size);
        for (int64_t r = 0; r < n; r++)
            scales[r] = range_codes(a, a->x + (row + r) * a->depth, codes + r * a->size, zeros + r);
        for (int64_t p = first; p < last; p += GROUP) {
            const int64_t column = p * PANEL, count = smaller(a->columns, smaller(last, p + GROUP) * PANEL) - column;
            multiplication m = {sums, GROUP_COLUMNS, a->start + column, 0, codes, a->size, ONE_PART, 1,
                                a->size / QUAD, a->deep, a->weights + p * a->size * PANEL, a->size * PANEL, n, count};
            product_for(n)(&m);
            for (int64_t r = 0; r < n; r++) {
                const int32_t *of = sums + r * GROUP_COLUMNS, *of_codes = a->sums + column;
                const float *own = a->scale_step ? a->scales + column : NULL, *bias = a->bias ? a->bias + column : NULL;
                const float one = scales[r] * a->scales[0];
                float *restrict y = a->y + (row + r) * a->columns + column;
                for (int64_t j = 0; j < count; j++) {
                    float number = (float)(of[j] - zeros[r] * of_codes[j]) * (own ? scales[r] * own[j] : one);
                    number = bias ? bias[j] + number : number;
                    number = number < low ? low : number; /* NaN stays */
                    y[j] = number > high ? high : number;
                }
            }
        }
    }
}

KERNELS(dynamic_range, KERNEL(dynamic_range_rows, dynamic_range_rows))
