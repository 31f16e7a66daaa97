/* Products of uint8 rows with int8 weights, exact in int32, and codes of real numbers.

   Weights are in panels of 32 columns with four of K side by side, [panel][K / 4][32][4], padded with
   zeros, and 16 of their rows behind the last. */
#ifndef PENSTOCK_INTEGERS_H
#define PENSTOCK_INTEGERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include "native.h"

#ifndef PENSTOCK_PRODUCTS_H
enum { PANEL = 32 };
#endif
enum { GROUP = 4, QUAD = 4, PANEL_BYTES = PANEL * QUAD, TAIL = 16 * PANEL_BYTES };

/* c = start + x w. A row of x has several parts, at these places from its beginning, of as many quads
   each; w has panels of all of them. Tiles take `deep` quads at once, which divide those of a part; of one
   part alone that is whatever is left, and x and w may be read beyond: x is padded with zeros to quads of
   whole tiles there. Halves of panels that rows of c have no room for are not written. Steps of c and start
   are elements, others bytes. */
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
} multiplication;

typedef void product(const multiplication *m);

enum { TILE = 16 };
static const int64_t ONE_PART[1] = {0};

/* The vectors of the instruction set. */
#if defined(__AVX512BW__)
typedef __m512i bytes;
#define V(name) _mm512_##name
#elif defined(__AVX2__)
typedef __m256i bytes;
#define V(name) _mm256_##name
#elif defined(__SSE2__)
typedef __m128i bytes;
#define V(name) _mm_##name
#endif
#if defined(__SSE2__)
enum { BYTES = sizeof(bytes), LANES_OF_SUMS = BYTES / 4 };
#endif

/* A product with vectors of some bytes, in blocks of `most` rows, or of one row and `wide` panels. */
#define PRODUCT(name, attribute, bytes, most, wide)                                               \
    typedef int32_t name##_sums __attribute__((vector_size(bytes)));                              \
                                                                                                  \
    attribute INLINED void name##_block(const multiplication *m, int64_t row, int64_t panel,      \
                                        const int rows, const int panels)                         \
    {                                                                                             \
        enum { LANES = bytes / 4, VECTORS = PANEL / LANES };                                      \
        name##_sums sums[(most > wide ? most : wide) * VECTORS];                                  \
        const int32_t *start = m->start + row * m->start_step + panel * PANEL;                    \
        const int8_t *w = m->w + panel * m->w_step;                                               \
        int32_t *c = m->c + row * m->c_step + panel * PANEL;                                        \
        _Pragma("GCC unroll 32") for (int i = 0; i < rows * panels * VECTORS; i++)                \
            memcpy(sums + i,                                                                      \
                   start + i / (panels * VECTORS) * m->start_step + i % (panels * VECTORS) * LANES, \
                   bytes);                                                                        \
        for (int64_t part = 0; part < m->parts; part++) {                                         \
            const uint8_t *x = m->x + row * m->x_step + m->places[part];                          \
            for (int64_t q = 0; q < m->quads; q++, w += PANEL_BYTES)                              \
            {                                                                                     \
                name##_sums columns[wide * VECTORS];                                              \
                _Pragma("GCC unroll 32") for (int j = 0; j < panels * VECTORS; j++)               \
                    memcpy(columns + j, w + j / VECTORS * m->w_step + j % VECTORS * bytes, bytes);\
                /* Row by row: registers hold a number of one row alone beside columns and sums. */\
                _Pragma("GCC unroll 32") for (int i = 0; i < rows; i++)                           \
                {                                                                                 \
                    int32_t four;                                                                 \
                    memcpy(&four, x + i * m->x_step + q * QUAD, QUAD);                            \
                    name##_sums number = (name##_sums){0} + four;                                 \
                    _Pragma("GCC unroll 32") for (int j = 0; j < panels * VECTORS; j++)           \
                    {                                                                             \
                        name##_sums *sum = sums + i * panels * VECTORS + j;                       \
                        *sum = name##_dot(*sum, number, columns[j]);                              \
                    }                                                                             \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
        _Pragma("GCC unroll 32") for (int i = 0; i < rows * panels * VECTORS; i++)                \
        {                                                                                         \
            const int64_t j = i % (panels * VECTORS) * LANES;                                     \
            if (panel * PANEL + j < m->c_step)                                                    \
                memcpy(c + i / (panels * VECTORS) * m->c_step + j, sums + i, bytes);              \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    attribute static void name(const multiplication *m)                                           \
    {                                                                                             \
        const int64_t panels = (m->columns + PANEL - 1) / PANEL;                                  \
        int64_t row = 0;                                                                          \
        for (; most > 1 && row + most <= m->rows; row += most)                                    \
            for (int64_t p = 0; p < panels; p++)                                                  \
                name##_block(m, row, p, most, 1);                                                 \
        for (; most > 4 && row + 4 <= m->rows; row += 4)                                          \
            for (int64_t p = 0; p < panels; p++)                                                  \
                name##_block(m, row, p, 4, 1);                                                    \
        for (; row < m->rows; row++) {                                                            \
            int64_t p = 0;                                                                        \
            for (; p + wide <= panels; p += wide)                                                 \
                name##_block(m, row, p, 1, wide);                                                 \
            for (; p < panels; p++)                                                               \
                name##_block(m, row, p, 1, 1);                                                    \
        }                                                                                         \
    }

/* Vectors of dot products of four uint8 with four int8. Without instructions for that: of the even and
   of the odd ones as int16. */
#if defined(__AVX512BW__)
#define VNNI __attribute__((target("avx512vnni")))
#define vnni_dot(sum, x, w) \
    (vnni_sums)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
PRODUCT(vnni, VNNI, 64, 12, 4)
#elif defined(__AVX2__)
#define VNNI __attribute__((target("avxvnni")))
#define vnni_dot(sum, x, w) \
    (vnni_sums)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
PRODUCT(vnni, VNNI, 32, 3, 2)
#endif

#if defined(__SSE2__)
#define plain_dot(sum, x, w)                                                                      \
    ((sum) +                                                                                      \
     (plain_sums)V(madd_epi16)((bytes)(x)&V(set1_epi16)(255),                                     \
                               V(srai_epi16)(V(slli_epi16)((bytes)(w), 8), 8)) +                  \
     (plain_sums)V(madd_epi16)(V(srli_epi16)((bytes)(x), 8), V(srai_epi16)((bytes)(w), 8)))
PRODUCT(plain, , BYTES, 2, 2)
#else
static void plain(const multiplication *m)
{
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t j = 0; j < m->columns; j++) {
            const int8_t *w = m->w + j / PANEL * m->w_step + j % PANEL * QUAD;
            int32_t sum = m->start[r * m->start_step + j];
            for (int64_t part = 0; part < m->parts; part++)
                for (int64_t i = 0; i < m->quads * QUAD; i++)
                    sum += m->x[r * m->x_step + m->places[part] + i] *
                           w[(part * m->quads + i / QUAD) * PANEL_BYTES + i % QUAD];
            m->c[r * m->c_step + j] = sum;
        }
}
#endif

/* Tiles of 16 rows: four of sums, two of x and two of weights. */
#if defined(__AVX512BW__) && defined(__linux__)
#include <sys/syscall.h>

long syscall(long number, ...); /* of unistd.h, with extensions of GNU alone */

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

static int has_tiles(void)
{
    static int known; /* 1: yes, 2: no */
    if (!__atomic_load_n(&known, __ATOMIC_RELAXED)) {
        int usable = __builtin_cpu_supports("amx-int8") &&
                     !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
        __atomic_store_n(&known, usable ? 1 : 2, __ATOMIC_RELAXED);
    }
    return __atomic_load_n(&known, __ATOMIC_RELAXED) == 1;
}

/* Shapes of tiles, as the processor reads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} shapes;

/* Tiles of sums: two by two, or without a `right` or `lower` half, or a `tall` column of four. */
#define EACH_TILE(X) X(0) X(1) X(2) X(3)
#define IS_USED(t) (tall || ((lower || t < 2) && (right || t % 2 == 0)))
#define PLACE(t, from, step) (from) + TILE * (tall ? t * (step) : t / 2 * (step) + t % 2)
#define LOAD(t) if (IS_USED(t)) _tile_loadd(t, PLACE(t, start, m->start_step), m->start_step * 4);
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
            _tile_dpbusd(0, 4, 6);
            if (lower)
                _tile_loadd(5, x + below, m->x_step);
            if (tall) {
                _tile_dpbusd(1, 5, 6);
                _tile_loadd(4, x + 2 * below, m->x_step);
                _tile_dpbusd(2, 4, 6);
                _tile_loadd(5, x + 3 * below, m->x_step);
                _tile_dpbusd(3, 5, 6);
                continue;
            }
            if (lower)
                _tile_dpbusd(2, 5, 6);
            if (right)
                _tile_loadd(7, w + 64, PANEL_BYTES);
            if (right)
                _tile_dpbusd(1, 4, 7);
            if (lower && right)
                _tile_dpbusd(3, 5, 7);
        }
    }
    EACH_TILE(STORE)
}

__attribute__((target("amx-tile,amx-int8"))) static void tiles(const multiplication *m)
{
    shapes shapes = {.palette = 1};
    int64_t configured = 0;
    for (int64_t row = 0; row < m->rows; row += 2 * TILE) {
        const int64_t rows = smaller(2 * TILE, m->rows - row), upper = smaller(rows, TILE);
        const int64_t lower = rows - upper;
        for (int i = 0; i < 8 && rows != configured; i++) {
            const int x = i == 4 || i == 5;
            shapes.bytes[i] = x ? m->deep * QUAD : 64;
            shapes.rows[i] = i > 5 ? m->deep : i == 2 || i == 3 || i == 5 ? lower + !lower : upper;
        }
        if (rows != configured) {
            __asm__ volatile("" ::"m"(shapes)); /* GCC takes only 8 bytes of it to be read */
            _tile_loadconfig(&shapes);
        }
        configured = rows;
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
    _tile_release();
}
#endif

#if defined(VNNI)
static int has_vnni(void)
{
#if defined(__AVX512BW__)
    return __builtin_cpu_supports("avx512vnni") != 0;
#else
    return __builtin_cpu_supports("avxvnni") != 0;
#endif
}
#endif

static product *product_for(int64_t rows)
{
#if defined(__AVX512BW__) && defined(__linux__)
    if (rows > 4 && has_tiles())
        return tiles;
#endif
#if defined(VNNI)
    if (has_vnni())
        return vnni;
#endif
    return plain;
}

static inline int32_t sum_of(const uint8_t *x, int64_t count)
{
#if defined(__AVX512BW__)
    __m512i sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < count; k += 64) {
        const __m512i some = _mm512_maskz_loadu_epi8(~0ull >> (64 - smaller(count - k, 64)), x + k);
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(some, _mm512_setzero_si512()));
    }
    return (int32_t)_mm512_reduce_add_epi64(sums);
#else
    int64_t sum = 0, k = 0;
    for (; k + 8 <= count; k += 8) { /* pairs as uint16, and these as one */
        uint64_t eight;
        memcpy(&eight, x + k, sizeof eight);
        const uint64_t mask = 0x00ff00ff00ff00ff, pairs = (eight & mask) + (eight >> 8 & mask);
        sum += pairs * 0x0001000100010001 >> 48;
    }
    for (; k < count; k++)
        sum += x[k];
    return (int32_t)sum;
#endif
}

/* Codes of at most GROUP * PANEL numbers x, which are lost; NaN becomes the lowest. In loops of their
   own, which the compiler vectorizes. */
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

enum { WIDTH = 64 };

typedef struct {
    float low[WIDTH], high[WIDTH];
    int32_t is_nan[WIDTH];
} range;

INLINED void widen(range *restrict r, const float *restrict x, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        r->low[j] = x[j] < r->low[j] ? x[j] : r->low[j];
        r->high[j] = x[j] > r->high[j] ? x[j] : r->high[j];
        r->is_nan[j] |= x[j] != x[j];
    }
}

/* Codes of numbers over their own range, 0 included. Store their scale and return their zero point. */
static inline int32_t to_codes(uint8_t *restrict y, const float *restrict x, int64_t count, float *scale_of)
{
    range r = {0};
    int64_t whole = count / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH)
        widen(&r, x + i, WIDTH);
    widen(&r, x + whole, count - whole);
    float low = 0, high = 0, numbers[WIDTH];
    for (int j = 0; j < WIDTH; j++) {
        low = r.low[j] < low ? r.low[j] : low;
        high = r.high[j] > high ? r.high[j] : high;
        r.is_nan[0] |= r.is_nan[j];
    }
    float scale = r.is_nan[0] ? NAN : (high - low) / 255.0f;
    float zero = scale == 0 ? 0 : rintf(-low / scale);
    zero = zero > 0 ? zero : 0; /* NaN too */
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
