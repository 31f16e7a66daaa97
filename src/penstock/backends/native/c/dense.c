/* Dense layers: a product with a constant matrix, and what follows it.

   The matrix is in panels of 64 columns, [panel][inner][64]; the last one has as few as hold what is left,
   a multiple of GRAIN, with zeros behind it. An item is a panel, for a block of rows. It is multiplied DEPTH
   rows of the panel at a time, which the second-level cache holds, by as many rows of x at a time as
   registers have room for their sums.

   Where x has few rows, reading the matrix from memory takes longer than multiplying. The processor fetches
   ahead only in the first of several passes over the same part of a panel, and leaves memory idle in the
   others. So each pass fetches some of the next part into the second-level cache. A single pass leaves that
   to the processor: it has more lines under way than a program can ask for. Results are stored to lines that
   were fetched while they were computed. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "floats.h"
#include "programs.h"

enum { PANEL = 64, GRAIN = 16, DEPTH = 256, ROWS = 12, BLOCK = 192, LINE = 64 };

enum { MOST_VECTORS = BY_WIDTH(4, 2, 2), SUMS = BY_WIDTH(24, 12, 12), TOGETHER = LANES * MOST_VECTORS };

struct dense {
    const float *x, *weights;
    const float *bias;   /* of whole panels, or NULL */
    const float *addend; /* as y, or NULL */
    float *y;
    int64_t rows, inner, columns, block; /* rows of an item: at most BLOCK */
    int64_t follows;                     /* whether there is a program */
    struct elementwise program;          /* of y, in place; tiles are parts of rows, of some panels */
};

/* What a pass fetches: `lines` lines of the cache for each four rows of a panel. */
typedef struct {
    const char *next;
    int64_t lines;
} fetching;

/* Where a pass puts sums, and what it adds to them: those of the passes before, a row and a matrix. */
typedef struct {
    float *y;
    int64_t step, sums_step;
    const float *sums, *bias, *addend; /* or NULL; addend as y */
} target;

/* The product of `rows` rows of x with `vectors` vectors of a panel's columns; both numbers are
   constants. */
INLINED void multiply(const float *x, int64_t x_step, const float *w, int64_t width, int64_t depth,
                      const target *to, fetching f, int rows, int vectors)
{
    vector own[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * vectors; i++)
        own[i] = (vector){0};
#define STEP(k)                                                                                    \
    {                                                                                              \
        vector columns[MOST_VECTORS];                                                              \
        _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) columns[j] =                     \
            loaded(w + j * LANES);                                                                 \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++)                                     \
            _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)                              \
                own[r * vectors + j] += x[r * x_step + (k)] * columns[j];                          \
        w += width;                                                                                \
    }
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
        for (int64_t i = 0; i < f.lines; i++, f.next += LINE)
            __builtin_prefetch(f.next, 0, 2);
        STEP(k)
        STEP(k + 1)
        STEP(k + 2)
        STEP(k + 3)
    }
    for (; k < depth; k++)
        STEP(k)
#undef STEP
    if (to->sums)
#pragma GCC unroll 32
        for (int i = 0; i < rows * vectors; i++)
            own[i] += loaded(to->sums + i / vectors * to->sums_step + i % vectors * LANES);
    if (to->bias)
#pragma GCC unroll 32
        for (int i = 0; i < rows * vectors; i++)
            own[i] += loaded(to->bias + i % vectors * LANES);
    if (to->addend)
#pragma GCC unroll 32
        for (int i = 0; i < rows * vectors; i++)
            own[i] += loaded(to->addend + i / vectors * to->step + i % vectors * LANES);
#pragma GCC unroll 32
    for (int i = 0; i < rows * vectors; i++)
        memcpy(to->y + i / vectors * to->step + i % vectors * LANES, &own[i], sizeof(vector));
}

/* As `multiply`, for any number of rows whose sums registers have room for. */
INLINED void multiply_rows(const float *x, int64_t x_step, const float *w, int64_t width, int64_t depth,
                           const target *to, fetching f, int64_t rows, int vectors)
{
#define OF_ROWS(number)                                                     \
    case number:                                                            \
        if (number * vectors <= SUMS)                                       \
            multiply(x, x_step, w, width, depth, to, f, number, vectors);   \
        break;
    switch (rows) {
        OF_ROWS(1)
        OF_ROWS(2)
        OF_ROWS(3)
        OF_ROWS(4)
        OF_ROWS(5)
        OF_ROWS(6)
        OF_ROWS(7)
        OF_ROWS(8)
        OF_ROWS(9)
        OF_ROWS(10)
        OF_ROWS(11)
        OF_ROWS(12)
    }
#undef OF_ROWS
}

/* As `multiply_rows`, for any number of vectors up to MOST_VECTORS. */
static void multiply_some(const float *x, int64_t x_step, const float *w, int64_t width, int64_t depth,
                          const target *to, fetching f, int64_t rows, int64_t vectors)
{
    if (vectors == 1)
        multiply_rows(x, x_step, w, width, depth, to, f, rows, 1);
    else if (vectors == 2)
        multiply_rows(x, x_step, w, width, depth, to, f, rows, 2);
#if defined(__AVX512F__)
    else if (vectors == 3)
        multiply_rows(x, x_step, w, width, depth, to, f, rows, 3);
    else
        multiply_rows(x, x_step, w, width, depth, to, f, rows, 4);
#endif
}

/* Fetch some vectors of the rows that a pass is to write, and of what it adds to them. */
static inline void fetch_rows(const target *to, int64_t rows, int64_t vectors)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < vectors * VECTOR_BYTES; j += LINE) {
            __builtin_prefetch((const char *)(to->y + r * to->step) + j, 1);
            if (to->addend)
                __builtin_prefetch((const char *)(to->addend + r * to->step) + j, 0);
        }
}

static inline const float *moved(const float *from, int64_t count)
{
    return from ? from + count : NULL;
}

/* y = x w, for a panel of `width` columns, and what is added to it; `next` is what is read after it.
   Sums that are not complete are in `sums`. */
static void multiply_panel(const float *x, int64_t rows, int64_t inner, const float *w, int64_t width,
                           const float *next, float *sums, target y)
{
    const int64_t most = smaller(ROWS, SUMS / (smaller(width, TOGETHER) / LANES));
    const int64_t tiles = (rows + most - 1) / most, passes = tiles * ((width + TOGETHER - 1) / TOGETHER);
    for (int64_t k = 0, depth; k < inner; k += depth) {
        depth = smaller(DEPTH, inner - k);
        const int last = k + depth == inner;
        const int64_t lines = 4 * width * 4 / LINE;
        fetching f = {(const char *)(last ? next : w + (k + depth) * width),
                      (lines + passes - 1) / passes};
        int64_t left = passes > 1 ? depth / 4 * lines : 0;
        for (int64_t row = 0, tile = tiles, some; row < rows; row += some, tile--) {
            some = (rows - row + tile - 1) / tile;
            for (int64_t column = 0; column < width; column += TOGETHER) {
                float *own = sums + row * width + column;
                const int64_t at = row * y.step + column;
                const target to = {
                    last ? y.y + at : own, last ? y.step : width, width, k ? own : NULL,
                    last ? moved(y.bias, column) : NULL, last ? moved(y.addend, at) : NULL,
                };
                const int64_t vectors = smaller(TOGETHER, width - column) / LANES;
                f.lines = left > 0 ? f.lines : 0;
                if (last)
                    fetch_rows(&to, some, vectors);
                multiply_some(x + row * inner + k, inner, w + k * width + column, width, depth, &to,
                              f, some, vectors);
                f.next += depth / 4 * f.lines * LINE;
                left -= depth / 4 * f.lines;
            }
        }
    }
}

/* Copy the first `count` columns of a panel to y, and add a matrix to them. */
static void put_columns(float *restrict y, int64_t step, const float *restrict from, int64_t width,
                        const float *restrict addend, int64_t rows, int64_t count)
{
    for (int64_t r = 0; r < rows; r++, y += step, from += width)
        if (addend) {
            for (int64_t i = 0; i < count; i++)
                y[i] = from[i] + addend[i];
            addend += step;
        }
        else
            memcpy(y, from, count * sizeof *y);
}

static int dense(const void *arguments, int64_t begin, int64_t end)
{
    const struct dense *a = arguments;
    const int64_t panels = (a->columns + PANEL - 1) / PANEL;
    const int64_t rest = (a->columns - (panels - 1) * PANEL + GRAIN - 1) / GRAIN * GRAIN;
    _Alignas(64) float sums[BLOCK * PANEL];
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
        const float *x = a->x + row * a->inner, *addend = moved(a->addend, at);
        const target y = {a->y + at, a->columns, 0, NULL, bias, addend};
        const target whole = {sums, width, 0, NULL, bias, NULL};
        multiply_panel(x, rows, a->inner, w, width, next, sums, count == width ? y : whole);
        if (count < width)
            put_columns(y.y, y.step, sums, width, addend, rows, count);
        const int64_t ready = column + count;
        if (a->follows && (panel + 1 == panels || item + 1 == end || ready - seen == program.tile)) {
            run_in_rows(&program, row, rows, seen, ready);
            seen = ready;
        }
    }
    return 0;
}

const kernel_entry dense_kernels[] = {
    KERNEL(dense, dense),
    END_OF_KERNELS,
};
