/* Products with weights of 4 or 8 bits in blocks (blocks.c), with quantized rows: the first stage quantizes each
   block of a row to int8 over its own range, so that sums of products of codes are exact. A piece of the second stage
   is a block of rows and some panels of columns.

   Weights are packed as in blocks.c: of eight 4-bit codes, the even ones are the low nibbles of four bytes, and the
   odd ones the high nibbles. Codes of rows are stored in the same order. */

// Compiler options: -ffp-contract=fast
#include "integers.h"
#include "native.h"

struct block_codes {
    const float *x;
    const uint8_t *weights;
    const float *scales, *shifts, *bias; /* as in blocks.c */
    float *y;
    int8_t *room; /* for codes of rows, then the scales of their blocks, and sums of codes; a multiple of 16 rows */
    int64_t rows, k, n, bits, block;
    int64_t together, some, pieces; /* together, some: rows and panels of a piece */
};

enum { EIGHT_CODES = 8, USUAL = 32, FETCHED_AHEAD = 4096, LINE = 64 };
/* Blocks whose values are all below this become zeros: the factors of smaller values would be infinite. */
static const float LEAST = 1e-36f;

enum { SIXTEEN = 16 };
typedef uint8_t sixteen __attribute__((vector_size(SIXTEEN)));

/* Reorder codes as 4-bit weights are packed: of each eight, the even ones first. */
INLINED void even_first(int8_t *to, const int size)
{
    sixteen some = {0};
    memcpy(&some, to, size);
    some = SHUFFLE(sixteen, some, some, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    memcpy(to, &some, size);
}

/* Quantize a part of a block, at most USUAL values, times a factor; return the sum of the codes. In loops of their
   own, so that the compiler vectorizes them. */
INLINED int32_t some_codes(const float *restrict x, int8_t *restrict to, int64_t count, float factor, int bits)
{
    int32_t codes[USUAL], sum = 0;
    for (int64_t i = 0; i < count; i++)
        codes[i] = TO_INT(x[i] * factor);
    for (int64_t i = 0; i < count; i++)
        sum += codes[i];
    for (int64_t i = 0; i < count; i++)
        to[i] = (int8_t)codes[i];
    for (int64_t i = 0; bits == 4 && i < count; i += SIXTEEN) {
        if (count - i >= SIXTEEN)
            even_first(to + i, SIXTEEN);
        else
            even_first(to + i, EIGHT_CODES);
    }
    return sum;
}

/* Quantize a block of a row; return its scale, and set the sum of its codes. */
INLINED float codes_of(const float *restrict x, int8_t *restrict to, const int64_t count, const int bits,
                       int32_t *sum)
{
    /* The bits of magnitudes, as integers, have the same order, and non-finite values are above all others. */
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t size;
        memcpy(&size, x + i, sizeof size);
        size &= INT32_MAX;
        most = size > most ? size : most;
    }
    float highest;
    memcpy(&highest, &most, sizeof most);
    *sum = 0;
    if (!(highest > LEAST && highest < INFINITY)) {
        memset(to, 0, count);
        return highest - highest; /* 0, or NaN for non-finite values */
    }
    for (int64_t i = 0; i < count; i += USUAL)
        *sum += some_codes(x + i, to + i, smaller(USUAL, count - i), 127 / highest, bits);
    return highest / 127;
}

static float block_of_codes(const float *x, int8_t *to, int64_t count, int bits, int32_t *sum)
{
    if (count == USUAL)
        return bits == 4 ? codes_of(x, to, USUAL, 4, sum) : codes_of(x, to, USUAL, 8, sum);
    return codes_of(x, to, count, bits, sum);
}

INLINED float *scales_of(const struct block_codes *a)
{
    return (float *)(a->room + CEIL_DIV(a->rows, TILE) * TILE * a->k);
}

INLINED int32_t *sums_of(const struct block_codes *a)
{
    return (int32_t *)(scales_of(a) + CEIL_DIV(a->rows, TILE) * TILE * CEIL_DIV(a->k, a->block));
}

/* Where the scale and the sum of codes of a block of a row are: those of 16 rows are adjacent. */
INLINED int64_t tile_place(const struct block_codes *a, int64_t row, int64_t b)
{
    return (row / TILE * (a->k / a->block) + b) * TILE + row % TILE;
}

/* Store some rows of a panel, with the bias. */
static __attribute__((noinline)) void store_panel(const struct block_codes *a, const float *restrict c, int64_t row,
                                                   int64_t rows, int64_t p)
{
    const int64_t width = smaller(PANEL, a->n - p * PANEL);
    const float *const bias = a->bias ? a->bias + p * PANEL : NULL;
    for (int64_t r = 0; r < rows; r++, c += PANEL) {
        float *restrict y = a->y + (row + r) * a->n + p * PANEL;
        for (int64_t i = 0; width == PANEL && i < PANEL; i++) /* whole vectors */
            y[i] = bias ? c[i] + bias[i] : c[i];
        for (int64_t i = 0; width < PANEL && i < width; i++)
            y[i] = bias ? c[i] + bias[i] : c[i];
    }
}

enum { VECTORS_AT_ONCE = 2 };
typedef float reals __attribute__((vector_size(BYTES)));

/* Sums are added to in the order of the program where registers have room for nothing else: compilers would otherwise
   broadcast the codes of all rows at once. */
#if defined(__SSE4_1__) && !defined(__AVX512BW__)
#define IN_ORDER(sum) __asm__ volatile("" : "+x"(sum))
#else
#define IN_ORDER(sum)
#endif

/* Sums of products of 4-bit codes with int8 fit in int16 for USUAL of them: 8 pairs of 15 x 127. */
#define HAS_HALVES 0
#define HALVES_DOT(sum, x, w) (sum)
#define HALVES_ADDED(sum, x) (sum)
#if defined(VNNI)
#define OF(name) vnni_##name
#define ATTRIBUTE VNNI
#if defined(__AVX512BW__)
#define MANY 6
#else
#define MANY 4
#endif
#include "block_codes_of.h"
#undef MANY
#undef ATTRIBUTE
#undef OF
#endif
#if defined(DOTS)
#define OF(name) dots_##name
#define ATTRIBUTE DOTS
#define MANY 4
#include "block_codes_of.h"
#undef MANY
#undef ATTRIBUTE
#undef OF
#endif
#if defined(__SSE4_1__)
#undef HAS_HALVES
#undef HALVES_DOT
#undef HALVES_ADDED
#define HAS_HALVES 1
#define HALVES_DOT(sum, x, w) \
    (words)V(add_epi16)((bytes)(sum), V(maddubs_epi16)((bytes)(x), (bytes)(w)))
#define HALVES_ADDED(sum, x) ((sum) + (words)V(madd_epi16)((bytes)(x), V(set1_epi16)(1)))
#endif
#define OF(name) plain_##name
#define ATTRIBUTE
#define MANY 4
#include "block_codes_of.h"

/* Products by AMX tiles of 16 rows and columns, with the sums and so the results of the vectors above. Weights of 4
   bits are first unpacked as those of 8 bits are packed, DEPTH of them at a time. A tile adds up a block; its sums are
   then stored, and later scaled and added to totals in registers, so that neither waits for the other: when the sums
   of a block are stored, those of the block SET before are scaled. Rows behind the last ones are computed, too, with
   scales of 0: others could be subnormal numbers, which take long. */
#ifdef HAVE_TILES
enum { DEPTH = 256, ROWS = 256, LEAST_TILED = 13, SET = 4, HALVES = PANEL / TILE };
#define TILED __attribute__((target("amx-tile,amx-int8")))
typedef float tile_reals __attribute__((vector_size(TILE_BYTES)));
typedef int8_t tile_codes __attribute__((vector_size(TILE_BYTES)));
typedef int32_t tile_words __attribute__((vector_size(TILE_BYTES)));

/* Some blocks of 16 rows and columns: codes and weights of the first of them, scales and sums of codes of the rows,
   [block][TILE], and what belongs to the columns, [block][PANEL]. */
typedef struct {
    const int8_t *codes, *weights;
    const float *of_rows, *scales, *shifts;
    const int32_t *of_sums;
    int64_t step, count;
} tile_blocks;

/* Whether blocks are whole tiles, and rows are enough. */
static int is_tiled(const struct block_codes *a)
{
    const int64_t block = a->block;
    const int fits = block % TILE == 0 && (TILE_BYTES % block == 0 || block % TILE_BYTES == 0);
    return fits && block <= DEPTH && a->k % block == 0 && a->rows >= LEAST_TILED && has_tiles();
}

/* Scale the sums of block b, and add them to totals. */
INLINED void add_block(const tile_blocks *t, const int32_t *sums, int64_t b, tile_reals *totals, const int shifted)
{
    tile_reals scale, shift = {0};
    memcpy(&scale, t->scales + b * PANEL, TILE_BYTES);
    if (shifted)
        memcpy(&shift, t->shifts + b * PANEL, TILE_BYTES);
    UNROLLED(r, TILE) {
        const float own = t->of_rows[b * TILE + r];
        tile_words sum;
        memcpy(&sum, sums + r * TILE, TILE_BYTES);
        totals[r] += __builtin_convertvector(sum, tile_reals) * (scale * own);
        if (shifted)
            totals[r] += own * (float)t->of_sums[b * TILE + r] * shift;
    }
}

/* Add products of blocks to totals, [TILE][PANEL]. `shifted`: whether there are zero points. */
TILED INLINED void add_blocks(const tile_blocks *t, float *restrict c, const int64_t block, const int shifted)
{
    const int64_t bytes = smaller(block, TILE_BYTES);
    tile_reals totals[TILE];
    int32_t _Alignas(TILE_BYTES) sums[2 * SET][TILE * TILE];
    UNROLLED(r, TILE)
        memcpy(&totals[r], c + r * PANEL, TILE_BYTES);
    for (int64_t begin = -SET; begin < t->count + SET; begin += SET) {
#define NEXT(tile)                                                                                 \
    {                                                                                              \
        const int64_t b = begin + tile, next = b + SET, before = b - SET;                          \
        if (b >= 0 && b < t->count)                                                                \
            _tile_stored(tile, sums[b % (2 * SET)], TILE_BYTES);                                   \
        if (next < t->count) {                                                                     \
            _tile_zero(tile);                                                                      \
            for (int64_t k = next * block; k < (next + 1) * block; k += bytes) {                   \
                _tile_loadd(4, t->codes + k, t->step);                                             \
                _tile_loadd(6, t->weights + k * PANEL, PANEL_BYTES);                               \
                _tile_dpbssd(tile, 4, 6);                                                          \
            }                                                                                      \
        }                                                                                          \
        if (before >= 0 && before < t->count)                                                      \
            add_block(t, sums[before % (2 * SET)], before, totals, shifted);                       \
    }
        EACH_TILE(NEXT)
#undef NEXT
    }
    UNROLLED(r, TILE)
        memcpy(c + r * PANEL, &totals[r], TILE_BYTES);
}

/* `count` weights of each column, [count / 4][PANEL][4], from words of eight. */
static void unpack_codes(int8_t *restrict to, const uint8_t *restrict words, int64_t count)
{
    for (int64_t k = 0; k < count; k += EIGHT_CODES, words += PANEL_BYTES, to += 2 * PANEL_BYTES)
        UNROLLED(half, HALVES) {
            tile_words eight;
            memcpy(&eight, words + half * TILE_BYTES, TILE_BYTES);
            const tile_codes even = (tile_codes)(eight & 0x0f0f0f0f) - 8;
            const tile_codes odd = (tile_codes)(eight >> 4 & 0x0f0f0f0f) - 8;
            memcpy(to + half * TILE_BYTES, &even, TILE_BYTES);
            memcpy(to + PANEL_BYTES + half * TILE_BYTES, &odd, TILE_BYTES);
        }
}

/* Some rows, at most ROWS, by a panel. */
TILED INLINED void tile_panel(const struct block_codes *a, int64_t row, int64_t end, int64_t p, const int64_t block,
                              const int shifted)
{
    const int64_t blocks = a->k / block, most = DEPTH / block;
    const uint8_t *const panel = a->weights + p * a->k * PANEL * a->bits / 8;
    float _Alignas(TILE_BYTES) c[ROWS * PANEL];
    int8_t _Alignas(TILE_BYTES) unpacked[DEPTH * PANEL];
    memset(c, 0, CEIL_DIV(end - row, TILE) * TILE * PANEL * sizeof *c);
    for (int64_t b = 0; b < blocks; b += most) {
        const int64_t count = smaller(most, blocks - b), k = b * block;
        const int8_t *weights = (const int8_t *)panel + k * PANEL;
        if (a->bits == 4) {
            unpack_codes(unpacked, panel + k * PANEL / 2, count * block);
            weights = unpacked;
        }
        for (int64_t r = row; r < end; r += TILE)
            for (int64_t half = 0; half < HALVES; half++) {
                const int64_t of_panel = (p * blocks + b) * PANEL + half * TILE, of_rows = tile_place(a, r, b);
                const tile_blocks t = {
                    .codes = a->room + r * a->k + k,
                    .weights = weights + half * TILE_BYTES,
                    .of_rows = scales_of(a) + of_rows,
                    .of_sums = sums_of(a) + of_rows,
                    .scales = a->scales + of_panel,
                    .shifts = shifted ? a->shifts + of_panel : NULL,
                    .step = a->k,
                    .count = count,
                };
                add_blocks(&t, c + (r - row) * PANEL + half * TILE, block, shifted);
            }
    }
    store_panel(a, c, row, end - row, p);
}

TILED static void tiled_codes(const struct block_codes *a, int64_t row, int64_t end, int64_t p, int64_t last)
{
    const int64_t bytes = smaller(a->block, TILE_BYTES);
    shape_tiles(TILE, TILE, bytes / QUAD, bytes);
    for (; p < last; p++)
        for (int64_t r = row; r < end; r += ROWS) {
            const int64_t to = smaller(end, r + ROWS);
            if (a->block == USUAL && !a->shifts)
                tile_panel(a, r, to, p, USUAL, 0);
            else
                tile_panel(a, r, to, p, a->block, !!a->shifts);
        }
    _tile_release();
}
#endif

static int block_codes_stage(const void *arguments, int64_t stage, int64_t begin, int64_t end)
{
    const struct block_codes *a = arguments;
    const int64_t blocks = CEIL_DIV(a->k, a->block), panels = CEIL_DIV(a->n, PANEL);
    const int64_t groups = CEIL_DIV(panels, a->some);
#ifdef HAVE_TILES
    const int tiled = is_tiled(a);
#else
    const int tiled = 0;
#endif
    for (int64_t r = begin * a->rows / a->pieces; !stage && r < end * a->rows / a->pieces; r++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * a->block, place = tiled ? tile_place(a, r, b) : r * blocks + b;
            scales_of(a)[place] = block_of_codes(a->x + r * a->k + from, a->room + r * a->k + from,
                                                 smaller(a->block, a->k - from), (int)a->bits, sums_of(a) + place);
        }
    for (int64_t r = a->rows; tiled && !stage && end == a->pieces && r % TILE; r++)
        for (int64_t b = 0; b < blocks; b++)
            scales_of(a)[tile_place(a, r, b)] = sums_of(a)[tile_place(a, r, b)] = 0;
    for (int64_t piece = begin; stage && piece < end; piece++) {
        const int64_t row = piece / groups * a->together, p = piece % groups * a->some;
        const int64_t to = smaller(a->rows, row + a->together), last = smaller(panels, p + a->some);
#ifdef HAVE_TILES
        if (tiled) {
            tiled_codes(a, row, to, p, last);
            continue;
        }
#endif
        WIDEST(_codes)(a, row, to, p, last);
    }
    return 0;
}

KERNELS(block_codes, STAGED_KERNEL(block_codes, block_codes, NULL, block_codes_stage))
