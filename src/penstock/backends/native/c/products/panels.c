/* A panel is multiplied DEPTH of its rows at a time, which the second-level cache holds, by as many rows of
   x at a time as registers have room for their sums.

   Where x has few rows, reading the matrix from memory takes longer than multiplying. The processor fetches
   ahead only in the first of several passes over the same part of a panel, and leaves memory idle in the
   others. So each pass fetches some of the next part into the second-level cache. A single pass leaves that
   to the processor: it has more lines under way than a program can ask for. Results are stored to lines that
   were fetched while they were computed. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "math32.h"
#include "panels.h"

enum { DEPTH = 256, ROWS = 8, LINE = 64 };
enum { MOST_VECTORS = BY_WIDTH(4, 2, 2), SUMS = BY_WIDTH(24, 12, 12), TOGETHER = LANES * MOST_VECTORS };

/* What a pass fetches: `lines` lines of the cache for each four rows of a panel. */
typedef struct {
    const char *next;
    int64_t lines;
} fetching;

int multiplies_bfloat16(void)
{
#if defined(__AVX512F__)
    return (features & AVX512_BF16) != 0;
#else
    return 0;
#endif
}

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

/* sum + x w. A function for the processors that multiply pairs could have no part in those for all: so
   this is no intrinsic. */
INLINED vector plus_product(vector sum, float x, vector w, int pairs)
{
#if defined(__AVX512F__)
    if (pairs) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(_mm512_set1_ps(x)));
        return sum;
    }
#endif
    return sum + x * w;
}

/* The product of `rows` rows of x with `vectors` vectors of a panel's columns; both numbers and
   `pairs` are constants. `before`, if not NULL, are sums of products before. */
INLINED void multiply(const operands *x, const float *w, int64_t width, const float *before,
                      const target *to, fetching f, int rows, int vectors, int pairs)
{
    /* A single vector has two sums of each row, since one would wait for the multiplication before. */
    enum { ODD = SUMS / 2 };
    vector own[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; i++)
        own[i] = (vector){0};
#define STEP(i)                                                                                    \
    {                                                                                              \
        vector columns[MOST_VECTORS];                                                              \
        _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) columns[j] =                     \
            loaded(w + j * LANES);                                                                 \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++)                                     \
            _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)                              \
            {                                                                                      \
                vector *sum = own + (vectors == 1) * (i) % 2 * ODD + r * vectors + j;              \
                *sum = plus_product(*sum, at[r][k + i], columns[j], pairs);                        \
            }                                                                                      \
        w += width;                                                                                \
    }
    const int64_t depth = x->depth;
    for (int64_t part = 0; part < x->parts; part++) {
        const float *const *of_part = x->rows + part * x->apart, *at[ROWS];
        if (all_at(x->zeros, of_part, rows)) {
            w += depth * width;
            continue;
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            at[r] = of_part[r] + x->begin;
        int64_t k = 0;
        for (; k + 4 <= depth; k += 4) {
            for (int64_t i = 0; i < f.lines; i++, f.next += LINE)
                __builtin_prefetch(f.next, 0, 2);
            STEP(0)
            STEP(1)
            STEP(2)
            STEP(3)
        }
        for (; k < depth; k++)
            STEP(0)
    }
#undef STEP
#pragma GCC unroll 16
    for (int r = 0; r < rows && vectors == 1; r++)
        own[r] += own[ODD + r];
    /* Copies, since stores might change what `to` points to. */
    float *const y = to->y;
    const float *const addend = to->addend;
    const int64_t step = to->step, addend_step = to->addend_step;
#define EACH(expression)                                                                           \
    _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++)                                        \
        _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++) expression
    if (before)
        EACH(own[r * vectors + j] += loaded(before + r * width + j * LANES));
    if (to->bias)
        EACH(own[r * vectors + j] += loaded(to->bias + j * LANES));
    /* The last vector may have columns that are none of the result's. */
    const int64_t rest = to->count - (vectors - 1) * LANES;
#define COUNT (j + 1 < vectors ? LANES : rest)
    if (addend)
        EACH(own[r * vectors + j] += load_some(addend + r * addend_step + j * LANES, COUNT));
    const activation last = to->activation;
    if (last.slopes)
        EACH(own[r * vectors + j] = sloped(own[r * vectors + j], loaded(last.slopes + j * LANES)));
    if (last.gate)
        EACH(own[r * vectors + j] = gated(own[r * vectors + j], last));
    if (last.low > -INFINITY || last.high < INFINITY)
        EACH(own[r * vectors + j] = bounded(own[r * vectors + j], last.low, last.high));
    EACH(store_some(y + r * step + j * LANES, own[r * vectors + j], COUNT));
#undef EACH
#undef COUNT
}

/* As `multiply`, for any numbers that registers have room for. */
static void multiply_some(const operands *x, const float *w, int64_t width, const float *before,
                          const target *to, fetching f, int64_t rows, int64_t vectors)
{
#define OF(rows, vectors)                                                                          \
    case rows * 8 + vectors:                                                                       \
        if (rows * (vectors > 1 ? vectors : 2) <= SUMS && vectors <= MOST_VECTORS)                 \
            BY_WIDTH(x->pairs, 0, 0) ? multiply(x, w, width, before, to, f, rows, vectors, 1)      \
                                     : multiply(x, w, width, before, to, f, rows, vectors, 0);     \
        break;
#define OF_ROWS(rows) OF(rows, 1) OF(rows, 2) OF(rows, 3) OF(rows, 4)
    switch (rows * 8 + vectors) {
        OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4)
        OF_ROWS(5) OF_ROWS(6) OF_ROWS(7) OF_ROWS(8)
    }
#undef OF
#undef OF_ROWS
}

/* Fetch some vectors of the rows that a pass is to write, and of what it adds to them. */
static inline void fetch_rows(const target *to, int64_t rows, int64_t vectors)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < vectors * VECTOR_BYTES; j += LINE) {
            __builtin_prefetch((const char *)(to->y + r * to->step) + j, 1);
            if (to->addend)
                __builtin_prefetch((const char *)(to->addend + r * to->addend_step) + j, 0);
        }
}

void multiply_panel(operands x, int64_t rows, const float *w, int64_t width, const float *next,
                    const target *y, int64_t count)
{
    _Alignas(64) float sums[BLOCK * PANEL];
    const int64_t used = (count + LANES - 1) / LANES * LANES;
    target result = *y;
    result.count = count;
    const int64_t vectors = smaller(used, TOGETHER) / LANES;
    const int64_t most = smaller(ROWS, SUMS / (vectors > 1 ? vectors : 2));
    const int64_t tiles = (rows + most - 1) / most, passes = tiles * ((used + TOGETHER - 1) / TOGETHER);
    const int64_t end = x.begin + x.depth, inner = x.parts * x.depth;
    const target unfinished = {sums, width, NULL, NULL, 0, NO_ACTIVATION, used};
    /* Several parts of the rows, or a piece of one. */
    const int64_t most_parts = x.depth < DEPTH ? DEPTH / x.depth : 1;
    for (int64_t k = 0, part = 0, depth; k < inner; k += depth) {
        operands some = x;
        some.parts = smaller(most_parts, x.parts - part);
        some.depth = smaller(DEPTH, end - x.begin);
        depth = some.parts * some.depth;
        const int last = k + depth == inner;
        const int64_t lines = 4 * width * 4 / LINE;
        fetching f = {(const char *)(last ? next : w + depth * width), (lines + passes - 1) / passes};
        int64_t left = passes > 1 ? depth / 4 * lines : 0;
        for (int64_t row = 0, tile = tiles, count; row < rows; row += count, tile--) {
            count = (rows - row + tile - 1) / tile;
            for (int64_t column = 0; column < used; column += TOGETHER) {
                const target to = part_of(last ? &result : &unfinished, row, column);
                const float *before = k ? sums + row * width + column : NULL;
                const int64_t wide = smaller(TOGETHER, used - column) / LANES;
                f.lines = left > 0 ? f.lines : 0;
                if (last)
                    fetch_rows(&to, count, wide);
                multiply_some(&some, w + column, width, before, &to, f, count, wide);
                f.next += depth / 4 * f.lines * LINE;
                left -= depth / 4 * f.lines;
            }
            some.rows += count;
        }
        w += depth * width;
        x.begin += some.depth;
        if (x.begin == end) {
            x.begin -= x.depth;
            x.rows += some.parts * x.apart;
            part += some.parts;
        }
    }
}
