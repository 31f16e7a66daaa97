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
    int8_t *room; /* for codes of all rows, then the scales of their blocks, and sums of codes */
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

enum { VECTORS_AT_ONCE = 2 };

#if defined(VNNI)
#define OF(name) vnni_##name
#define ATTRIBUTE VNNI
#if defined(__AVX512BW__)
#define VECTOR_OF_CODES 64
#define MANY 6
#else
#define VECTOR_OF_CODES BYTES
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
#undef VECTOR_OF_CODES
#define VECTOR_OF_CODES BYTES
#define OF(name) plain_##name
#define ATTRIBUTE
#define MANY 4
#include "block_codes_of.h"

static int block_codes_stage(const void *arguments, int64_t stage, int64_t begin, int64_t end)
{
    const struct block_codes *a = arguments;
    const int64_t blocks = CEIL_DIV(a->k, a->block), panels = CEIL_DIV(a->n, PANEL);
    const int64_t groups = CEIL_DIV(panels, a->some);
    float *const scales = (float *)(a->room + a->rows * a->k);
    int32_t *const sums = (int32_t *)(scales + a->rows * blocks);
    for (int64_t r = begin * a->rows / a->pieces; !stage && r < end * a->rows / a->pieces; r++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * a->block;
            scales[r * blocks + b] =
                block_of_codes(a->x + r * a->k + from, a->room + r * a->k + from, smaller(a->block, a->k - from),
                               (int)a->bits, sums + r * blocks + b);
        }
    for (int64_t piece = begin; stage && piece < end; piece++) {
        const int64_t row = piece / groups * a->together, p = piece % groups * a->some;
        WIDEST(_codes)(a, row, smaller(a->rows, row + a->together), p, smaller(panels, p + a->some));
    }
    return 0;
}

KERNELS(block_codes, STAGED_KERNEL(block_codes, block_codes, NULL, block_codes_stage))
