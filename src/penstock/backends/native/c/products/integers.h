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
typedef int32_t words __attribute__((vector_size(BYTES)));

/* Dot products of four uint8 with four int8, in vectors. Without such instructions: even and odd products separately
   as int16. DOTS are of int8 with int8: x is 64 + 64 more than what these take for it. WIDEST selects the functions
   of the widest suffix that the processor supports. */
#if defined(__AVX512BW__)
#define VNNI __attribute__((target("avx512vnni")))
#define WIDEST(suffix) (features & AVX512_VNNI ? vnni##suffix : plain##suffix)
#define vnni_dot(sum, x, w) \
    (words)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
#elif defined(__AVX2__)
#define VNNI __attribute__((target("avxvnni")))
#define WIDEST(suffix) (features & AVX_VNNI ? vnni##suffix : plain##suffix)
#define vnni_dot(sum, x, w) \
    (words)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
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
    (words)vusdotq_s32((int32x4_t)(sum), (uint8x16_t)(x), (int8x16_t)(w))
#define DOTS __attribute__((target("arch=armv8.2-a+dotprod")))
#define DOT(sum, x, w) vdotq_s32(sum, (int8x16_t)(x), (int8x16_t)(w))
#define dots_dot(sum, x, w) \
    (words)DOT(DOT(DOT((int32x4_t)(sum), (bytes)(x) ^ 128, w), (bytes){0} + 64, w), (bytes){0} + 64, w)
#else
#define WIDEST(suffix) plain##suffix
#endif

#if defined(__SSE4_1__)
#define plain_dot(sum, x, w)                                                                      \
    ((sum) +                                                                                      \
     (words)V(madd_epi16)((bytes)(x)&V(set1_epi16)(255),                                     \
                               V(srai_epi16)(V(slli_epi16)((bytes)(w), 8), 8)) +                  \
     (words)V(madd_epi16)(V(srli_epi16)((bytes)(x), 8), V(srai_epi16)((bytes)(w), 8)))
#else
#if defined(__aarch64__)
#define PAIRS_ADDED(sum, x) (words)vpadalq_s16((int32x4_t)(sum), (int16x8_t)(x))
#else
#define PAIRS_ADDED(sum, x) ((sum) + ((words)(x) << 16 >> 16) + ((words)(x) >> 16))
#endif
#define plain_dot(sum, x, w)                                                                      \
    PAIRS_ADDED(PAIRS_ADDED(sum, (signed_halves)((halves)(x)&255) * ((signed_halves)(w) << 8 >> 8)), \
                (signed_halves)((halves)(x) >> 8) * ((signed_halves)(w) >> 8))
#endif

#if defined(__SSE4_1__)
/* Codes of quads as pairs of int16: the even ones of each quad, and the odd ones. */
INLINED void widen_words(words *even, words *odd, const int8_t *from)
{
    words codes;
    memcpy(&codes, from, BYTES);
    *even = (words)V(srai_epi16)(V(slli_epi16)((bytes)codes, 8), 8);
    *odd = (words)V(srai_epi16)((bytes)codes, 8);
}
#endif

/* The products of integers.c, by what the processor has; those of `tiles` are AMX's. */
#pragma GCC visibility push(hidden)
product plain;
#if defined(VNNI)
product vnni;
#endif
#if defined(DOTS)
product dots;
#endif
#ifdef HAVE_TILES
#define EACH_TILE(X) X(0) X(1) X(2) X(3) /* those of sums */
product tiles;
void release_tiles(void);
#endif

/* The fastest for this many rows. */
product *product_for(int64_t rows);
#pragma GCC visibility pop

/* Release the tiles that were configured for a shape. */
static inline void end_tiles(int64_t shape)
{
#ifdef HAVE_TILES
    if (shape)
        release_tiles();
#endif
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

#if defined(__SSE4_1__)
/* Four vectors of int32 plus zero as uint8, saturated: in their order, or as the vectors interleave. */
INLINED bytes packed_codes(const bytes *whole, int64_t zero, int ordered)
{
    const bytes added = V(set1_epi16)((int16_t)zero);
    const bytes codes = V(packus_epi16)(V(adds_epi16)(V(packs_epi32)(whole[0], whole[1]), added),
                                        V(adds_epi16)(V(packs_epi32)(whole[2], whole[3]), added));
#if defined(__AVX512BW__)
    if (ordered)
        return V(permutexvar_epi32)(V(set_epi32)(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), codes);
#elif defined(__AVX2__)
    if (ordered)
        return V(permutevar8x32_epi32)(codes, V(set_epi32)(7, 3, 6, 2, 5, 1, 4, 0));
#endif
    return codes;
}
#endif

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
    const float low = r.low, high = r.high;
    float scale = r.is_nan ? NAN : (high - low) / 255.0f;
    float zero = scale == 0 ? 0 : rintf(-low / scale);
    zero = zero > 0 ? zero : 0; /* also if NaN */
    zero = zero < 255 ? zero : 255;
    scale = scale == 0 ? 1 : scale;
    int64_t i = 0;
#if defined(__FMA__)
    /* A product with the inverse, corrected by its remainder, is rounded as a division is (Markstein, 1990), but is
       faster. */
    const float inverse = 1 / scale;
    for (; scale > 0x1p-60f && scale < 0x1p60f && i + BYTES <= count; i += BYTES) {
        float numbers[BYTES];
        bytes whole[4], codes;
        UNROLLED(j, BYTES) {
            const float near = x[i + j] * inverse;
            numbers[j] = __builtin_fmaf(__builtin_fmaf(-near, scale, x[i + j]), inverse, near);
        }
        UNROLLED(j, 4)
            whole[j] = V(cvtps_epi32)(V(loadu_ps)(numbers + j * LANES_OF_SUMS));
        codes = packed_codes(whole, (int64_t)zero, 1);
        memcpy(y + i, &codes, BYTES);
    }
#endif
    for (; i < count; i++) {
        const float number = rintf(x[i] / scale) + zero, inside = number > 0 ? number : 0; /* also if NaN */
        y[i] = (uint8_t)(int32_t)(inside < 255 ? inside : 255);
    }
    *scale_of = scale;
    return (int32_t)zero;
}

#endif
