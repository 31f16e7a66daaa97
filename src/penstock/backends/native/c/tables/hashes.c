/* Locality-sensitive hashes: the signs of weighted sums of fingerprints of seeds and items. A kernel's item is a row of
   seeds. The fingerprint is FarmHash's Fingerprint64 (https://github.com/google/farmhash), which never changes. */
#include "native.h"
#include <string.h>

static const uint64_t K0 = 0xC3A5C85C97CB3127u, K1 = 0xB492B66FBE98F273u, K2 = 0x9AE16A3B2F90404Fu;

enum { SEED = 4, NEAR = 64, HEAD = NEAR + 8, SEEDS = 256 };

/* A key is a seed and then an item. Words that begin before NEAR are read from the head, a copy of its first bytes with
   zeros for the seed, others behind `rest`, where the key would begin if its seed stood before the item. */
typedef struct {
    char head[HEAD];
    const char *rest;
    int64_t length;
    uint32_t seed;
} key;

INLINED uint64_t seed_at(const key *k, int64_t at)
{
    return at < SEED ? k->seed >> 8 * at : 0;
}

INLINED uint64_t word(const key *k, int64_t at)
{
    uint64_t x;
    memcpy(&x, (at < NEAR ? k->head : k->rest) + at, sizeof x);
    return x | seed_at(k, at);
}

INLINED uint64_t half(const key *k, int64_t at)
{
    uint32_t x;
    memcpy(&x, k->head + at, sizeof x);
    return x | seed_at(k, at);
}

INLINED uint64_t rotated(uint64_t x, int bits)
{
    return x >> bits | x << (64 - bits);
}

INLINED uint64_t mixed(uint64_t x)
{
    return x ^ x >> 47;
}

INLINED uint64_t joined(uint64_t x, uint64_t y, uint64_t mul)
{
    return mixed((y ^ mixed((x ^ y) * mul)) * mul) * mul;
}

static uint64_t of_up_to_64(const key *k, uint64_t mul)
{
    const int64_t length = k->length;
    const uint64_t a = word(k, 0) * (length > 32 ? K2 : K1), b = word(k, 8), c = word(k, length - 8) * mul;
    const uint64_t y = rotated(a + b, 43) + rotated(c, 30) + word(k, length - 16) * K2;
    const uint64_t z = joined(y, a + rotated(b + K2, 18) + c, mul);
    if (length <= 32)
        return z;
    const uint64_t e = word(k, 16) * mul, f = word(k, 24);
    const uint64_t g = (y + word(k, length - 32)) * mul, h = (z + word(k, length - 24)) * mul;
    return joined(rotated(e + f, 43) + rotated(g, 30) + h, e + rotated(f + a, 18) + g, mul);
}

typedef struct {
    uint64_t x, y, z, v[2], w[2];
} state;

/* Mix two words with 32 bytes of the key. */
INLINED void halves(const key *k, int64_t at, uint64_t a, uint64_t b, uint64_t *to)
{
    const uint64_t last = word(k, at + 24);
    a += word(k, at);
    const uint64_t whole = a + word(k, at + 8) + word(k, at + 16);
    to[0] = whole + last;
    to[1] = rotated(b + a + last, 21) + rotated(whole, 44) + a;
}

/* Mix the state with the 64 bytes from `at` on. */
INLINED void block(state *s, const key *k, int64_t at, uint64_t mul, const int times)
{
    const uint64_t x = (rotated(s->x + s->y + s->v[0] + word(k, at + 8), 37) * mul) ^ (s->w[1] * times);
    const uint64_t y = rotated(s->y + s->v[1] + word(k, at + 48), 42) * mul + s->v[0] * times + word(k, at + 40);
    const uint64_t z = rotated(s->z + s->w[0], 33) * mul;
    halves(k, at, s->v[1] * mul, x + s->w[0], s->v);
    halves(k, at + 32, z + s->w[1], y + word(k, at + 16), s->w);
    s->x = z, s->y = y, s->z = x;
}

static uint64_t of_many(const key *k)
{
    const uint64_t y = 81 * K1 + 113;
    state s = {81 * K2 + word(k, 0), y, mixed(y * K2 + 113) * K2, {0, 0}, {0, 0}};
    for (int64_t at = 0; at < (k->length - 1) / 64 * 64; at += 64)
        block(&s, k, at, K1, 1);
    const uint64_t mul = K1 + ((s.z & 0xFF) << 1);
    s.w[0] += (k->length - 1) % 64;
    s.v[0] += s.w[0];
    s.w[0] += s.v[0];
    block(&s, k, k->length - 64, mul, 9);
    const uint64_t first = joined(s.v[0], s.w[0], mul) + mixed(s.y) * K0 + s.z;
    return joined(first, joined(s.v[1], s.w[1], mul) + s.x, mul);
}

INLINED uint64_t fingerprint(const key *k)
{
    const int64_t length = k->length;
    const uint64_t mul = K2 + 2 * length;
    if (length > 64)
        return of_many(k);
    if (length > 16)
        return of_up_to_64(k, mul);
    if (length < 8)
        return joined((half(k, 0) << 3) + length, half(k, length - 4), mul);
    const uint64_t a = word(k, 0) + K2, b = word(k, length - 8);
    return joined(rotated(b, 37) * mul + a, (rotated(a, 25) + b) * mul, mul);
}

struct projection {
    const uint32_t *seeds;
    const char *items;
    const float *weights; /* or NULL */
    int32_t *y;
    int64_t bits, count, bytes; /* seeds of a row; items, and bytes of each */
    int64_t dense;              /* each bit is a number; else those of a row, in a range of its own */
};

/* Add the weighted fingerprints of all items to the totals of seeds. */
static void add_items(const struct projection *a, const uint32_t *seeds, int64_t count, double *totals)
{
    key k;
    memset(k.head, 0, SEED);
    k.length = a->bytes + SEED;
    for (int64_t i = 0; i < a->count; i++) {
        const char *item = a->items + i * a->bytes;
        memcpy(k.head + SEED, item, smaller(a->bytes, HEAD - SEED));
        k.rest = item - SEED;
        const double weight = a->weights ? a->weights[i] : 1;
        for (int64_t j = 0; j < count; j++) {
            k.seed = seeds[j];
            totals[j] += weight * (double)(int64_t)fingerprint(&k);
        }
    }
}

ITEMS_OF(projection, projection)
{
    const int64_t bits = a->bits, together = bits ? SEEDS / bits : end - begin;
    for (int64_t row = begin, last; row < end; row = last) {
        double totals[SEEDS] = {0}, *total = totals;
        last = smaller(row + together, end);
        add_items(a, a->seeds + row * bits, (last - row) * bits, totals);
        for (; row < last; row++) {
            int64_t number = row;
            for (int64_t bit = 0; bit < bits; bit++, total++) {
                number = number << 1 | (*total > 0);
                if (a->dense)
                    a->y[row * bits + bit] = *total > 0;
            }
            if (!a->dense)
                a->y[row] = (int32_t)number;
        }
    }
}

KERNELS(hashes, KERNEL(projection, projection))
