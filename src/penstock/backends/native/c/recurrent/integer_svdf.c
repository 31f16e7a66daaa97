/* TFLite's integer SVDF of 8-bit codes, bit-exact with ops/tflite/layers.py. An item is a row of the batch; some are
   computed together. Weights and codes have the layouts of integer_lstm.c. */
#include "integers.h"
#include "native.h"
#include "rescaling.h"

enum { MOST_ROWS = 8, ROW_BYTES = 32768, GROUP_COLUMNS = GROUP * PANEL };

struct integer_svdf {
    const int8_t *x;
    const int16_t *memory;
    const int8_t *weights; /* panels of all filters */
    const int32_t *start;
    int64_t size, deep;   /* bytes of a row of codes, quads of a tile */
    const int16_t *times; /* time weights, filter by filter */
    const int32_t *bias;
    int8_t *y;
    int16_t *later;
    const int32_t *multipliers, *shifts; /* of features, and of outputs */
    int64_t features, filters, steps, units, zero, batch, block;
};

/* The outputs of a row, from the memory of each unit's filters. */
static void outputs(const struct integer_svdf *a, const int16_t *restrict memory, int8_t *restrict y)
{
    const int64_t count = a->filters / a->units * a->steps;
    const int16_t *restrict times = a->times;
    int32_t sums[GROUP_COLUMNS];
    for (int64_t first = 0, n; first < a->units; first += n) {
        n = smaller(GROUP_COLUMNS, a->units - first);
        for (int64_t i = 0; i < n; i++, memory += count, times += count) {
            sums[i] = a->bias[first + i];
            for (int64_t k = 0; k < count; k++)
                sums[i] += memory[k] * times[k];
        }
        for (int64_t i = 0; i < n; i++) {
            const int32_t code = rescaled_large(sums[i], a->multipliers[1], a->shifts[1]) + (int32_t)a->zero;
            y[first + i] = (int8_t)WITHIN(code, -128, 127);
        }
    }
}

ITEMS_OF(integer_svdf, integer_svdf)
{
    const int64_t steps = a->steps, held = a->filters * steps;
    _Alignas(64) uint8_t x[ROW_BYTES + TILE * QUAD];
    _Alignas(64) int32_t sums[MOST_ROWS * GROUP_COLUMNS];
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item * a->block, n = smaller(a->block, a->batch - row);
        int16_t *later = a->later + row * held;
        memset(x, 0, n * a->size);
        for (int64_t r = 0; r < n; r++)
            flip(x + r * a->size, a->x + (row + r) * a->features, a->features);
        /* Shift the oldest step out of all filters; their last elements are set below. */
        memcpy(later, a->memory + row * held + 1, (n * held - 1) * sizeof *later);
        for (int64_t f = 0; f < a->filters; f += GROUP_COLUMNS) {
            const int64_t count = smaller(GROUP_COLUMNS, a->filters - f);
            const multiplication m = {sums, GROUP_COLUMNS, a->start + f, 0, x, a->size, ONE_PART, 1, a->size / QUAD,
                                      a->deep, a->weights + f * a->size, a->size * PANEL, n, count, NULL, 0};
            product_for(n)(&m);
            for (int64_t r = 0; r < n; r++) {
                int32_t *of = sums + r * GROUP_COLUMNS;
                for (int64_t i = 0; i < count; i++)
                    of[i] = bounded(rescaled_large(of[i], a->multipliers[0], a->shifts[0]));
                for (int64_t i = 0; i < count; i++)
                    later[r * held + (f + i + 1) * steps - 1] = (int16_t)of[i];
            }
        }
        for (int64_t r = 0; r < n; r++)
            outputs(a, later + r * held, a->y + (row + r) * a->units);
    }
}

KERNELS(integer_svdf, KERNEL(integer_svdf, integer_svdf))
