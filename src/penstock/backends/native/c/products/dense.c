/* Dense layers: a product with a constant matrix, and what follows it. An item is a panel, for a block of
   rows. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "panels.h"
#include "programs.h"

struct dense {
    const float *x, *weights;
    const float *bias;   /* of whole panels, or NULL */
    const float *addend; /* as y, or NULL */
    float *y;
    int64_t rows, inner, columns, block; /* rows of an item: at most BLOCK */
    float *pairs;                        /* of bfloat16, that x is rounded to; or NULL */
    int64_t items;
    int64_t follows;                     /* whether there is a program */
    struct elementwise program;          /* of y, in place; tiles are parts of rows, of some panels */
};

ITEMS_OF(dense, dense)
{
    const int64_t panels = (a->columns + PANEL - 1) / PANEL;
    const int64_t rest = (a->columns - (panels - 1) * PANEL + GRAIN - 1) / GRAIN * GRAIN;
    const float *from[BLOCK];
    struct elementwise program = a->program;
    program.inputs[0] = program.output = a->y;
    int64_t seen = begin % panels * PANEL; /* by the program: columns before it */
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
                          NO_ACTIVATION, count, 0};
        for (int64_t r = 0; r < rows; r++)
            from[r] = a->x + (row + r) * a->inner;
        const operands x = {from, NULL, BLOCK, 1, 0, a->inner, a->pairs != NULL, 0, 1};
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
