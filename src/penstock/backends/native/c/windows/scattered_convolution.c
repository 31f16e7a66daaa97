/* Small transposed convolutions: for each tap, the products of all elements of an image are added to the results that
   they are part of. An item is an image. Where each phase of the result has few positions, this takes less time than
   to find their inputs (image_convolution.c). Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "floats.h"
#include "images.h"

enum { SUMS = 4096, GROUP = 8, AXES = 3 };
typedef float group __attribute__((vector_size(4 * GROUP), aligned(4), may_alias));

struct scattered_convolution {
    const float *x, *weights, *bias; /* weights: [tap, channel, filter], with `padded` filters */
    float *y;
    const axis *axes[AXES]; /* windows of the result: one for each element of x */
    int64_t channels, filters, padded;
    const steps *x_steps, *y_steps;
};

/* The windows from `low` to `high` whose element of a tap is inside of the result, and that of window 0. */
typedef struct {
    int64_t low, high, at;
} range;

static inline range windows_of(const axis *a, int64_t tap)
{
    const int64_t at = tap * a->dilation - a->begin;
    const int64_t low = at < 0 ? CEIL_DIV(-at, a->stride) : 0;
    const int64_t high = at < a->size ? CEIL_DIV(a->size - at, a->stride) : 0;
    return (range){low, smaller(high, a->count), at};
}

/* Add the products of `count` elements, `step` apart, to sums that are `apart`. */
static inline void add_line(const struct scattered_convolution *a, const float *x, int64_t step, int64_t count,
                            const float *w, float *sums, int64_t apart)
{
    const int64_t channels = a->channels, channel = a->x_steps->channel, padded = a->padded;
    for (int64_t i = 0; i < count; i++, x += step, sums += apart)
        for (int64_t f = 0; f < padded; f += GROUP) {
            group sum = *(const group *)(sums + f);
            for (int64_t c = 0; c < channels; c++)
                sum += x[c * channel] * *(const group *)(w + c * padded + f);
            *(group *)(sums + f) = sum;
        }
}

ITEMS_OF(scattered_convolution, scattered_convolution)
{
    const axis *slices = a->axes[0], *rows = a->axes[1], *columns = a->axes[2];
    const steps *from = a->x_steps, *to = a->y_steps;
    const int64_t padded = a->padded, line = columns->size * padded, of_tap = a->channels * padded;
    for (int64_t image = begin; image < end; image++) {
        _Alignas(64) float sums[SUMS];
        const float *w = a->weights;
        for (int64_t i = 0; i < slices->size * rows->size * line; i += padded)
            for (int64_t f = 0; f < padded; f += GROUP)
                *(group *)(sums + i + f) = *(const group *)(a->bias + f);
        for (int64_t i = 0; i < slices->kernel; i++)
            for (int64_t j = 0; j < rows->kernel; j++)
                for (int64_t k = 0; k < columns->kernel; k++, w += of_tap) {
                    const range s = windows_of(slices, i), r = windows_of(rows, j), c = windows_of(columns, k);
                    for (int64_t p = s.low; p < s.high; p++)
                        for (int64_t q = r.low; q < r.high; q++) {
                            const int64_t slice = p * slices->stride + s.at, row = q * rows->stride + r.at;
                            const float *x = a->x + image * from->image + p * from->slice + q * from->row;
                            float *sum = sums + (slice * rows->size + row) * line;
                            add_line(a, x + c.low * from->column, from->column, c.high - c.low, w,
                                     sum + (c.low * columns->stride + c.at) * padded, columns->stride * padded);
                        }
                }
        const float *sum = sums;
        for (int64_t i = 0; i < slices->size; i++)
            for (int64_t j = 0; j < rows->size; j++)
                for (int64_t k = 0; k < columns->size; k++, sum += padded) {
                    float *y = a->y + image * to->image + i * to->slice + j * to->row + k * to->column;
                    if (to->channel == 1)
                        copy_floats(y, sum, a->filters);
                    for (int64_t f = 0; f < a->filters && to->channel != 1; f++)
                        y[f * to->channel] = sum[f];
                }
    }
}

KERNELS(scattered_convolution, KERNEL(scattered_convolution, scattered_convolution))
