/* Products of rows whose elements lie anywhere with a panel: each element of the first row has an address, and
   adjacent rows are a constant distance apart. These are the inputs of a line of positions in images of few channels.
   As operands of panels.c, their parts would have few elements each, and planar images would be copied.

   Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
// GCC options: -O2 -fno-tree-vectorize -fno-tree-sink
#include <limits.h>
#include "additions.h"
#include "panels.h"

/* Rows addressed by multiples of a step from one address, and the accumulators of a tile. */
enum { GROUP = 8, MOST_SUMS = BY_WIDTH(28, 12, 12) };
enum { USUAL = BY_WIDTH(4, 2, 2) }; /* vectors of columns of a tile */

/* A row is an odd number of steps times this power of 2 beyond the address one step before its group. */
#define BY(r) (((r) % GROUP + 1) & -((r) % GROUP + 1))

/* Multiply x in tiles of `each` rows by some vectors of columns; both counts are constants. The last tile may overlap
   the one before. */
INLINED void multiply_tiles(const float *const *elements, int64_t depth, int64_t step, int64_t rows, const float *w,
                            int64_t width, target to, int64_t column, int each, int vectors)
{
    /* Sums of a tile that are written together: the first are ready before the last. */
    enum { TOGETHER = 8 };
    const int some = TOGETHER / vectors;
    /* A single row has several accumulators for each sum, to hide the latency of additions. */
    const int chains = each > 1 ? 1 : vectors > 2 ? 2 : 4;
    const int64_t steps[] = {4 * step, 12 * step, 20 * step, 28 * step}, y_step = to.step;
    const float *const bias = moved(to.bias, column);
    const int64_t rest = to.count - column - (vectors - 1) * LANES;
    const activation *const f = &to.activation;
    const int clamps = is_active(f), plain = rest >= LANES && !to.addend && !f->slopes && !f->gate;
    const vector low = (vector){0} + f->low, high = (vector){0} + f->high;
    for (int64_t tile = 0; tile < rows; tile += each) {
        const int64_t row = smaller(tile, rows - each), place = (row - 1) * step;
        const float *of_tile = w + column, *addend = moved(to.addend, row * to.addend_step + column);
        float *y = to.y + row * y_step + column;
        vector sums[MOST_SUMS];
        EACH(each, vectors) sums[r * vectors + j] = bias ? loaded(bias + j * LANES) : (vector){0};
        EACH(chains - 1, vectors) sums[(r + 1) * vectors + j] = (vector){0};
        for (int64_t k = 0; k < depth; k += chains)
            UNROLLED(chain, chains)
            {
                const float *const *const element = elements + k + chain;
                if ((chain && k + chain >= depth) || !*element)
                    continue;
                const float *group[MOST_SUMS / GROUP + 1] = {*element + place};
                UNROLLED(i, MOST_SUMS / GROUP)
                    group[i + 1] = group[i] + GROUP * step;
                vector columns[4];
                UNROLLED(j, vectors)
                    columns[j] = loaded(of_tile + (k + chain) * width + j * LANES);
                UNROLLED(r, each)
                {
                    vector *const sum = sums + (chain + r) * vectors;
                    const float *const x = group[r / GROUP];
                    const int64_t at = steps[(r % GROUP + 1) / BY(r) / 2];
                    if (vectors == 1)
                        add_1_FLOATS(sum, 1, x, at, BY(r), 0, columns);
                    else if (vectors == 2)
                        add_2_FLOATS(sum, 1, x, at, BY(r), 0, columns);
                    else if (vectors == 3)
                        add_3_FLOATS(sum, 1, x, at, BY(r), 0, columns);
                    else
                        add_4_FLOATS(sum, 1, x, at, BY(r), 0, columns);
                }
            }
        EACH(chains - 1, vectors) sums[j] += sums[(r + 1) * vectors + j];
        if (plain && clamps)
            EACH(each, vectors) sums[r * vectors + j] = LESSER(high, LARGER(low, sums[r * vectors + j]));
        if (plain) {
            UNROLLED(r, each)
            {
                UNROLLED(j, vectors)
                    memcpy(y + j * LANES, &sums[r * vectors + j], VECTOR_BYTES);
                ADVANCE(y, y_step);
            }
            continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i + some <= each; i += some) {
            put_rows(sums + i * vectors, &to, y, addend, column, rest, some, vectors);
            ADVANCE(y, some * y_step);
            addend = moved(addend, some * to.addend_step);
        }
        if (each % some)
            put_rows(sums + each / some * some * vectors, &to, y, addend, column, rest, each % some, vectors);
    }
}

#define MULTIPLY(rows, vectors)                                                                    \
    static void multiply_##rows##_##vectors(const float *const *elements, int64_t depth, int64_t step, int64_t count, \
                                            const float *w, int64_t width, const target *to, int64_t column) \
    {                                                                                              \
        multiply_tiles(elements, depth, step, count, w, width, *to, column, rows, vectors);         \
    }
#if defined(__AVX512F__)
MULTIPLY(1, 1) MULTIPLY(8, 1) MULTIPLY(12, 1) MULTIPLY(16, 1) MULTIPLY(21, 1) MULTIPLY(28, 1)
MULTIPLY(1, 2) MULTIPLY(4, 2) MULTIPLY(8, 2) MULTIPLY(14, 2)
MULTIPLY(1, 3) MULTIPLY(4, 3) MULTIPLY(8, 3)
MULTIPLY(1, 4) MULTIPLY(4, 4) MULTIPLY(6, 4)
#else
MULTIPLY(1, 1) MULTIPLY(4, 1) MULTIPLY(8, 1)
MULTIPLY(1, 2) MULTIPLY(4, 2) MULTIPLY(6, 2)
#endif

/* By the number of vectors, the tallest first. */
#define FORM(rows, vectors) {rows, CEIL_DIV(ONE, rows), multiply_##rows##_##vectors}
enum { ONE = 1 << 20 };
static const struct {
    int rows, inverse; /* of rows, as a part of ONE: divisions take as long as a product of some rows */
    __typeof__(multiply_1_1) *multiply;
} forms[][6] = {
#if defined(__AVX512F__)
    {FORM(28, 1), FORM(21, 1), FORM(16, 1), FORM(12, 1), FORM(8, 1), FORM(1, 1)},
    {FORM(14, 2), FORM(8, 2), FORM(4, 2), FORM(1, 2)},
    {FORM(8, 3), FORM(4, 3), FORM(1, 3)},
    {FORM(6, 4), FORM(4, 4), FORM(1, 4)},
#else
    {FORM(8, 1), FORM(4, 1), FORM(1, 1)},
    {FORM(6, 2), FORM(4, 2), FORM(1, 2)},
#endif
};

/* The fastest form of tiles for this many rows. The start and end of each tile take about as long as 100 products. */
static int form_of(int rows, int depth, int vectors)
{
    int i = 0;
    while (forms[vectors - 1][i].rows > rows)
        i++;
    int best = i;
    for (int least = INT_MAX; forms[vectors - 1][i].rows > 1; i++) {
        const int each = forms[vectors - 1][i].rows;
        const int tiles = (int)((int64_t)(rows + each - 1) * forms[vectors - 1][i].inverse / ONE);
        const int work = tiles * (each * depth * vectors + 100);
        if (work < least)
            best = i, least = work;
    }
    return best;
}

void multiply_elements(const float *const *elements, int64_t depth, int64_t step, int64_t rows, const float *w,
                       int64_t width, const target *y, int64_t count)
{
    const int64_t end = CEIL_DIV(count, LANES) * LANES;
    target to = *y;
    to.count = count;
    for (int64_t column = 0, vectors; column < end; column += vectors * LANES) {
        vectors = smaller(USUAL, (end - column) / LANES);
        const int best = form_of((int)rows, (int)depth, (int)vectors);
        forms[vectors - 1][best].multiply(elements, depth, step, rows, w, width, &to, column);
    }
}
