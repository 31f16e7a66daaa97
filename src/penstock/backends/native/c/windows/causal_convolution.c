/* CausalConvWithState: a depthwise convolution over past elements. An item is a block of rows, each a channel of a
   sample. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "wide.h"
#include <string.h>
#include "math32.h"
#include "native.h"

enum { TOGETHER = 64 }; /* results */

struct causal {
    const float *x, *w, *bias, *past; /* bias, past: or NULL */
    float *y, *state;                 /* state: or NULL */
    int64_t rows, channels, length, kernel, silu;
    int64_t block; /* rows of an item */
};

/* Element `at` of a row that is preceded by `before` elements of `past` (or NULL). */
INLINED float element(const float *past, const float *x, int64_t before, int64_t at)
{
    return at >= 0 ? x[at] : past ? past[at + before] : 0;
}

/* Rows of one element. */
INLINED void step(const struct causal *a, int64_t first, int64_t last, const int64_t kernel)
{
    const int64_t before = kernel - 1;
    for (int64_t row = first; row < last; row++) {
        const float *w = a->w + row % a->channels * kernel;
        const float *past = a->past ? a->past + row * before : NULL;
        float sum = fused32(w[before], a->x[row], a->bias ? a->bias[row % a->channels] : 0);
        for (int64_t k = 0; past && k < before; k++)
            sum = fused32(w[k], past[k], sum);
        a->y[row] = sum;
        for (int64_t k = 0; a->state && k < before; k++)
            a->state[row * before + k] = element(past, a->x + row, before, k + 1 - before);
    }
}

static void row_of_many(const struct causal *a, int64_t row)
{
    const int64_t kernel = a->kernel, before = kernel - 1, length = a->length;
    const float *x = a->x + row * length, *w = a->w + row % a->channels * kernel;
    const float *past = a->past ? a->past + row * before : NULL, bias = a->bias ? a->bias[row % a->channels] : 0;
    float *y = a->y + row * length;
    int64_t t = 0;
    for (; t < smaller(before, length); t++) {
        y[t] = bias;
        for (int64_t k = 0; k < kernel; k++)
            y[t] = fused32(w[k], element(past, x, before, t + k - before), y[t]);
    }
    for (int64_t count; t < length; t += count) {
        float sums[TOGETHER];
        count = smaller(TOGETHER, length - t);
        FILL(sums, TOGETHER, bias);
        for (int64_t k = 0; k < kernel; k++)
            if (count == TOGETHER)
                for (int i = 0; i < TOGETHER; i++)
                    sums[i] += w[k] * x[t + k - before + i];
            else
                for (int64_t i = 0; i < count; i++)
                    sums[i] += w[k] * x[t + k - before + i];
        memcpy(y + t, sums, count * sizeof(float));
    }
    for (int64_t k = 0; a->state && k < before; k++)
        a->state[row * before + k] = element(past, x, before, length + k - before);
}

ITEMS_OF(causal, causal)
{
    const int64_t first = begin * a->block, last = smaller(end * a->block, a->rows);
    if (a->length == 1 && a->kernel == 4)
        step(a, first, last, 4);
    else if (a->length == 1)
        step(a, first, last, a->kernel);
    else
        for (int64_t row = first; row < last; row++)
            row_of_many(a, row);
    for (int64_t i = first * a->length; a->silu && i < last * a->length; i++)
        a->y[i] *= sigmoid32(a->y[i]);
}

KERNELS(causal, KERNEL(causal, causal))
