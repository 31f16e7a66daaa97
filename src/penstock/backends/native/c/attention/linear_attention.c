/* LinearAttention: each step scales the rows of a state matrix by a decay, adds the outer product of keys with the
   difference between values and the matrix's prediction of them, and multiplies it by queries. Columns are
   independent: an item is some columns of a head. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "floats.h"
#include "math32.h"

enum { VECTORS = 4, COLUMNS = 64, MOST_KEYS = 512 };

struct linear_attention {
    const float *q, *k, *v;          /* [batch, length, heads, elements] */
    const float *past, *decay, *beta; /* or NULL; past: [batch, key heads, size, values] */
    float *y, *state;
    int64_t length, heads, key_heads, size, values;
    int64_t decays, betas; /* of a token */
    int64_t blocks;        /* of columns, each an item */
    double scale;
};

/* Some columns of a matrix. */
typedef struct {
    float *data;
    int64_t row;
} columns;

/* One step of `count` columns, at most `vectors` vectors; `known`: keys times decays. */
INLINED void step(const struct linear_attention *a, columns from, columns to, const float *k, const float *decays,
                  const float *known, const float *v, const float *beta, const float *q, float *y, const int vectors,
                  const int64_t count)
{
    const int64_t size = a->size;
    vector added[VECTORS], sums[2 * VECTORS];
    UNROLLED(j, 2 * vectors)
        sums[j] = (vector){0};
    UNROLLED(j, vectors)
        added[j] = load_some(v + j * LANES, count - j * LANES);
    if (beta) {
        const float *at = from.data;
        int64_t i = 0;
        for (; i + 1 < size; i += 2, at += 2 * from.row)
            UNROLLED(j, vectors) {
                sums[j] += known[i] * load_some(at + j * LANES, count - j * LANES);
                sums[j + vectors] += known[i + 1] * load_some(at + from.row + j * LANES, count - j * LANES);
            }
        UNROLLED(j, vectors) {
            if (i < size)
                sums[j] += known[i] * load_some(at + j * LANES, count - j * LANES);
            added[j] = (added[j] - (sums[j] + sums[j + vectors])) * *beta;
            sums[j] = (vector){0};
        }
    }
    for (int64_t i = 0; i < size; i++)
        UNROLLED(j, vectors) {
            const vector old = load_some(from.data + i * from.row + j * LANES, count - j * LANES);
            const vector next = old * decays[i] + k[i] * added[j];
            sums[j] += q[i] * next;
            store_some(to.data + i * to.row + j * LANES, next, count - j * LANES);
        }
    for (int64_t other = 1;; other++) {
        UNROLLED(j, vectors) {
            store_some(y + j * LANES, sums[j] * (float)a->scale, count - j * LANES);
            sums[j] = (vector){0};
        }
        if (other == a->heads / a->key_heads)
            return;
        y += a->values;
        for (int64_t i = 0; i < size; i++)
            UNROLLED(j, vectors)
                sums[j] += q[other * size + i] * load_some(to.data + i * to.row + j * LANES, count - j * LANES);
    }
}

ITEMS_OF(linear_attention, linear_attention)
{
    const int64_t size = a->size, row = a->values, group = a->heads / a->key_heads;
    _Alignas(64) float held[MOST_KEYS * COLUMNS];
    float decays[MOST_KEYS], known[MOST_KEYS];
    for (int64_t item = begin; item < end; item++) {
        const int64_t matrix = item / a->blocks, head = matrix % a->key_heads, column = item % a->blocks * COLUMNS;
        const int64_t count = smaller(COLUMNS, row - column), place = matrix * size * row + column;
        const columns state = {a->state + place, row}, inside = {held, COLUMNS};
        columns from = a->past ? (columns){(float *)a->past + place, row} : inside;
        FILL(decays, size, 1);
        if (!a->past)
            memset(held, 0, size * COLUMNS * sizeof(float));
        for (int64_t t = 0; t < a->length; t++, from = inside) {
            const int64_t token = matrix / a->key_heads * a->length + t, keys = token * a->key_heads + head;
            const int64_t queries = token * a->heads + head * group;
            const float *decay = a->decay ? a->decay + token * a->decays : NULL, *k = a->k + keys * size;
            const float *beta = a->beta ? a->beta + token * a->betas + (a->betas > 1 ? head : 0) : NULL;
            const float *q = a->q + queries * size, *v = a->v + keys * row + column;
            float *y = a->y + queries * row + column;
            const columns to = t + 1 < a->length ? inside : state;
            if (decay && a->decays == a->key_heads) {
                const float own = exp32(decay[head]);
                FILL(decays, size, own);
            }
            for (int64_t i = 0; i < size; i++) {
                if (decay && a->decays > a->key_heads)
                    decays[i] = exp32(decay[head * size + i]);
                known[i] = k[i] * decays[i];
            }
            int64_t j = 0;
#define STEP(vectors, count)                                                                      \
    step(a, (columns){from.data + j, from.row}, (columns){to.data + j, to.row}, k, decays, known, v + j, beta, q, y + j, \
         vectors, count)
            for (; j + VECTORS * LANES <= count; j += VECTORS * LANES)
                STEP(VECTORS, VECTORS * LANES);
            for (; j + 2 * LANES <= count; j += 2 * LANES)
                STEP(2, 2 * LANES);
            for (; j < count; j += LANES)
                STEP(1, count - j);
        }
        for (int64_t i = 0; !a->length && i < size; i++)
            memcpy(state.data + i * row, from.data + i * from.row, count * sizeof(float));
    }
}

KERNELS(linear_attention, KERNEL(linear_attention, linear_attention))
