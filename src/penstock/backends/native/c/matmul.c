/* Products of small matrices, and of matrices of integers: y = alpha a b + beta c. An item is a block
   of rows of one product. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include <string.h>
#include "arguments.h"
#include "families.h"
#include "vectors.h"

enum { ROWS = 4, MOST_TAIL = 1024, MOST_VECTORS = BY_WIDTH(4, 2, 2) };

/* Which matrix a product takes; -1 if there is no such. */
static int64_t matrix_of(const int64_t *chosen, int64_t matrices, int64_t batch)
{
    int64_t i = chosen ? chosen[batch] : batch;
    if (!chosen)
        return i;
    i += i < 0 ? matrices : 0;
    return i < matrices ? i : -1;
}

/* For rows and vectors that are constants, of which the last vector has `width` columns. */
#define BLOCK(suffix, type)                                                                        \
    typedef type suffix##_vector __attribute__((vector_size(VECTOR_BYTES)));                       \
    enum { suffix##_LANES = VECTOR_BYTES / sizeof(type) };                                         \
                                                                                                   \
    INLINED void suffix##_block(const struct product *p, const type *a, const type *b,             \
                                int64_t b_inner, const type *c, type *y, int rows, int vectors,    \
                                int64_t width)                                                     \
    {                                                                                              \
        suffix##_vector sums[ROWS * MOST_VECTORS];                                                 \
        for (int i = 0; i < rows * vectors; i++)                                                   \
            sums[i] = (suffix##_vector){0};                                                        \
        for (int64_t k = 0; k < p->inner; k++)                                                     \
            _Pragma("GCC unroll 4") for (int j = 0; j < vectors; j++)                              \
            {                                                                                      \
                suffix##_vector column;                                                            \
                memcpy(&column, b + k * b_inner + j * suffix##_LANES, VECTOR_BYTES);               \
                _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)                             \
                    sums[i * vectors + j] += a[i * p->a_row + k * p->a_inner] * column;            \
            }                                                                                      \
        int plain = p->alpha == 1 && (!c || (p->beta == 1 && p->c_column == 1));                   \
        for (int i = 0; i < rows; i++)                                                             \
            for (int j = 0; j < vectors; j++) {                                                    \
                type part[suffix##_LANES];                                                         \
                int64_t count = j + 1 < vectors ? suffix##_LANES : width, first = j * suffix##_LANES; \
                suffix##_vector sum = sums[i * vectors + j];                                       \
                if (plain && count == suffix##_LANES) {                                            \
                    if (c) {                                                                       \
                        suffix##_vector term;                                                      \
                        memcpy(&term, c + i * p->c_row + first, VECTOR_BYTES);                     \
                        sum += term;                                                               \
                    }                                                                              \
                    memcpy(y + i * p->columns + first, &sum, VECTOR_BYTES);                        \
                    continue;                                                                      \
                }                                                                                  \
                memcpy(part, &sum, VECTOR_BYTES);                                                  \
                if (plain) {                                                                       \
                    for (int64_t l = 0; l < count; l++)                                            \
                        y[i * p->columns + first + l] =                                            \
                            c ? part[l] + c[i * p->c_row + first + l] : part[l];                   \
                    continue;                                                                      \
                }                                                                                  \
                for (int64_t l = 0; l < count; l++) {                                              \
                    type value = p->alpha == 1 ? part[l] : (type)p->alpha * part[l];               \
                    const type *term = c ? c + i * p->c_row + (first + l) * p->c_column : NULL;    \
                    value += !term ? 0 : p->beta == 1 ? *term : (type)p->beta * *term;             \
                    y[i * p->columns + first + l] = value;                                         \
                }                                                                                  \
            }                                                                                      \
    }                                                                                              \
                                                                                                   \
    INLINED void suffix##_rows(const struct product *p, const type *a, const type *b,              \
                               const type *tail, const type *c, type *y, int rows)                 \
    {                                                                                              \
        int64_t lanes = suffix##_LANES, first = 0;                                                 \
        for (; first + MOST_VECTORS * lanes <= p->columns; first += MOST_VECTORS * lanes)          \
            suffix##_block(p, a, b + first, p->b_inner, c ? c + first * p->c_column : c,           \
                           y + first, rows, MOST_VECTORS, lanes);                                  \
        for (; first + 2 * lanes <= p->columns && MOST_VECTORS > 2; first += 2 * lanes)            \
            suffix##_block(p, a, b + first, p->b_inner, c ? c + first * p->c_column : c,           \
                           y + first, rows, 2, lanes);                                             \
        for (; first + lanes <= p->columns; first += lanes)                                        \
            suffix##_block(p, a, b + first, p->b_inner, c ? c + first * p->c_column : c,           \
                           y + first, rows, 1, lanes);                                             \
        if (first < p->columns)                                                                    \
            suffix##_block(p, a, tail ? tail : b + first, tail ? lanes : p->b_inner,               \
                           c ? c + first * p->c_column : c, y + first, rows, 1,                    \
                           p->columns - first);                                                    \
    }                                                                                              \
                                                                                                   \
    static int product_##suffix(const void *arguments, int64_t begin, int64_t end)                 \
    {                                                                                              \
        const struct product *p = arguments;                                                       \
        type buffer[MOST_TAIL * suffix##_LANES];                                                   \
        int64_t blocks = (p->rows + ROWS - 1) / ROWS, packed = -1;                                 \
        int64_t rest = p->columns % suffix##_LANES;                                                \
        for (int64_t item = begin; item < end; item++) {                                           \
            int64_t batch = item / blocks, row = item % blocks * ROWS;                             \
            int64_t own = p->chosen ? batch / p->sharing : batch;                                  \
            const type *a = (const type *)p->a + own * p->a_batch + row * p->a_row;                \
            int64_t matrix = matrix_of(p->chosen, p->matrices, batch);                             \
            if (matrix < 0)                                                                        \
                return 1;                                                                          \
            const type *b = (const type *)p->b + matrix * p->b_batch;                              \
            const type *c = p->c ? (const type *)p->c + row * p->c_row : NULL;                     \
            type *y = (type *)p->y + (batch * p->rows + row) * p->columns;                         \
            if (rest && !p->padded && (packed < 0 || p->b_batch) && packed != batch) {             \
                for (int64_t k = 0; k < p->inner; k++)                                             \
                    for (int64_t l = 0; l < suffix##_LANES; l++)                                   \
                        buffer[k * suffix##_LANES + l] =                                           \
                            l < rest ? b[k * p->b_inner + p->columns - rest + l] : 0;              \
                packed = batch;                                                                    \
            }                                                                                      \
            const type *tail = rest && !p->padded ? buffer : NULL;                                 \
            if (p->rows - row >= ROWS) {                                                           \
                suffix##_rows(p, a, b, tail, c, y, ROWS);                                          \
                continue;                                                                          \
            }                                                                                      \
            for (; row < p->rows; row++, a += p->a_row, y += p->columns) {                         \
                suffix##_rows(p, a, b, tail, c, y, 1);                                             \
                c = c ? c + p->c_row : NULL;                                                       \
            }                                                                                      \
        }                                                                                          \
        return 0;                                                                                  \
    }

BLOCK(float32, float)
BLOCK(float64, double)
/* Integers wrap. */
BLOCK(int32, uint32_t)
BLOCK(int64, uint64_t)

/* Products with a matrix whose columns are dense: each number is a sum along both. An item is a block of
   columns of one product. */
enum { DOT_COLUMNS = 64, TOGETHER = 4 };

#define DOTS(suffix, type)                                                                         \
    INLINED void dots_##suffix##_of(const type *a, const type *b, int64_t step, int64_t inner,     \
                                    int columns, type *y)                                          \
    {                                                                                              \
        enum { LANES = suffix##_LANES };                                                           \
        suffix##_vector sums[TOGETHER] = {0}, left, right;                                         \
        type parts[TOGETHER][LANES];                                                               \
        int64_t k = 0;                                                                             \
        for (; k + LANES <= inner; k += LANES) {                                                   \
            memcpy(&left, a + k, VECTOR_BYTES);                                                    \
            for (int j = 0; j < columns; j++) {                                                    \
                memcpy(&right, b + j * step + k, VECTOR_BYTES);                                    \
                sums[j] += left * right;                                                           \
            }                                                                                      \
        }                                                                                          \
        memcpy(parts, sums, sizeof parts);                                                         \
        for (int j = 0; j < columns; j++) {                                                        \
            type sum = 0;                                                                          \
            for (int half = LANES / 2; half; half /= 2)                                            \
                for (int l = 0; l < half; l++)                                                     \
                    parts[j][l] += parts[j][l + half];                                             \
            for (int64_t i = k; i < inner; i++)                                                    \
                sum += a[i] * b[j * step + i];                                                     \
            y[j] = parts[j][0] + sum;                                                              \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static int dots_##suffix(const void *arguments, int64_t begin, int64_t end)                    \
    {                                                                                              \
        const struct dots *p = arguments;                                                          \
        int64_t blocks = (p->columns + DOT_COLUMNS - 1) / DOT_COLUMNS;                             \
        for (int64_t item = begin; item < end; item++) {                                           \
            int64_t batch = item / blocks, first = item % blocks * DOT_COLUMNS;                    \
            int64_t last = first + DOT_COLUMNS < p->columns ? first + DOT_COLUMNS : p->columns;    \
            int64_t matrix = matrix_of(p->chosen, p->matrices, batch);                             \
            if (matrix < 0)                                                                        \
                return 1;                                                                          \
            const type *b = (const type *)p->b + matrix * p->b_batch;                              \
            int64_t own = p->chosen ? batch / p->sharing : batch;                                  \
            for (int64_t row = 0; row < p->rows; row++) {                                          \
                const type *a = (const type *)p->a + own * p->a_batch + row * p->a_row;            \
                type *y = (type *)p->y + (batch * p->rows + row) * p->columns;                     \
                int64_t j = first;                                                                 \
                for (; j + TOGETHER <= last; j += TOGETHER)                                        \
                    dots_##suffix##_of(a, b + j * p->b_column, p->b_column, p->inner, TOGETHER,    \
                                       y + j);                                                     \
                for (; j < last; j++)                                                              \
                    dots_##suffix##_of(a, b + j * p->b_column, p->b_column, p->inner, 1, y + j);   \
            }                                                                                      \
        }                                                                                          \
        return 0;                                                                                  \
    }

DOTS(float32, float)
DOTS(float64, double)

const kernel_entry matmul_kernels[] = {
    KERNELS_OF_NUMBERS(product, product),
    KERNELS_OF_FLOATS(dots, dots),
    END_OF_KERNELS,
};
