/* Products of uint8 rows with int8 weights, exact in int32, and quantization of real numbers.

   Weights are packed into panels of 32 columns, with quads of four depth elements adjacent, [panel][K / 4][32][4],
   padded with zeros, and 16 extra rows after the last panel. */
#ifndef PENSTOCK_INTEGERS_H
#define PENSTOCK_INTEGERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE4_1__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "native.h"
#include "tiles.h"

#ifndef PENSTOCK_PRODUCTS_H
enum { PANEL = 32 };
#endif
enum { GROUP = 4, QUAD = 4, PANEL_BYTES = PANEL * QUAD, TAIL = 16 * PANEL_BYTES };

/* c = start + x w. A row of x consists of parts at offsets `places`, of equal numbers of quads; w has panels for all
   of them. A tile takes `deep` quads at once, a divisor of the quads of a part. With a single part, the last tile
   takes the remainder, and x and w may be read past it: there x is padded with zeros to whole tiles. Rows of c have
   equally many columns, in multiples of TILE. Steps of c and start are in elements, others in bytes. Configuring and
   releasing tiles takes as long as many products: callers that multiply several times hold them. */
typedef struct {
    int32_t *c;
    int64_t c_step;
    const int32_t *start;
    int64_t start_step;
    const uint8_t *x;
    int64_t x_step;
    const int64_t *places;
    int64_t parts, quads, deep;
    const int8_t *w;
    int64_t w_step, rows, columns;
    int64_t *shape; /* current tile configuration, 0 at first, until the caller calls `end_tiles`; or NULL */
    int is_signed;  /* x is int8, which only tiles multiply */
} multiplication;

typedef void product(const multiplication *m);

enum { TILE = 16 };
static const int64_t ONE_PART[1] = {0};

/* The vectors of the instruction set. Outside x86, GCC's vectors with the operations that depthwise convolutions
   need; aarch64 has instructions for these. */
#if defined(__AVX512BW__)
typedef __m512i bytes;
#define V(name) _mm512_##name
#elif defined(__AVX2__)
typedef __m256i bytes;
#define V(name) _mm256_##name
#elif defined(__SSE4_1__)
typedef __m128i bytes;
#define V(name) _mm_##name
#else
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef int16_t signed_halves __attribute__((vector_size(16)));
#define V(name) portable_##name
#define HALVES(a, b, ...) (bytes)SHUFFLE(halves, (halves)(a), (halves)(b), __VA_ARGS__)
#define portable_unpacklo_epi16(a, b) HALVES(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define portable_unpackhi_epi16(a, b) HALVES(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define portable_unpacklo_epi8(a, b) \
    SHUFFLE(bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define portable_unpackhi_epi8(a, b) \
    SHUFFLE(bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif
enum { BYTES = sizeof(bytes), LANES_OF_SUMS = BYTES / 4 };

/* A product with vectors of `bytes` bytes, in tiles of `most` rows, or of one row and `wide` panels. Rows are divided
   equally among the fewest tiles possible; of a few rows, each is a tile. */
#define PRODUCT(name, attribute, bytes, most, wide)                                               \
    typedef int32_t name##_sums __attribute__((vector_size(bytes)));                              \
                                                                                                  \
    attribute INLINED void name##_block(const multiplication *m, int64_t row, int64_t panel,      \
                                        const int rows, const int panels)                         \
    {                                                                                             \
        enum { LANES = bytes / 4, VECTORS = PANEL / LANES };                                      \
        name##_sums sums[(most > wide ? most : wide) * VECTORS];                                  \
        const int each = panels * VECTORS;                                                        \
        const int32_t *start = m->start + row * m->start_step + panel * PANEL;                    \
        const int8_t *w = m->w + panel * m->w_step;                                               \
        int32_t *c = m->c + row * m->c_step + panel * PANEL;                                      \
        const int64_t x_step = m->x_step, room = CEIL_DIV(m->columns, TILE) * TILE;               \
        UNROLLED(i, rows * each)                                                                  \
            memcpy(sums + i, start + i / each * m->start_step + i % each * LANES, bytes);         \
        for (int64_t part = 0; part < m->parts; part++) {                                         \
            const uint8_t *at[(most + 2) / 3]; /* one per three rows, as in products_of.h */      \
            UNROLLED(i, (rows + 2) / 3)                                                           \
                at[i] = m->x + (row + 3 * i) * x_step + m->places[part];                          \
            for (int64_t q = 0; q < m->quads; q++, w += PANEL_BYTES) {                            \
                name##_sums columns[wide * VECTORS];                                              \
                UNROLLED(j, each)                                                                 \
                    memcpy(columns + j, w + j / VECTORS * m->w_step + j % VECTORS * bytes, bytes);\
                /* Row by row: registers have room for one broadcast quad beside columns and sums. */\
                UNROLLED(i, rows) {                                                               \
                    int32_t four;                                                                 \
                    memcpy(&four, at[i / 3] + i % 3 * x_step, QUAD);                              \
                    name##_sums number = (name##_sums){0} + four;                                 \
                    UNROLLED(j, each)                                                             \
                        sums[i * each + j] = name##_dot(sums[i * each + j], number, columns[j]);  \
                }                                                                                 \
                UNROLLED(i, (rows + 2) / 3) { ADVANCE(at[i], QUAD); }                             \
            }                                                                                     \
        }                                                                                         \
        UNROLLED(i, rows * each)                                                                  \
            if (panel * PANEL + i % each * LANES < room)                                          \
                memcpy(c + i / each * m->c_step + i % each * LANES, sums + i, bytes);             \
    }                                                                                             \
                                                                                                  \
    attribute static void name(const multiplication *m)                                           \
    {                                                                                             \
        const int64_t panels = CEIL_DIV(m->columns, PANEL);                                       \
        int64_t tiles = m->rows < smaller(4, most) ? m->rows : CEIL_DIV(m->rows, most);           \
        for (int64_t row = 0, rows, p; tiles > 0; row += rows, tiles--) {                         \
            rows = CEIL_DIV(m->rows - row, tiles), p = 0;                                         \
            for (; rows == 1 && p + wide <= panels; p += wide)                                    \
                name##_block(m, row, p, 1, wide);                                                 \
            switch (rows) {                                                                       \
                ROWS(name, most, 1) ROWS(name, most, 2) ROWS(name, most, 3) ROWS(name, most, 4)   \
                ROWS(name, most, 5) ROWS(name, most, 6) ROWS(name, most, 7) ROWS(name, most, 8)   \
                ROWS(name, most, 9) ROWS(name, most, 10) ROWS(name, most, 11) ROWS(name, most, 12)\
            }                                                                                     \
        }                                                                                         \
    }
#define ROWS(name, most, rows)                                                                    \
    case rows:                                                                                    \
        for (; rows <= most && p < panels; p++)                                                   \
            name##_block(m, row, p, rows <= most ? rows : 1, 1);                                  \
        break;

/* Dot products of four uint8 with four int8, in vectors. Without such instructions: even and odd products separately
   as int16. DOTS are of int8 with int8: x is 64 + 64 more than what these take for it. WIDEST selects the functions
   of the widest suffix that the processor supports. */
#if defined(__AVX512BW__)
#define VNNI __attribute__((target("avx512vnni")))
#define WIDEST(suffix) (features & AVX512_VNNI ? vnni##suffix : plain##suffix)
#define vnni_dot(sum, x, w) \
    (vnni_sums)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
PRODUCT(vnni, VNNI, 64, 12, 4)
#elif defined(__AVX2__)
#define VNNI __attribute__((target("avxvnni")))
#define WIDEST(suffix) (features & AVX_VNNI ? vnni##suffix : plain##suffix)
#define vnni_dot(sum, x, w) \
    (vnni_sums)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
PRODUCT(vnni, VNNI, 32, 3, 2)
#elif defined(__aarch64__) && (defined(__linux__) || defined(__ARM_FEATURE_DOTPROD))
#if defined(__linux__)
#include <sys/auxv.h>
#define HAS(word, bit) (getauxval(word) & (bit))
#else /* features that the compiler may assume */
#define HAS(word, bit) (word)
enum { AT_HWCAP = 1, AT_HWCAP2 = 0 };
#endif
#define WIDEST(suffix)                                \
    (HAS(AT_HWCAP2, HWCAP2_I8MM) ? vnni##suffix       \
     : HAS(AT_HWCAP, HWCAP_ASIMDDP) ? dots##suffix    \
                                    : plain##suffix)
#define VNNI __attribute__((target("arch=armv8.2-a+i8mm")))
#define vnni_dot(sum, x, w) \
    (vnni_sums)vusdotq_s32((int32x4_t)(sum), (uint8x16_t)(x), (int8x16_t)(w))
PRODUCT(vnni, VNNI, 16, 2, 2)
#define DOTS __attribute__((target("arch=armv8.2-a+dotprod")))
#define DOT(sum, x, w) vdotq_s32(sum, (int8x16_t)(x), (int8x16_t)(w))
#define dots_dot(sum, x, w) \
    (dots_sums)DOT(DOT(DOT((int32x4_t)(sum), (bytes)(x) ^ 128, w), (bytes){0} + 64, w), (bytes){0} + 64, w)
PRODUCT(dots, DOTS, 16, 2, 2)
#else
#define WIDEST(suffix) plain##suffix
#endif

#if defined(__SSE4_1__)
#define plain_dot(sum, x, w)                                                                      \
    ((sum) +                                                                                      \
     (plain_sums)V(madd_epi16)((bytes)(x)&V(set1_epi16)(255),                                     \
                               V(srai_epi16)(V(slli_epi16)((bytes)(w), 8), 8)) +                  \
     (plain_sums)V(madd_epi16)(V(srli_epi16)((bytes)(x), 8), V(srai_epi16)((bytes)(w), 8)))
#else
#if defined(__aarch64__)
#define PAIRS_ADDED(sum, x) (plain_sums)vpadalq_s16((int32x4_t)(sum), (int16x8_t)(x))
#else
#define PAIRS_ADDED(sum, x) ((sum) + ((plain_sums)(x) << 16 >> 16) + ((plain_sums)(x) >> 16))
#endif
#define plain_dot(sum, x, w)                                                                      \
    PAIRS_ADDED(PAIRS_ADDED(sum, (signed_halves)((halves)(x)&255) * ((signed_halves)(w) << 8 >> 8)), \
                (signed_halves)((halves)(x) >> 8) * ((signed_halves)(w) >> 8))
#endif
PRODUCT(plain, , BYTES, 2, 2)

/* AMX tiles of 16 rows: four of sums, two of x and two of weights. */
#ifdef HAVE_TILES
/* Tiles of sums: 2 x 2, optionally without the `right` or `lower` half, or a `tall` column of four. */
#define EACH_TILE(X) X(0) X(1) X(2) X(3)
#define IS_USED(t) (tall || ((lower || t < 2) && (right || t % 2 == 0)))
#define PLACE(t, from, step) (from) + TILE * (tall ? t * (step) : t / 2 * (step) + t % 2)
#define LOAD(t) if (IS_USED(t)) _tile_loadd(t, PLACE(t, start, m->start_step), m->start_step * 4);
#define MULTIPLY(...) do if (m->is_signed) _tile_dpbssd(__VA_ARGS__); else _tile_dpbusd(__VA_ARGS__); while (0)
#define STORE(t) if (IS_USED(t)) _tile_stored(t, PLACE(t, c, m->c_step), m->c_step * 4);

__attribute__((target("amx-tile,amx-int8"))) INLINED void tiles_of(
    const multiplication *m, int64_t row, int64_t panel, const int lower, const int right, const int tall)
{
    const int32_t *start = m->start + row * m->start_step + panel * PANEL;
    const int64_t below = TILE * m->x_step;
    int32_t *c = m->c + row * m->c_step + panel * PANEL;
    const int8_t *w = m->w + panel * m->w_step;
    EACH_TILE(LOAD)
    for (int64_t part = 0; part < m->parts; part++) {
        const uint8_t *x = m->x + row * m->x_step + m->places[part];
        const uint8_t *end = x + m->quads * QUAD;
        for (; x < end; x += m->deep * QUAD, w += m->deep * PANEL_BYTES) {
            _tile_loadd(6, w, PANEL_BYTES);
            _tile_loadd(4, x, m->x_step);
            MULTIPLY(0, 4, 6);
            if (lower)
                _tile_loadd(5, x + below, m->x_step);
            if (tall) {
                MULTIPLY(1, 5, 6);
                _tile_loadd(4, x + 2 * below, m->x_step);
                MULTIPLY(2, 4, 6);
                _tile_loadd(5, x + 3 * below, m->x_step);
                MULTIPLY(3, 5, 6);
                continue;
            }
            if (lower)
                MULTIPLY(2, 5, 6);
            if (right)
                _tile_loadd(7, w + 64, PANEL_BYTES);
            if (right)
                MULTIPLY(1, 4, 7);
            if (lower && right)
                MULTIPLY(3, 5, 7);
        }
    }
    EACH_TILE(STORE)
}

__attribute__((target("amx-tile,amx-int8"))) static void tiles(const multiplication *m)
{
    int64_t own = 0, *const shape = m->shape ? m->shape : &own;
    for (int64_t row = 0; row < m->rows; row += 2 * TILE) {
        const int64_t rows = smaller(2 * TILE, m->rows - row), upper = smaller(rows, TILE);
        const int64_t lower = rows - upper;
        const int64_t wanted = m->deep * (2 * TILE + 1) + rows;
        if (*shape != wanted)
            shape_tiles(upper, lower, m->deep, m->deep * QUAD);
        *shape = wanted;
        if (m->columns <= TILE && m->rows - row >= 4 * TILE) {
            tiles_of(m, row, 0, 1, 0, 1);
            row += 2 * TILE;
            continue;
        }
        for (int64_t p = 0; p * PANEL < m->columns; p++) {
            const int right = m->columns - p * PANEL > TILE;
            if (lower && right)
                tiles_of(m, row, p, 1, 1, 0);
            else if (lower)
                tiles_of(m, row, p, 1, 0, 0);
            else if (right)
                tiles_of(m, row, p, 0, 1, 0);
            else
                tiles_of(m, row, p, 0, 0, 0);
        }
    }
    if (!m->shape)
        _tile_release();
}

__attribute__((target("amx-tile"), unused)) static void release_tiles(void)
{
    _tile_release();
}
#endif

/* Release the tiles that were configured for a shape. */
__attribute__((unused)) static inline void end_tiles(int64_t shape)
{
#ifdef HAVE_TILES
    if (shape)
        release_tiles();
#endif
}

__attribute__((unused)) static product *product_for(int64_t rows)
{
#ifdef HAVE_TILES
    if (rows > 4 && has_tiles())
        return tiles;
#endif
    return WIDEST();
}

/* Add 128 to codes, or subtract it (the same operation). */
static inline void flip(void *restrict to, const void *restrict from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        ((uint8_t *)to)[i] = ((const uint8_t *)from)[i] ^ 128;
}

/* The sum of `count` codes of each part of a row. */
static inline int32_t sum_of(const uint8_t *x, const int64_t *places, int64_t parts, int64_t count)
{
#if defined(__AVX512BW__)
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < parts; i++)
        for (int64_t k = 0; k < count; k += 64) {
            const __mmask64 inside = ~0ull >> (64 - smaller(count - k, 64));
            const __m512i some = _mm512_maskz_loadu_epi8(inside, x + places[i] + k);
            sums = _mm512_add_epi64(sums, _mm512_sad_epu8(some, _mm512_setzero_si512()));
        }
    return (int32_t)_mm512_reduce_add_epi64(sums);
#else
    int32_t sum = 0;
    for (int64_t i = 0; i < parts; i++)
        for (int64_t k = 0; k < count; k++)
            sum += x[places[i] + k];
    return sum;
#endif
}

/* Store at most GROUP * PANEL values as codes; x is overwritten, and NaN becomes the lowest code. In loops of their
   own, so that the compiler vectorizes them. */
INLINED void store_codes(uint8_t *restrict y, float *restrict x, int64_t count, float zero)
{
    int32_t codes[GROUP * PANEL];
    for (int64_t i = 0; i < count; i++)
        x[i] = rintf(x[i]) + zero;
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] > 0 ? x[i] : 0;
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] < 255 ? x[i] : 255;
    for (int64_t i = 0; i < count; i++)
        codes[i] = (int32_t)x[i];
    for (int64_t i = 0; i < count; i++)
        y[i] = (uint8_t)codes[i];
}

enum { WIDTH = 64, NARROW = 16, LONG_ROW = 4 * WIDTH };

/* The range of values, 0 included, and whether some are NaN. */
typedef struct {
    float low, high;
    int32_t is_nan;
} range;

typedef struct {
    float low[WIDTH], high[WIDTH];
    int32_t is_nan[WIDTH];
} ranges;

INLINED void widen(ranges *restrict r, const float *restrict x, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        r->low[j] = x[j] < r->low[j] ? x[j] : r->low[j];
        r->high[j] = x[j] > r->high[j] ? x[j] : r->high[j];
        r->is_nan[j] |= x[j] != x[j];
    }
}

/* By `width` partial ranges, a constant: for short rows, to set and join many takes longer than to read the row. */
INLINED range range_by(const float *restrict x, int64_t count, const int width)
{
    ranges r;
    for (int j = 0; j < width; j++)
        r.low[j] = r.high[j] = 0, r.is_nan[j] = 0;
    const int64_t whole = count / width * width;
    for (int64_t i = 0; i < whole; i += width)
        widen(&r, x + i, width);
    widen(&r, x + whole, count - whole);
    for (int half = width / 2; half; half /= 2)
        for (int j = 0; j < half; j++) {
            r.low[j] = r.low[j + half] < r.low[j] ? r.low[j + half] : r.low[j];
            r.high[j] = r.high[j + half] > r.high[j] ? r.high[j + half] : r.high[j];
            r.is_nan[j] |= r.is_nan[j + half];
        }
    return (range){r.low[0], r.high[0], r.is_nan[0]};
}

static inline range range_of(const float *restrict x, int64_t count)
{
    return count < LONG_ROW ? range_by(x, count, NARROW) : range_by(x, count, WIDTH);
}

/* Quantize values over their own range, 0 included. Store the scale and return the zero point. */
static inline int32_t to_codes(uint8_t *restrict y, const float *restrict x, int64_t count, float *scale_of)
{
    const range r = range_of(x, count);
    const int64_t whole = count / WIDTH * WIDTH;
    const float low = r.low, high = r.high;
    float numbers[WIDTH];
    float scale = r.is_nan ? NAN : (high - low) / 255.0f;
    float zero = scale == 0 ? 0 : rintf(-low / scale);
    zero = zero > 0 ? zero : 0; /* also if NaN */
    zero = zero < 255 ? zero : 255;
    scale = scale == 0 ? 1 : scale;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        for (int j = 0; j < WIDTH; j++)
            numbers[j] = x[i + j] / scale;
        store_codes(y + i, numbers, WIDTH, zero);
    }
    for (int64_t i = whole; i < count; i++)
        numbers[i - whole] = x[i] / scale;
    store_codes(y + whole, numbers, count - whole, zero);
    *scale_of = scale;
    return (int32_t)zero;
}

#endif
