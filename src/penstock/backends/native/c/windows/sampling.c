/* GridSample and AffineGrid. An item is a block of the points at which an image is sampled: their indices and weights
   are computed once for all channels. */
#include <math.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "native.h"

struct grid_sample {
    const void *x, *grid;
    void *y;
    const int64_t *sizes;              /* of the sampled axes */
    int64_t rank, channels, points;    /* points of an image */
    int64_t taps, padding, corners;    /* taps along an axis: 1 nearest, 2 linear, 4 cubic */
};

struct affine_grid {
    const void *theta;   /* [images, rank, rank + 1] */
    const void *centres; /* concatenated over axes */
    void *y;
    const int64_t *sizes;
    int64_t rank, rows; /* rows of an image along its last axis */
};

enum { POINTS = 64, MOST_TAPS = 64, MOST_RANK = 3 };
enum { ZEROS, BORDER, REFLECTION };

#define CUBIC_A (-0.75)

/* Gather the elements at POINTS indices, 0 for negative ones. */
#define PICK(type)                                                                                \
    static inline void picked_##type(const type *x, const int32_t *places, type *values)          \
    {                                                                                             \
        for (int64_t p = 0; p < POINTS; p++)                                                      \
            values[p] = places[p] < 0 ? 0 : x[places[p]];                                         \
    }

PICK(double)
#ifdef __AVX512F__ /* compilers prefer scalar loads by mistake */
static inline void picked_float(const float *x, const int32_t *places, float *values)
{
    for (int64_t p = 0; p < POINTS; p += 16) {
        const __m512i at = _mm512_loadu_si512(places + p);
        const __mmask16 inside = _mm512_cmpge_epi32_mask(at, _mm512_setzero_si512());
        _mm512_storeu_ps(values + p, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), inside, at, x, 4));
    }
}
#else
PICK(float)
#endif

#define SAMPLE(type, rint, floor, fmod)                                                           \
    static inline type reflected_##type(type x, type low, type high)                              \
    {                                                                                             \
        type extent = high - low;                                                                 \
        if (x >= low && x <= high)                                                                \
            return extent > 0 ? x : low;                                                          \
        if (extent <= 0)                                                                          \
            return low;                                                                           \
        type folded = fmod(x - low, 2 * extent);                                                  \
        folded = folded < 0 ? folded + 2 * extent : folded;                                       \
        return low + (2 * extent - folded < folded ? 2 * extent - folded : folded);               \
    }                                                                                             \
                                                                                                  \
    /* Indices and weights of the `taps` neighbours of each point along an axis; -1: outside. */  \
    static inline void neighbours_##type(const struct grid_sample *a, const type *grid,           \
                                         int64_t size, int64_t count, int32_t (*pixels)[POINTS],  \
                                         type (*weights)[POINTS])                                 \
    {                                                                                             \
        const type near = (type)CUBIC_A + 2, near3 = (type)CUBIC_A + 3, cubic = (type)CUBIC_A;    \
        type low = a->corners ? 0 : (type)-0.5, high = a->corners ? size - 1 : size - (type)0.5;  \
        for (int64_t p = 0; p < count; p++) {                                                     \
            type g = grid[p * a->rank], x;                                                        \
            x = a->corners ? (g + 1) / 2 * (size - 1) : ((g + 1) * size - 1) / 2;                 \
            x = a->taps == 1 ? rint(x) : x;                                                       \
            if (a->padding == BORDER && a->taps != 4 && (x < low || x > high))                    \
                x = x < 0 ? 0 : size - 1;                                                         \
            if (a->padding == REFLECTION)                                                         \
                x = reflected_##type(x, low, high);                                               \
            x = x != x || x < -4 ? -4 : x > size + 4 ? size + 4 : x;                              \
            type left = a->taps == 1 ? x : floor(x), t = x - left, s = 1 - t;                     \
            if (a->taps == 2) {                                                                   \
                weights[0][p] = s;                                                                \
                weights[1][p] = t;                                                                \
            }                                                                                     \
            if (a->taps == 4) {                                                                   \
                type first = 1 + t, last = 2 - t;                                                 \
                weights[0][p] =                                                                   \
                    ((cubic * first - 5 * cubic) * first + 8 * cubic) * first - 4 * cubic;        \
                weights[1][p] = (near * t - near3) * t * t + 1;                                   \
                weights[2][p] = (near * s - near3) * s * s + 1;                                   \
                weights[3][p] = ((cubic * last - 5 * cubic) * last + 8 * cubic) * last - 4 * cubic; \
            }                                                                                     \
            for (int64_t k = 0; k < a->taps; k++) {                                               \
                type place = left + (k - (a->taps == 4));                                         \
                if (a->padding == REFLECTION)                                                     \
                    place = reflected_##type(place, low, high);                                   \
                type inside = place < 0 ? 0 : place > size - 1 ? size - 1 : place;                \
                int outside = a->padding == ZEROS && inside != place;                             \
                pixels[k][p] = outside ? -1 : (int32_t)inside;                                    \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(grid_sample_##type, grid_sample)                                                     \
    {                                                                                             \
        int64_t blocks = CEIL_DIV(a->points, POINTS), pixels = 1;                                 \
        int32_t places[MOST_TAPS][POINTS], own[4][POINTS];                                        \
        type shares[MOST_TAPS][POINTS], weights[4][POINTS];                                       \
        memset(weights, 0, sizeof weights);                                                       \
        for (int64_t i = 0; i < a->rank; i++)                                                     \
            pixels *= a->sizes[i];                                                                \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t image = item / blocks, first = item % blocks * POINTS, taps = 1;              \
            int64_t count = a->points - first < POINTS ? a->points - first : POINTS;              \
            const type *grid = (const type *)a->grid + (image * a->points + first) * a->rank;     \
            const type *x = (const type *)a->x + image * a->channels * pixels;                    \
            type *y = (type *)a->y + image * a->channels * a->points + first;                     \
            memset(own, 0, sizeof own); /* sums are of all POINTS, which are inside */            \
            for (int64_t axis = 0; axis < a->rank; axis++) {                                      \
                neighbours_##type(a, grid + a->rank - 1 - axis, a->sizes[axis], count, own, weights);\
                for (int64_t t = taps - 1; t >= 0; t--)                                           \
                    for (int64_t k = a->taps - 1; k >= 0; k--)                                    \
                        for (int64_t p = 0; p < POINTS; p++) {                                    \
                            int32_t before = axis ? places[t][p] : 0, at = own[k][p];             \
                            type share = axis ? shares[t][p] * weights[k][p] : weights[k][p];     \
                            int32_t place = before * (int32_t)a->sizes[axis] + at;                \
                            places[t * a->taps + k][p] = (before | at) < 0 ? -1 : place;          \
                            shares[t * a->taps + k][p] = share;                                   \
                        }                                                                         \
                taps *= a->taps;                                                                  \
            }                                                                                     \
            for (int64_t c = 0; c < a->channels; c++, x += pixels, y += a->points) {              \
                type values[POINTS], sums[POINTS] = {0};                                          \
                for (int64_t t = 0; t < taps; t++) {                                              \
                    picked_##type(x, places[t], values);                                          \
                    for (int64_t p = 0; p < POINTS && taps > 1; p++)                              \
                        sums[p] += values[p] * shares[t][p];                                      \
                }                                                                                 \
                memcpy(y, taps > 1 ? sums : values, count * sizeof(type));                        \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(affine_grid_##type, affine_grid)                                                     \
    {                                                                                             \
        int64_t rank = a->rank, width = a->sizes[rank - 1];                                       \
        for (int64_t item = begin; item < end; item++) {                                          \
            const type *theta = (const type *)a->theta + item / a->rows * rank * (rank + 1);      \
            const type *centres = a->centres;                                                     \
            type *restrict y = (type *)a->y + item * width * rank;                                \
            int64_t at[MOST_RANK], row = item % a->rows;                                          \
            type fixed[MOST_RANK], slope[MOST_RANK];                                              \
            for (int64_t axis = rank - 2; axis >= 0; axis--) {                                    \
                at[axis] = row % a->sizes[axis];                                                  \
                row /= a->sizes[axis];                                                            \
            }                                                                                     \
            for (int64_t i = 0; i < rank; i++) {                                                  \
                const type *from = centres;                                                       \
                slope[i] = theta[i * (rank + 1)];                                                 \
                fixed[i] = theta[i * (rank + 1) + rank];                                          \
                for (int64_t axis = 0; axis < rank - 1; from += a->sizes[axis++])                 \
                    fixed[i] += theta[i * (rank + 1) + rank - 1 - axis] * from[at[axis]];         \
            }                                                                                     \
            for (int64_t axis = 0; axis < rank - 1; axis++)                                       \
                centres += a->sizes[axis];                                                        \
            if (rank == 2)                                                                        \
                for (int64_t j = 0; j < width; j++) {                                             \
                    y[2 * j] = centres[j] * slope[0] + fixed[0];                                  \
                    y[2 * j + 1] = centres[j] * slope[1] + fixed[1];                              \
                }                                                                                 \
            else                                                                                  \
                for (int64_t j = 0; j < width * rank; j++)                                        \
                    y[j] = centres[j / rank] * slope[j % rank] + fixed[j % rank];                 \
        }                                                                                         \
    }

SAMPLE(float, rintf, floorf, fmodf)
SAMPLE(double, rint, floor, fmod)

KERNELS(sampling, KERNEL(grid_sample_float, grid_sample), KERNEL(grid_sample_double, grid_sample),
        KERNEL(affine_grid_float, affine_grid), KERNEL(affine_grid_double, affine_grid))
