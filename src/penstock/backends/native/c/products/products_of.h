/* Products of tiles of matrices in the type REAL, whose functions have names OF(name), of at most
   MOST_ROWS rows: products.h and matmul.c include this for each type. */

enum {
    OF(LANES) = VECTOR_BYTES / sizeof(REAL),
    OF(VECTORS) = PANEL / OF(LANES),
    OF(TILE_COLUMNS) = TILE_VECTORS * OF(LANES)
};

typedef REAL OF(vector) __attribute__((vector_size(VECTOR_BYTES)));

static inline OF(vector) OF(loaded)(const REAL *from)
{
    OF(vector) v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* The first `count` lanes, zeros behind them; all of a vector if these are more. */
INLINED OF(vector) OF(load_lanes)(const REAL *from, int64_t count)
{
#if defined(__AVX512F__)
    if (__builtin_constant_p(count) && count >= OF(LANES))
        return OF(loaded)(from);
    const uint32_t some = (1u << smaller(count, OF(LANES))) - 1;
    return sizeof(REAL) == 4 ? (OF(vector))_mm512_maskz_loadu_epi32((__mmask16)some, from)
                             : (OF(vector))_mm512_maskz_loadu_epi64((__mmask8)some, from);
#else
    if (count >= OF(LANES))
        return OF(loaded)(from);
    OF(vector) v = {0};
    for (int64_t l = 0; l < count; l++)
        v[l] = from[l];
    return v;
#endif
}

INLINED void OF(store_lanes)(REAL *to, OF(vector) v, int64_t count)
{
#if defined(__AVX512F__)
    const uint32_t some = (1u << smaller(count, OF(LANES))) - 1;
    if (__builtin_constant_p(count) && count >= OF(LANES))
        memcpy(to, &v, sizeof v);
    else if (sizeof(REAL) == 4)
        _mm512_mask_storeu_epi32(to, (__mmask16)some, (__m512i)v);
    else
        _mm512_mask_storeu_epi64(to, (__mmask8)some, (__m512i)v);
#else
    if (count >= OF(LANES))
        memcpy(to, &v, sizeof v);
    else
        for (int64_t l = 0; l < count; l++)
            to[l] = v[l];
#endif
}

/* y = a b, or y += a b with `adds`, for vectors of columns, of whose last one `last` are stored. */
typedef struct {
    const REAL *a, *b;
    REAL *y;
    int64_t inner, a_row, a_inner, b_inner, y_row, last; /* strides in elements */
    int adds;
} OF(tile);

/* For numbers of rows and vectors that are constants. Few sums are divided in up to four each, since one
   would wait for the multiplication before; those of several rows do not depend on how many. */
INLINED void OF(multiply)(const OF(tile) *t, int rows, int vectors)
{
    const int ways = rows == 1 ? (vectors > 2 ? 2 : 4) : vectors == 1 ? 2 : 1, size = rows * vectors;
    const int64_t a_inner = t->a_inner, b_inner = t->b_inner, last = t->last;
    OF(vector) sums[TILE_SUMS];
    const REAL *at[MOST_ROWS], *b = t->b;
    UNROLLED(i, TILE_SUMS)
        sums[i] = (OF(vector)){0};
    UNROLLED(r, rows)
        at[r] = t->a + r * t->a_row;
    int64_t left = t->inner, k = 0;
#define STEP(i)                                                                                    \
    {                                                                                              \
        OF(vector) columns[TILE_VECTORS];                                                          \
        UNROLLED(j, vectors) columns[j] =                                                          \
            OF(loaded)(b + j * OF(LANES));                                                         \
        UNROLLED(r, rows)                                                                          \
            UNROLLED(j, vectors)                                                                   \
                sums[(i) % ways * size + r * vectors + j] += at[r][k] * columns[j];                \
        k += a_inner;                                                                              \
        b += b_inner;                                                                              \
    }
    for (; left >= ways; left -= ways) {
        STEP(0)
        if (ways > 1)
            STEP(1)
        if (ways > 2) {
            STEP(2)
            STEP(3)
        }
    }
    for (; left > 0 && ways > 1; left--)
        STEP(0)
#undef STEP
#pragma GCC unroll 16
    for (int i = size; i < ways * size; i++)
        sums[i % size] += sums[i];
    REAL *y = t->y;
    const int64_t y_row = t->y_row;
#define EACH(expression)                                                                           \
    UNROLLED(r, rows)                                                                              \
        UNROLLED(j, vectors)                                                                       \
    {                                                                                              \
        REAL *to = y + r * y_row + j * OF(LANES);                                                  \
        const int64_t count = j + 1 < vectors ? OF(LANES) : last;                                  \
        expression;                                                                                \
    }
    if (t->adds)
        EACH(sums[r * vectors + j] += OF(load_lanes)(to, count))
    EACH(OF(store_lanes)(to, sums[r * vectors + j], count))
#undef EACH
}

/* For any number of rows, and at most TILE_VECTORS. */
static void OF(multiply_rows)(OF(tile) t, int64_t rows, int64_t vectors)
{
    const int64_t most = smaller(MOST_ROWS, TILE_SUMS / (vectors > 1 ? vectors : 2));
    for (int64_t tiles = (rows + most - 1) / most, count; tiles > 0; tiles--) {
        count = (rows + tiles - 1) / tiles;
#define TILE(rows, vectors)                                                                        \
    case rows * 8 + vectors:                                                                       \
        if (rows <= MOST_ROWS && rows * (vectors > 1 ? vectors : 2) <= TILE_SUMS && vectors <= TILE_VECTORS)                                     \
            OF(multiply)(&t, rows, vectors);                                                       \
        break;
#define TILES(rows) TILE(rows, 1) TILE(rows, 2) TILE(rows, 3) TILE(rows, 4)
        switch (count * 8 + vectors) {
            TILES(1) TILES(2) TILES(3) TILES(4)
            TILES(5) TILES(6) TILES(7) TILES(8)
        }
#undef TILES
#undef TILE
        rows -= count;
        t.a += count * t.a_row;
        t.y += count * t.y_row;
    }
}

/* c += a b, for a of [rows, k] and b of one panel of 32 columns. */
static inline void OF(add_product)(REAL *c, int64_t c_step, const REAL *a, int64_t a_step,
                                   const REAL *b, int64_t k, int64_t rows)
{
    enum { TOGETHER = BY_WIDTH(4, 2, 2), WIDE = (int)OF(VECTORS) < TOGETHER ? (int)OF(VECTORS) : TOGETHER };
    for (int64_t j = 0; j < PANEL; j += WIDE * OF(LANES))
        OF(multiply_rows)((OF(tile)){a, b + j, c + j, k, a_step, 1, PANEL, c_step, OF(LANES), 1}, rows, WIDE);
}
