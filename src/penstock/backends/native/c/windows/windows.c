/* Col2Im, where an item is a plane (one channel of one image), and reductions over windows. */
#include <string.h>
#include "images.h"
#include "families.h"

enum { AXES = 3 };

struct windows {
    const void *x;
    void *y;
    const axis *axes; /* AXES of them, the first ones of size 1 if there are fewer */
};

/* The windows, `low` to `high`, whose k-th element is not padding; return the index of that element in window 0. */
static inline int64_t inside(const axis *w, int64_t k, int64_t *low, int64_t *high)
{
    int64_t first = k * w->dilation - w->begin, last = w->size - 1 - first;
    *low = first < 0 ? CEIL_DIV(-first, w->stride) : 0;
    *high = last < 0 ? 0 : last / w->stride + 1;
    *high = *high < w->count ? *high : w->count;
    return first;
}

#define WINDOWS(type)                                                                             \
    ITEMS_OF(col2im_##type, windows)                                                              \
    {                                                                                             \
        const axis *u = a->axes, *v = u + 1, *w = u + 2;                                          \
        int64_t plane = u->size * v->size * w->size, count = u->count * v->count * w->count;      \
        int64_t taps = u->kernel * v->kernel * w->kernel, low[AXES], high[AXES], at[AXES];        \
        for (int64_t item = begin; item < end; item++) {                                          \
            type *y = (type *)a->y + item * plane;                                                \
            const type *x = (const type *)a->x + item * taps * count;                             \
            memset(y, 0, plane * sizeof(type));                                                   \
            for (int64_t k = 0; k < taps; k++, x += count) {                                      \
                int64_t rest = k;                                                                 \
                for (int i = AXES - 1; i >= 0; rest /= u[i--].kernel)                             \
                    at[i] = inside(&u[i], rest % u[i].kernel, &low[i], &high[i]);                 \
                for (int64_t i = low[0]; i < high[0]; i++)                                        \
                    for (int64_t j = low[1]; j < high[1]; j++) {                                  \
                        int64_t row = (at[0] + i * u->stride) * v->size + at[1] + j * v->stride;  \
                        type *restrict to = y + row * w->size + at[2];                            \
                        const type *restrict from = x + (i * v->count + j) * w->count;            \
                        if (w->stride == 1)                                                       \
                            for (int64_t l = low[2]; l < high[2]; l++)                            \
                                to[l] += from[l];                                                 \
                        else                                                                      \
                            for (int64_t l = low[2]; l < high[2]; l++)                            \
                                to[l * w->stride] += from[l];                                     \
                    }                                                                             \
            }                                                                                     \
        }                                                                                         \
    }

WINDOWS(float)
WINDOWS(double)

/* Reductions of windows over any axes, with an initial value: an item is a row of the result. */
struct windowed {
    const void *x, *first;
    void *y;
    const int64_t *dims, *steps; /* of the result without its rows; between windows, in elements of x */
    const int64_t *taps;         /* offsets of the elements of a window */
    int64_t rank, count, length, step; /* of dims, of taps, of a row, and between windows in a row */
};

#define WINDOWED(name, type, COMBINE)                                                             \
    ITEMS_OF(name, windowed)                                                                      \
    {                                                                                             \
        const int64_t length = a->length, step = a->step;                                         \
        for (int64_t item = begin; item < end; item++) {                                          \
            const type *x = a->x;                                                                 \
            type *restrict y = (type *)a->y + item * length;                                      \
            int64_t rest = item;                                                                  \
            for (int64_t d = a->rank - 1; d >= 0; rest /= a->dims[d--])                           \
                x += rest % a->dims[d] * a->steps[d];                                             \
            FILL(y, length, *(const type *)a->first);                                             \
            for (int64_t tap = 0; tap < a->count; tap++) {                                        \
                const type *from = x + a->taps[tap];                                              \
                if (step == 1)                                                                    \
                    for (int64_t j = 0; j < length; j++)                                          \
                        y[j] = COMBINE(y[j], from[j]);                                            \
                else                                                                              \
                    for (int64_t j = 0; j < length; j++)                                          \
                        y[j] = COMBINE(y[j], from[j * step]);                                     \
            }                                                                                     \
        }                                                                                         \
    }

#define WINDOWS_OF(suffix, type, sum)                                                                \
    WINDOWED(window_add_##suffix, sum, ADDED)                                                     \
    WINDOWED(window_multiply_##suffix, sum, MULTIPLIED)                                           \
    WINDOWED(window_maximum_##suffix, type, HIGHER_OF)                                               \
    WINDOWED(window_minimum_##suffix, type, LOWER_OF)

WINDOWS_OF(float32, float, float)
WINDOWS_OF(float64, double, double)
WINDOWS_OF(int32, int32_t, uint32_t)
WINDOWS_OF(int64, int64_t, uint64_t)

KERNELS(windows, KERNEL(col2im_float, windows), KERNEL(col2im_double, windows),
        KERNELS_OF_NUMBERS(window_add, windowed), KERNELS_OF_NUMBERS(window_multiply, windowed),
        KERNELS_OF_NUMBERS(window_maximum, windowed), KERNELS_OF_NUMBERS(window_minimum, windowed))
