/* Products of rows of codes with panels of weights in blocks (block_codes.c), with the vectors of OF(dot): a constant
   number of rows, at most MANY, by two vectors of a panel at once, so that the sums fit in registers. A `block` of 0
   means any length. Each pass over a panel prefetches a part of the next one, `stride` bytes from `ahead` on for
   every eight codes: otherwise memory would be idle in all passes but the first. */

ATTRIBUTE INLINED void OF(rows)(const struct block_codes *a, int64_t row, int64_t p, int first, float *c,
                                   const uint8_t *ahead, int64_t stride, const int bits, const int rows,
                                   const int block)
{
    const int64_t blocks = CEIL_DIV(a->k, a->block);
    const uint8_t *panel = a->weights + p * a->k * PANEL * bits / 8 + first * BYTES;
    const int8_t *codes = a->room + row * a->k;
    const float *of_rows = scales_of(a) + row * blocks;
    const int32_t *of_sums = sums_of(a) + row * blocks;
    const float *scales = a->scales + p * blocks * PANEL + first * LANES_OF_SUMS;
    const float *shifts = a->shifts ? a->shifts + p * blocks * PANEL + first * LANES_OF_SUMS : NULL;
    reals totals[MANY * VECTORS_AT_ONCE] = {0};
    const int zero = bits == 4 ? 8 : 128, in_halves = bits == 4 && HAS_HALVES;
    for (int64_t b = 0, k = 0; b < blocks; b++) {
        const int64_t end = block ? k + block : smaller(a->k, k + a->block);
        words sums[MANY * VECTORS_AT_ONCE];
        UNROLLED(i, rows * VECTORS_AT_ONCE)
            sums[i] = (words){0} - zero * of_sums[i / VECTORS_AT_ONCE * blocks + b];
        while (k < end) {
            const int64_t stop = block ? end : smaller(end, k + USUAL);
            words some[MANY * VECTORS_AT_ONCE]; /* of at most USUAL codes */
            UNROLLED(i, rows * VECTORS_AT_ONCE)
                some[i] = in_halves ? (words){0} : sums[i];
#pragma GCC unroll 4
            for (; k < stop; k += EIGHT_CODES) {
                words read[VECTORS_AT_ONCE];
                UNROLLED(j, VECTORS_AT_ONCE)
                    memcpy(&read[j], panel + j * BYTES, BYTES);
                UNROLLED(l, bits / 2)
                    __builtin_prefetch(ahead + l * LINE);
                ahead += stride;
                /* One half of them after the other, so that registers hold all sums. */
                UNROLLED(half, 2) {
                    words columns[VECTORS_AT_ONCE];
                    UNROLLED(j, VECTORS_AT_ONCE) {
                        if (bits == 8 && half)
                            memcpy(&read[j], panel + PANEL * QUAD + j * BYTES, BYTES);
                        columns[j] = bits == 8 ? read[j] ^ (int32_t)0x80808080 : read[j] >> 4 * half & 0x0f0f0f0f;
                    }
                    UNROLLED(r, rows) {
                        int32_t four;
                        memcpy(&four, codes + r * a->k + k + half * QUAD, QUAD);
                        const words number = (words){0} + four;
                        UNROLLED(j, VECTORS_AT_ONCE) {
                            words *const sum = &some[r * VECTORS_AT_ONCE + j];
                            *sum = in_halves ? HALVES_DOT(*sum, columns[j], number) : OF(dot)(*sum, columns[j], number);
                            IN_ORDER(*sum);
                        }
                    }
                }
                panel += PANEL * bits;
            }
            UNROLLED(i, rows * VECTORS_AT_ONCE)
                sums[i] = in_halves ? HALVES_ADDED(sums[i], some[i]) : some[i];
        }
        UNROLLED(j, VECTORS_AT_ONCE) {
            reals scale, shift = {0};
            memcpy(&scale, scales + b * PANEL + j * LANES_OF_SUMS, BYTES);
            if (shifts)
                memcpy(&shift, shifts + b * PANEL + j * LANES_OF_SUMS, BYTES);
            UNROLLED(r, rows) {
                const float own = of_rows[r * blocks + b];
                const reals number = __builtin_convertvector(sums[r * VECTORS_AT_ONCE + j], reals);
                totals[r * VECTORS_AT_ONCE + j] += number * (scale * own);
                if (shifts)
                    totals[r * VECTORS_AT_ONCE + j] += own * (float)of_sums[r * blocks + b] * shift;
            }
        }
    }
    UNROLLED(i, rows * VECTORS_AT_ONCE)
        memcpy(c + i / VECTORS_AT_ONCE * PANEL + (first + i % VECTORS_AT_ONCE) * LANES_OF_SUMS, &totals[i], BYTES);
}

ATTRIBUTE INLINED void OF(panel)(const struct block_codes *a, int64_t row, int64_t p, int64_t group, int64_t groups,
                                    const int bits, const int rows, const int block)
{
    enum { PARTS = PANEL * 4 / (BYTES * VECTORS_AT_ONCE) };
    float c[MANY * PANEL];
    const int64_t size = a->k * PANEL * bits / 8, passes = groups * PARTS;
    int64_t pass = group * PARTS;
    for (int first = 0; first < PANEL * 4 / BYTES; first += VECTORS_AT_ONCE, pass++) {
        const uint8_t *ahead = a->weights + p * size;
        ahead += passes == 1 ? FETCHED_AHEAD : size + pass * size / passes;
        OF(rows)(a, row, p, first, c, ahead, PANEL * bits / passes, bits, rows, block);
    }
    store_panel(a, c, row, rows, p);
}

/* Forms for bits, rows and the block are functions: one with all of them would take longer to compile. */
#define FORM(bits, rows, block)                                                                    \
    ATTRIBUTE static __attribute__((noinline)) void OF(panel_##bits##_##rows##_##block)(           \
        const struct block_codes *a, int64_t row, int64_t p, int64_t group, int64_t groups)        \
    {                                                                                              \
        OF(panel)(a, row, p, group, groups, bits, rows, block);                                    \
    }
#define ROWS_OF(X, rows) X(4, rows, 0) X(4, rows, USUAL) X(8, rows, 0) X(8, rows, USUAL)
#if MANY > 4
#define FORMS(X) ROWS_OF(X, MANY) ROWS_OF(X, 4) ROWS_OF(X, 2) ROWS_OF(X, 1)
#else
#define FORMS(X) ROWS_OF(X, MANY) ROWS_OF(X, 2) ROWS_OF(X, 1)
#endif
FORMS(FORM)

ATTRIBUTE static void OF(codes)(const struct block_codes *a, int64_t row, int64_t end, int64_t p, int64_t last)
{
    const int64_t groups = end - row == 8 ? 2 : CEIL_DIV(end - row, MANY);
    const int64_t of_blocks = a->block == USUAL && a->k % USUAL == 0 ? USUAL : 0;
    for (; p < last; p++)
        for (int64_t r = row, rows, group = 0; r < end; r += rows, group++) {
            const int64_t left = end - r;
            rows = left >= MANY && left != 8 ? MANY : left >= 4 ? 4 : left >= 2 ? 2 : 1;
#define USE(of_bits, number, block)                                                                \
    if (a->bits == of_bits && rows == number && of_blocks == block)                                \
        OF(panel_##of_bits##_##number##_##block)(a, r, p, group, groups);
            FORMS(USE)
#undef USE
        }
}
#undef FORM
#undef FORMS
#undef ROWS_OF
