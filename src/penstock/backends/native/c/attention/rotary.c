/* Rotary position embedding: pairs of features are rotated by the angles of their position. An item is a head of a
   token. */
#include <string.h>
#include "native.h"

struct rotary {
    const float *x, *cos, *sin; /* cos, sin: [batch, sequence, half] without positions, else [angles, half] */
    const int64_t *positions;   /* [batch, sequence], or one start for all samples */
    float *y;
    int64_t heads, sequence, size, half, angles;
    int64_t heads_first, interleaved, one;
};

static inline void turn(const float *restrict a, const float *restrict b, const float *restrict cos,
                        const float *restrict sin, float *restrict c, float *restrict d, int64_t half,
                        const int step)
{
    for (int64_t i = 0; i < half; i++) {
        c[i * step] = a[i * step] * cos[i] - b[i * step] * sin[i];
        d[i * step] = a[i * step] * sin[i] + b[i * step] * cos[i];
    }
}

CHECKED_ITEMS_OF(rotary, rotary)
{
    int64_t size = a->size, half = a->half, of_sample = a->heads * a->sequence;
    for (int64_t item = begin; item < end; item++) {
        int64_t at = a->heads_first ? item % a->sequence : item % of_sample / a->heads;
        int64_t token = item / of_sample * a->sequence + at, angle = token;
        if (a->positions)
            angle = a->one ? a->positions[0] : a->positions[token];
        if (angle < 0 || angle >= a->angles)
            return 1;
        angle += a->one ? at : 0;
        if (angle >= a->angles)
            return 1;
        const float *x = a->x + item * size, *cos = a->cos + angle * half, *sin = a->sin + angle * half;
        float *y = a->y + item * size;
        if (a->interleaved)
            turn(x, x + 1, cos, sin, y, y + 1, half, 2);
        else
            turn(x, x + half, cos, sin, y, y + half, half, 1);
        memcpy(y + 2 * half, x + 2 * half, (size - 2 * half) * sizeof *y);
    }
    return 0;
}

KERNELS(rotary, KERNEL(rotary, rotary))
