/* Matrix products of rows at arbitrary addresses with a constant matrix, shared by dense layers and convolutions.

   The matrix is packed into panels of 64 columns, [panel][inner][64]. The last panel has only the columns that
   remain, padded with zeros to a multiple of GRAIN. A row of x consists of parts of equal depth, such as the input of
   each tap of a convolution, and each part has its own address. With 16-lane vectors, a sole panel of at most 8
   columns may interleave pairs of rows, [inner / 2][8][2], if the depth of a part is even.

   Where the processor multiplies bfloat16, x and the matrix can hold pairs of bfloat16 along depth: adjacent elements
   of a row of x and of a column of the matrix. Their products are accumulated in float32. */
#ifndef PENSTOCK_PANELS_H
#define PENSTOCK_PANELS_H

#include <math.h>
#include <stdint.h>
#include "floats.h"

enum { PANEL = 64, GRAIN = 16, BLOCK = 192 }; /* BLOCK: most rows of a product with a whole panel */
enum { NEAR = 65536 }; /* elements of a matrix that stays in cache between blocks */

/* Elements between the sums of adjacent rows. */
#define SUMS_STEP(width) ((width) < GRAIN ? GRAIN : (width))

/* The rows of a line that lie inside the input for a part, `low` up to `high`. */
typedef struct {
    int32_t low, high;
} line_ends;

/* Rows of x: the address of each part of each row, [part][apart], and the offset in a part at which to begin; parts
   at `zeros` need not be multiplied. With `pairs`, all elements are pairs of bfloat16. If `line` is not 0, rows form
   lines of `line` rows, evenly spaced in each part except those at `zeros`, and no tile crosses the end of a line.
   With `taps`, each of `taps` adjacent parts reads for a row what the part before reads for the next row of the line.
   If `step` is not 0, the rows of a line are `step` elements apart in a part, or at `zeros`, and only the first row
   has an address; the first row of x is row `at` of its line. If there are `ends` for each part, rows outside of them
   are at `zeros` too; a line that is a piece of a longer one begins with row `first` of that. While multiplying,
   prefetch `ahead_step` elements per row from `ahead` on. */
typedef struct {
    const float *const *rows, *zeros;
    int64_t apart, parts, begin, depth;
    int pairs;
    int64_t line, taps, step, at;
    const float *ahead;
    int64_t ahead_step;
    const line_ends *ends;
    int64_t first;
} operands;

/* The activation: scale values below 0 by their column's slope, if there are slopes; if `gate` is not 0, multiply
   each value by a clamped linear function of itself (as HardSwish does); then clamp. NaN is preserved. */
typedef struct {
    const float *slopes;
    float gate, offset, factor, term, low, high;
} activation;

#define NO_ACTIVATION ((activation){NULL, 0, 0, 1, 0, -INFINITY, INFINITY})

/* The destination of sums, and the epilogue: add a bias row and an addend matrix, then apply an activation. */
typedef struct {
    float *y;
    int64_t step;
    const float *bias, *addend; /* or NULL; addend has y's layout with its own step */
    int64_t addend_step;
    activation activation;
    int64_t count;  /* valid columns (vectors may extend past them); for products only */
    int unfinished; /* whether later products accumulate onto these sums */
    int split;      /* whether these sums are one of several products', to which the bias is added at the end */
} target;

static inline const float *moved(const float *from, int64_t count)
{
    return from ? from + count : NULL;
}

/* The part of the result that starts at this row and column. */
static inline target part_of(const target *y, int64_t row, int64_t column)
{
    target part = *y;
    part.y = y->y ? y->y + row * y->step + column : NULL;
    part.bias = moved(y->bias, column);
    part.addend = moved(y->addend, row * y->addend_step + column);
    part.activation.slopes = moved(y->activation.slopes, column);
    part.count = y->count - column;
    return part;
}

/* Whether `count` rows all point to `place`. */
INLINED int all_at(const float *place, const float *const *rows, int count)
{
    for (; count > 0 && *rows == place; rows++)
        count--;
    return !count;
}

/* The same operands, starting at a later row. */
static inline operands from_row(operands x, int64_t row)
{
    x.ahead += x.ahead_step ? row * x.ahead_step : 0;
    if (!x.step) {
        x.rows += row;
        return x;
    }
    for (x.at += row; x.at >= x.line; x.at -= x.line)
        x.rows++;
    return x;
}

/* Whether all rows of a part are at `zeros`; whole lines are counted from the first row on. */
static inline int is_outside(const operands *x, int64_t part, int64_t rows)
{
    if (x->ends && x->ends[part].low >= x->ends[part].high)
        return 1;
    const int64_t addresses = x->step ? (uint32_t)(rows + x->line - 1) / (uint32_t)x->line : rows;
    return all_at(x->zeros, x->rows + part * x->apart, (int)addresses);
}

/* For each vector j of each row r; both counts are compile-time constants. */
#define EACH(rows, vectors)                                                                        \
    UNROLLED(r, rows)                                                                              \
        UNROLLED(j, vectors)

/* Whether sums change before they are written. */
static inline int is_active(const activation *f)
{
    return f->slopes || f->gate || f->low > -INFINITY || f->high < INFINITY;
}

/* Apply the epilogue except the bias to the sums of some rows and write them to y. They are columns of the target
   from `column` on; the last vector of each row has `rest` valid lanes. */
INLINED void put_rows(vector *sums, const target *to, float *y, const float *addend, int64_t column,
                         int64_t rest, int rows, int vectors)
{
    const int64_t step = to->step, addend_step = to->addend_step;
    const activation *const f = &to->activation;
    const vector none = {0};
#define COUNT (j + 1 < vectors ? LANES : rest)
#if defined(__AVX512F__)
    /* One form for full and partial vectors: compilers take long to read each. */
    const __mmask16 some = (__mmask16)(rest < LANES ? (1u << rest) - 1 : 0xffff);
#define LOADED_OF(from) (j + 1 < vectors ? loaded(from) : (vector)_mm512_maskz_loadu_ps(some, from))
#else
#define LOADED_OF(from) load_some(from, COUNT)
#endif
#define OWN sums[r * vectors + j]
    if (addend)
        EACH(rows, vectors) OWN += LOADED_OF(addend + r * addend_step + j * LANES);
    if (f->slopes)
        UNROLLED(j, vectors) {
            const vector slopes = LOADED_OF(f->slopes + column + j * LANES);
            UNROLLED(r, rows)
                OWN = LARGER(none, OWN) + LESSER(none, OWN) * slopes;
        }
    if (f->gate)
        EACH(rows, vectors)
            OWN = OWN * LESSER(none + 1, LARGER(none, OWN * f->gate + f->offset)) * f->factor + f->term;
    if (f->low > -INFINITY)
        EACH(rows, vectors) OWN = LARGER(none + f->low, OWN);
    if (f->high < INFINITY)
        EACH(rows, vectors) OWN = LESSER(none + f->high, OWN);
    if (rest >= LANES)
        EACH(rows, vectors) memcpy(y + r * step + j * LANES, &OWN, VECTOR_BYTES);
    else
        EACH(rows, vectors) store_some(y + r * step + j * LANES, OWN, COUNT);
#undef COUNT
#undef LOADED_OF
#undef OWN
}

/* As `put_rows`, but a few sums at a time if there are many, since the first are ready before the last. */
INLINED void put_vectors(vector *sums, const target *to, float *y, const float *addend, int64_t column,
                         int64_t rest, int rows, int vectors)
{
    const int some = vectors > 2 ? 2 : rows;
    UNROLLED(i, rows / some)
        put_rows(sums + i * some * vectors, to, y + i * some * to->step,
                 moved(addend, i * some * to->addend_step), column, rest, some, vectors);
    if (rows % some)
        put_rows(sums + (rows - 1) * vectors, to, y + (rows - 1) * to->step,
                 moved(addend, (rows - 1) * to->addend_step), column, rest, 1, vectors);
}

/* Write `count` adjacent sums to the first row of `to`, from its first column on, with the epilogue except the
   bias. */
static inline void put_floats(const target *to, const float *sums, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        vector value = load_some(sums + i, count - i);
        put_vectors(&value, to, to->y + i, moved(to->addend, i), i, count - i, 1, 1);
    }
}

#pragma GCC visibility push(hidden)
/* Round `count` values, `step` apart, to pairs of bfloat16; the last pair is padded with 0 if `count` is odd. */
void round_to_pairs(float *to, const float *from, int64_t step, int64_t count);

/* The first `count` columns of y = x w for one panel of `width` columns (8: rows interleaved in pairs), and at most
   BLOCK rows, or as many as have no more sums; `next` is what is read afterwards, NULL if the whole matrix is
   near. */
void multiply_panel(operands x, int64_t rows, const float *w, int64_t width, const float *next,
                    const target *y, int64_t count);

/* The same, where each of the `depth` elements of the first row of x has its own address, or NULL if it is 0 in all
   rows; adjacent rows are `step` elements apart. */
void multiply_elements(const float *const *elements, int64_t depth, int64_t step, int64_t rows, const float *w,
                       int64_t width, const target *y, int64_t count);
#pragma GCC visibility pop

#endif
