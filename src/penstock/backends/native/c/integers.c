/* Products of 8-bit integers with constant weights [K, N], exact in int32, and real numbers or codes
   made of them. An item is a block of rows with a group of panels.

   Weights are int8 (uint8 less 128) in the panels of integers.h, rows uint8 (int8 plus 128). Zero
   points a of x and b of weights are taken off the sums:

       sum (x - a) (w - b) = sum x w - a (sum w - K b) - b sum x */
#include "integers.h"
#include "native.h"

struct integer_product {
    const uint8_t *x, *x_zero; /* x_zero: null for 0 */
    const int8_t *weights;
    const int32_t *sums, *zeros, *terms; /* by column: sum w - K b, b, what is added; or null */
    const float *factors;                /* of columns, for real numbers and codes */
    void *y;
    int64_t rows, k, n, is_signed, result, y_zero;
};

enum { INT32, FLOAT32, UINT8, INT8 };
enum { BLOCK = 64, PART = 512 };

/* Copy a part of a row as uint8, padded with zeros to whole tiles. */
static void copy_row(uint8_t *restrict to, const uint8_t *restrict x, int64_t count, int is_signed)
{
    uint8_t change = is_signed ? 128 : 0;
    for (int64_t k = 0; k < count; k++)
        to[k] = x[k] ^ change;
    memset(to + count, 0, (64 - count % 64) % 64);
}

#define RESULTS(type, value)                                                                      \
    do {                                                                                          \
        type *restrict y = (type *)a->y + at;                                                     \
        for (int64_t j = 0; j < count; j++)                                                       \
            y[j] = (type)(value);                                                                 \
    } while (0)

/* The results of `count` columns from `column` on, y[at] the first, of a row whose codes sum to
   `row_sum`. */
static void finish(const struct integer_product *a, int32_t *restrict c, int32_t row_sum,
                   int64_t column, int64_t count, int64_t at)
{
    int32_t zero = a->x_zero ? *a->x_zero : 0;
    const float *restrict f = a->factors + column;
    if (a->is_signed)
        zero = (int8_t)zero + 128;
    if (zero)
        for (int64_t j = 0; j < count; j++)
            c[j] -= zero * a->sums[column + j];
    if (a->zeros)
        for (int64_t j = 0; j < count; j++)
            c[j] -= row_sum * a->zeros[column + j];
    if (a->terms)
        for (int64_t j = 0; j < count; j++)
            c[j] += a->terms[column + j];
    float numbers[GROUP * PANEL];
    switch (a->result) {
    case INT32: RESULTS(int32_t, c[j]); break;
    case FLOAT32: RESULTS(float, (float)c[j] * f[j]); break;
    default:
        for (int64_t j = 0; j < count; j++)
            numbers[j] = (float)c[j] * f[j];
        store_codes((uint8_t *)a->y + at, numbers, count, (float)a->y_zero, a->result == INT8);
    }
}

/* Codes of real numbers over their own range, 0 included: one item. */
struct dynamically_quantized {
    const float *x;
    uint8_t *y;
    float *scale;
    uint8_t *zero;
    int64_t count;
};

static int dynamically_quantized(const void *arguments, int64_t begin, int64_t end)
{
    const struct dynamically_quantized *a = arguments;
    *a->zero = (uint8_t)to_codes(a->y, a->x, a->count, a->scale);
    return 0;
}

static int integer_product(const void *arguments, int64_t begin, int64_t end)
{
    const struct integer_product *a = arguments;
    uint8_t copy[BLOCK * PART];
    int32_t c[BLOCK * GROUP * PANEL], sums[BLOCK];
    int64_t blocks = (a->rows + BLOCK - 1) / BLOCK, quads = (a->k + QUAD - 1) / QUAD;
    int64_t panels = (a->n + PANEL - 1) / PANEL;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item % blocks * BLOCK, first = item / blocks * GROUP;
        int64_t rows = a->rows - row < BLOCK ? a->rows - row : BLOCK;
        int64_t group = panels - first < GROUP ? panels - first : GROUP;
        memset(sums, 0, sizeof sums);
        memset(c, 0, rows * GROUP * PANEL * sizeof *c);
        for (int64_t from = 0; from < a->k; from += PART) {
            int64_t count = a->k - from < PART ? a->k - from : PART;
            const int8_t *w = a->weights + (first * quads + from / QUAD) * PANEL_BYTES;
            const uint8_t *part = a->x + row * a->k + from;
            int64_t step = a->k;
            if (a->is_signed || count % 64) {
                for (int64_t r = 0; r < rows; r++)
                    copy_row(copy + r * PART, part + r * a->k, count, a->is_signed != 0);
                part = copy;
                step = PART;
            }
            for (int64_t r = 0; r < rows && a->zeros; r++)
                sums[r] += sum_of(part + r * step, count);
            product_for(rows)(c, part, step, w, quads * PANEL_BYTES, (count + QUAD - 1) / QUAD, rows,
                              group);
        }
        int64_t column = first * PANEL, left = a->n - column;
        for (int64_t r = 0; r < rows; r++)
            finish(a, c + r * GROUP * PANEL, sums[r], column,
                   left < group * PANEL ? left : group * PANEL, (row + r) * a->n + column);
    }
    return 0;
}

/* Operations that products of many rows make in a nanosecond, about: a multiplication and an addition
   are two. */
int integer_speed(void)
{
#if defined(__AVX512BW__) && defined(__linux__)
    if (product_for(BLOCK) == tiles)
        return 1000;
#endif
#if defined(__AVX2__)
    if (product_for(BLOCK) == vnni)
        return 250;
    return 80;
#else
    return 40;
#endif
}

const kernel_entry integers_kernels[] = {
    KERNEL(dynamically_quantized, dynamically_quantized),
    KERNEL(integer_product, integer_product),
    END_OF_KERNELS,
};
