/* Products with weights of 4 or 8 bits in blocks (blocks.c), by codes of the rows: each block of a row becomes int8 over
   its own range, in the first stage, and sums of products of codes are exact. A piece of the second stage is a block of
   rows and some panels of columns.

   Weights are in the words of blocks.c: of 4 bits, the even codes of eight are the low halves of four bytes, and the odd
   ones the high halves. So codes of rows are in this order, too. */

// Compiler options: -ffp-contract=fast
#include "integers.h"
#include "native.h"

struct block_codes {
    const float *x;
    const uint8_t *weights;
    const float *scales, *shifts, *bias; /* as in blocks.c */
    float *y;
    int8_t *room; /* for codes of all rows, then scales of their blocks, and sums of codes */
    int64_t rows, k, n, bits, block;
    int64_t together, some, pieces; /* rows and panels of a piece */
};

enum { EIGHT_CODES = 8, FETCHED_AHEAD = 4096 };

/* Codes of a block of a row; return their scale, and set their sum. */
static float block_of_codes(const float *restrict x, int8_t *restrict to, int64_t count, int bits, int32_t *sum)
{
    float most[EIGHT_CODES] = {0}, bad[EIGHT_CODES] = {0};
    for (int64_t i = 0; i < count; i += EIGHT_CODES)
        for (int j = 0; j < EIGHT_CODES; j++) {
            const float size = fabsf(x[i + j]);
            most[j] = size > most[j] ? size : most[j];
            bad[j] += x[i + j] - x[i + j]; /* NaN for what is not finite */
        }
    float highest = most[0], spoiled = bad[0];
    for (int j = 1; j < EIGHT_CODES; j++) {
        highest = most[j] > highest ? most[j] : highest;
        spoiled += bad[j];
    }
    const float factor = highest > 0 ? 127 / highest : 0;
    int32_t total = 0;
    for (int64_t i = 0; i < count; i += EIGHT_CODES)
        for (int j = 0; j < EIGHT_CODES; j++) {
            const float number = x[i + j] * factor;
            const int32_t code = (int32_t)rintf(WITHIN(number, -127.0f, 127.0f));
            to[i + (bits == 4 ? j / 2 + j % 2 * 4 : j)] = (int8_t)code;
            total += code;
        }
    *sum = total;
    return highest / 127 + spoiled;
}

enum { VECTORS_AT_ONCE = 2, USUAL = 32 };

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
    const int64_t blocks = (a->k + a->block - 1) / a->block, panels = (a->n + PANEL - 1) / PANEL;
    const int64_t groups = (panels + a->some - 1) / a->some;
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
