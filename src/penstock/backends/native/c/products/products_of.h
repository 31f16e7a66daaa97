/* Products of tiles of matrices in the type REAL, whose functions are named OF(name), of at most MOST_ROWS rows:
   products.h and matmul.c include this for each type. */

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

/* Load the first `count` lanes, zeros beyond them; the whole vector if `count` is larger. */
INLINED OF(vector) OF(load_lanes)(const REAL *from, int64_t count)
{
#if defined(__AVX512F__)
    if (!__builtin_constant_p(count) || count < OF(LANES))
        return (OF(vector))_mm512_maskz_loadu_epi32(SOME(count), from);
#elif defined(__AVX2__)
    if (count < OF(LANES))
        return (OF(vector))_mm256_maskload_epi32((const int *)from, SOME(count));
#else
    OF(vector) v = {0};
    for (int64_t l = 0; count < OF(LANES) && l < count; l++)
        v[l] = from[l];
    if (count < OF(LANES))
        return v;
#endif
    return OF(loaded)(from);
}

INLINED void OF(store_lanes)(REAL *to, OF(vector) v, int64_t count)
{
#if defined(__AVX512F__)
    if (!__builtin_constant_p(count) || count < OF(LANES))
        _mm512_mask_storeu_epi32(to, SOME(count), (__m512i)v);
    else
#elif defined(__AVX2__)
    if (count < OF(LANES))
        _mm256_maskstore_epi32((int *)to, SOME(count), (__m256i)v);
    else
#else
    for (int64_t l = 0; count < OF(LANES) && l < count; l++)
        to[l] = v[l];
    if (count >= OF(LANES))
#endif
        memcpy(to, &v, sizeof v);
}

/* y = a b, or y += a b with `adds`, for vectors of columns; the last vector stores `last` lanes. */
typedef struct {
    const REAL *a, *b;
    REAL *y;
    int64_t inner, a_row, a_inner, b_inner, y_row, last; /* strides in elements */
    int adds, ordered; /* ordered: sums are not split */
} OF(tile);

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

/* For any number of rows, and at most TILE_VECTORS vectors. */
__attribute__((noinline)) static void OF(multiply_rows)(OF(tile) t, int64_t rows, int64_t vectors)
{
    const int64_t most = smaller(MOST_ROWS, TILE_SUMS / (vectors > 1 ? vectors : 2));
    const int64_t tiles = CEIL_DIV(rows, most), more = rows % tiles;
    /* Some tiles have one row more than the others. */
    for (int64_t one = 1; one >= 0; one--) {
#define TILE(rows, vectors)                                                                        \
    case rows * 8 + vectors:                                                                       \
        if (rows <= MOST_ROWS && rows * (vectors > 1 ? vectors : 2) <= TILE_SUMS && vectors <= TILE_VECTORS) \
            OF(multiply)(&t, one ? more : tiles - more, rows, vectors);                            \
        break;
#define TILES(rows) TILE(rows, 1) TILE(rows, 2) TILE(rows, 3) TILE(rows, 4)
        switch ((rows / tiles + one) * 8 + vectors) {
            TILES(1) TILES(2) TILES(3) TILES(4)
            TILES(5) TILES(6) TILES(7) TILES(8)
            TILES(9) TILES(10) TILES(11) TILES(12)
        }
#undef TILES
#undef TILE
    }
}

/* c += a b, for a of [rows, k] and b of one panel of 32 columns; `ordered` as in a tile. */
static inline void OF(add_product)(REAL *c, int64_t c_step, const REAL *a, int64_t a_step,
                                   const REAL *b, int64_t k, int64_t rows, int ordered)
{
    enum { TOGETHER = BY_WIDTH(4, 2, 2), WIDE = (int)OF(VECTORS) < TOGETHER ? (int)OF(VECTORS) : TOGETHER };
    for (int64_t j = 0; j < PANEL; j += WIDE * OF(LANES))
        OF(multiply_rows)((OF(tile)){a, b + j, c + j, k, a_step, 1, PANEL, c_step, OF(LANES), 1, ordered}, rows, WIDE);
}
