/* A panel is multiplied in slices of DEPTH of its rows, which fit in the L2 cache, by as many rows of x at a time as
   there are registers for accumulators.

   If x has few rows, reading the matrix from memory takes longer than multiplying. The hardware prefetcher runs ahead
   only in the first of several passes over the same slice of a panel, and leaves memory idle in the others. So each
   pass prefetches some of the next slice into the L2 cache. A single pass leaves this to the hardware, which keeps
   more cache lines in flight than a program can request. The destination lines of long products are prefetched while
   the sums are computed.

   With 16-lane vectors, tiles may be tall. One vector of columns needs a load for each product, which takes longer
   than the product: such a tile has up to 16 rows, and loads the elements of three adjacent taps once. In lines of 7,
   13 or 14 positions, tiles of four vectors would have few rows, and read the panel from the L2 cache more often than
   its bandwidth allows. Rows are addressed as two groups of evenly spaced rows, as there are too few registers for
   the address of each. Compiled with contraction to fused multiply-add. */

// With these, GCC keeps one form of the loop over a row's elements, without copies between registers.
// Compiler options: -ffp-contract=fast
// There are no loops for GCC to vectorize: -O3 compiles more slowly, and makes nothing faster.
// GCC options: -O2 -fno-tree-vectorize -fno-tree-sink
#include "additions.h"
#include "math32.h"
#include "panels.h"
#include "tiles.h"

enum { ROWS = 8, LINE = 64, LONG = 128 }; /* LONG: depth from which results are prefetched */
/* On processors with wide vectors, the L2 cache has 1 MiB or more. */
enum { DEPTH = 384 };
/* Rows of a panel per prefetch of as many rows of the next slice: with wide vectors, four take too little time to pay
   for the test whether anything is left to prefetch. */
enum { AHEAD = BY_WIDTH(8, 4, 4) };
/* Vectors of columns of a tile, the most of a tile at the end of a panel, and accumulators. */
enum { USUAL = BY_WIDTH(4, 2, 2), MOST_VECTORS = BY_WIDTH(4, 3, 3), SUMS = BY_WIDTH(24, 12, 12) };
#define MOST_ROWS(vectors) (SUMS / (vectors) < ROWS ? SUMS / (vectors) : ROWS)
/* Rows of a tall tile (two groups of evenly spaced rows, one or two vectors), and accumulators. */
enum { TALL = BY_WIDTH(16, 0, 0), TALL_SUMS = BY_WIDTH(28, SUMS, SUMS), LEAST_GROUP = 5, ALL_ROWS = -1, UNEVEN = -2 };
enum { LEAST_DEPTH = 8 }; /* below it, tiles are not used */
/* Kinds of elements. The last vector of HALVES uses half of its lanes. A vector of TWOS covers half as many columns,
   with two interleaved rows of the panel, and is multiplied by two elements of a row of x. */
enum { FLOATS, PAIRS, HALVES, TWOS };

/* What to prefetch: from `next` up to `end`, `lines` cache lines for every four rows of a panel. */
typedef struct {
    const char *next, *end;
    int64_t lines;
} fetching;

void round_to_pairs(float *to, const float *from, int64_t step, int64_t count)
{
    uint16_t *halves = (uint16_t *)to;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (vector pairs; step == 1 && i + 2 * LANES <= count; i += 2 * LANES, to += LANES) {
        __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(loaded(from + i)), "v"(loaded(from + i + LANES)));
        memcpy(to, &pairs, sizeof pairs);
    }
#endif
    for (; i < count; i++)
        halves[i] = bfloat_of(from[i * step]);
    if (count % 2)
        halves[count] = 0;
}

/* Prefetch the destination vectors of some rows, and their addends. */
INLINED void fetch_rows(const target *to, const float *y, const float *addend, int rows, int vectors)
{
    const int64_t step = to->step, addend_step = to->addend_step;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, y += step)
#pragma GCC unroll 4
        for (int j = 0; j < vectors * LANES; j += LINE / 4)
            __builtin_prefetch(y + j, 1);
    for (int r = 0; r < rows && addend; r++, addend += addend_step)
        for (int j = 0; j < vectors * LANES; j += LINE / 4)
            __builtin_prefetch(addend + j, 0);
}

/* Prefetch `count` elements. */
static inline void fetch_ahead(const float *from, int64_t count)
{
    for (int64_t i = 0; i < count; i += LINE / 4)
        __builtin_prefetch(from + i);
}

/* For rows a step apart, the bit mask of those that are at `zeros` in a part; ALL_ROWS if all are. */
static inline int outside_of_line(const operands *x, int64_t part, int rows)
{
    if (x->rows[part * x->apart] == x->zeros)
        return ALL_ROWS;
    if (!x->ends)
        return 0;
    const int64_t low = x->ends[part].low - x->first - x->at, high = x->ends[part].high - x->first - x->at;
    if (low <= 0 && high >= rows)
        return 0;
    if (low >= rows || high <= 0)
        return ALL_ROWS;
    const int before = low > 0 ? (1 << low) - 1 : 0, behind = high < rows ? -1 << high : 0;
    return before | (behind & ((1 << rows) - 1));
}

#if defined(__AVX512F__)
/* The bit mask of the rows of a tall tile that are at `zeros`; its first group has `group` rows. UNEVEN if the other
   rows are not `*step` bytes apart, ALL_ROWS if there are none. */
static inline int outside_of(const float *const *at, const float *zeros, int rows, int group, int64_t *step)
{
    *step = (intptr_t)at[2] - (intptr_t)at[1];
    int outside = 0, uneven = 0;
    const __m512i far = _mm512_mullo_epi64(_mm512_set1_epi64(*step), _mm512_setr_epi64(-1, 0, 1, 2, 3, 4, 5, 6));
    for (int first = 0; first < rows; first += group) {
        const __mmask8 own = (__mmask8)((1 << (first ? rows - group : group)) - 1);
        const __m512i places = _mm512_maskz_loadu_epi64(own, at + first);
        const __m512i even = _mm512_add_epi64(far, _mm512_set1_epi64((intptr_t)at[first + 1]));
        const int others = _mm512_mask_cmpneq_epi64_mask(own, places, _mm512_set1_epi64((intptr_t)zeros));
        uneven |= _mm512_mask_cmpneq_epi64_mask((__mmask8)others, places, even);
        outside |= (others ^ own) << first;
    }
    return outside == (1 << rows) - 1 ? ALL_ROWS : uneven ? UNEVEN : outside;
}

/* The same for a part, whose first row is at `place` of its line if rows are a step apart; also find the address one
   step before the first row of each group. */
INLINED int find_groups(const operands *x, int64_t part, int64_t place, int rows, int group, int64_t *step,
                        const float **groups)
{
    const float *const *const at = x->rows + part * x->apart;
    if (x->step) {
        *step = 4 * x->step;
        groups[0] = at[0] + place - x->step;
        groups[1] = groups[0] + group * x->step;
        return outside_of_line(x, part, rows);
    }
    const int outside = outside_of(at, x->zeros, rows, group, step);
    groups[0] = (const float *)((intptr_t)at[1] - 2 * *step);
    groups[1] = (const float *)((intptr_t)at[group + 1] - 2 * *step);
    return outside;
}
#endif

#define NAME_OF(rows, vectors) multiply_##rows##_rows_##vectors
/* Whether tiles of this many rows and vectors exist; constants. */
#define HAS_FORM(rows, vectors)                                                                    \
    ((rows) > ROWS ? (vectors) == 1 || ((rows) * (vectors) <= TALL_SUMS && ((rows) < 11 || (rows) > 12)) \
                   : (rows) * (vectors) <= SUMS && (vectors) <= MOST_VECTORS)
#define IS_TALL 0
#define VECTORS 1
#include "panels_of.h"
#define VECTORS 2
#include "panels_of.h"
#define VECTORS 3
#include "panels_of.h"
#define VECTORS 4
#include "panels_of.h"
#if defined(__AVX512F__)
#undef IS_TALL
#define IS_TALL 1
#define VECTORS 1
#include "panels_of.h"
#define VECTORS 2
#include "panels_of.h"
#endif

#define OF_ROWS(vectors)                                                                           \
    NAME_OF(1, vectors), NAME_OF(2, vectors), NAME_OF(3, vectors), NAME_OF(4, vectors),            \
        NAME_OF(5, vectors), NAME_OF(6, vectors), NAME_OF(7, vectors), NAME_OF(8, vectors)
#define OF_TALL(vectors)                                                                           \
    NAME_OF(9, vectors), NAME_OF(10, vectors), NAME_OF(11, vectors), NAME_OF(12, vectors),         \
        NAME_OF(13, vectors), NAME_OF(14, vectors), NAME_OF(15, vectors), NAME_OF(16, vectors)
static __typeof__(multiply_1_rows_1) *const forms[] = {OF_ROWS(1), OF_ROWS(2), OF_ROWS(3), OF_ROWS(4)};
/* Of one and two vectors. */
static __typeof__(multiply_1_rows_1) *const tall_forms[] = {
#if defined(__AVX512F__)
    OF_TALL(1), OF_TALL(2),
#endif
    NULL,
};

static inline int64_t tiles_of(int64_t rows, int64_t most)
{
    return (uint32_t)(rows + most - 1) / (uint32_t)most;
}

/* The most rows of a tile with this many vectors, given the rows of a line of x, or of two lines for whole tiles. */
static inline int64_t most_rows(int64_t line, int64_t vectors, int kind)
{
    static const uint8_t most[] = {1, MOST_ROWS(1), MOST_ROWS(2), MOST_ROWS(3), MOST_ROWS(4)};
    /* Wide tiles are faster unless they have few rows: each reads the panel from the L2 cache. */
    const int tall = TALL && line > ROWS && (kind == FLOATS || kind == TWOS) &&
                     (vectors == 1 || (vectors == 2 && line < 5 * tiles_of(line, most[4])));
    return tall ? smaller(TALL, TALL_SUMS / vectors) : most[vectors];
}

/* The rows whose ends no tile crosses: a line, or two lines if these make a tall tile of rows with addresses. */
static inline int64_t unit_of(const operands *x, int64_t rows, int64_t vectors, int kind)
{
    const int64_t two = 2 * x->line;
    return !x->step && x->line >= LEAST_GROUP && two <= rows && two <= most_rows(two, vectors, kind) ? two : x->line;
}

/* The product of rows of x with columns `column` to `end` of a panel, `vectors` vectors at a time. */
static void multiply_columns(const operands *x, int64_t rows, const float *w, int64_t width, const float *before,
                             const target *to, fetching *f, int64_t column, int64_t end, int64_t vectors, int kind)
{
    const int64_t unit = unit_of(x, rows, vectors, kind);
    /* Tiles with few rows, as short lines would have, cost more per row; with narrow vectors, they have so few
       accumulators that additions wait for each other. */
    const int is_even = x->step != 0; /* a tile across two lines would not be */
    const int by_line =
        is_even || BY_WIDTH(unit && 2 * unit >= 7 * tiles_of(unit, most_rows(unit, vectors, kind)), 0, 0);
    const int64_t most = most_rows(by_line ? unit : 0, vectors, kind);
    const uint32_t line = (uint32_t)(by_line ? unit : rows), tiles = (uint32_t)tiles_of(line, most);
    const uint32_t whole = line / tiles, more = line % tiles;
    /* Some tiles of a line have one row more than the others. */
    for (int64_t row = 0, one = more > 0, number, each; row < rows; row += number * each, one = !one && more) {
        number = !more ? (rows - row) / whole : one ? more : tiles - more, each = whole + one;
        if (!number)
            number = 1, each = rows - row;
        const target part = part_of(to, row, 0);
        const operands some = from_row(*x, row);
        const int64_t form = (vectors - 1) * ROWS + each - 1;
        (each > ROWS ? tall_forms[form - ROWS] : forms[form])(
            some, w, width, moved(before, row * SUMS_STEP(width)), &part, f, column, end, number, kind);
    }
}

#ifdef HAVE_TILES
#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))

/* Where a tile is loaded from, and the bytes between its rows. */
typedef struct {
    const float *from;
    int64_t step;
} tile;

/* The bytes between adjacent rows of `count`; 0 if they differ. */
static inline int64_t step_of(const float *const *rows, int64_t count)
{
    const int64_t step = count > 1 ? rows[1] - rows[0] : TILE_ROWS;
    for (int64_t r = 2; r < count; r++)
        if (rows[r] - rows[r - 1] != step)
            return 0;
    return step * 4;
}

/* `depth` pairs of `count` rows from k on: in place, or copied to `room` and padded with zeros. */
static inline tile tile_of(const float *const *rows, int64_t count, int64_t step, int64_t k, int64_t depth,
                           float *room)
{
    if (step && depth == TILE_ROWS)
        return (tile){rows[0] + k, step};
    for (int64_t r = 0; r < count; r++)
        store_some(room + r * TILE_ROWS, load_some(rows[r] + k, depth), TILE_ROWS);
    return (tile){room, TILE_BYTES};
}

/* `depth` rows of a panel, as tile_of. */
static inline tile tile_of_panel(const float *w, int64_t width, int64_t depth, float *room)
{
    if (depth == TILE_ROWS)
        return (tile){w, width * 4};
    memset(room, 0, TILE_ROWS * TILE_BYTES);
    for (int64_t k = 0; k < depth; k++)
        memcpy(room + k * TILE_ROWS, w + k * width, TILE_BYTES);
    return (tile){room, TILE_BYTES};
}

/* The product of `upper` and `lower` rows of x, from `row` on, with `vectors` vectors of columns; the last two
   arguments are constants. Tiles 0 to 3 hold sums, side by side, 4 and 5 hold x, 6 and 7 the panel. */
WITH_TILES INLINED void multiply_tiles(const operands *x, int64_t row, int64_t upper, int64_t lower, const float *w,
                                       int64_t width, const float *before, const target *to, int64_t column,
                                       const int below, const int vectors)
{
    enum { AREA = TILE_ROWS * TILE_ROWS };
    _Alignas(64) float of_x[2][AREA], of_panel[4][AREA], sums[4 * AREA];
    const int64_t rows = upper + lower, apart = vectors * LANES;
    w += column;
#define EACH_TILE(from, step)                                                                      \
    TILE(0, from, step) TILE(1, from, step) TILE(2, from, step) TILE(3, from, step)
#define TILE_AT(t, from, step) (from) + (below ? t / 2 * TILE_ROWS * (step) + t % 2 * LANES : t * LANES)
#define IS_USED(t) (below ? t % 2 < vectors : t < vectors)
#define TILE(t, from, step)                                                                        \
    if (IS_USED(t) && !before)                                                                     \
        _tile_zero(t);                                                                             \
    else if (IS_USED(t))                                                                           \
        _tile_loadd(t, TILE_AT(t, from, step), (step) * 4);
    EACH_TILE(before + row * width + column, width)
#undef TILE
#define TILE(t, from, step)                                                                        \
    if (IS_USED(t))                                                                                \
        _tile_stored(t, TILE_AT(t, from, step), (step) * 4);
/* GCC does not know that tiles are loaded from and stored to memory. */
#define IN_MEMORY __asm__ volatile("" ::: "memory")
#define COLUMNS(t, of)                                                                             \
    if (t < vectors) {                                                                             \
        const tile some = tile_of_panel(w + k * width + t * LANES, width, depth, of_panel[t]);     \
        IN_MEMORY;                                                                                 \
        _tile_loadd(of, some.from, some.step);                                                     \
        _tile_dpbf16ps(t, 4, of);                                                                  \
    }
    for (int64_t part = 0; part < x->parts; part++, w += x->depth * width) {
        const float *const *from = x->rows + part * x->apart + row;
        if (all_at(x->zeros, from, (int)rows))
            continue;
        const int64_t step = step_of(from, upper), next_step = step_of(from + upper, lower);
        for (int64_t k = 0; k < x->depth; k += TILE_ROWS) {
            const int64_t depth = smaller(TILE_ROWS, x->depth - k);
            const tile first = tile_of(from, upper, step, x->begin + k, depth, of_x[0]);
            IN_MEMORY;
            _tile_loadd(4, first.from, first.step);
            COLUMNS(0, 6)
            COLUMNS(1, 7)
            COLUMNS(2, 6)
            COLUMNS(3, 7)
            if (below) {
                const tile second = tile_of(from + upper, lower, next_step, x->begin + k, depth, of_x[1]);
                IN_MEMORY;
                _tile_loadd(5, second.from, second.step);
                _tile_dpbf16ps(2, 5, 6);
            }
            if (below && vectors > 1)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    if (to->unfinished) {
        EACH_TILE(to->y + row * to->step + column, to->step)
        return;
    }
    EACH_TILE(sums, apart)
    IN_MEMORY;
    const int64_t rest = to->count - column - (vectors - 1) * LANES;
    for (int64_t r = 0, at = row; r < rows; r++, at++) {
        vector own[4];
        UNROLLED(j, vectors) {
            own[j] = loaded(sums + r * apart + j * LANES);
            own[j] = to->bias ? own[j] + loaded(to->bias + column + j * LANES) : own[j];
        }
        put_rows(own, to, to->y + at * to->step + column, moved(to->addend, at * to->addend_step + column), column,
                 rest, 1, vectors);
    }
}

/* As multiply_columns, with AMX tiles, for all columns before `end`: 2 x 2 tiles of sums, or four side by side. */
WITH_TILES static void multiply_by_tiles(const operands *x, int64_t rows, const float *w, int64_t width,
                                         const float *before, const target *to, int64_t end)
{
    for (int64_t row = 0, shaped = 0, some; row < rows; row += some) {
        some = smaller(2 * TILE_ROWS, rows - row);
        const int64_t upper = smaller(some, TILE_ROWS), lower = some - upper, most = lower ? 2 : 4;
        if (some != shaped)
            shape_tiles(upper, lower, TILE_ROWS, TILE_BYTES);
        shaped = some;
        for (int64_t column = 0, vectors; column < end; column += vectors * LANES) {
            vectors = smaller(most, (end - column) / LANES);
#define MULTIPLY(below, number)                                                                    \
    if (below == (lower > 0) && vectors == number)                                                 \
        multiply_tiles(x, row, upper, lower, w, width, before, to, column, below, number);
            MULTIPLY(1, 1)
            MULTIPLY(1, 2)
            MULTIPLY(0, 1)
            MULTIPLY(0, 2)
            MULTIPLY(0, 3)
            MULTIPLY(0, 4)
        }
    }
    _tile_release();
}
#else
#define multiply_by_tiles(...) (void)0
#endif

void multiply_panel(operands x, int64_t rows, const float *w, int64_t width, const float *next,
                    const target *y, int64_t count)
{
    _Alignas(64) float sums[BLOCK * PANEL];
    const int64_t used = CEIL_DIV(count, LANES) * LANES, vectors = used / LANES;
    /* The widest vectors of a panel are multiplied together. Some processors take half the time for half a vector. */
    const int half = BY_WIDTH(HAS_HALVES && features & HALF_VECTORS && used - count >= LANES / 2, 0, 0);
    const int kind = BY_WIDTH(x.pairs, 0, 0) ? PAIRS : width < LANES ? TWOS : half ? HALVES : FLOATS;
    const int64_t unit = unit_of(&x, rows, 2, kind), usual = most_rows(unit, 2, kind) > ROWS ? 2 : USUAL;
    /* A leftover vector is multiplied together with those before it. */
    const int64_t left = vectors % usual;
    const int64_t rest = left && vectors > left && left + usual <= MOST_VECTORS ? left + usual : left;
    const int64_t whole = vectors - rest, passes = whole / usual * tiles_of(rows, most_rows(unit, usual, kind)) +
                                                   (rest ? tiles_of(rows, most_rows(unit, rest, kind)) : 0);
    const int by_tiles = x.pairs && x.depth >= LEAST_DEPTH && has_tiles();
    const int64_t end = x.begin + x.depth;
    const target unfinished = {sums, SUMS_STEP(width), NULL, NULL, 0, NO_ACTIVATION, used, 1, 1};
    /* Several parts of the rows, or a piece of one. Pieces have about equal depth, since each prefetches as much of
       the next one. */
    const int64_t most_parts = x.depth < DEPTH ? DEPTH / x.depth : 1, pieces = CEIL_DIV(x.depth, DEPTH);
    const int64_t piece = CEIL_DIV(CEIL_DIV(x.depth, pieces), GRAIN) * GRAIN;
    const float *before = NULL;
    /* Parts that see only padding add nothing, so that results do not depend on the other rows of an item. */
    const int split = x.parts > most_parts || pieces > 1;
    /* Where taps are far apart, most of them see only padding for all rows. */
    while (x.parts > 1 && is_outside(&x, x.parts - 1, rows))
        x.parts--;
    for (int64_t depth; x.parts; w += depth * width) {
        if (most_parts == 1 && x.parts > 1 && is_outside(&x, 0, rows)) {
            x.parts--, x.rows += x.apart, x.ends += x.ends != NULL, depth = x.depth;
            continue;
        }
        operands some = x;
        some.parts = smaller(most_parts < x.taps ? most_parts : most_parts / x.taps * x.taps, x.parts);
        some.depth = smaller(piece, end - x.begin);
        depth = some.parts * some.depth;
        const int last = some.parts == x.parts && x.begin + some.depth == end;
        const int64_t lines = 4 * width * 4 / LINE;
        const char *const from = (const char *)(last ? next : w + depth * width);
        fetching f = {from, from + (passes > 1 && next ? depth / 4 * lines * LINE : 0), CEIL_DIV(lines, passes)};
        target to = last ? *y : unfinished;
        to.count = last ? count : used;
        to.split = split;
        if (by_tiles)
            multiply_by_tiles(&some, rows, w, width, before, &to, used);
        if (whole && !by_tiles)
            multiply_columns(&some, rows, w, width, before, &to, &f, 0, whole * LANES, usual, kind);
        if (rest && !by_tiles)
            multiply_columns(&some, rows, w, width, before, &to, &f, whole * LANES, used, rest, kind);
        before = sums;
        x.begin += some.depth;
        if (x.begin == end) {
            x.begin -= x.depth;
            x.rows += some.parts * x.apart;
            x.ends += x.ends ? some.parts : 0;
            x.parts -= some.parts;
        }
    }
}
