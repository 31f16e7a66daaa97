/* Products of tiles of matrices in the type REAL, whose functions are named OF(name): products.h and matmul.c include
   this for each type. */

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

/* For any number of rows, and at most TILE_VECTORS vectors: of matmul.c. */
#pragma GCC visibility push(hidden)
void OF(multiply_rows)(OF(tile) t, int64_t rows, int64_t vectors);
#pragma GCC visibility pop

/* c += a b, for a of [rows, k] and b of one panel of 32 columns; `ordered` as in a tile. */
static inline void OF(add_product)(REAL *c, int64_t c_step, const REAL *a, int64_t a_step,
                                   const REAL *b, int64_t k, int64_t rows, int ordered)
{
    enum { TOGETHER = BY_WIDTH(4, 2, 2), WIDE = (int)OF(VECTORS) < TOGETHER ? (int)OF(VECTORS) : TOGETHER };
    for (int64_t j = 0; j < PANEL; j += WIDE * OF(LANES))
        OF(multiply_rows)((OF(tile)){a, b + j, c + j, k, a_step, 1, PANEL, c_step, OF(LANES), 1, ordered}, rows, WIDE);
}
