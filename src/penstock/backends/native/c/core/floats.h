/* Vectors of float32, the widest that the processor has. */
#ifndef PENSTOCK_FLOATS_H
#define PENSTOCK_FLOATS_H

#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include "native.h"
#include "vectors.h"

enum { LANES = VECTOR_BYTES / 4 };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

static inline vector loaded(const float *from)
{
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* The larger and the lesser elements of two vectors; those of b where one is NaN. */
#if defined(__AVX512F__)
#define LARGER(a, b) (vector) _mm512_max_ps((__m512)(a), (__m512)(b))
#define LESSER(a, b) (vector) _mm512_min_ps((__m512)(a), (__m512)(b))
#elif defined(__AVX__)
#define LARGER(a, b) (vector) _mm256_max_ps((__m256)(a), (__m256)(b))
#define LESSER(a, b) (vector) _mm256_min_ps((__m256)(a), (__m256)(b))
#elif defined(__SSE2__)
#define LARGER(a, b) (vector) _mm_max_ps((__m128)(a), (__m128)(b))
#define LESSER(a, b) (vector) _mm_min_ps((__m128)(a), (__m128)(b))
#else
INLINED vector one_of(vector a, vector b, int smaller)
{
    for (int i = 0; i < LANES; i++)
        a[i] = (smaller ? a[i] < b[i] : a[i] > b[i]) ? a[i] : b[i];
    return a;
}
#define LARGER(a, b) one_of(a, b, 0)
#define LESSER(a, b) one_of(a, b, 1)
#endif

/* The sum of SUM_VECTORS vectors, which overwrites them, as the lanes of a single vector are added up: neighbours
   first. */
INLINED vector joined_sums(vector *sums)
{
    UNROLLED(i, SUM_VECTORS / 2)
        sums[i] = sums[2 * i] + sums[2 * i + 1];
    return SUM_VECTORS > 2 ? sums[0] + sums[1] : sums[0];
}

/* For too few floats to be worth a call of memcpy. */
static inline void copy_floats(float *restrict to, const float *restrict from, int64_t count)
{
    for (; count >= LANES; count -= LANES, to += LANES, from += LANES)
        memcpy(to, from, VECTOR_BYTES);
#if defined(__AVX512F__)
    const __mmask16 some = (__mmask16)((1u << count) - 1);
    _mm512_mask_storeu_ps(to, some, _mm512_maskz_loadu_ps(some, from));
#else
    for (; count >= 4; count -= 4, to += 4, from += 4)
        memcpy(to, from, 16);
    for (; count > 0; count--)
        *to++ = *from++;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* The mask of the first `count` lanes. */
static inline __m256i mask_of(int64_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

/* Load the first `count` lanes; the whole vector if `count` is larger. */
INLINED vector load_some(const float *from, int64_t count)
{
    if (count >= LANES)
        return loaded(from);
#if defined(__AVX512F__)
    return (vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif defined(__AVX2__)
    return (vector)_mm256_maskload_ps(from, mask_of(count));
#else
    vector v = {0};
    copy_floats((float *)&v, from, count);
    return v;
#endif
}

static inline void store_some(float *to, vector v, int64_t count)
{
    if (count >= LANES)
        memcpy(to, &v, sizeof v);
    else
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#elif defined(__AVX2__)
        _mm256_maskstore_ps(to, mask_of(count), (__m256)v);
#else
        copy_floats(to, (const float *)&v, count);
#endif
}

#endif
