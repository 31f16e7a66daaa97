/* Copies by one of three methods: contiguous runs, transposed blocks if two dims are exchanged, and single
   elements. */
#include <string.h>
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif
#include "compilers.h"
#include "copies.h"

/* FEW: rows that are too few for a loop of their own, unless they have LONG_RUN bytes */
enum { TILE = 32, FEW = 8, LONG_RUN = 1024 };

/* Elements may be unaligned: a run of two is one of twice the size. */
#define AT_ANY_ADDRESS __attribute__((aligned(1), may_alias))
typedef uint16_t AT_ANY_ADDRESS bytes_2;
typedef uint32_t AT_ANY_ADDRESS bytes_4;
typedef uint64_t AT_ANY_ADDRESS bytes_8;
typedef struct __attribute__((packed, may_alias)) {
    uint64_t low, high;
} bytes_16;

static void move(copy_plan *p, int at, int place)
{
    int64_t *const all[] = {p->dims, p->from, p->to};
    for (int i = 0; i < 3; i++) {
        const int64_t value = all[i][at];
        memmove(all[i] + at, all[i] + at + 1, (place - at) * sizeof value);
        all[i][place] = value;
    }
}

/* Sort dims by their strides in the destination, the longest first. */
static void sort_dims(copy_plan *p)
{
    for (int end = p->rank; end > 1; end--) {
        int least = 0;
        for (int i = 1; i < end; i++)
            if (p->to[i] <= p->to[least])
                least = i;
        move(p, least, end - 1);
    }
}

/* Drop dims of one element, and merge dims that are contiguous on both sides. */
static void join_dims(copy_plan *p)
{
    int rank = 0;
    for (int i = 0; i < p->rank; i++) {
        if (p->dims[i] == 1)
            continue;
        int64_t dim = p->dims[i], from = p->from[i], to = p->to[i];
        if (rank && p->from[rank - 1] == dim * from && p->to[rank - 1] == dim * to)
            dim *= p->dims[--rank];
        p->dims[rank] = dim;
        p->from[rank] = from;
        p->to[rank++] = to;
    }
    p->rank = rank;
}

#define OF_BLOCK(name)                                                                             \
    void name(const char *from, char *to, int64_t from_step, int64_t to_step, int64_t rows,        \
              int64_t length, int64_t from_stride, int64_t to_stride)
typedef OF_BLOCK((*block_function));

/* Rows of single elements. */
#define ELEMENTS(name, type)                                                                       \
    static OF_BLOCK(name)                                                                          \
    {                                                                                              \
        for (int64_t i = 0; i < rows; i++, from += from_step, to += to_step) {                     \
            if (to_stride == sizeof(type) && !from_stride) {                                       \
                type value = *(const type *)from;                                                  \
                for (int64_t j = 0; j < length; j++)                                               \
                    ((type *)to)[j] = value;                                                       \
            }                                                                                      \
            else                                                                                   \
                for (int64_t j = 0; j < length; j++)                                               \
                    *(type *)(to + j * to_stride) = *(const type *)(from + j * from_stride);       \
        }                                                                                          \
    }

ELEMENTS(elements_1, uint8_t)
ELEMENTS(elements_2, bytes_2)
ELEMENTS(elements_4, bytes_4)
ELEMENTS(elements_8, bytes_8)
ELEMENTS(elements_16, bytes_16)

/* Runs of `length` bytes. A call of memcpy takes longer than a few copies of `part` bytes, the last one
   overlapping. */
INLINED void runs_in_parts(const char *from, char *to, int64_t from_step, int64_t to_step, int64_t rows, int64_t length,
                           const int64_t part)
{
    for (int64_t i = 0; i < rows; i++, from += from_step, to += to_step) {
        for (int64_t j = 0; j + part < length; j += part)
            memcpy(to + j, from + j, part);
        memcpy(to + length - part, from + length - part, part);
    }
}

static OF_BLOCK(runs)
{
    if (length >= 8 && length < 32)
        runs_in_parts(from, to, from_step, to_step, rows, length, 8);
    else if (length >= 32 && length <= 512)
        runs_in_parts(from, to, from_step, to_step, rows, length, 32);
    else
        for (int64_t i = 0; i < rows; i++)
            memcpy(to + i * to_step, from + i * from_step, length);
}

/* Transpose a block of SIDE vectors of SIDE elements: interleaving row i with row i + SIDE / 2 rotates the bits of an
   element's index by one. */
#define BLOCK(name, type, SIDE, LOW, HIGH)                                                         \
    typedef type name##_lanes __attribute__((vector_size(SIDE * sizeof(type))));                   \
    INLINED void name##_round(const name##_lanes *rows, name##_lanes *next)                        \
    {                                                                                              \
        _Pragma("GCC unroll 16") for (int i = 0; i < SIDE / 2; i++) {                              \
            next[2 * i] = SHUFFLE(name##_lanes, rows[i], rows[i + SIDE / 2], LOW);                 \
            next[2 * i + 1] = SHUFFLE(name##_lanes, rows[i], rows[i + SIDE / 2], HIGH);            \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static inline void name(const char *from, int64_t from_step, char *to, int64_t to_step)        \
    {                                                                                              \
        name##_lanes rows[SIDE], next[SIDE], *last = SIDE == 4 || SIDE == 16 ? rows : next;        \
        _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i++)                                    \
            memcpy(&rows[i], from + i * from_step, sizeof rows[i]);                                           \
        name##_round(rows, next);                                                                  \
        if (SIDE > 2)                                                                              \
            name##_round(next, rows);                                                              \
        if (SIDE > 4)                                                                              \
            name##_round(rows, next);                                                              \
        if (SIDE > 8)                                                                              \
            name##_round(next, rows);                                                              \
        _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i++)                                    \
            memcpy(to + i * to_step, &last[i], sizeof last[i]);                                               \
    }
#define SET(...) __VA_ARGS__
#define LOW_16 SET(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_16 SET(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
BLOCK(block_1, uint8_t, 16, LOW_16, HIGH_16)
BLOCK(block_2, uint16_t, 8, SET(0, 8, 1, 9, 2, 10, 3, 11), SET(4, 12, 5, 13, 6, 14, 7, 15))
BLOCK(block_4, uint32_t, 4, SET(0, 4, 1, 5), SET(2, 6, 3, 7))
BLOCK(block_8, uint64_t, 2, SET(0, 2), SET(1, 3))

/* As a BLOCK of bytes, of 64 rows of 16 elements: vectors interleave within 16-byte lanes, so that each transposes
   four blocks, and whole cache lines are written. */
#ifdef __AVX512BW__
static inline void block_1_wide(const char *from, int64_t from_step, char *to, int64_t to_step)
{
    __m512i rows[16], next[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++, from += from_step)
    {
        rows[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
        rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128((const __m128i *)(from + 16 * from_step)), 1);
        rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128((const __m128i *)(from + 32 * from_step)), 2);
        rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128((const __m128i *)(from + 48 * from_step)), 3);
    }
    _Pragma("GCC unroll 4") for (int round = 0; round < 4; round++)
    {
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
        {
            next[2 * i] = _mm512_unpacklo_epi8(rows[i], rows[i + 8]);
            next[2 * i + 1] = _mm512_unpackhi_epi8(rows[i], rows[i + 8]);
        }
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
            rows[i] = next[i];
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
        _mm512_storeu_si512(to + i * to_step, rows[i]);
}
#endif

/* Elements of n planes that are interleaved on one side, such as the colors of an image. */
#define FEW_PLANES(type, n)                                                                        \
    if (length == n && to_step == n * (int64_t)sizeof(type)) {                                     \
        IVDEP for (int64_t i = 0; i < rows; i++)                                                   \
            UNROLLED(k, n) ((type *)to)[n * i + k] = ((const type *)(from + k * from_stride))[i];  \
        return;                                                                                    \
    }                                                                                              \
    if (rows == n && from_stride == n * (int64_t)sizeof(type)) {                                   \
        IVDEP for (int64_t j = 0; j < length; j++)                                                 \
            UNROLLED(k, n) ((type *)(to + k * to_step))[j] = ((const type *)from)[n * j + k];      \
        return;                                                                                    \
    }

/* Rows whose element j is at j * from_stride, with `sizeof(type)` between rows. The last block of a side overlaps
   others if too little is left. A BLOCK has SIDE rows of LONG elements. */
#define TRANSPOSED(name, type, SIDE, LONG, BLOCK, ELEMENTS)                                            \
    static OF_BLOCK(name)                                                                          \
    {                                                                                              \
        FEW_PLANES(type, 2) FEW_PLANES(type, 3) FEW_PLANES(type, 4)                                \
        if (rows < SIDE || length < LONG) {                                                        \
            ELEMENTS(from, to, from_step, to_step, rows, length, from_stride, to_stride);          \
            return;                                                                                \
        }                                                                                          \
        for (int64_t i0 = 0; i0 < rows; i0 += TILE)                                                \
            for (int64_t j0 = 0; j0 < length; j0 += LONG > TILE ? LONG : TILE)                     \
                for (int64_t i = i0; i < rows && i < i0 + TILE; i += SIDE)                         \
                    for (int64_t j = j0; j < length && j < j0 + (LONG > TILE ? LONG : TILE); j += LONG) {       \
                        int64_t row = i < rows - SIDE ? i : rows - SIDE;                           \
                        int64_t column = j < length - LONG ? j : length - LONG;                    \
                        BLOCK(from + row * sizeof(type) + column * from_stride, from_stride,       \
                              to + row * to_step + column * sizeof(type), to_step);                \
                    }                                                                              \
    }

TRANSPOSED(transposed_1, uint8_t, 16, 16, block_1, elements_1)
#ifdef __AVX512BW__
TRANSPOSED(transposed_1_wide, uint8_t, 16, 64, block_1_wide, elements_1)
#else
#define transposed_1_wide transposed_1
#endif
TRANSPOSED(transposed_2, bytes_2, 8, 8, block_2, elements_2)
TRANSPOSED(transposed_4, bytes_4, 4, 4, block_4, elements_4)
#ifdef __AVX512F__
BLOCK(block_4_wide, uint32_t, 16, LOW_16, HIGH_16)
TRANSPOSED(transposed_4_wide, bytes_4, 16, 16, block_4_wide, elements_4)
#else
#define transposed_4_wide transposed_4
#endif
TRANSPOSED(transposed_8, bytes_8, 2, 2, block_8, elements_8)

static block_function by_size(int64_t size, block_function const functions[5])
{
    return size == 16 ? functions[4] : functions[size == 8 ? 3 : size == 4 ? 2 : size - 1];
}

/* Choose how to copy the last two dims; if two dims are transposed, the other one is moved before the last. */
static block_function chosen(copy_plan *p)
{
    static block_function const single[] = {elements_1, elements_2, elements_4, elements_8, elements_16};
    static block_function const transposing[] = {transposed_1, transposed_2, transposed_4, transposed_8, elements_16};
    int last = p->rank - 1, other = last - 1;
    if (p->from[last] == p->size && p->to[last] == p->size) {
        int most = other;
        for (int i = 0; i < other; i++)
            most = p->dims[i] >= p->dims[most] ? i : most; /* among equals, the one with the smallest output stride */
        p->dims[last] *= p->size;
        if (last && p->dims[other] < FEW && p->dims[last] < LONG_RUN)
            move(p, most, other);
        return runs;
    }
    while (other >= 0 && p->from[other] != p->size)
        other--;
    /* Long rows of a repeated element are filled with it. */
    if (other < 0 || p->to[last] != p->size || (!p->from[last] && p->dims[last] >= TILE))
        return by_size(p->size, single);
    move(p, other, last - 1);
    if (p->size == 4 && p->dims[last - 1] >= 16 && p->dims[last] >= 16)
        return transposed_4_wide;
    if (p->size == 1 && p->dims[last - 1] >= 16 && p->dims[last] >= 64)
        return transposed_1_wide;
    return by_size(p->size, transposing);
}

/* Merge a short contiguous run into one larger element. */
static void widen_elements(copy_plan *p)
{
    int last = p->rank - 1;
    if (last < 0 || p->from[last] != p->size || p->to[last] != p->size)
        return;
    int64_t run = p->dims[last] * p->size;
    if (run == 2 || run == 4 || run == 8 || run == 16) {
        p->size = run;
        p->rank = last;
    }
}

void copy_elements(copy_plan *p, const char *from, char *to)
{
    for (int i = 0; i < p->rank; i++)
        if (!p->dims[i])
            return;
    sort_dims(p);
    join_dims(p);
    widen_elements(p);
    if (!p->rank) {
        memcpy(to, from, p->size);
        return;
    }
    if (p->rank == 1 && p->from[0] == p->size && p->to[0] == p->size) {
        memcpy(to, from, p->dims[0] * p->size);
        return;
    }
    block_function block = chosen(p);
    int last = p->rank - 1, outer = last > 0 ? last - 1 : 0;
    int64_t rows = last ? p->dims[last - 1] : 1;
    int64_t from_step = last ? p->from[last - 1] : 0, to_step = last ? p->to[last - 1] : 0;
    int64_t index[MOST_DIMS];
    for (int d = 0; d < outer; d++) /* most are never used */
        index[d] = 0;
    for (;;) {
        block(from, to, from_step, to_step, rows, p->dims[last], p->from[last], p->to[last]);
        int d = outer - 1;
        for (; d >= 0; d--) {
            from += p->from[d];
            to += p->to[d];
            if (++index[d] < p->dims[d])
                break;
            from -= p->from[d] * p->dims[d];
            to -= p->to[d] * p->dims[d];
            index[d] = 0;
        }
        if (d < 0)
            return;
    }
}
