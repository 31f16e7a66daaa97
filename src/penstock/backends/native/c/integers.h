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

/* c += x w, for `rows` rows of x and `panels` panels of `quads` quads. c has rows of GROUP panels; other
   steps are in bytes. */
typedef void product(int32_t *c, const uint8_t *x, int64_t x_step, const int8_t *w, int64_t w_step,
                     int64_t quads, int64_t rows, int64_t panels);

/* A product with vectors of some bytes, in blocks of `most` rows, or of one row and `wide` panels. */
#define PRODUCT(name, attribute, bytes, most, wide)                                               \
    typedef int32_t name##_sums __attribute__((vector_size(bytes)));                              \
                                                                                                  \
    attribute INLINED void name##_block(int32_t *c, const uint8_t *x, int64_t x_step, const int8_t *w, \
                                        int64_t w_step, int64_t quads, const int rows,            \
                                        const int panels)                                         \
    {                                                                                             \
        enum { LANES = bytes / 4, VECTORS = PANEL / LANES };                                      \
        name##_sums sums[(most > wide ? most : wide) * VECTORS];                                  \
        _Pragma("GCC unroll 32") for (int i = 0; i < rows * panels * VECTORS; i++)                \
            memcpy(sums + i,                                                                      \
                   c + i / (panels * VECTORS) * GROUP * PANEL + i % (panels * VECTORS) * LANES,   \
                   bytes);                                                                        \
        for (int64_t q = 0; q < quads; q++)                                                       \
            _Pragma("GCC unroll 32") for (int j = 0; j < panels * VECTORS; j++)                   \
            {                                                                                     \
                name##_sums column;                                                               \
                memcpy(&column,                                                                   \
                       w + j / VECTORS * w_step + q * PANEL_BYTES + j % VECTORS * bytes, bytes);  \
                _Pragma("GCC unroll 32") for (int i = 0; i < rows; i++)                           \
                {                                                                                 \
                    int32_t four;                                                                 \
                    memcpy(&four, x + i * x_step + q * QUAD, QUAD);                               \
                    name##_sums *sum = sums + i * panels * VECTORS + j;                           \
                    *sum = name##_dot(*sum, (name##_sums){0} + four, column);                     \
                }                                                                                 \
            }                                                                                     \
        _Pragma("GCC unroll 32") for (int i = 0; i < rows * panels * VECTORS; i++)                \
            memcpy(c + i / (panels * VECTORS) * GROUP * PANEL + i % (panels * VECTORS) * LANES,   \
                   sums + i, bytes);                                                              \
    }                                                                                             \
                                                                                                  \
    attribute static void name(int32_t *c, const uint8_t *x, int64_t x_step, const int8_t *w,     \
                               int64_t w_step, int64_t quads, int64_t rows, int64_t panels)       \
    {                                                                                             \
        int64_t row = 0;                                                                          \
        for (; most > 1 && row + most <= rows; row += most)                                       \
            for (int64_t p = 0; p < panels; p++)                                                  \
                name##_block(c + (row * GROUP + p) * PANEL, x + row * x_step, x_step,             \
                             w + p * w_step, w_step, quads, most, 1);                             \
        for (; most > 4 && row + 4 <= rows; row += 4)                                             \
            for (int64_t p = 0; p < panels; p++)                                                  \
                name##_block(c + (row * GROUP + p) * PANEL, x + row * x_step, x_step,             \
                             w + p * w_step, w_step, quads, 4, 1);                                \
        for (; row < rows; row++) {                                                               \
            int64_t p = 0;                                                                        \
            for (; p + wide <= panels; p += wide)                                                 \
                name##_block(c + (row * GROUP + p) * PANEL, x + row * x_step, x_step,             \
                             w + p * w_step, w_step, quads, 1, wide);                             \
            for (; p < panels; p++)                                                               \
                name##_block(c + (row * GROUP + p) * PANEL, x + row * x_step, x_step,             \
                             w + p * w_step, w_step, quads, 1, 1);                                \
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

#if defined(__AVX2__)
typedef __m256i pairs;
#define MADD(x, w) _mm256_madd_epi16(x, w)
#define LOW(x) _mm256_and_si256(x, _mm256_set1_epi16(255))
#define HIGH(x) _mm256_srli_epi16(x, 8)
#define SIGNED_LOW(w) _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8)
#define SIGNED_HIGH(w) _mm256_srai_epi16(w, 8)
enum { PAIRS = 32 };
#elif defined(__SSE2__)
typedef __m128i pairs;
#define MADD(x, w) _mm_madd_epi16(x, w)
#define LOW(x) _mm_and_si128(x, _mm_set1_epi16(255))
#define HIGH(x) _mm_srli_epi16(x, 8)
#define SIGNED_LOW(w) _mm_srai_epi16(_mm_slli_epi16(w, 8), 8)
#define SIGNED_HIGH(w) _mm_srai_epi16(w, 8)
enum { PAIRS = 16 };
#endif

#if defined(__SSE2__)
#define plain_dot(sum, x, w)                                                                      \
    ((sum) + (plain_sums)MADD(LOW((pairs)(x)), SIGNED_LOW((pairs)(w))) +                          \
     (plain_sums)MADD(HIGH((pairs)(x)), SIGNED_HIGH((pairs)(w))))
PRODUCT(plain, , PAIRS, 2, 2)
#else
static void plain(int32_t *c, const uint8_t *x, int64_t x_step, const int8_t *w, int64_t w_step,
                  int64_t quads, int64_t rows, int64_t panels)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t p = 0; p < panels; p++)
            for (int64_t i = 0; i < quads * PANEL_BYTES; i++)
                c[(r * GROUP + p) * PANEL + i % PANEL_BYTES / QUAD] +=
                    x[r * x_step + i / PANEL_BYTES * QUAD + i % QUAD] * w[p * w_step + i];
}
#endif

/* Tiles of 16 rows: four of sums, two of x and two of weights. */
#if defined(__AVX512BW__) && defined(__linux__)
#include <sys/syscall.h>

long syscall(long number, ...); /* of unistd.h, with extensions of GNU alone */

enum { TILE = 16, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

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

/* x is padded with zeros to quads of whole tiles. */
__attribute__((target("amx-tile,amx-int8"))) static void tiles(
    int32_t *c, const uint8_t *x, int64_t x_step, const int8_t *w, int64_t w_step, int64_t quads,
    int64_t rows, int64_t panels)
{
    enum { C_STEP = GROUP * PANEL * 4 };
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (; rows > 0; rows -= 2 * TILE, c += 2 * TILE * GROUP * PANEL, x += 2 * TILE * x_step) {
        int64_t upper = rows < TILE ? rows : TILE, lower = rows - upper < TILE ? rows - upper : TILE;
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = 64;
            shapes.rows[i] = i == 2 || i == 3 || i == 5 ? lower + !lower : i < 6 ? upper : TILE;
        }
        _tile_loadconfig(&shapes);
        for (int64_t p = 0; p < panels; p++) {
            int32_t *above = c + p * PANEL, *below = above + TILE * GROUP * PANEL;
            const int8_t *panel = w + p * w_step;
            _tile_loadd(0, above, C_STEP);
            _tile_loadd(1, above + TILE, C_STEP);
            if (lower) {
                _tile_loadd(2, below, C_STEP);
                _tile_loadd(3, below + TILE, C_STEP);
            }
            for (int64_t q = 0; q < quads; q += TILE) {
                _tile_loadd(4, x + q * QUAD, x_step);
                _tile_loadd(6, panel + q * PANEL_BYTES, PANEL_BYTES);
                _tile_loadd(7, panel + q * PANEL_BYTES + 64, PANEL_BYTES);
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
                if (lower) {
                    _tile_loadd(5, x + TILE * x_step + q * QUAD, x_step);
                    _tile_dpbusd(2, 5, 6);
                    _tile_dpbusd(3, 5, 7);
                }
            }
            _tile_stored(0, above, C_STEP);
            _tile_stored(1, above + TILE, C_STEP);
            if (lower) {
                _tile_stored(2, below, C_STEP);
                _tile_stored(3, below + TILE, C_STEP);
            }
        }
    }
    _tile_release();
}
#endif

static product *product_for(int64_t rows)
{
#if defined(__AVX512BW__) && defined(__linux__)
    if (rows > 4 && has_tiles())
        return tiles;
#endif
#if defined(__AVX512BW__)
    if (__builtin_cpu_supports("avx512vnni"))
        return vnni;
#elif defined(__AVX2__)
    if (__builtin_cpu_supports("avxvnni"))
        return vnni;
#endif
    return plain;
}

static inline int32_t sum_of(const uint8_t *x, int64_t count)
{
    int64_t sum = 0, k = 0;
#if defined(__AVX512BW__)
    __m512i sums = _mm512_setzero_si512();
    for (; k + 64 <= count; k += 64)
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(_mm512_loadu_si512(x + k), _mm512_setzero_si512()));
    sum = _mm512_reduce_add_epi64(sums);
#endif
    for (; k < count; k++)
        sum += x[k];
    return (int32_t)sum;
}

/* Codes of at most GROUP * PANEL numbers x, which are lost; NaN becomes the lowest. In loops of their
   own, which the compiler vectorizes. Both kinds of codes have the same lowest bits. */
INLINED void store_codes(uint8_t *restrict y, float *restrict x, int64_t count, float zero,
                         int is_signed)
{
    float low = is_signed ? -128 : 0, high = low + 255;
    int32_t codes[GROUP * PANEL];
    for (int64_t i = 0; i < count; i++)
        x[i] = rintf(x[i]) + zero;
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] > low ? x[i] : low;
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] < high ? x[i] : high;
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
        store_codes(y + i, numbers, WIDTH, zero, 0);
    }
    for (int64_t i = whole; i < count; i++)
        numbers[i - whole] = x[i] / scale;
    store_codes(y + whole, numbers, count - whole, zero, 0);
    *scale_of = scale;
    return (int32_t)zero;
}

#endif
