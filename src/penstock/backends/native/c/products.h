/* Products of a few rows with a matrix in panels of 32 columns, [panel][k][32], padded with zeros. Files
   that include this are compiled with contraction to fused multiply-add. */
#ifndef PENSTOCK_PRODUCTS_H
#define PENSTOCK_PRODUCTS_H

#include <stdint.h>
#include <string.h>

enum { PANEL = 32 };

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, MOST_ROWS = 8 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, MOST_ROWS = 2 };
#else
enum { VECTOR_BYTES = 16, MOST_ROWS = 1 };
#endif
enum { LANES = VECTOR_BYTES / 4, VECTORS = PANEL / LANES };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

static inline vector loaded(const float *from)
{
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Add the product of `rows` rows of a with `panels` panels to c; both numbers are constants. */
static inline __attribute__((always_inline)) void add_block(
    float *c, int64_t c_step, const float *a, int64_t a_step, const float *b, int64_t k, int rows,
    int panels)
{
    vector sums[(MOST_ROWS > 4 ? MOST_ROWS : 4) * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * VECTORS; j++)
            sums[i * panels * VECTORS + j] = loaded(c + i * c_step + j * LANES);
    for (int64_t at = 0; at < k; at++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * VECTORS; j++) {
            const float *panel = b + (int64_t)(j / VECTORS) * k * PANEL;
            vector column = loaded(panel + at * PANEL + j % VECTORS * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++)
                sums[i * panels * VECTORS + j] += a[i * a_step + at] * column;
        }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * VECTORS; j++)
            memcpy(c + i * c_step + j * LANES, &sums[i * panels * VECTORS + j], sizeof(vector));
}

/* c += a b, for a of [rows, k] and b of `panels` panels; c has 32 columns for each panel. */
static inline void add_product(float *c, int64_t c_step, const float *a, int64_t a_step,
                               const float *b, int64_t k, int64_t rows, int64_t panels)
{
    int64_t row = 0;
    for (; row + MOST_ROWS <= rows && MOST_ROWS > 1; row += MOST_ROWS)
        for (int64_t p = 0; p < panels; p++)
            add_block(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                      b + p * k * PANEL, k, MOST_ROWS, 1);
    for (; row + 4 <= rows && MOST_ROWS > 4; row += 4)
        for (int64_t p = 0; p < panels; p++)
            add_block(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                      b + p * k * PANEL, k, 4, 1);
    for (; row + 2 <= rows && MOST_ROWS > 2; row += 2)
        for (int64_t p = 0; p < panels; p++)
            add_block(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                      b + p * k * PANEL, k, 2, 1);
    for (; row < rows; row++) {
        int64_t p = 0;
        for (; p + 4 <= panels; p += 4)
            add_block(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                      b + p * k * PANEL, k, 1, 4);
        for (; p < panels; p++)
            add_block(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                      b + p * k * PANEL, k, 1, 1);
    }
}

#endif
