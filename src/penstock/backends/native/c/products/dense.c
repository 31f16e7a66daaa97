/* Dense layers: a product with a constant matrix, and its epilogue. An item is a panel for a block of rows. A single
   row has a loop of its own, without the setup of tiles, which takes longer than the product with a small matrix.
   Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "panels.h"
#include "programs.h"

struct dense {
    const float *x, *weights;
    const float *bias;   /* padded to whole panels, or NULL */
    const float *addend; /* as y, or NULL */
    float *y;
    int64_t rows, inner, columns, block; /* block: rows of an item, at most BLOCK */
    float *pairs;                        /* room to round x to bfloat16; or NULL */
    int64_t items;
    double low, high;                    /* bounds of the sums */
    int64_t alone;                       /* whether a single row has its own loop, which sums in another order */
    int64_t follows;                     /* whether a program follows */
    struct elementwise program;          /* on y, in place; its tiles are parts of rows, of some panels */
};

/* Columns multiplied at once, each with two accumulators to hide latency; and the products that are summed up before
   they are added to the total: many short sums are more accurate than a long one. */
enum { AT_ONCE = BY_WIDTH(4, 4, 2), PIECE = 512 };

/* The product of a row with `vectors` vectors of columns of a panel; `vectors` is a constant. */
INLINED void multiply_row(const struct dense *a, const float *w, int64_t width, int64_t column, int vectors)
{
    vector total[AT_ONCE];
    UNROLLED(j, vectors)
        total[j] = a->bias ? loaded(a->bias + column + j * LANES) : (vector){0};
    const float *x = a->x, *const end = x + a->inner;
    while (x < end) {
        const float *const stop = x + smaller(PIECE, end - x);
        vector even[AT_ONCE], odd[AT_ONCE];
        UNROLLED(j, vectors)
            even[j] = odd[j] = (vector){0};
        for (; x + 2 <= stop; x += 2, w += 2 * width)
            UNROLLED(j, vectors) {
                even[j] += x[0] * loaded(w + j * LANES);
                odd[j] += x[1] * loaded(w + width + j * LANES);
            }
        if (x < stop) {
            UNROLLED(j, vectors)
                even[j] += x[0] * loaded(w + j * LANES);
            x++, w += width;
        }
        UNROLLED(j, vectors)
            total[j] += even[j] + odd[j];
    }
    const vector low = (vector){0} + (float)a->low, high = (vector){0} + (float)a->high;
    UNROLLED(j, vectors) {
        const int64_t at = column + j * LANES, count = a->columns - at;
        if (a->addend)
            total[j] += load_some(a->addend + at, count);
        total[j] = LESSER(high, LARGER(low, total[j])); /* NaN is preserved */
        store_some(a->y + at, total[j], count);
    }
}

/* Panels `begin` up to `end`, for a single row. */
static void multiply_one_row(const struct dense *a, int64_t begin, int64_t end)
{
    const int64_t last = smaller(end * PANEL, a->columns);
    for (int64_t column = begin * PANEL, vectors; column < last; column += vectors * LANES) {
        const int64_t panel = column / PANEL * PANEL;
        const int64_t width = smaller(PANEL, CEIL_DIV(a->columns - panel, GRAIN) * GRAIN);
        const float *w = a->weights + panel * a->inner + (column - panel);
        vectors = smaller(AT_ONCE, CEIL_DIV(smaller(panel + PANEL, a->columns) - column, LANES));
#define VECTORS(number)                                                                            \
    if (vectors == number)                                                                         \
        multiply_row(a, w, width, column, number);
        VECTORS(1) VECTORS(2) VECTORS(3) VECTORS(4)
#undef VECTORS
    }
}

ITEMS_OF(dense, dense)
{
    if (a->alone) {
        multiply_one_row(a, begin, end);
        if (a->follows) {
            struct elementwise program = a->program;
            program.inputs[0] = program.output = a->y;
            for (int64_t column = begin * PANEL, last = smaller(end * PANEL, a->columns), next; column < last; column = next) {
                next = smaller(column + a->program.tile, last);
                run_in_rows(&program, 0, 1, column, next);
            }
        }
        return;
    }
    const int64_t panels = CEIL_DIV(a->columns, PANEL);
    const int64_t rest = CEIL_DIV(a->columns - (panels - 1) * PANEL, GRAIN) * GRAIN;
    const float *from[BLOCK];
    activation bounds = NO_ACTIVATION;
    bounds.low = (float)a->low, bounds.high = (float)a->high;
    struct elementwise program = a->program;
    program.inputs[0] = program.output = a->y;
    int64_t seen = begin % panels * PANEL; /* columns that the program has processed */
    for (int64_t item = begin; item < end; item++) {
        const int64_t panel = item % panels, row = item / panels * a->block, column = panel * PANEL;
        const int64_t rows = smaller(a->block, a->rows - row);
        const int64_t width = panel + 1 < panels ? PANEL : rest;
        seen = panel ? seen : 0;
        const int64_t count = smaller(width, a->columns - column), at = row * a->columns + column;
        const float *w = a->weights + column * a->inner, *bias = moved(a->bias, column);
        const float *next = panel + 1 < panels ? w + width * a->inner : a->weights;
        next = a->inner * a->columns > NEAR ? next : NULL;
        const target y = {a->y + at, a->columns, bias, moved(a->addend, at), a->columns,
                          bounds, count, 0, 0};
        for (int64_t r = 0; r < rows; r++)
            from[r] = a->x + (row + r) * a->inner;
        const operands x = {from, NULL, BLOCK, 1, 0, a->inner, a->pairs != NULL, 0, 1, 0, 0, NULL, 0, NULL, 0};
        multiply_panel(x, rows, w, width, next, &y, count);
        const int64_t ready = column + count;
        if (a->follows && (panel + 1 == panels || item + 1 == end || ready - seen == program.tile)) {
            run_in_rows(&program, row, rows, seen, ready);
            seen = ready;
        }
    }
}

/* Round rows of x in the first stage, and multiply them in the second. */
static int rounded_dense_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    struct dense a = *(const struct dense *)arguments;
    const int64_t pairs = (a.inner + 1) / 2, row = first * a.rows / a.items, end = last * a.rows / a.items;
    const int64_t some = a.inner % 2 ? 1 : end - row; /* rows without a gap */
    for (int64_t r = row; !stage && r < end; r += some)
        round_to_pairs(a.pairs + r * pairs, a.x + r * a.inner, 1, some * a.inner);
    a.x = a.pairs, a.inner = pairs;
    return stage ? dense(&a, first, last) : 0;
}

KERNELS(dense, KERNEL(dense, dense), STAGED_KERNEL(rounded_dense, dense, NULL, rounded_dense_stage))
