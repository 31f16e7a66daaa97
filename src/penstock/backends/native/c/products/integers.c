/* Products of uint8 rows with int8 weights (integers.h), for each of the instruction sets that a module chooses from
   when it runs. */
#include "integers.h"

/* A product in tiles of `most` rows, or of one row and `wide` panels. Rows are divided equally among the fewest tiles
   possible; of a few rows, each is a tile. */
#define PRODUCT(name, attribute, most, wide)                                                      \
    attribute INLINED void name##_block(const multiplication *m, int64_t row, int64_t panel,      \
                                        const int rows, const int panels)                         \
    {                                                                                             \
        enum { VECTORS = PANEL / LANES_OF_SUMS };                                                 \
        words sums[(most > wide ? most : wide) * VECTORS];                                        \
        const int each = panels * VECTORS;                                                        \
        const int32_t *start = m->start + row * m->start_step + panel * PANEL;                    \
        const int8_t *w = m->w + panel * m->w_step;                                               \
        int32_t *c = m->c + row * m->c_step + panel * PANEL;                                      \
        const int64_t x_step = m->x_step, room = CEIL_DIV(m->columns, TILE) * TILE;               \
        UNROLLED(i, rows * each)                                                                  \
            memcpy(sums + i, start + i / each * m->start_step + i % each * LANES_OF_SUMS, BYTES); \
        for (int64_t part = 0; part < m->parts; part++) {                                         \
            const uint8_t *at[(most + 2) / 3]; /* one per three rows, as in products_of.h */      \
            UNROLLED(i, (rows + 2) / 3)                                                           \
                at[i] = m->x + (row + 3 * i) * x_step + m->places[part];                          \
            for (int64_t q = 0; q < m->quads; q++, w += PANEL_BYTES) {                            \
                words columns[wide * VECTORS];                                                    \
                UNROLLED(j, each)                                                                 \
                    memcpy(columns + j, w + j / VECTORS * m->w_step + j % VECTORS * BYTES, BYTES); \
                /* Row by row: registers have room for one broadcast quad beside columns and sums. */ \
                UNROLLED(i, rows) {                                                               \
                    int32_t four;                                                                 \
                    memcpy(&four, at[i / 3] + i % 3 * x_step, QUAD);                              \
                    words number = (words){0} + four;                                             \
                    UNROLLED(j, each)                                                             \
                        sums[i * each + j] = name##_dot(sums[i * each + j], number, columns[j]);  \
                }                                                                                 \
                UNROLLED(i, (rows + 2) / 3) { ADVANCE(at[i], QUAD); }                             \
            }                                                                                     \
        }                                                                                         \
        UNROLLED(i, rows * each)                                                                  \
            if (panel * PANEL + i % each * LANES_OF_SUMS < room)                                  \
                memcpy(c + i / each * m->c_step + i % each * LANES_OF_SUMS, sums + i, BYTES);     \
    }                                                                                             \
                                                                                                  \
    attribute void name(const multiplication *m)                                                  \
    {                                                                                             \
        const int64_t panels = CEIL_DIV(m->columns, PANEL);                                       \
        int64_t tiles = m->rows < smaller(4, most) ? m->rows : CEIL_DIV(m->rows, most);           \
        for (int64_t row = 0, rows, p; tiles > 0; row += rows, tiles--) {                         \
            rows = CEIL_DIV(m->rows - row, tiles), p = 0;                                         \
            for (; rows == 1 && p + wide <= panels; p += wide)                                    \
                name##_block(m, row, p, 1, wide);                                                 \
            switch (rows) {                                                                       \
                ROWS(name, most, 1) ROWS(name, most, 2) ROWS(name, most, 3) ROWS(name, most, 4)   \
                ROWS(name, most, 5) ROWS(name, most, 6) ROWS(name, most, 7) ROWS(name, most, 8)   \
                ROWS(name, most, 9) ROWS(name, most, 10) ROWS(name, most, 11) ROWS(name, most, 12) \
            }                                                                                     \
        }                                                                                         \
    }
#define ROWS(name, most, rows)                                                                    \
    case rows:                                                                                    \
        for (; rows <= most && p < panels; p++)                                                   \
            name##_block(m, row, p, rows <= most ? rows : 1, 1);                                  \
        break;

#if defined(VNNI) && defined(__AVX512BW__)
PRODUCT(vnni, VNNI, 12, 4)
#elif defined(VNNI) && defined(__AVX2__)
PRODUCT(vnni, VNNI, 3, 2)
#elif defined(VNNI)
PRODUCT(vnni, VNNI, 2, 2)
#endif
#if defined(DOTS)
PRODUCT(dots, DOTS, 2, 2)
#endif
#if !defined(__SSE4_1__)
PRODUCT(plain, , 2, 2)
#else
/* Without such instructions, x86-64 multiplies int16 and adds up pairs. The quads of some rows are widened once for all
   panels, DEPTH of them: the even elements of a quad, and the odd ones. */
enum { ROWS_AT_ONCE = 4, DEPTH = 128, PAIRS = 2, AT_ONCE = 2, ALONE = PANEL / LANES_OF_SUMS };

/* Add the products of `count` widened quads, from quad `begin` of w on, to one row by a panel or to some rows by AT_ONCE
   vectors of it. */
INLINED void wide_block(const multiplication *m, int64_t row, int64_t column, const int32_t (*x)[DEPTH][PAIRS],
                        int64_t begin, int64_t count, const int rows, const int each)
{
    words sums[ROWS_AT_ONCE * ALONE];
    const int64_t room = CEIL_DIV(m->columns, TILE) * TILE;
    const int32_t *start = begin ? m->c + row * m->c_step : m->start + row * m->start_step;
    const int64_t start_step = begin ? m->c_step : m->start_step;
    const int8_t *w = m->w + column / PANEL * m->w_step + begin * PANEL_BYTES + column % PANEL * QUAD;
    UNROLLED(i, rows * each) {
        const int64_t at = column + i % each * LANES_OF_SUMS;
        sums[i] = (words){0};
        if (at < room)
            memcpy(sums + i, start + i / each * start_step + at, BYTES);
    }
    for (int64_t q = 0; q < count; q++, w += PANEL_BYTES) {
        words even[ALONE], odd[ALONE];
        UNROLLED(j, each)
            widen_words(even + j, odd + j, w + j * BYTES);
        UNROLLED(i, rows) {
            const words of_even = (words){0} + x[i][q][0], of_odd = (words){0} + x[i][q][1];
            UNROLLED(j, each)
                sums[i * each + j] += (words)V(madd_epi16)((bytes)of_even, (bytes)even[j]) +
                                      (words)V(madd_epi16)((bytes)of_odd, (bytes)odd[j]);
        }
    }
    UNROLLED(i, rows * each) {
        const int64_t at = column + i % each * LANES_OF_SUMS;
        if (at < room)
            memcpy(m->c + (row + i / each) * m->c_step + at, sums + i, BYTES);
    }
}

/* Widen `count` quads of a row, the first of them number `begin` of all its parts. */
INLINED void widen_row(const multiplication *m, int64_t row, int32_t (*to)[PAIRS], int64_t begin, int64_t count)
{
    for (int64_t part = begin / m->quads, first = begin % m->quads; count > 0; part++, first = 0) {
        const int64_t some = smaller(count, m->quads - first);
        const uint8_t *x = m->x + row * m->x_step + m->places[part] + first * QUAD;
        int64_t q = 0;
        for (; q + 2 <= some; q += 2) {
            const int all = q + 4 <= some;
            const __m128i codes = all ? _mm_loadu_si128((const void *)(x + q * QUAD))
                                      : _mm_loadl_epi64((const void *)(x + q * QUAD));
            const __m128i even = _mm_and_si128(codes, _mm_set1_epi16(255)), odd = _mm_srli_epi16(codes, 8);
            _mm_storeu_si128((void *)to[q], _mm_unpacklo_epi32(even, odd));
            if (all)
                _mm_storeu_si128((void *)to[q += 2], _mm_unpackhi_epi32(even, odd));
        }
        if (q < some) {
            uint32_t four;
            memcpy(&four, x + q * QUAD, QUAD);
            to[q][0] = four & 0x00ff00ff, to[q][1] = four >> 8 & 0x00ff00ff;
        }
        to += some, count -= some;
    }
}

void plain(const multiplication *m)
{
    int32_t x[ROWS_AT_ONCE][DEPTH][PAIRS];
    const int64_t quads = m->parts * m->quads;
    for (int64_t row = 0, rows; row < m->rows; row += rows) {
        rows = smaller(m->rows - row, ROWS_AT_ONCE);
        for (int64_t begin = 0; begin < quads; begin += DEPTH) {
            const int64_t count = smaller(DEPTH, quads - begin);
            for (int64_t i = 0; i < rows; i++)
                widen_row(m, row + i, x[i], begin, count);
#define ROWS_OF(number, each)                                                                     \
    for (int64_t j = 0; rows == number && j < m->columns; j += each * LANES_OF_SUMS)              \
        if (each == AT_ONCE && m->columns - j <= LANES_OF_SUMS)                                   \
            wide_block(m, row, j, x, begin, count, number, 1);                                    \
        else                                                                                      \
            wide_block(m, row, j, x, begin, count, number, each);
            ROWS_OF(1, ALONE) ROWS_OF(2, AT_ONCE) ROWS_OF(3, AT_ONCE) ROWS_OF(4, AT_ONCE)
        }
    }
}
#undef ROWS_OF
#endif

/* AMX tiles of 16 rows: four of sums, two of x and two of weights. */
#ifdef HAVE_TILES
/* Tiles of sums: 2 x 2, optionally without the `right` or `lower` half, or a `tall` column of four. */
#define IS_USED(t) (tall || ((lower || t < 2) && (right || t % 2 == 0)))
#define PLACE(t, from, step) (from) + TILE * (tall ? t * (step) : t / 2 * (step) + t % 2)
#define LOAD(t) if (IS_USED(t)) _tile_loadd(t, PLACE(t, start, m->start_step), m->start_step * 4);
#define MULTIPLY(...) do if (m->is_signed) _tile_dpbssd(__VA_ARGS__); else _tile_dpbusd(__VA_ARGS__); while (0)
#define STORE(t) if (IS_USED(t)) _tile_stored(t, PLACE(t, c, m->c_step), m->c_step * 4);

__attribute__((target("amx-tile,amx-int8"))) INLINED void tiles_of(
    const multiplication *m, int64_t row, int64_t panel, const int lower, const int right, const int tall)
{
    const int32_t *start = m->start + row * m->start_step + panel * PANEL;
    const int64_t below = TILE * m->x_step;
    int32_t *c = m->c + row * m->c_step + panel * PANEL;
    const int8_t *w = m->w + panel * m->w_step;
    EACH_TILE(LOAD)
    for (int64_t part = 0; part < m->parts; part++) {
        const uint8_t *x = m->x + row * m->x_step + m->places[part];
        const uint8_t *end = x + m->quads * QUAD;
        for (; x < end; x += m->deep * QUAD, w += m->deep * PANEL_BYTES) {
            _tile_loadd(6, w, PANEL_BYTES);
            _tile_loadd(4, x, m->x_step);
            MULTIPLY(0, 4, 6);
            if (lower)
                _tile_loadd(5, x + below, m->x_step);
            if (tall) {
                MULTIPLY(1, 5, 6);
                _tile_loadd(4, x + 2 * below, m->x_step);
                MULTIPLY(2, 4, 6);
                _tile_loadd(5, x + 3 * below, m->x_step);
                MULTIPLY(3, 5, 6);
                continue;
            }
            if (lower)
                MULTIPLY(2, 5, 6);
            if (right)
                _tile_loadd(7, w + 64, PANEL_BYTES);
            if (right)
                MULTIPLY(1, 4, 7);
            if (lower && right)
                MULTIPLY(3, 5, 7);
        }
    }
    EACH_TILE(STORE)
}

__attribute__((target("amx-tile,amx-int8"))) void tiles(const multiplication *m)
{
    int64_t own = 0, *const shape = m->shape ? m->shape : &own;
    for (int64_t row = 0; row < m->rows; row += 2 * TILE) {
        const int64_t rows = smaller(2 * TILE, m->rows - row), upper = smaller(rows, TILE);
        const int64_t lower = rows - upper;
        const int64_t wanted = m->deep * (2 * TILE + 1) + rows;
        if (*shape != wanted)
            shape_tiles(upper, lower, m->deep, m->deep * QUAD);
        *shape = wanted;
        if (m->columns <= TILE && m->rows - row >= 4 * TILE) {
            tiles_of(m, row, 0, 1, 0, 1);
            row += 2 * TILE;
            continue;
        }
        for (int64_t p = 0; p * PANEL < m->columns; p++) {
            const int right = m->columns - p * PANEL > TILE;
            if (lower && right)
                tiles_of(m, row, p, 1, 1, 0);
            else if (lower)
                tiles_of(m, row, p, 1, 0, 0);
            else if (right)
                tiles_of(m, row, p, 0, 1, 0);
            else
                tiles_of(m, row, p, 0, 0, 0);
        }
    }
    if (!m->shape)
        _tile_release();
}

__attribute__((target("amx-tile"))) void release_tiles(void)
{
    _tile_release();
}
#endif

product *product_for(int64_t rows)
{
#ifdef HAVE_TILES
    if (rows > 4 && has_tiles())
        return tiles;
#endif
    return WIDEST();
}
