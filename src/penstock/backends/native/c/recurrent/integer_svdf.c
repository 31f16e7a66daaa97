/* SVDF of 8-bit codes that TFLite computes in integers: as ops/tflite/layers.py says, bit by bit. An item is a
   row of the batch; some are computed together. Weights and codes are those of integer_lstm.c. */
#include "integers.h"
#include "native.h"
#include "rescaling.h"

enum { MOST_ROWS = 8 };

struct integer_svdf {
    const int8_t *x;
    const int16_t *memory;
    const int8_t *weights;
    const int32_t *start;
    int64_t size, deep;    /* bytes of a row of codes, quads of a tile */
    const int16_t *times;  /* weights of a filter's steps, filter by filter */
    const int32_t *bias;
    int8_t *y;
    int16_t *later;
    const int32_t *multipliers, *shifts; /* of features, and of outputs */
    uint8_t *work;
    int64_t room, columns; /* bytes of a row's codes and sums; sums of one, a multiple of PANEL */
    int64_t features, filters, steps, units, zero;
};

/* The memory and the outputs of a row after what the features come to. */
static void advance(const struct integer_svdf *a, int32_t *restrict sums, int64_t row)
{
    const int64_t steps = a->steps, units = a->units, held = a->filters * steps, count = held / units;
    const int32_t zero = (int32_t)a->zero, *by = a->multipliers, *shifts = a->shifts;
    int16_t *restrict memory = a->later + row * held;
    memcpy(memory, a->memory + row * held + 1, (held - 1) * sizeof *memory);
    for (int64_t i = 0; i < a->filters; i++)
        sums[i] = bounded(rescaled_integer(sums[i], by[0], shifts[0]));
    for (int64_t i = 0; i < a->filters; i++)
        memory[i * steps + steps - 1] = (int16_t)sums[i];
    for (int64_t i = 0; i < units; i++) {
        const int16_t *restrict values = memory + i * count, *restrict times = a->times + i * count;
        int32_t sum = a->bias[i];
        for (int64_t k = 0; k < count; k++)
            sum += values[k] * times[k];
        sums[i] = sum;
    }
    for (int64_t i = 0; i < units; i++) {
        const int32_t code = rescaled_integer(sums[i], by[1], shifts[1]) + zero;
        a->y[row * units + i] = (int8_t)WITHIN(code, -128, 127);
    }
}

static int integer_svdf(const void *arguments, int64_t begin, int64_t end)
{
    const struct integer_svdf *a = arguments;
    for (int64_t row = begin, n; row < end; row += n) {
        n = smaller(end - row, MOST_ROWS);
        uint8_t *x = a->work + row * a->room;
        int32_t *sums = (int32_t *)(x + n * a->size);
        const multiplication m = {sums, a->columns, a->start, 0, x, a->size, ONE_PART, 1, a->size / QUAD, a->deep,
                                  a->weights, a->size * PANEL, n, a->filters};
        memset(x, 0, n * a->size);
        for (int64_t r = 0; r < n; r++)
            flip(x + r * a->size, a->x + (row + r) * a->features, a->features);
        product_for(n)(&m);
        for (int64_t r = 0; r < n; r++)
            advance(a, sums + r * a->columns, row + r);
    }
    return 0;
}

KERNELS(integer_svdf, KERNEL(integer_svdf, integer_svdf))
