/* MaxPool, AveragePool and LpPool, with channels before the positions or behind them. An item is a
   stretch of columns of one row of the result, or several short rows: those that the windows of one
   see are combined into one, of which the windows then combine columns. */
#include <math.h>
#include <string.h>
#include "native.h"

enum { AXES = 3, BUFFER = 12288, CHUNK = 512, MOST_TAPS = 64, WIDE = 1024, MOST_LINES = 64 };

typedef struct {
    int64_t size, count, kernel, stride, dilation, begin, pitch;
} window;

struct pooling {
    const void *x;
    void *y;
    int64_t *indices;
    const window *axes;    /* AXES of them, the first ones of size 1 if there are fewer */
    const double *counted; /* elements by which a mean is divided, of the windows of each axis */
    int64_t channels;      /* behind a position, or 1 */
    int64_t chunk;         /* columns of an item */
    int64_t total, lines;  /* rows of the result, and those of an item */
    int64_t pitch;         /* elements from one row to the next that an item combines */
};

/* The taps from `first` to `last` - 1 of window o are no padding; that of tap 0. */
static inline int64_t inside(const window *w, int64_t o, int64_t *first, int64_t *last)
{
    const int64_t at = o * w->stride - w->begin, step = w->dilation, left = w->size - at;
    *first = 0;
    *last = w->kernel;
    if (at >= 0 && left > (w->kernel - 1) * step)
        return at; /* divisions take long beside short rows */
    *first = at < 0 ? (-at + step - 1) / step : 0;
    *last = left > 0 ? (left + step - 1) / step : 0;
    *last = *last < w->kernel ? *last : w->kernel;
    return at;
}

/* NaN beats all numbers, and nothing beats NaN. */
#define HOW(type)                                                                                 \
    static inline type sum_##type(type a, type b)                                                 \
    {                                                                                             \
        return a + b;                                                                             \
    }                                                                                             \
    static inline type higher_##type(type a, type b)                                              \
    {                                                                                             \
        const type most = b > a ? b : a;                                                          \
        return b != b ? b : most;                                                                 \
    }

HOW(float)
HOW(double)

#define COMBINE(name, type, MAP, HOW)                                                             \
    /* to[j] = what `n` rows come to in their elements j * step. */                               \
    INLINED void name##_step(type *restrict to, const type *const *from, int64_t n, int64_t length, \
                             int64_t step)                                                        \
    {                                                                                             \
        const type *restrict a = from[0], *restrict b = from[n > 1], *restrict c = from[n - 1];   \
        if (n == 1)                                                                               \
            for (int64_t j = 0; j < length; j++)                                                  \
                to[j] = MAP(a[j * step]);                                                         \
        else if (n == 2)                                                                          \
            for (int64_t j = 0; j < length; j++)                                                  \
                to[j] = HOW(MAP(a[j * step]), MAP(b[j * step]));                                  \
        else                                                                                      \
            for (int64_t j = 0; j < length; j++) {                                                \
                const type both = HOW(MAP(a[j * step]), MAP(b[j * step]));                        \
                to[j] = HOW(both, MAP(c[j * step]));                                              \
            }                                                                                     \
        for (int64_t i = 2; i < n - 1; i++) {                                                     \
            const type *restrict next = from[i];                                                  \
            for (int64_t j = 0; j < length; j++)                                                  \
                to[j] = HOW(to[j], MAP(next[j * step]));                                          \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void name(type *to, const type *const *from, int64_t n, int64_t length,         \
                            int64_t step)                                                         \
    {                                                                                             \
        if (step == 1)                                                                            \
            name##_step(to, from, n, length, 1);                                                  \
        else if (step == 2)                                                                       \
            name##_step(to, from, n, length, 2);                                                  \
        else                                                                                      \
            name##_step(to, from, n, length, step);                                               \
    }

/* The remainder of `rest` by n, and its quotient in its place. */
static inline int64_t digit(int64_t *rest, int64_t n)
{
    if (n == 1)
        return 0;
    const int64_t quotient = *rest / n, remainder = *rest % n;
    *rest = quotient;
    return remainder;
}

#define POOL(name, type, start, MAP, HOW, FINISH)                                                 \
    COMBINE(name##_rows, type, MAP, HOW)                                                          \
    COMBINE(name##_columns, type, SAME, HOW)                                                      \
    /* Combine what columns from `first` on of a line of the result see into one row. Returns by  \
       how many rows a mean is divided. */                                                        \
    static inline type name##_line(const struct pooling *a, int64_t line, int64_t first,          \
                                   int64_t count, type *row)                                      \
    {                                                                                             \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const int64_t channels = a->channels, o = digit(&line, v->count);                         \
        const int64_t d = digit(&line, u->count);                                                 \
        const type *from[MOST_TAPS];                                                              \
        int64_t d0, d1, h0, h1, n = 0;                                                            \
        const int64_t depth = inside(u, d, &d0, &d1), height = inside(v, o, &h0, &h1);            \
        /* The columns that the windows see, and those of them that are no padding. */            \
        const int64_t left = first * w->stride - w->begin;                                        \
        const int64_t right = left + (count - 1) * w->stride + (w->kernel - 1) * w->dilation + 1; \
        const int64_t low = left < 0 ? 0 : left, high = right > w->size ? w->size : right;        \
        for (int64_t i = d0; i < d1; i++)                                                         \
            for (int64_t k = h0; k < h1; k++) {                                                   \
                const int64_t r = (line * u->size + depth + i * u->dilation) * v->size + height + \
                                  k * v->dilation;                                                \
                from[n++] = (const type *)a->x + (r * w->size + low) * channels;                  \
            }                                                                                     \
        if (n && low < high)                                                                      \
            name##_rows(row + (low - left) * channels, from, n, (high - low) * channels, 1);      \
        const int64_t none = n && low < high ? low - left : right - left;                         \
        for (int64_t j = 0; j < none * channels; j++)                                             \
            row[j] = start;                                                                       \
        for (int64_t j = (high - left) * channels; j < (right - left) * channels; j++)            \
            row[j < 0 ? 0 : j] = start;                                                           \
        return (type)(a->counted[d] * a->counted[u->count + o]);                                  \
    }                                                                                             \
                                                                                                  \
    static int name(const void *arguments, int64_t begin, int64_t end)                            \
    {                                                                                             \
        const struct pooling *a = arguments;                                                      \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const int64_t channels = a->channels, chunks = (w->count + a->chunk - 1) / a->chunk;      \
        const double *of_column = a->counted + u->count + v->count;                               \
        const int64_t step = a->pitch / w->stride; /* results of a line, with those between lines */\
        type row[BUFFER], wide[WIDE], rows[MOST_LINES];                                           \
        const type *from[MOST_TAPS];                                                              \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t block = item;                                                                 \
            const int64_t first = digit(&block, chunks) * a->chunk, rest = w->count - first;      \
            const int64_t count = rest < a->chunk ? rest : a->chunk, line = block * a->lines;     \
            const int64_t lines = a->total - line < a->lines ? a->total - line : a->lines;        \
            for (int64_t l = 0; l < lines; l++)                                                   \
                rows[l] = name##_line(a, line + l, first, count, row + l * a->pitch);             \
            type *restrict y = (type *)a->y + (line * w->count + first) * channels;               \
            const int64_t length = (lines - 1) * step + count, apart = lines > 1 && step > count; \
            for (int64_t j = 0; j < (channels == 1 ? 1 : count); j++) {                           \
                for (int64_t k = 0; k < w->kernel; k++)                                           \
                    from[k] = row + (j * w->stride + k * w->dilation) * channels;                 \
                if (channels == 1)                                                                \
                    name##_columns(apart ? wide : y, from, w->kernel, length, w->stride);         \
                else                                                                              \
                    name##_columns(y + j * channels, from, w->kernel, channels, 1);               \
            }                                                                                     \
            for (int64_t l = 0; l < lines; l++, y += count * channels) {                          \
                if (apart)                                                                        \
                    memcpy(y, wide + l * step, count * sizeof(type));                             \
                FINISH                                                                            \
            }                                                                                     \
        }                                                                                         \
        return 0;                                                                                 \
    }

#define SAME(x) (x)
#define SQUARE(x) ((x) * (x))
#define ABSOLUTE(x) ((x) < 0 ? -(x) : (x))
#define NOTHING (void)of_column, (void)rows[l];
#define ROOT                                                                                      \
    NOTHING                                                                                       \
    for (int64_t j = 0; j < count * channels; j++)                                                \
        y[j] = (__typeof__(*y))sqrt(y[j]);
#define MEAN                                                                                      \
    if (channels == 1)                                                                            \
        for (int64_t j = 0; j < count; j++)                                                       \
            y[j] /= rows[l] * (__typeof__(*y))of_column[first + j];                                  \
    else                                                                                          \
        for (int64_t j = 0; j < count; j++)                                                       \
            for (int64_t c = 0; c < channels; c++)                                                \
                y[j * channels + c] /= rows[l] * (__typeof__(*y))of_column[first + j];

#define INDICES(type)                                                                             \
    static int max_pool_indices_##type(const void *arguments, int64_t begin, int64_t end)         \
    {                                                                                             \
        const struct pooling *a = arguments;                                                      \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const int64_t chunks = (w->count + CHUNK - 1) / CHUNK;                                    \
        type best[CHUNK];                                                                         \
        int32_t places[CHUNK];                                                                    \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t line = item, plane;                                                           \
            const int64_t first = digit(&line, chunks) * CHUNK, rest = w->count - first;          \
            const int64_t o = (plane = line, digit(&plane, v->count));                            \
            const int64_t d = digit(&plane, u->count);                                            \
            const int64_t count = rest < CHUNK ? rest : CHUNK;                                    \
            int64_t d0, d1, h0, h1;                                                               \
            const int64_t depth = inside(u, d, &d0, &d1), height = inside(v, o, &h0, &h1);        \
            for (int64_t j = 0; j < count; j++) {                                                 \
                best[j] = -INFINITY;                                                              \
                places[j] = -1;                                                                   \
            }                                                                                     \
            for (int64_t i = d0; i < d1; i++)                                                     \
                for (int64_t k = h0; k < h1; k++)                                                 \
                    for (int64_t l = 0; l < w->kernel; l++) {                                     \
                        const int64_t p = depth + i * u->dilation, q = height + k * v->dilation;  \
                        const int64_t r = first * w->stride - w->begin + l * w->dilation;         \
                        const type *x = (const type *)a->x +                                      \
                                        ((plane * u->size + p) * v->size + q) * w->size + r;      \
                        const int64_t step = w->stride, left = w->size - r;                       \
                        const int64_t low = r < 0 ? (-r + step - 1) / step : 0;                   \
                        int64_t high = left > 0 ? (left + step - 1) / step : 0;                   \
                        high = high < count ? high : count;                                       \
                        const int32_t place =                                                     \
                            (int32_t)(p * u->pitch + q * v->pitch + r * w->pitch);                \
                        const int32_t further = (int32_t)(step * w->pitch);                       \
                        if (step == 1)                                                            \
                            FURTHER(1)                                                            \
                        else if (step == 2)                                                       \
                            FURTHER(2)                                                            \
                        else                                                                      \
                            FURTHER(step)                                                         \
                    }                                                                             \
            const int64_t at = line * w->count + first;                                           \
            const int64_t before = plane * u->size * v->size * w->size;                           \
            for (int64_t j = 0; j < count; j++) {                                                 \
                ((type *)a->y)[at + j] = best[j];                                                 \
                a->indices[at + j] = places[j] < 0 ? -1 : places[j] + before;                     \
            }                                                                                     \
        }                                                                                         \
        return 0;                                                                                 \
    }

#define FURTHER(step)                                                                             \
    for (int64_t j = low; j < high; j++) {                                                        \
        const int beaten = ((!(x[j * step] <= best[j])) | (places[j] < 0)) & (best[j] == best[j]); \
        best[j] = beaten ? x[j * step] : best[j];                                                 \
        places[j] = beaten ? place + (int32_t)j * further : places[j];                            \
    }

#define KINDS(type)                                                                               \
    POOL(max_pool_##type, type, -INFINITY, SAME, higher_##type, NOTHING)                                 \
    POOL(average_pool_##type, type, 0, SAME, sum_##type, MEAN)                                           \
    POOL(l1_pool_##type, type, 0, ABSOLUTE, sum_##type, NOTHING)                                         \
    POOL(l2_pool_##type, type, 0, SQUARE, sum_##type, ROOT)                                              \
    INDICES(type)

KINDS(float)
KINDS(double)

#define ENTRIES(type)                                                                             \
    KERNEL(max_pool_##type, pooling), KERNEL(average_pool_##type, pooling),                       \
        KERNEL(l1_pool_##type, pooling), KERNEL(l2_pool_##type, pooling),                         \
        KERNEL(max_pool_indices_##type, pooling)

const kernel_entry pooling_kernels[] = {ENTRIES(float), ENTRIES(double), END_OF_KERNELS};
