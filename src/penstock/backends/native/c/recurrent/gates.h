/* Products of a few rows with the weights of gates, packed in blocks of 16 units with their gates adjacent,
   [block][k][gate][16], padded with zeros. Files that include this are compiled with contraction to fused
   multiply-add. */
#ifndef PENSTOCK_GATES_H
#define PENSTOCK_GATES_H

#include <stdint.h>
#include <string.h>
#include "native.h"
#include "vectors.h"

enum { UNITS = 16 };

/* Weights that stay in the L1 cache, and the size of a layer from which on weights may be in no cache: a core reads
   memory at full bandwidth only if it prefetches. */
enum { NEAR_WEIGHTS = 1 << 13, FAR_WEIGHTS = 1 << 21 };

/* Accumulators that fit in registers, and the most rows among them. */
enum { MOST_SUMS = BY_WIDTH(24, 12, 12), MOST_GATE_ROWS = BY_WIDTH(8, 6, 3) };
enum { GATE_LANES = VECTOR_BYTES / 4, GATE_VECTORS = UNITS / GATE_LANES };

typedef float gate_vector __attribute__((vector_size(VECTOR_BYTES)));

/* The part of a sum from `from` up to `to` of k products, whose weights may be far. */
typedef struct {
    int64_t from, to, k;
    int is_far;
} gate_depth;

/* Add the product of `rows` rows with `some` of the `gates` gates of `blocks` blocks; these four are constants. Rows
   of c are c_step apart, gates `next`. */
INLINED void add_gate_block(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                            const float *b, gate_depth depth, const int rows, const int gates,
                            const int some, const int blocks)
{
    enum { MOST = 32 };
    const int vectors = some * GATE_VECTORS, columns = blocks * vectors;
    gate_vector sums[MOST];
#define GATE_AT(i, j)                                                                               \
    (c + (i) * c_step + (j) % vectors / GATE_VECTORS * next + (j) / vectors * UNITS +              \
     (j) % GATE_VECTORS * GATE_LANES)
    UNROLLED(i, rows)
        UNROLLED(j, columns)
            memcpy(&sums[i * columns + j], GATE_AT(i, j), sizeof(gate_vector));
    for (int64_t at = depth.from; at < depth.to; at++) {
        gate_vector column[MOST];
        UNROLLED(j, columns)
        {
            const float *weights = b + (j / vectors * depth.k + at) * gates * UNITS + j % vectors * GATE_LANES;
            memcpy(&column[j], weights, sizeof(gate_vector));
            if (depth.is_far && j % GATE_VECTORS == 0)
                __builtin_prefetch(weights + NEAR_WEIGHTS, 0, 2);
        }
        /* Keep the operand with fewer vectors in registers, beside the sums. */
        if (rows < columns)
            UNROLLED(j, columns)
                UNROLLED(i, rows)
                    sums[i * columns + j] += a[i * a_step + at] * column[j];
        else
            UNROLLED(i, rows)
                UNROLLED(j, columns)
                    sums[i * columns + j] += a[i * a_step + at] * column[j];
    }
    UNROLLED(i, rows)
        UNROLLED(j, columns)
            memcpy(GATE_AT(i, j), &sums[i * columns + j], sizeof(gate_vector));
#undef GATE_AT
}

/* As add_gate_block, for all gates of one block; both counts are constants. */
INLINED void add_gate_rows(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                           const float *b, gate_depth depth, const int rows, const int gates)
{
    const int fits = MOST_SUMS / (rows * GATE_VECTORS), fit = fits < 1 ? 1 : fits < gates ? fits : gates;
    const int parts = CEIL_DIV(gates, fit), some = CEIL_DIV(gates, parts);
    int gate = 0;
    for (; gate + some <= gates; gate += some)
        add_gate_block(c + gate * next, c_step, next, a, a_step, b + gate * UNITS, depth, rows, gates, some, 1);
    for (; gate < gates; gate++)
        add_gate_block(c + gate * next, c_step, next, a, a_step, b + gate * UNITS, depth, rows, gates, 1, 1);
}

/* As add_gate_rows, for blocks `first` up to `last`: several blocks at once if one has too few accumulators to hide
   the latency of additions. */
INLINED void add_gate_blocks(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                             const float *b, gate_depth depth, const int rows, const int gates,
                             int64_t first, int64_t last, int down)
{
    const int sums = rows * gates * GATE_VECTORS, few = rows == 1 ? 8 : MOST_SUMS * 2 / 3;
    const int together = 2 * sums > few ? 1 : few / sums;
    while (first < last) {
        int64_t some = last - first < together ? 1 : together, block = down ? last - some : first;
        const float *weights = b + block * depth.k * gates * UNITS;
        float *to = c + block * UNITS;
        if (some == together && (rows == 1 || together > 1))
            add_gate_block(to, c_step, next, a, a_step, weights, depth, rows, gates, gates, together);
        else
            add_gate_rows(to, c_step, next, a, a_step, weights, depth, rows, gates);
        first += down ? 0 : some;
        last -= down ? some : 0;
    }
}

/* As add_gate_blocks, for any number of rows. */
INLINED void add_gate_tile(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                           const float *b, gate_depth depth, int64_t rows, const int gates,
                           int64_t first, int64_t last, int down)
{
    const gate_depth near = {depth.from, depth.to, depth.k, 0};
#if defined(__AVX512F__)
    const gate_depth far = {depth.from, depth.to, depth.k, 1};
#endif
    for (int64_t row = 0, left = rows; left; ) {
        /* Parts of equal size, since a few rows take as long as waiting for the weights. */
        int64_t parts = CEIL_DIV(left, MOST_GATE_ROWS), some = left / parts;
        some = some == 5 ? left == 5 ? 3 : 4 : some == 7 ? left == 7 ? 4 : 8 : some;
        float *to = c + row * c_step;
        const float *from = a + row * a_step;
#define ROWS(n, depth) add_gate_blocks(to, c_step, next, from, a_step, b, depth, n, gates, first, last, down)
#define ROWS_OF_ANY(n) if (depth.is_far) ROWS(n, far); else ROWS(n, near)
        switch (some) {
        case 1: ROWS(1, near); break;
        case 2: ROWS(2, near); break;
        case 3: ROWS(3, near); break;
#if defined(__AVX512F__)
        case 4: ROWS_OF_ANY(4); break;
        case 8: ROWS_OF_ANY(8); break;
        default: some = 6; ROWS_OF_ANY(6);
#elif defined(__AVX__)
        case 4: ROWS(4, near); break;
        default: some = 6, ROWS(6, near);
#endif
        }
#undef ROWS
#undef ROWS_OF_ANY
        row += some;
        left -= some;
    }
}

INLINED void add_gates_of(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                          const float *b, int64_t k, int64_t rows, const int gates, int64_t first,
                          int64_t last, int down)
{
    const int64_t most = gates == 1 ? 4 : gates == 2 ? 2 : 1;
    if (rows == 1) {
        add_gate_blocks(c, 0, next, a, 0, b, (gate_depth){0, k, k, 0}, 1, gates, first, last, down);
        return;
    }
    const int64_t deep = NEAR_WEIGHTS / (gates * UNITS);
    const int is_far = k * next * gates > FAR_WEIGHTS;
    for (; first < last; first += down ? 0 : most, last -= down ? most : 0) {
        int64_t from = down && last - most > first ? last - most : first;
        int64_t to = down || last - first < most ? last : first + most;
        for (int64_t at = 0; at < k; at += deep)
            add_gate_tile(c, c_step, next, a, a_step, b, (gate_depth){at, k - at < deep ? k : at + deep, k, is_far}, rows,
                           gates, from, to, down);
    }
}

/* c += a b for the gates of blocks `first` up to `last`: a is [rows, k]; c and b begin with block 0. If `down`,
   blocks are processed from the last to the first. Sums do not depend on the division. */
static void add_gates(float *c, int64_t c_step, int64_t next, const float *a, int64_t a_step,
                      const float *b, int64_t k, int64_t rows, int64_t gates, int64_t first, int64_t last,
                      int down)
{
    switch (gates) {
    case 1: add_gates_of(c, c_step, next, a, a_step, b, k, rows, 1, first, last, down); break;
    case 2: add_gates_of(c, c_step, next, a, a_step, b, k, rows, 2, first, last, down); break;
    case 3: add_gates_of(c, c_step, next, a, a_step, b, k, rows, 3, first, last, down); break;
    default: add_gates_of(c, c_step, next, a, a_step, b, k, rows, 4, first, last, down);
    }
}

#endif
