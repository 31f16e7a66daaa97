/* Products with blockwise quantized weights of 4 or 8 bits: a scale, and perhaps a zero point, for each block of K.
   An item is a panel of 32 columns (products.h).

   Weights are [panel][K / 8][32] uint32 of eight 4-bit codes, the lowest first, offset by half their range, or
   [panel][K / 4][32][4] int8. Scales are [panel][block][32], and so is `shifts`, the term that a zero point adds to
   each weight. A few rows dequantize weights in registers; for more rows, a part of a panel is first dequantized to
   float32 in memory. Weights of experts may be float32, without scales. */

// Compiler options: -ffp-contract=fast
#include <stdlib.h>
#include "math32.h"
#include "native.h"
#include "products.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct block_product {
    const float *x;
    const void *weights;
    const float *scales, *shifts, *bias; /* NULL without zero points, without bias */
    float *y, *border;                   /* border: [rows][32], for a panel cut off by the end of y */
    int64_t rows, k, n, bits, block;
    int64_t ordered; /* whether the order of summation is independent of the number of rows */
};

/* Accumulators in flight for a column: one for each of several rows, or CHAINS for a single row. */
enum { SUMS = 4, DIRECT = BY_WIDTH(4, 2, 1), CHAINS = VECTORS < 8 ? 8 / VECTORS : 1 };
enum { FEW = 2 * DIRECT, PART = 256, MOST_BLOCKS = 2048 };
/* Distance in bytes at which codes are prefetched: the hardware prefetcher stops at the end of its page, which left a
   sixth of the memory bandwidth unused. Panels are contiguous, so that what is prefetched is soon needed. Scales are
   prefetched as many blocks ahead, or twice as many. */
enum { CODES_AHEAD = 4096, SCALES_AHEAD = 1024, LINE = 64 };
_Static_assert((int)CHAINS <= (int)SUMS, "parts of direct() have room");

typedef int32_t words __attribute__((vector_size(VECTOR_BYTES)));

/* Vector j of the 32 weights at k; `held` keeps those that are packed together. */
INLINED vector weights_of(const struct block_product *a, int bits, const char *panel, int64_t k, int j,
                          words *held)
{
    if (bits == 8) {
        if (k % 4 == 0)
            memcpy(held, panel + k * PANEL + j * VECTOR_BYTES, sizeof *held);
        const words code = *held << 24 >> 24;
        *held >>= 8;
        return __builtin_convertvector(code, vector);
    }
    if (k % 8 == 0)
        memcpy(held, panel + k / 8 * PANEL * 4 + j * VECTOR_BYTES, sizeof *held);
    words codes = *held;
    *held >>= 4;
#if defined(__AVX512F__)
    static const vector numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return PERMUTED(numbers, codes);
#else
    return __builtin_convertvector((codes & 15) - 8, vector);
#endif
}

/* Multiply some rows (a constant) by a panel. `sums` has the sums of x by row and block. Each accumulator waits for
   its previous addition: a single row has several for each column, so that enough are in flight. */
INLINED void direct(const struct block_product *a, int bits, int rows, int64_t p, const float *x,
                    const float *sums, float *c, int64_t c_step)
{
    int64_t blocks = CEIL_DIV(a->k, a->block);
    const char *panel = (const char *)a->weights + p * a->k * PANEL * bits / 8;
    const int chains = rows == 1 ? CHAINS : 1;
    vector totals[DIRECT * VECTORS] = {0};
    for (int64_t b = 0; b < blocks; b++) {
        int64_t from = b * a->block, to = from + a->block < a->k ? from + a->block : a->k;
        vector parts[SUMS * VECTORS] = {0};
        words held[VECTORS] = {0};
        for (int64_t k = from; k < to; k += 8) {
            const char *next = panel + k * PANEL * bits / 8 + CODES_AHEAD;
#pragma GCC unroll 4
            for (int line = 0; line < PANEL * bits; line += LINE)
                __builtin_prefetch(next + line);
            UNROLLED(i, 8)
                UNROLLED(j, VECTORS) {
                    vector column = weights_of(a, bits, panel, k + i, j, held + j);
                    UNROLLED(r, rows)
                        parts[(i % chains * rows + r) * VECTORS + j] += x[r * a->k + k + i] * column;
                }
        }
#pragma GCC unroll 8
        for (int i = 1; i < chains; i++)
            UNROLLED(j, VECTORS)
                parts[j] += parts[i * VECTORS + j];
        const float *scales = a->scales + (p * blocks + b) * PANEL;
        const float *shifts = a->shifts ? a->shifts + (p * blocks + b) * PANEL : NULL;
#pragma GCC unroll 2
        for (int line = 0; line < PANEL * (int)sizeof *scales; line += LINE)
            __builtin_prefetch((const char *)scales + SCALES_AHEAD + line);
        UNROLLED(i, rows * VECTORS) {
            int j = i % VECTORS;
            totals[i] += parts[i] * loaded(scales + j * LANES);
            if (shifts)
                totals[i] += sums[i / VECTORS * blocks + b] * loaded(shifts + j * LANES);
        }
    }
    UNROLLED(i, rows * VECTORS) {
        vector sum = loaded(c + i / VECTORS * c_step + i % VECTORS * LANES) + totals[i];
        memcpy(c + i / VECTORS * c_step + i % VECTORS * LANES, &sum, sizeof sum);
    }
}

INLINED void few(const struct block_product *a, int bits, int64_t p, const float *sums, float *c, int64_t c_step)
{
    int64_t row = 0, blocks = CEIL_DIV(a->k, a->block);
    for (; row + DIRECT <= a->rows; row += DIRECT)
        direct(a, bits, DIRECT, p, a->x + row * a->k, sums + row * blocks, c + row * c_step, c_step);
    for (; row < a->rows; row++)
        direct(a, bits, 1, p, a->x + row * a->k, sums + row * blocks, c + row * c_step, c_step);
}

/* All rows, with the weights of a panel dequantized to float32, part after part. */
INLINED void many(const struct block_product *a, int bits, int64_t p, float *c, int64_t c_step)
{
    float part[PART * PANEL];
    const char *panel = (const char *)a->weights + p * a->k * PANEL * bits / 8;
    int64_t blocks = CEIL_DIV(a->k, a->block);
    for (int64_t from = 0; from < a->k; from += PART) {
        int64_t count = a->k - from < PART ? a->k - from : PART;
        for (int64_t k = 0; k < count; k += 8) {
            words held[VECTORS] = {0};
            int64_t at = (p * blocks + (from + k) / a->block) * PANEL;
            UNROLLED(i, 8)
                UNROLLED(j, VECTORS) {
                    vector w = weights_of(a, bits, panel, from + k + i, j, held + j);
                    /* One form, or compilers would fuse the multiply-add in some loops alone. */
                    const vector shift = a->shifts ? loaded(a->shifts + at + j * LANES) : (vector){0};
                    w = w * loaded(a->scales + at + j * LANES) + shift;
                    memcpy(part + (k + i) * PANEL + j * LANES, &w, sizeof w);
                }
        }
        add_product(c, c_step, a->x + from, a->k, part, count, a->rows, (int)a->ordered);
    }
}

ITEMS_OF(block_product, block_product)
{
    float sums[FEW * MOST_BLOCKS];
    int64_t blocks = CEIL_DIV(a->k, a->block);
    const int is_few = a->rows <= FEW && !a->ordered;
    if (is_few && a->shifts)
        for (int64_t i = 0; i < a->rows * blocks; i++) {
            int64_t from = i % blocks * a->block, rest = a->k - from;
            const float *x = a->x + i / blocks * a->k + from;
            float sum = 0;
            for (int64_t k = 0; k < (rest < a->block ? rest : a->block); k++)
                sum += x[k];
            sums[i] = sum;
        }
    for (int64_t p = begin; p < end; p++) {
        int64_t width = a->n - p * PANEL < PANEL ? a->n - p * PANEL : PANEL;
        float *y = a->y + p * PANEL, *c = width < PANEL ? a->border : y;
        int64_t step = width < PANEL ? PANEL : a->n;
        for (int64_t row = 0; row < a->rows; row++) {
            memset(c + row * step, 0, PANEL * sizeof(float));
            if (a->bias)
                memcpy(c + row * step, a->bias + p * PANEL, width * sizeof(float));
        }
        if (a->bits == 32)
            add_product(c, step, a->x, a->k, (const float *)a->weights + p * a->k * PANEL, a->k, a->rows,
                        (int)a->ordered);
        else if (is_few)
            a->bits == 4 ? few(a, 4, p, sums, c, step) : few(a, 8, p, sums, c, step);
        else
            a->bits == 4 ? many(a, 4, p, c, step) : many(a, 8, p, c, step);
        for (int64_t row = 0; row < a->rows && c != y; row++)
            memcpy(y + row * a->n, c + row * PANEL, width * sizeof(float));
    }
}

/* Mixture of experts: each token passes a few of the networks. An item is an expert for `together` tokens, the first
   tokens first, so that few items are long. y is [tokens, chosen, hidden]: results by rank of the expert, times their
   shares. */
enum { RELU, GELU, SILU, IDENTITY, SWIGLU };
enum { FC1, FC2, FC3, TOGETHER = 32 };

typedef struct {
    const char *weights; /* of all experts; fc3 is optional */
    const float *scales, *shifts, *bias;
    int64_t k, n, bits, block;
} expert_layer;

struct experts {
    const float *x, *scores, *shares; /* shares: NULL to use the softmax of the scores */
    expert_layer layers[3];
    float *y;
    int64_t tokens, count, chosen, hidden, inner, fusion, activation, is_normalized, together;
    double alpha, beta, limit;
    int64_t ordered; /* as in block_product */
};

/* The number of experts that rank above expert e: NaN ranks first, and among equal scores the last one does. */
static int64_t rank_of(const float *scores, int64_t count, int64_t e)
{
    int64_t rank = 0;
    float own = scores[e];
    for (int64_t j = 0; j < count; j++) {
        int equal = scores[j] == own || (scores[j] != scores[j] && own != own);
        rank += equal ? j > e : scores[j] > own || scores[j] != scores[j];
    }
    return rank;
}

static float share_of(const struct experts *a, int64_t token, int64_t e)
{
    const float *scores = a->scores + token * a->count, *given = a->shares + token * a->count;
    const int of_chosen = a->shares || a->is_normalized; /* else the softmax is over all scores */
    float most = scores[0], own = 0, sum = 0;
    for (int64_t j = 1; j < a->count; j++)
        most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < a->count; j++) {
        if (of_chosen && rank_of(scores, a->count, j) >= a->chosen)
            continue;
        float weight = a->shares ? given[j] : expf(scores[j] - most);
        sum += weight;
        own = j == e ? weight : own;
    }
    return a->is_normalized || !of_chosen ? own / sum : own;
}

static void run_layer(const struct experts *a, int i, int64_t e, const float *x, float *y, int64_t rows)
{
    const expert_layer *l = a->layers + i;
    int64_t scales = e * l->n * (l->k / l->block);
    struct block_product product = {
        x, l->weights + e * l->n * l->k * l->bits / 8, l->scales ? l->scales + scales : NULL,
        l->shifts ? l->shifts + scales : NULL, l->bias ? l->bias + e * l->n : NULL, y, NULL,
        rows, l->k, l->n, l->bits, l->block, a->ordered};
    block_product(&product, 0, l->n / PANEL);
}

/* y of `inner` elements from a row of fc1, and of one of fc3 if present. */
static void activate(const struct experts *a, const float *restrict x, const float *restrict third,
                     float *restrict y)
{
    int64_t n = a->inner, step = a->fusion == 1 ? 2 : 1;
    const float *restrict linear = a->fusion == 1 ? x + 1 : a->fusion == 2 ? x + n : third;
    float alpha = (float)a->alpha, beta = (float)a->beta, limit = (float)a->limit;
    for (int64_t i = 0; i < n; i++) {
        float v = x[i * step];
        switch (a->activation) {
        case RELU: y[i] = v < 0 ? 0 : v; break;
        case GELU: y[i] = v * sigmoid32(1.5957691216f * (v + 0.044715f * v * v * v)); break;
        case SILU: y[i] = v * sigmoid32(v); break;
        case IDENTITY: y[i] = v; break;
        default: {
            float u = linear[i * step];
            v = v > limit ? limit : v;
            u = u > limit ? limit : u < -limit ? -limit : u;
            y[i] = v * sigmoid32(alpha * v) * (u + beta);
        }
        }
        if (third && a->activation != SWIGLU)
            y[i] *= third[i];
    }
}

static void run_expert(const struct experts *a, int64_t e, const int64_t *tokens, int64_t rows, float *at)
{
    int64_t width = a->layers[FC1].n;
    float *x = at, *first = x + TOGETHER * a->hidden, *third = first + TOGETHER * width;
    float *inner = third + TOGETHER * a->inner, *y = inner + TOGETHER * a->inner;
    int has_third = a->layers[FC3].weights != NULL;
    for (int64_t r = 0; r < rows; r++)
        memcpy(x + r * a->hidden, a->x + tokens[r] * a->hidden, a->hidden * sizeof *x);
    run_layer(a, FC1, e, x, first, rows);
    if (has_third)
        run_layer(a, FC3, e, x, third, rows);
    for (int64_t r = 0; r < rows; r++)
        activate(a, first + r * width, has_third ? third + r * a->inner : NULL, inner + r * a->inner);
    run_layer(a, FC2, e, inner, y, rows);
    for (int64_t r = 0; r < rows; r++) {
        int64_t rank = rank_of(a->scores + tokens[r] * a->count, a->count, e);
        if (rank >= a->chosen)
            continue; /* another thread has changed the scores meanwhile */
        float share = share_of(a, tokens[r], e);
        float *restrict to = a->y + (tokens[r] * a->chosen + rank) * a->hidden;
        for (int64_t i = 0; i < a->hidden; i++)
            to[i] = y[r * a->hidden + i] * share;
    }
}

CHECKED_ITEMS_OF(experts, experts)
{
    /* Rows of x and y, and the results of the layers between. */
    size_t numbers = 2 * a->hidden + a->layers[FC1].n + 2 * a->inner;
    float *at = malloc(TOGETHER * numbers * sizeof *at);
    if (!at)
        return 1;
    for (int64_t item = begin; item < end; item++) {
        int64_t e = item % a->count, first = item / a->count * a->together;
        int64_t last = a->tokens - first < a->together ? a->tokens : first + a->together;
        int64_t tokens[TOGETHER], rows = 0;
        for (int64_t token = first; token < last; token++) {
            if (rank_of(a->scores + token * a->count, a->count, e) < a->chosen)
                tokens[rows++] = token;
            if (rows == TOGETHER || (rows && token == last - 1)) {
                run_expert(a, e, tokens, rows, at);
                rows = 0;
            }
        }
    }
    free(at);
    return 0;
}

KERNELS(blocks, KERNEL(experts, experts), KERNEL(block_product, block_product))
