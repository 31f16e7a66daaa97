/* Inverses and determinants in the type REAL, whose functions are named OF(name): inverse.c includes this for each
   type. */

static void OF(swap)(REAL *a, REAL *b, int64_t count, int64_t step)
{
    for (int64_t j = 0; j < count * step; j += step) {
        const REAL kept = a[j];
        a[j] = b[j], b[j] = kept;
    }
}

/* row += factor * other */
INLINED void OF(add_row)(REAL *restrict row, const REAL *restrict other, REAL factor, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        row[j] += factor * other[j];
}

/* Move the largest element of column k, from row k on, to row k; return the row that it came from. */
static int64_t OF(pivot)(REAL *a, int64_t n, int64_t k)
{
    int64_t row = k;
    for (int64_t i = k + 1; i < n; i++)
        row = fabs((double)a[i * n + k]) > fabs((double)a[row * n + k]) ? i : row;
    if (row != k)
        OF(swap)(a + row * n, a + k * n, n, 1);
    return row;
}

/* Gauss-Jordan elimination in place; NaN if there is no inverse. */
static void OF(invert)(REAL *a, int64_t n)
{
    int64_t rows[MOST_SIDE];
    for (int64_t k = 0; k < n; k++) {
        rows[k] = OF(pivot)(a, n, k);
        REAL *pivots = a + k * n;
        const REAL scale = 1 / pivots[k];
        if (pivots[k] == 0) {
            FILL(a, n * n, (REAL)NAN);
            return;
        }
        pivots[k] = 1;
        for (int64_t j = 0; j < n; j++)
            pivots[j] *= scale;
        for (int64_t i = 0; i < n; i++)
            if (i != k) {
                const REAL factor = a[i * n + k];
                a[i * n + k] = 0;
                OF(add_row)(a + i * n, pivots, -factor, n);
            }
    }
    for (int64_t k = n; k--;)
        if (rows[k] != k)
            OF(swap)(a + k, a + rows[k], n, n);
}

static REAL OF(determinant)(REAL *a, int64_t n)
{
    REAL product = 1;
    for (int64_t k = 0; k < n && product != 0; k++) {
        product *= OF(pivot)(a, n, k) == k ? a[k * n + k] : -a[k * n + k];
        for (int64_t i = k + 1; i < n && product != 0; i++)
            OF(add_row)(a + i * n + k, a + k * n + k, -a[i * n + k] / a[k * n + k], n - k);
    }
    return product;
}

ITEMS_OF(OF(inverse), inverse)
{
    const int64_t size = a->side * a->side;
    for (int64_t m = begin; m < end; m++) {
        REAL *y = memmove((REAL *)a->y + m * size, (const REAL *)a->x + m * size, size * sizeof *y);
        OF(invert)(y, a->side);
    }
}

/* An item is `each` adjacent matrices, with scratch memory for one of them. */
ITEMS_OF(OF(det), inverse)
{
    const int64_t size = a->side * a->side;
    for (int64_t item = begin; item < end; item++)
        for (int64_t m = item * a->each; m < smaller(a->count, (item + 1) * a->each); m++) {
            REAL *copy = memcpy((REAL *)a->work + item * size, (const REAL *)a->x + m * size, size * sizeof *copy);
            ((REAL *)a->y)[m] = OF(determinant)(copy, a->side);
        }
}
