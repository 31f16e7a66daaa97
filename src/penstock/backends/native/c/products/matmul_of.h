/* Products in the type REAL, whose functions are named OF(name), in tiles of at most MOST_ROWS rows: matmul.c includes
   this for each type. */

/* Multiply `tiles` tiles, one below the other; the rows and vectors of a tile are constants. With few sums, each is
   split into up to four accumulators to hide latency; with several rows, this split does not depend on their number.
   There are too few registers for the address of each row: one serves three rows. */
INLINED void OF(multiply)(OF(tile) *t, int64_t tiles, int rows, int vectors)
{
    const int ways = rows == 1 ? (vectors > 2 ? 2 : 4) : vectors == 1 ? 2 : 1, size = rows * vectors;
    const int64_t a_row = t->a_row, a_inner = t->a_inner, b_inner = t->b_inner, y_row = t->y_row;
    for (; tiles > 0; tiles--, t->a += rows * a_row, t->y += rows * y_row) {
        OF(vector) sums[TILE_SUMS];
        const REAL *at[(MOST_ROWS + 2) / 3], *b = t->b;
        UNROLLED(i, TILE_SUMS)
            sums[i] = (OF(vector)){0};
        UNROLLED(i, (rows + 2) / 3)
            at[i] = t->a + 3 * i * a_row;
        int64_t left = t->inner, apart = ways > 1 && !t->ordered ? left / ways * ways : 0;
#define STEP(way)                                                                                  \
    {                                                                                              \
        OF(vector) columns[TILE_VECTORS];                                                          \
        UNROLLED(j, vectors) columns[j] = OF(loaded)(b + j * OF(LANES));                           \
        UNROLLED(r, rows)                                                                          \
            UNROLLED(j, vectors)                                                                   \
                sums[(way) * size + r * vectors + j] += at[r / 3][r % 3 * a_row] * columns[j];     \
        UNROLLED(i, (rows + 2) / 3) { ADVANCE(at[i], a_inner); }                                   \
        b += b_inner;                                                                              \
    }
        for (left -= apart; apart > 0; apart -= ways)
            UNROLLED(way, ways)
                STEP(way)
        for (; left > 0; left--)
            STEP(0)
#undef STEP
#pragma GCC unroll 16
        for (int i = size; i < ways * size; i++)
            sums[i % size] += sums[i];
#define EACH(expression)                                                                           \
    UNROLLED(r, rows)                                                                              \
        UNROLLED(j, vectors) {                                                                     \
            REAL *to = t->y + r * y_row + j * OF(LANES);                                           \
            const int64_t count = j + 1 < vectors ? OF(LANES) : t->last;                           \
            expression;                                                                            \
        }
        if (t->adds)
            EACH(sums[r * vectors + j] += OF(load_lanes)(to, count))
        EACH(OF(store_lanes)(to, sums[r * vectors + j], count))
#undef EACH
    }
}

/* Each form is a function: one with all of them would take longer to compile. */
#define TILES(X, rows) X(rows, 1) X(rows, 2) X(rows, 3) X(rows, 4)
#define ALL_TILES(X)                                                                               \
    TILES(X, 1) TILES(X, 2) TILES(X, 3) TILES(X, 4) TILES(X, 5) TILES(X, 6)                        \
    TILES(X, 7) TILES(X, 8) TILES(X, 9) TILES(X, 10) TILES(X, 11) TILES(X, 12)
#define TILE(rows, vectors)                                                                        \
    static __attribute__((noinline)) void OF(multiply_##rows##_##vectors)(OF(tile) *t, int64_t tiles) \
    {                                                                                              \
        if (rows <= MOST_ROWS && rows * (vectors > 1 ? vectors : 2) <= TILE_SUMS && vectors <= TILE_VECTORS) \
            OF(multiply)(t, tiles, rows, vectors);                                                 \
    }
ALL_TILES(TILE)

void OF(multiply_rows)(OF(tile) t, int64_t rows, int64_t vectors)
{
#define FORM(rows, vectors) OF(multiply_##rows##_##vectors),
    static __typeof__(OF(multiply_1_1)) *const forms[] = {ALL_TILES(FORM)};
    const int64_t most = smaller(MOST_ROWS, TILE_SUMS / (vectors > 1 ? vectors : 2));
    const int64_t tiles = CEIL_DIV(rows, most), more = rows % tiles;
    /* Some tiles have one row more than the others. */
    if (more)
        forms[rows / tiles * 4 + vectors - 1](&t, more);
    forms[(rows / tiles - 1) * 4 + vectors - 1](&t, tiles - more);
}
#undef TILES
#undef ALL_TILES
#undef TILE
#undef FORM

typedef struct {
    const REAL *a, *b;
    REAL *y;
} OF(matrices);

/* Find the matrices of one product; return 0 if its index is out of range. */
static int OF(find_matrices)(const struct product *p, int64_t product, OF(matrices) *m)
{
    *m = (OF(matrices)){p->a, p->b, p->y};
    if (p->chosen) {
        int64_t i = p->chosen[product];
        i += i < 0 ? p->matrices : 0;
        if (i < 0 || i >= p->matrices)
            return 0;
        m->b += i * p->b_matrix;
    }
    for (int64_t axis = p->rank - 1; axis >= 0 && product; axis--) {
        const int64_t *lead = p->lead + 4 * axis, i = product % lead[0];
        product /= lead[0];
        m->a += i * lead[1];
        m->b += i * lead[2];
        m->y += i * lead[3];
    }
    return 1;
}

/* Transpose a square of vectors. Each step swaps elements whose row and column differ in one bit. */
INLINED void OF(transpose)(OF(vector) *x)
{
    typedef INDEX indices __attribute__((vector_size(VECTOR_BYTES)));
#define STEP(bit)                                                                                      \
    _Pragma("GCC unroll 16") for (int i = 0; bit < OF(LANES) && i < OF(LANES); i++)                    \
        if (!(i & bit)) {                                                                              \
            const OF(vector) first = x[i], second = x[i + bit];                                        \
            x[i] = SHUFFLE(indices, first, second, LANES_OF_REAL(WITHOUT_BIT, bit));                   \
            x[i + bit] = SHUFFLE(indices, first, second, LANES_OF_REAL(WITH_BIT, bit));                \
        }
    STEP(1)
    STEP(2)
    STEP(4)
    STEP(8)
#undef STEP
}

/* Pack `columns` columns of b times a factor into rows of `width`, padded with zeros. */
static void OF(pack)(REAL *to, int64_t width, const REAL *b, int64_t b_inner, int64_t b_column,
                     int64_t inner, int64_t columns, REAL factor)
{
    if (b_column == 1) {
        for (int64_t k = 0; k < inner; k++, b += b_inner)
            for (int64_t j = 0; j < width; j += OF(LANES)) {
                __builtin_prefetch(b + AHEAD * b_inner + j);
                const OF(vector) v = factor * OF(load_lanes)(b + j, columns - j);
                memcpy(to + k * width + j, &v, sizeof v);
            }
        return;
    }
    for (int64_t k = 0; k < inner; k += OF(LANES))
        for (int64_t j = 0; j < width; j += OF(LANES)) {
            const int64_t deep = smaller(OF(LANES), inner - k), wide = smaller(OF(LANES), columns - j);
            const REAL *from = b + k * b_inner + j * b_column;
            REAL square[OF(LANES) * OF(LANES)];
            int64_t step = b_column;
            OF(vector) x[OF(LANES)];
            if (b_inner != 1) {
                for (int64_t l = 0; l < wide; l++)
                    for (int64_t i = 0; i < deep; i++)
                        square[l * OF(LANES) + i] = from[l * b_column + i * b_inner];
                from = square, step = OF(LANES);
            }
            UNROLLED(l, OF(LANES))
                x[l] = l < wide ? OF(load_lanes)(from + l * step, deep) : (OF(vector)){0};
            OF(transpose)(x);
            for (int64_t i = 0; i < deep; i++) {
                const OF(vector) v = factor * x[i];
                memcpy(to + (k + i) * width + j, &v, sizeof v);
            }
        }
}

/* y = beta c, for the rows and columns of an item. */
static void OF(put_term)(const struct product *p, REAL *y, int64_t row, int64_t rows, int64_t column,
                         int64_t columns)
{
    const REAL *c = p->c ? (const REAL *)p->c + row * p->c_row + column * p->c_column : NULL;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++)
            y[r * p->y_row + j] = c ? (REAL)p->beta * c[r * p->c_row + j * p->c_column] : 0;
}

/* Dot products of one row of a with `columns` columns of b (a constant), all contiguous along the inner dimension. */
INLINED void OF(put_dots)(const REAL *a, const REAL *b, int64_t b_column, int64_t inner, int columns,
                          REAL factor, int adds, REAL *y)
{
    /* More columns a page apart would evict each other's lines from the cache. */
    enum { MOST = sizeof(OF(vector)) < 8 * sizeof(REAL) ? OF(LANES) : 8 };
    OF(vector) sums[OF(LANES)] = {0};
#pragma GCC unroll 2
    for (int first = 0; first < columns; first += MOST)
        for (int64_t k = 0; k < inner; k += OF(LANES)) {
            const OF(vector) left = OF(load_lanes)(a + k, inner - k);
            UNROLLED(j, MOST)
                if (first + j < columns)
                    sums[first + j] += left * OF(load_lanes)(b + (first + j) * b_column + k, inner - k);
        }
    OF(transpose)(sums);
#pragma GCC unroll 16
    for (int l = 1; l < OF(LANES); l++)
        sums[0] += sums[l];
    sums[0] *= factor;
    if (adds)
        sums[0] += OF(load_lanes)(y, columns);
    OF(store_lanes)(y, sums[0], columns);
}

static void OF(put_rows_of_dots)(const struct product *p, OF(matrices) m, int64_t row, int64_t rows,
                                 int64_t column, int64_t stop)
{
    for (int64_t end = row + rows; row < end; row++)
        for (int64_t j = column, count; j < stop; j += count) {
            const REAL *a = m.a + row * p->a_row, *b = m.b + j * p->b_column;
            REAL *y = m.y + row * p->y_row + j;
            count = stop - j >= OF(LANES) ? OF(LANES) : stop - j >= 4 ? 4 : 1;
#define DOTS(columns) OF(put_dots)(a, b, p->b_column, p->inner, columns, (REAL)p->alpha, p->c != NULL, y)
            if (count == OF(LANES))
                DOTS(OF(LANES));
            else if (count == 4)
                DOTS((OF(LANES) < 4 ? OF(LANES) : 4));
            else
                DOTS(1);
#undef DOTS
        }
}

/* Multiply `inner` rows of b from k on, and columns from `column` on; return the number of columns. */
static int64_t OF(multiply_part)(const struct product *p, OF(matrices) m, int64_t row, int64_t rows,
                                 int64_t column, int64_t stop, int64_t k, int64_t inner)
{
    _Alignas(64) REAL packed[DEPTH * OF(TILE_COLUMNS)];
    /* A few rows leave registers for more columns, and these wait for b. */
    const int64_t most = p->rows < FEW_ROWS ? OF(TILE_COLUMNS) : BY_WIDTH(4, 2, 2) * OF(LANES);
    const int64_t width = smaller(most, (stop - column + OF(LANES) - 1) / OF(LANES) * OF(LANES));
    const int64_t columns = smaller(width, stop - column);
    const REAL *b = m.b + k * p->b_inner + column * p->b_column;
    OF(tile) t = {m.a + row * p->a_row + k * p->a_inner, b, m.y + row * p->y_row + column, inner, p->a_row,
                  p->a_inner, p->b_inner, p->y_row, columns - width + OF(LANES), k || p->c,
                  p->ordered};
    if (p->b_column != 1 || (columns < width && !p->padded) || p->alpha != 1 ||
        (rows > DIRECT && p->b_inner != width)) {
        OF(pack)(packed, width, b, p->b_inner, p->b_column, inner, columns, (REAL)p->alpha);
        t.b = packed, t.b_inner = width;
    }
    OF(multiply_rows)(t, rows, width / OF(LANES));
    return columns;
}

CHECKED_ITEMS_OF(OF(product), product)
{
    const int64_t unit = UNIT / sizeof(REAL), units = CEIL_DIV(a->columns, unit);
    /* Cost in cycles per vector: to multiply each row and add up lanes, or to pack. */
    const int dots = a->b_inner == 1 && a->a_inner == 1 && a->rows * (a->inner + 160) < 12 * a->inner && !a->ordered;
    const int64_t parts = CEIL_DIV(a->inner, DEPTH);
    for (int64_t item = begin, next; item < end; item = next) {
        const int64_t strip = item % a->strips, group = item / a->strips % a->groups;
        /* Adjacent groups of rows share a packed copy of b. */
        const int64_t most = a->strips == 1 ? SHARED * a->groups / a->rows : 1;
        const int64_t left = smaller(end - item, a->groups - group), groups = most > 1 ? smaller(most, left) : 1;
        const int64_t row = group * a->rows / a->groups, rows = (group + groups) * a->rows / a->groups - row;
        const int64_t stop = smaller((strip + 1) * units / a->strips * unit, a->columns);
        const int64_t first = strip * units / a->strips * unit;
        OF(matrices) m;
        if (!OF(find_matrices)(a, item / a->strips / a->groups, &m))
            return 1;
        if (a->c || !parts)
            OF(put_term)(a, m.y + row * a->y_row + first, row, rows, first, stop - first);
        if (dots)
            OF(put_rows_of_dots)(a, m, row, rows, first, stop);
        else
            for (int64_t column = first, columns = 0; column < stop; column += columns)
                for (int64_t part = 0, k = 0, to; part < parts; part++, k = to) {
                    to = a->inner * (part + 1) / parts;
                    columns = OF(multiply_part)(a, m, row, rows, column, stop, k, to - k);
                }
        next = item + groups;
    }
    return 0;
}

#undef REAL
#undef OF
