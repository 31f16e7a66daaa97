/* Products of rows, which may lie anywhere, with a constant matrix: what dense layers and convolutions
   have in common.

   The matrix is in panels of 64 columns, [panel][inner][64]; the last one has as few as hold what is left,
   a multiple of GRAIN, with zeros behind it. A row of x has several parts of equal depth, such as what
   each tap of a convolution's kernel sees, and each part has an address of its own. Where vectors have 16 lanes,
   the only panel of at most 8 columns may have those of two rows in turn, [inner / 2][8][2], if parts have even depth.

   Where the processor multiplies bfloat16, numbers of x and of the matrix can be pairs of those: of adjacent
   elements of a row, and of the same elements of a column. Their products are summed up in float32. */
#ifndef PENSTOCK_PANELS_H
#define PENSTOCK_PANELS_H

#include <math.h>
#include <stdint.h>
#include "floats.h"

enum { PANEL = 64, GRAIN = 16, BLOCK = 192 }; /* BLOCK: rows of a product with a whole panel, at most */
enum { NEAR = 65536 }; /* elements of a matrix that stays in a cache from one block to the next */

/* Elements from the sums of a row to those of the next. */
#define SUMS_STEP(width) ((width) < GRAIN ? GRAIN : (width))

/* The rows of a line that a part has, from `low` to `high`. */
typedef struct {
    int32_t low, high;
} line_ends;

/* Rows of x: the addresses of each part of them, [part][apart], and where in a part to begin; parts at `zeros`
   need not be multiplied. With `pairs`, all numbers are pairs of bfloat16. If `line` is not 0, rows are whole lines
   of so many, which are equally far apart in each part but for those at `zeros`, and tiles do not begin in one line
   and end in another. Each of `taps` adjacent parts has what the one before has of the next row, in a line. If `step`
   is not 0, the rows of a line are so many elements apart, or at `zeros` in a part, and only its first one has an
   address; the first row is `at` in its line. If there are `ends` of each part, those outside of them are also at
   `zeros`; a line that is part of another begins with row `first` of that. Meanwhile, `ahead_step` elements from
   `ahead` on are fetched for each row. */
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

/* Values below 0 are multiplied by the slope of their column, if there are slopes; all by a bounded linear
   function of themselves, if `gate` is not 0, as HardSwish does; and are bounded. NaN stays. */
typedef struct {
    const float *slopes;
    float gate, offset, factor, term, low, high;
} activation;

#define NO_ACTIVATION ((activation){NULL, 0, 0, 1, 0, -INFINITY, INFINITY})

/* Where sums go, and what happens to them before: a row and a matrix are added, and an activation. */
typedef struct {
    float *y;
    int64_t step;
    const float *bias, *addend; /* or NULL; addend as y, but for its own step */
    int64_t addend_step;
    activation activation;
    int64_t count;  /* columns that there are, of those that whole vectors have; in products alone */
    int unfinished; /* whether these are sums that others are added to */
} target;

static inline const float *moved(const float *from, int64_t count)
{
    return from ? from + count : NULL;
}

/* Rows and columns of the result from these on. */
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

/* Whether `count` rows all begin at `place`. */
INLINED int all_at(const float *place, const float *const *rows, int count)
{
    for (; count > 0 && *rows == place; rows++)
        count--;
    return !count;
}

/* The same operands from a row on. */
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

/* Whether all rows of a part are at zeros, those of whole lines from the first one on. */
static inline int is_outside(const operands *x, int64_t part, int64_t rows)
{
    if (x->ends && x->ends[part].low >= x->ends[part].high)
        return 1;
    const int64_t addresses = x->step ? (uint32_t)(rows + x->line - 1) / (uint32_t)x->line : rows;
    return all_at(x->zeros, x->rows + part * x->apart, (int)addresses);
}

/* For each vector j of each row r; both numbers are constants. */
#define EACH(rows, vectors)                                                                        \
    UNROLLED(r, rows)                                                                              \
        UNROLLED(j, vectors)

/* Write the sums of some rows to y, with what is added to them but for the bias. They are columns of the
   target from `column` on, of which the last vector of a row has `rest`. */
INLINED void put_rows(vector *sums, const target *to, float *y, const float *addend, int64_t column,
                         int64_t rest, int rows, int vectors)
{
    const int64_t step = to->step, addend_step = to->addend_step;
    const activation *const f = &to->activation;
    const vector none = {0};
#define COUNT (j + 1 < vectors ? LANES : rest)
#if defined(__AVX512F__)
    /* One form for whole vectors and for parts of them: compilers take long to read each. */
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

/* As `put_rows`, but of many sums some at a time, since the first are ready before the last. */
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

/* Write `count` adjacent sums of the first row of `to` on from its first column, with what is added to them
   but for the bias. */
static inline void put_floats(const target *to, const float *sums, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        vector value = load_some(sums + i, count - i);
        put_vectors(&value, to, to->y + i, moved(to->addend, i), i, count - i, 1, 1);
    }
}

#pragma GCC visibility push(hidden)
/* Round `count` numbers, `step` apart, to pairs of bfloat16; the last one may have 0 in its other half. */
void round_to_pairs(float *to, const float *from, int64_t step, int64_t count);

/* The first `count` columns of y = x w, for at most BLOCK rows, or as many as have no more sums, and a panel of `width`
   columns, 8 if it has those of two rows in turn; `next` is what is read after it, or NULL if all of the matrix is near. */
void multiply_panel(operands x, int64_t rows, const float *w, int64_t width, const float *next,
                    const target *y, int64_t count);

/* The same, where each of `depth` elements of the first row of x has an address, or NULL if those of all rows are 0;
   the next rows are `step` elements behind. */
void multiply_elements(const float *const *elements, int64_t depth, int64_t step, int64_t rows, const float *w,
                       int64_t width, const target *y, int64_t count);
#pragma GCC visibility pop

#endif
