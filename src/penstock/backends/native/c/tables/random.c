/* Random bits of counters, by Threefry-2x32 and Philox-4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
   SC 2011). An item is a block of counters. */
#include "native.h"
#include <string.h>

struct random_bits {
    const uint64_t *state; /* key, counter, and perhaps more of Philox's counter */
    uint64_t *next;        /* the state behind all bits */
    uint32_t *y;
    int64_t words, count; /* of the state, of 8 bytes, and of y, of 4 */
    int64_t threefry;
};

enum { BLOCK = 64, WIDEST = 4 };
typedef uint32_t lanes[BLOCK];

INLINED void threefry(const uint32_t k0, const uint32_t k1, lanes x0, lanes x1)
{
    static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    for (int l = 0; l < BLOCK; l++)
        x0[l] += k0, x1[l] += k1;
    for (int group = 0; group < 5; group++) {
        for (int i = 0; i < 4; i++) {
            const int turn = rotations[group % 2][i];
            for (int l = 0; l < BLOCK; l++) {
                x0[l] += x1[l];
                x1[l] = (x1[l] << turn | x1[l] >> (32 - turn)) ^ x0[l];
            }
        }
        for (int l = 0; l < BLOCK; l++)
            x0[l] += keys[(group + 1) % 3], x1[l] += keys[(group + 2) % 3] + group + 1;
    }
}

INLINED void philox(uint32_t k0, uint32_t k1, lanes x0, lanes x1, lanes x2, lanes x3)
{
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int l = 0; l < BLOCK; l++) {
            const uint64_t first = (uint64_t)0xD2511F53u * x0[l], second = (uint64_t)0xCD9E8D57u * x2[l];
            x0[l] = (uint32_t)(second >> 32) ^ x1[l] ^ k0;
            x2[l] = (uint32_t)(first >> 32) ^ x3[l] ^ k1;
            x1[l] = (uint32_t)second, x3[l] = (uint32_t)first;
        }
}

/* Write the words of all lanes in turn. */
INLINED void interleave(lanes *x, const int width, uint32_t *restrict to)
{
    for (int l = 0; l < BLOCK; l++)
        for (int i = 0; i < width; i++)
            to[l * width + i] = x[i][l];
}

ITEMS_OF(random_bits, random_bits)
{
    const int width = a->threefry ? 2 : 4;
    const uint32_t k0 = (uint32_t)a->state[0], k1 = (uint32_t)(a->state[0] >> 32);
    const uint64_t rest = a->state[a->words == 3 ? 2 : 0];
    if (!begin) {
        memcpy(a->next, a->state, a->words * sizeof *a->next);
        a->next[1] += CEIL_DIV(a->count, width);
    }
    for (int64_t item = begin; item < end; item++) {
        lanes x[WIDEST];
        uint32_t last[BLOCK * WIDEST];
        for (int l = 0; l < BLOCK; l++) {
            const uint64_t counter = a->state[1] + item * BLOCK + l;
            x[0][l] = (uint32_t)counter, x[1][l] = (uint32_t)(counter >> 32);
            x[2][l] = (uint32_t)rest, x[3][l] = (uint32_t)(rest >> 32);
        }
        const int64_t at = item * BLOCK * width, left = smaller(a->count - at, BLOCK * width);
        uint32_t *y = left < BLOCK * width ? last : a->y + at;
        if (width == 2) {
            threefry(k0, k1, x[0], x[1]);
            interleave(x, 2, y);
        } else {
            philox(k0, k1, x[0], x[1], x[2], x[3]);
            interleave(x, 4, y);
        }
        if (y == last)
            memcpy(a->y + at, last, left * sizeof *last);
    }
}

KERNELS(random, KERNEL(random_bits, random_bits))
