/* Products of rows of real numbers with a matrix of int8: each row becomes codes over its own range, as
   ops/tflite/layers.py says, bit by bit, in the first stage. A piece of the second is a block of rows and some
   panels of columns. */
#include "integers.h"
#include "native.h"

enum { MOST_ROWS = 32, GROUP_COLUMNS = GROUP * PANEL };

struct dynamic_range_rows {
    const float *x;
    const int8_t *weights;       /* panels of all columns */
    const int32_t *start, *sums; /* what sums of products with codes + 128 begin with; of columns */
    const float *scales, *bias;  /* of columns, or null; scales `scale_step` apart */
    float *y;
    uint8_t *room; /* for codes + 128 of all rows, then their scales and zero points */
    int64_t scale_step, rows, columns, depth;
    int64_t size, deep, block, some, pieces; /* bytes of a row, quads of a tile; rows and panels of a piece */
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
    const float low = r.low, high = r.high;
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

static int dynamic_range_stage(const void *arguments, int64_t stage, int64_t begin, int64_t end)
{
    const struct dynamic_range_rows *a = arguments;
    const int64_t panels = (a->columns + PANEL - 1) / PANEL, groups = (panels + a->some - 1) / a->some;
    const float low = (float)a->low, high = (float)a->high;
    float *const scales = (float *)(a->room + a->rows * a->size);
    int32_t *const zeros = (int32_t *)(scales + a->rows);
    for (int64_t r = begin * a->rows / a->pieces; !stage && r < end * a->rows / a->pieces; r++) {
        scales[r] = range_codes(a, a->x + r * a->depth, a->room + r * a->size, zeros + r);
        memset(a->room + r * a->size + a->depth, 0, a->size - a->depth);
    }
    _Alignas(64) int32_t sums[MOST_ROWS * GROUP_COLUMNS];
    for (int64_t piece = begin; stage && piece < end; piece++) {
        const int64_t row = piece / groups * a->block, first = piece % groups * a->some;
        const int64_t n = smaller(a->block, a->rows - row), last = smaller(panels, first + a->some);
        for (int64_t p = first; p < last; p += GROUP) {
            const int64_t column = p * PANEL, count = smaller(a->columns, smaller(last, p + GROUP) * PANEL) - column;
            multiplication m = {sums, GROUP_COLUMNS, a->start + column, 0, a->room + row * a->size, a->size, ONE_PART,
                                1, a->size / QUAD, a->deep, a->weights + p * a->size * PANEL, a->size * PANEL, n,
                                count};
            product_for(n)(&m);
            for (int64_t r = 0; r < n; r++) {
                const int32_t *of = sums + r * GROUP_COLUMNS, *of_codes = a->sums + column, zero = zeros[row + r];
                const float *own = a->scale_step ? a->scales + column : NULL, *bias = a->bias ? a->bias + column : NULL;
                const float scale = scales[row + r], one = scale * a->scales[0];
                float *restrict y = a->y + (row + r) * a->columns + column;
                for (int64_t j = 0; j < count; j++) {
                    float number = (float)(of[j] - zero * of_codes[j]) * (own ? scale * own[j] : one);
                    number = bias ? bias[j] + number : number;
                    number = number < low ? low : number; /* NaN stays */
                    y[j] = number > high ? high : number;
                }
            }
        }
    }
    return 0;
}

KERNELS(dynamic_range, STAGED_KERNEL(dynamic_range_rows, dynamic_range_rows, NULL, dynamic_range_stage))
