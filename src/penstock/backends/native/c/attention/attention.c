/* Attention: softmax(scale q k + terms) v for each head, in blocks of keys, so that scores stay in the L1 cache. An
   item is a part of a head's queries. Queries, keys and values may be packed, some rows for each sample; terms are
   then those of the padded batch. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include <float.h>
#include <string.h>
#include "attention.h"
#include "copies.h"
#include "floats.h"
#include "math32.h"

enum { ROWS = 6 }; /* most queries that are computed together */

enum { NONE, NANS, UNSEEN }; /* rows that become 0: those that are NaN, or those that attend to no key */

/* Vectors of a row that are computed together: the accumulators of six rows, and their operands, fill the
   registers. */
enum { VECTORS = BY_WIDTH(4, 2, 2) };

#define ALIGNED __attribute__((aligned(64)))

typedef int32_t lanes __attribute__((vector_size(VECTOR_BYTES)));

/* The offset of a head's first element in the tensor with these strides. */
static int64_t first_of(const struct attention *h, const int64_t *steps, int64_t head)
{
    int64_t at = 0;
    for (int64_t i = h->rank - 1; i >= 0; i--) {
        at += head % h->dims[i] * steps[i];
        head /= h->dims[i];
    }
    return at;
}

static inline int64_t whole_vectors(int64_t n)
{
    return CEIL_DIV(n, LANES) * LANES;
}

/* Copy a matrix to rows of whole vectors, whose padding must be zeros already. */
static void copy(float *to, const float *from, int64_t rows, int64_t columns, const int64_t *steps)
{
    copy_plan plan = {2, sizeof *to, {rows, columns}, {0}, {whole_vectors(columns) * sizeof *to, sizeof *to}};
    plan.from[0] = steps[0] * sizeof *to;
    plan.from[1] = steps[1] * sizeof *to;
    copy_elements(&plan, (const char *)from, (char *)to);
}

/* c = factor * a b + keep * c for some rows, each with its factors, and some vectors of columns, both constant;
   without `keep`, c is not read. */
INLINED void block(const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row,
                   int64_t n, float *c, int64_t c_row, const float *factors, const float *keep,
                   const int rows, const int vectors)
{
    vector sums[ROWS * VECTORS], x[VECTORS];
    UNROLLED(i, rows * vectors)
        sums[i] = (vector){0};
    for (int64_t k = 0; k < n; k++) {
        UNROLLED(j, vectors)
            memcpy(&x[j], b + k * b_row + j * LANES, sizeof *x);
        UNROLLED(i, rows) {
            float factor = a[i * a_row + k * a_column];
            UNROLLED(j, vectors)
                sums[i * vectors + j] += factor * x[j];
        }
    }
    __asm__("" : "+m"(*(float(*)[ROWS])factors) : : ); /* or the compiler loads factors before the loop */
    UNROLLED(i, rows * vectors)
        sums[i] *= factors[i / vectors];
    if (keep)
        UNROLLED(i, rows * vectors) {
            memcpy(x, c + i / vectors * c_row + i % vectors * LANES, sizeof *x);
            sums[i] += keep[i / vectors] * *x;
        }
    UNROLLED(i, rows * vectors)
        memcpy(c + i / vectors * c_row + i % vectors * LANES, &sums[i], sizeof *x);
}

/* The same for whole rows of b. */
INLINED void product(const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row,
                     int64_t n, float *c, int64_t c_row, const float *factors, const float *keep,
                     const int rows)
{
    int64_t rest = b_row / LANES;
    for (; rest >= VECTORS; rest -= VECTORS, b += VECTORS * LANES, c += VECTORS * LANES)
        block(a, a_row, a_column, b, b_row, n, c, c_row, factors, keep, rows, VECTORS);
    if (rest == 3) /* only with four vectors */
        block(a, a_row, a_column, b, b_row, n, c, c_row, factors, keep, rows, VECTORS > 3 ? 3 : 1);
    if (rest == 2)
        block(a, a_row, a_column, b, b_row, n, c, c_row, factors, keep, rows, 2);
    if (rest == 1)
        block(a, a_row, a_column, b, b_row, n, c, c_row, factors, keep, rows, 1);
}

/* SWAPPED(x, bit): x with the lanes swapped whose indices differ in one bit. */
#define OTHER(n, l, bit) (l) ^ (bit)
#define SWAPPED(x, bit) SHUFFLE(lanes, x, x, LANES_32(OTHER, bit))
#define FOLDED(x, join) (x = join(x, SWAPPED(x, 1)), x = join(x, SWAPPED(x, 2)), FOLDED_WIDE(x, join))
#if defined(__AVX512F__)
#define FOLDED_WIDE(x, join) (x = join(x, SWAPPED(x, 4)), x = join(x, SWAPPED(x, 8)), x)
#elif defined(__AVX__)
#define FOLDED_WIDE(x, join) (x = join(x, SWAPPED(x, 4)), x)
#else
#define FOLDED_WIDE(x, join) (x)
#endif

/* The sum of the lanes of SUM_VECTORS vectors, in the order in which those of a single vector are folded. */
INLINED float sum_of(vector *sums)
{
    UNROLLED(i, SUM_VECTORS)
        sums[i] = FOLDED(sums[i], SUM_OF);
    return joined_sums(sums)[0];
}

/* The elements of a where the mask is set, and else those of b. */
static inline vector chosen_of(lanes mask, vector a, vector b)
{
    return (vector)(((lanes)a & mask) | ((lanes)b & ~mask));
}

/* e^x / 256 for x <= 0, with a relative error of 4e-7: sums of up to 256 weights are at most 1. The polynomial
   approximates e^r for |r| up to log(2) / 2 within 8e-8. Results below 2^-126 are 0, so that weights are never
   subnormal, which would be slow. */
static inline vector weight_of(vector x)
{
    vector rounded = x * 1.44269504f + ROUNDER, n = rounded - ROUNDER, r = n * -0.693147181f + x;
    vector p = 8.29765511e-3f / 256 * r + 4.19153826e-2f / 256;
    p = p * r + 0.166675747f / 256;
    p = p * r + 0.499988948f / 256;
    p = p * r + 0.999999692f / 256;
    p = p * r + 1.00000007f / 256;
    return chosen_of(x < -81.79f, (vector){0}, (vector)((lanes)p + ((lanes)rounded << 23)));
}

/* The last elements of a row of a term, from j on; nothing beyond the row is read. */
static __attribute__((noinline)) vector read_last(const float *row, int64_t step, int64_t j, int64_t n)
{
    vector x;
    lanes places;
    if (step != 1 || n < LANES) {
        for (int l = 0; l < LANES; l++)
            x[l] = row[(j + l < n ? j + l : n - 1) * step];
        return x;
    }
    /* Load the last whole vector of the row, and rotate earlier elements behind. */
    for (int l = 0; l < LANES; l++)
        places[l] = (l + (int)(j + LANES - n)) % LANES;
    return PERMUTED(loaded(row + n - LANES), places);
}

/* A head and a block of its keys: pointers to its first elements, and to the terms of the first of these keys. Keys
   and values are contiguous, and padded with zeros to whole vectors. */
struct head {
    const float *q, *keys, *values, *terms[TERMS];
    float *y;
    int64_t n;   /* keys of the block */
    int first, last; /* whether it is the first block, and the last */
};

/* The running state of a query over blocks: the highest score, and the sum of weights without a common factor. */
struct row {
    float top, total;
};

/* Soft-cap scores to (-cap, cap). */
static __attribute__((noinline)) void bound(float *scores, int64_t n, float cap)
{
    for (int64_t j = 0; j < n; j++)
        scores[j] = cap * tanh32(scores[j] / cap);
}

/* Turn the scores of some queries (a constant number) for a block of keys into weights (online softmax); `keep` is
   the factor for the weights of earlier blocks. So the weights of all blocks so far always sum to 1, and large values
   do not overflow. If a score is NaN, or the highest is infinite, the sum is NaN, and so are all later weights. If
   all scores are negative infinity, there is no sum to divide by, but other blocks may have one. */
INLINED void weigh(const struct attention *h, const struct head *of, float *scores,
                   const float *const *terms, struct row *states, float *factors, float *keep,
                   const int rows)
{
    int64_t wide = whole_vectors(of->n), each = h->rank + 2;
    const int64_t *steps = h->steps + 3 * each + h->rank;
    vector tops[ROWS], totals[ROWS][SUM_VECTORS], lowest = (vector){0} - INFINITY;
    lanes within;
    for (int l = 0; l < LANES; l++)
        within[l] = wide - LANES + l < of->n ? -1 : 0;
    UNROLLED(i, rows)
        tops[i] = (vector){0} + states[i].top;
    for (int64_t j = 0; j < wide; j += LANES) {
        vector x[ROWS];
        UNROLLED(i, rows)
            x[i] = loaded(scores + i * wide + j);
        UNROLLED(t, TERMS) {
            const float *term = terms[t];
            int64_t row = steps[t * each], step = steps[t * each + 1];
            if (term && step == 1 && j + LANES <= of->n)
                UNROLLED(i, rows)
                    x[i] += loaded(term + i * row + j);
            else if (term)
                UNROLLED(i, rows)
                    x[i] += read_last(term + i * row, step, j, of->n);
        }
        UNROLLED(i, rows) {
            x[i] = j + LANES <= of->n ? x[i] : chosen_of(within, x[i], lowest);
            tops[i] = LARGER(x[i], tops[i]);
            memcpy(scores + i * wide + j, &x[i], VECTOR_BYTES);
        }
    }
    UNROLLED(i, rows)
        tops[i] = FOLDED(tops[i], LARGER);
    UNROLLED(i, rows) {
        UNROLLED(v, SUM_VECTORS)
            totals[i][v] = (vector){0};
        for (int64_t j = 0; j < wide; j += SUM_VECTORS * LANES)
            UNROLLED(v, SUM_VECTORS)
                if (j + v * LANES < wide) {
                    float *const at = scores + i * wide + j + v * LANES;
                    vector x = weight_of(loaded(at) - tops[i]);
                    memcpy(at, &x, VECTOR_BYTES);
                    totals[i][v] += x;
                }
    }
    UNROLLED(i, rows) {
        float total = sum_of(totals[i]);
        if (!of->first) {
            float before = states[i].total * 256 * weight_of((vector){0} + states[i].top - tops[i])[0];
            total += before;
            keep[i] = before / total;
        }
        factors[i] = 1 / total;
        int nothing = total != total || total == 0;
        if (nothing && (h->zeros == NANS || (total == 0 && (h->zeros == UNSEEN || !of->last))))
            memset(scores + i * wide, 0, wide * sizeof *scores), factors[i] = keep[i] = 0;
        states[i] = (struct row){tops[i][0], total};
    }
}

#define SOME(rows)                                                                                     \
    static __attribute__((noinline)) void some_##rows(const struct attention *h, const struct head *of,    \
                                                      int64_t row, struct row *states)                 \
    {                                                                                                  \
        const int64_t rank = h->rank, each = rank + 2, *steps = h->steps + rank;                       \
        const int64_t *y_steps = steps + (3 + TERMS) * each;                                           \
        int64_t wide = whole_vectors(of->n), out = whole_vectors(h->out);                              \
        float ALIGNED scores[ROWS * KEYS], ALIGNED results[ROWS * KEYS], *y = of->y + row * y_steps[0]; \
        float scales[ROWS], factors[ROWS], kept[ROWS], *keep = of->first ? NULL : kept;                \
        const float *terms[TERMS];                                                                     \
        for (int i = 0; i < rows; i++)                                                                 \
            scales[i] = (float)h->scale;                                                               \
        for (int t = 0; t < TERMS; t++)                                                                \
            terms[t] = of->terms[t] ? of->terms[t] + row * steps[(3 + t) * each] : NULL;               \
        product(of->q + row * steps[0], steps[0], steps[1], of->keys, wide, h->width, scores, wide,    \
                scales, NULL, rows);                                                                   \
        if (h->softcap)                                                                                \
            bound(scores, rows * wide, (float)h->softcap);                                             \
        weigh(h, of, scores, terms, states, factors, kept, rows);                                      \
        if (y_steps[1] == 1 && out == h->out) {                                                        \
            product(scores, wide, 1, of->values, out, of->n, y, y_steps[0], factors, keep, rows);      \
            return;                                                                                    \
        }                                                                                              \
        for (int i = 0; keep && i < rows; i++)                                                         \
            for (int64_t j = 0; j < out; j++)                                                          \
                results[i * out + j] = j < h->out ? y[i * y_steps[0] + j * y_steps[1]] : 0;            \
        product(scores, wide, 1, of->values, out, of->n, results, out, factors, keep, rows);                    \
        for (int i = 0; i < rows; i++)                                                                 \
            for (int64_t j = 0; j < h->out; j++)                                                       \
                y[i * y_steps[0] + j * y_steps[1]] = results[i * out + j];                             \
    }

SOME(1)
SOME(2)
SOME(3)
SOME(4)
SOME(5)
SOME(6)

static int attention(const void *arguments, int64_t begin, int64_t end)
{
    static void (*const some[])(const struct attention *, const struct head *, int64_t, struct row *) = {
        some_1, some_2, some_3, some_4, some_5, some_6};
    const struct attention *h = arguments;
    const int64_t rank = h->rank, each = rank + 2, *steps = h->steps;
    const int64_t *k_steps = steps + each + rank, *v_steps = k_steps + each;
    int64_t out = whole_vectors(h->out), copied = -1;
    /* Rows that end within a vector are copied: memory beyond the last one must not be read. */
    int dense = v_steps[1] == 1 && v_steps[0] == out && out == h->out;
    float ALIGNED keys[COPIED], ALIGNED values[COPIED];
    struct row states[PART];
    int64_t heads = 1, most = h->ranges ? h->most : whole_vectors(CEIL_DIV(h->keys, h->blocks));
    for (int64_t i = 1; i < rank; i++)
        heads *= h->dims[i];
    memset(keys, 0, h->width * most * sizeof *keys);
    memset(values, 0, dense ? 0 : most * out * sizeof *values);
    for (int64_t item = begin; item < end; item++) {
        int64_t i = item / h->parts, part = item % h->parts;
        /* The rows of a sample in the padded batch, and its first row in the packed one. */
        const int64_t whole[] = {0, h->keys, 0}, *const range = h->ranges ? h->ranges + i / heads * 3 : whole;
        const int64_t n_keys = range[1], packed = range[2];
        const int64_t n_queries = h->ranges ? n_keys : h->queries;
        const int64_t blocks = h->ranges ? CEIL_DIV(n_keys, most) : h->blocks;
        int64_t first = n_queries * part / h->parts, n = n_queries * (part + 1) / h->parts - first;
        for (int64_t j = 0; j < n; j++)
            states[j] = (struct row){-FLT_MAX, 0};
        for (int64_t at = 0; at < blocks; at++) {
            int64_t key = n_keys * at / blocks, own = i * MOST_BLOCKS + at;
            struct head of = {h->q + first_of(h, steps, i) + packed * steps[rank], keys, values, {0}, NULL, 0, 0, 0};
            const float *k = h->k + first_of(h, steps + each, i) + (packed + key) * k_steps[1];
            const float *v = h->v + first_of(h, steps + 2 * each, i) + (packed + key) * v_steps[0];
            const int64_t *y_steps = steps + (3 + TERMS) * each;
            of.n = n_keys * (at + 1) / blocks - key;
            of.first = !at;
            of.last = at == blocks - 1;
            if (copied != own)
                copy(keys, k, h->width, of.n, k_steps);
            if (dense)
                of.values = v;
            else if (copied != own)
                copy(values, v, of.n, h->out, v_steps);
            copied = own;
            for (int t = 0; t < TERMS; t++) {
                const int64_t *term_steps = steps + (3 + t) * each;
                if (h->terms[t])
                    of.terms[t] = h->terms[t] + first_of(h, term_steps, i) + range[0] * term_steps[rank] +
                                  (range[0] + key) * term_steps[rank + 1];
            }
            of.y = h->y + first_of(h, y_steps, i) + packed * y_steps[rank];
            for (int64_t j = 0, groups = CEIL_DIV(n, ROWS); j < groups; j++) {
                int64_t row = n * j / groups;
                some[n * (j + 1) / groups - row - 1](h, &of, first + row, states + row);
            }
        }
    }
    return 0;
}

KERNELS(attention, KERNEL(attention, attention))
