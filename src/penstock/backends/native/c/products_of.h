/* Products of a few rows with panels of 32 columns in the type REAL, whose functions have names OF(name):
   products.h includes this once for each type. */

enum {
    OF(LANES) = VECTOR_BYTES / sizeof(REAL),
    OF(VECTORS) = PANEL / OF(LANES),
    OF(MOST_ROWS) = sizeof(REAL) == 4 || ROWS_OF_FLOATS == 1 ? ROWS_OF_FLOATS : ROWS_OF_FLOATS / 2
};

typedef REAL OF(vector) __attribute__((vector_size(VECTOR_BYTES)));

static inline OF(vector) OF(loaded)(const REAL *from)
{
    OF(vector) v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Add the product of `rows` rows of a with `panels` panels to c; both numbers are constants. */
INLINED void OF(add_block)(REAL *c, int64_t c_step, const REAL *a, int64_t a_step, const REAL *b,
                int64_t k, int rows, int panels)
{
    OF(vector) sums[(OF(MOST_ROWS) > 4 ? OF(MOST_ROWS) : 4) * OF(VECTORS)];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * OF(VECTORS); j++)
            sums[i * panels * OF(VECTORS) + j] = OF(loaded)(c + i * c_step + j * OF(LANES));
    for (int64_t at = 0; at < k; at++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * OF(VECTORS); j++) {
            const REAL *panel = b + (int64_t)(j / OF(VECTORS)) * k * PANEL;
            OF(vector) column = OF(loaded)(panel + at * PANEL + j % OF(VECTORS) * OF(LANES));
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++)
                sums[i * panels * OF(VECTORS) + j] += a[i * a_step + at] * column;
        }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < panels * OF(VECTORS); j++)
            memcpy(c + i * c_step + j * OF(LANES), &sums[i * panels * OF(VECTORS) + j],
                   sizeof(OF(vector)));
}

/* c += a b, for a of [rows, k] and b of `panels` panels; c has 32 columns for each panel. */
static inline void OF(add_product)(REAL *c, int64_t c_step, const REAL *a, int64_t a_step,
                                   const REAL *b, int64_t k, int64_t rows, int64_t panels)
{
    int64_t row = 0;
    for (; row + OF(MOST_ROWS) <= rows && OF(MOST_ROWS) > 1; row += OF(MOST_ROWS))
        for (int64_t p = 0; p < panels; p++)
            OF(add_block)(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                          b + p * k * PANEL, k, OF(MOST_ROWS), 1);
    for (; row + 4 <= rows && OF(MOST_ROWS) > 4; row += 4)
        for (int64_t p = 0; p < panels; p++)
            OF(add_block)(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                          b + p * k * PANEL, k, 4, 1);
    for (; row + 2 <= rows && OF(MOST_ROWS) > 2; row += 2)
        for (int64_t p = 0; p < panels; p++)
            OF(add_block)(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                          b + p * k * PANEL, k, 2, 1);
    for (; row < rows; row++) {
        int64_t p = 0;
        for (; p + 4 <= panels; p += 4)
            OF(add_block)(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                          b + p * k * PANEL, k, 1, 4);
        for (; p < panels; p++)
            OF(add_block)(c + row * c_step + p * PANEL, c_step, a + row * a_step, a_step,
                          b + p * k * PANEL, k, 1, 1);
    }
}
