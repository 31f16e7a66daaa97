/* Tiles of VECTORS vectors of columns, with 1 to 8 rows, or 9 to 16 if IS_TALL. panels.c includes this for each
   combination. These are macros rather than arguments of inlined functions: compilers would read all forms for each
   combination, and drop all but one. Kinds of elements differ only in the innermost loops: a function for each would
   consist mostly of what all have. */

#define JOINED(name, vectors, kind) name##_##vectors##_##kind
#define ADD_OF(vectors, kind) JOINED(add, vectors, kind)
#define TILES_OF(vectors, is_tall) JOINED(multiply, vectors, is_tall)
/* Elements of a row that are multiplied at once. */
#define ELEMENTS(kind) ((kind) == TWOS ? 2 : 1)

/* Multiply `tiles` tiles of `rows` rows of x by the columns `first` to `end` of a panel, VECTORS vectors at a time;
   `rows` is a constant. `before`, if not NULL, holds the sums of earlier products. */
INLINED void TILES_OF(VECTORS, IS_TALL)(operands x, const float *panel, int64_t width, const float *before,
                                        const target *to, fetching *f, int64_t first, int64_t end, int64_t tiles,
                                        int kind, int rows)
{
    /* With three vectors, GCC copies accumulators between registers from one form of the loop to the next. */
    enum { VECTORS_OF = VECTORS, HAS_ENDS = BY_WIDTH(VECTORS != 3, 0, 0) };
    const int two = BY_WIDTH(VECTORS == 1 && kind == TWOS, 0, 0);
    /* Unrolling of the innermost loop, in rows of the panel. Two suffice where one row has 9 to 16 products, and
       compile faster; for two vectors, with up to 28 products, four are 3 % faster. */
    enum { AT_ONCE = IS_TALL && VECTORS == 1 ? 2 : 4 };
    const int64_t depth = x.depth, ready = x.parts * depth >= LONG && !to->unfinished;
    const int64_t y_step = to->step;
    const int plain = to->count >= end && !to->addend && !is_active(&to->activation);
    float *first_y = to->y;
    const float *first_addend = to->addend;
#if IS_TALL
    /* Rows of a tall tile are addressed by the base of each group and a few multiples of the step between rows. */
    const int group = (rows + 1) / 2, upper = (1 << group) - 1, lower = (1 << rows) - 1 - upper;
#endif
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = x.begin, limit = begin + depth, place = x.at * x.step;
        for (int64_t column = first; column < end; column += VECTORS * LANES) {
            float *y = first_y + column;
            const float *const addend = moved(first_addend, column), *const bias = moved(to->bias, column);
            const float *w = panel + column;
            const char *next = f->next;
            const int64_t lines = next < f->end ? f->lines * (AHEAD / 4) : 0;
            const int64_t ahead = lines && AHEAD > 4 ? AHEAD : depth;
            vector own[TALL_SUMS];
            UNROLLED(i, TALL_SUMS)
                own[i] = (vector){0};
            if (bias && !two && !to->split)
                EACH(rows, VECTORS) own[r * VECTORS + j] = loaded(bias + j * LANES);
            /* Short products take less time than a fetch does: prefetch the destination of the next tile. */
            if (ready || IS_TALL || x.parts * depth < LONG / 2)
                fetch_rows(to, ready ? y : y + rows * y_step, addend, rows, VECTORS);
            if (column == first)
                fetch_ahead(x.ahead, rows * x.ahead_step);
#if IS_TALL
/* The address of a row of a tall tile: its group's base plus an odd number of steps times a power of 2. */
#define BY(r) (((r) % group + 1) & -((r) % group + 1))
#define GROUP_ROW(r) group_at[(r) / group] + k, steps[((r) % group + 1) / BY(r) / 2], BY(r)
#define ADD_ROW(kind, sum, r, i, even)                                                             \
    if (even)                                                                                      \
        ADD_OF(VECTORS, kind)(sum, 1, GROUP_ROW(r), i, some);                                      \
    else                                                                                           \
        ADD_OF(VECTORS, kind)(sum, 1, at[r], k, 4, i, some)
/* As STEP, for three taps: most elements of a line are loaded once for all three. */
#define STEP_OF_TAPS(kind)                                                                         \
    {                                                                                              \
        vector some[3];                                                                            \
        UNROLLED(t, 3) some[t] = loaded(w + t * depth * width);                                    \
        ADD_OF(1, kind)(own, 1, left, k, 4, 0, some);                                              \
        ADD_OF(2, kind)(own + 1, -1, GROUP_ROW(0), 0, some);                                       \
        UNROLLED(r, rows - 2)                                                                      \
            ADD_OF(3, kind)(own + r + 2, -1, GROUP_ROW(r + 1), 0, some);                           \
        ADD_OF(2, kind)(own + rows - 1, -1, GROUP_ROW(rows - 1), 0, some + 1);                     \
        ADD_OF(1, kind)(own + rows - 1, 1, right, k, 4, 0, some + 2);                              \
        w += ELEMENTS(kind) * width;                                                               \
    }
#else
#define ADD_ROW(kind, sum, r, i, even) ADD_OF(VECTORS, kind)(sum, 1, at[r], k, 4, i, some)
#endif
#define STEP(kind, i, without, even)                                                               \
    {                                                                                              \
        vector some[VECTORS_OF];                                                                   \
        UNROLLED(j, VECTORS) some[j] = loaded(w + j * LANES);                                      \
        UNROLLED(r, rows)                                                                          \
        {                                                                                          \
            vector *const sum = own + r * VECTORS;                                                 \
            if (!((without) >> r & 1)) {                                                           \
                ADD_ROW(kind, sum, r, i, even);                                                    \
            }                                                                                      \
        }                                                                                          \
        w += ELEMENTS(kind) * width;                                                               \
    }
#define FETCH(now)                                                                                 \
    for (int64_t i = 0; (now) && i < lines; i++, next += LINE)                                     \
        __builtin_prefetch(next, 0, 2);
/* A part, except the rows set in `without`; `even`: rows of the tall tile are evenly spaced. */
#define PART(kind, without, even)                                                                  \
    {                                                                                              \
        for (int64_t k = begin; k < limit;) {                                                      \
            const int64_t stop = smaller(k + ahead, limit);                                        \
            FETCH(AHEAD > 4)                                                                       \
            for (; k + AT_ONCE <= stop; k += AT_ONCE) {                                            \
                FETCH(AHEAD == 4)                                                                  \
                STEP(kind, 0, without, even)                                                       \
                if (ELEMENTS(kind) == 1)                                                           \
                    STEP(kind, 1, without, even)                                                   \
                if (AT_ONCE > 2)                                                                   \
                    STEP(kind, 2, without, even)                                                   \
                if (AT_ONCE > 2 && ELEMENTS(kind) == 1)                                            \
                    STEP(kind, 3, without, even)                                                   \
            }                                                                                      \
            for (; AT_ONCE > ELEMENTS(kind) && k < stop; k += ELEMENTS(kind))                      \
                STEP(kind, 0, without, even)                                                       \
        }                                                                                          \
    }
/* The addresses of the rows of a part. */
#define FIND_ROWS                                                                                  \
    UNROLLED(r, rows)                                                                              \
        at[r] = !x.step ? of_part[r] : outside >> r & 1 ? x.zeros : of_part[0] + place + r * x.step;
            for (int64_t part = 0; part < x.parts; part++) {
                const float *const *of_part = x.rows + part * x.apart, *at[TALL_SUMS];
#if IS_TALL
                int64_t step;
                const float *group_at[2];
#if VECTORS == 1
                const int is_row = x.taps == 3 && part % 3 == 0 && part + 3 <= x.parts && rows <= x.line;
                if (is_row && !find_groups(&x, part + 1, place, rows, group, &step, group_at)) {
                    const float *const *const last = of_part + 2 * x.apart;
                    const float *left = of_part[0] + place;
                    const float *right = x.step ? last[0] + place + (rows - 1) * x.step : last[rows - 1];
                    left = x.step && outside_of_line(&x, part, 1) ? x.zeros : left;
                    right = x.step && outside_of_line(&x, part + 2, rows) ? x.zeros : right;
                    const int64_t steps[] = {step, 3 * step, 5 * step, 7 * step};
                    if (two)
                        for (int64_t k = begin; k < limit; k += 2)
                            STEP_OF_TAPS(TWOS)
                    else
                        for (int64_t k = begin; k < limit; k++)
                            STEP_OF_TAPS(FLOATS)
                    w += 2 * depth * width, part += 2;
                    continue;
                }
#endif
                const int outside = find_groups(&x, part, place, rows, group, &step, group_at);
                const int64_t steps[] = {step, 3 * step, 5 * step, 7 * step};
                if (outside == ALL_ROWS) {
                    w += depth * width;
                    continue;
                }
                /* At the edges of an image, the first or last row of a tile, or of both of its lines, is often
                   padding. */
                const int both = rows % 2 == 0;
                const float *const from = w;
#define EVEN(kind, possible, bits) if ((possible) && outside == (bits)) PART(kind, bits, 1) else
#define TALL_PART(kind)                                                                            \
    EVEN(kind, 1, 0)                                                                               \
    EVEN(kind, 1, 1)                                                                               \
    EVEN(kind, 1, 1 << (rows - 1))                                                                 \
    EVEN(kind, both, 1 | 1 << group)                                                               \
    EVEN(kind, both, 1 << (group - 1) | 1 << (rows - 1))                                           \
    {                                                                                              \
        FIND_ROWS                                                                                  \
        if (x.step ? ~outside & upper : !all_at(x.zeros, of_part, group))                          \
            PART(kind, lower, 0)                                                                   \
        w = from;                                                                                  \
        if (x.step ? ~outside & lower : !all_at(x.zeros, of_part + group, rows - group))           \
            PART(kind, upper, 0)                                                                   \
        w = from + depth * width;                                                                  \
    }
#if VECTORS == 1
                if (two)
                    TALL_PART(TWOS)
                else
#endif
                    TALL_PART(FLOATS)
#else
                const int has_ends = HAS_ENDS && rows > 2, outside = x.step ? outside_of_line(&x, part, rows) : 0;
                if (x.step ? outside == ALL_ROWS : all_at(x.zeros, of_part, rows)) {
                    w += depth * width;
                    continue;
                }
                FIND_ROWS
#if defined(__AVX512F__)
                if (kind == PAIRS)
                    PART(PAIRS, 0, 0)
                else
#if VECTORS == 1
                if (kind == TWOS)
                    PART(TWOS, 0, 0)
                else
#endif
#if HAS_HALVES
                if (kind == HALVES)
                    PART(HALVES, 0, 0)
                else
#endif
#endif
                if (has_ends && (x.step ? outside & 1 : of_part[0] == x.zeros))
                    PART(FLOATS, 1, 0)
                else if (has_ends && (x.step ? outside >> (rows - 1) & 1 : of_part[rows - 1] == x.zeros))
                    PART(FLOATS, 1 << (rows - 1), 0)
                else
                    PART(FLOATS, 0, 0)
#endif
            }
#undef EVEN
#undef TALL_PART
#undef PART
#undef FIND_ROWS
#undef FETCH
#undef STEP
#undef STEP_OF_TAPS
#undef ADD_ROW
#undef BY
#undef GROUP_ROW
            f->next = next;
            /* Summing up the parts at the end is more accurate than one long sum. */
            if (before)
                EACH(rows, VECTORS) own[r * VECTORS + j] += loaded(before + column + r * SUMS_STEP(width) + j * LANES);
            if (bias && !two && to->split)
                EACH(rows, VECTORS) own[r * VECTORS + j] += loaded(bias + j * LANES);
#if defined(__AVX512F__)
            if (two && !to->unfinished)
                UNROLLED(r, rows) {
                    own[r] += (vector)_mm512_permute_ps((__m512)own[r], 0xb1);
                    own[r] = (vector)_mm512_maskz_compress_ps(0x5555, (__m512)own[r]);
                    own[r] += bias ? load_some(bias, to->count) : (vector){0};
                }
#endif
            /* The last vector may extend past the columns of the result. */
            const int64_t rest = to->count - column - (VECTORS - 1) * LANES;
            if (plain)
                UNROLLED(r, rows) {
                    UNROLLED(j, VECTORS)
                        memcpy(y + j * LANES, &own[r * VECTORS + j], VECTOR_BYTES);
                    ADVANCE(y, y_step);
                }
            else
                put_vectors(own, to, y, addend, column, rest, rows, VECTORS);
        }
        x = from_row(x, rows);
        first_y += rows * to->step;
        first_addend = moved(first_addend, rows * to->addend_step);
        before = moved(before, rows * SUMS_STEP(width));
    }
}

/* As above, for each number of rows that fits in registers. Each is a function of its own, since compilers take
   longer for one function with all of them. */
#define FORM_OF(rows, vectors) NAME_OF(rows, vectors)
#define FORM(rows)                                                                                 \
    static __attribute__((noinline)) void FORM_OF(rows, VECTORS)(                                  \
        operands x, const float *w, int64_t width, const float *before, const target *to,          \
        fetching *f, int64_t column, int64_t end, int64_t tiles, int kind)                         \
    {                                                                                              \
        if (HAS_FORM(rows, VECTORS))                                                               \
            TILES_OF(VECTORS, IS_TALL)(x, w, width, before, to, f, column, end, tiles, kind, rows); \
    }
#if IS_TALL
FORM(9) FORM(10) FORM(11) FORM(12) FORM(13) FORM(14) FORM(15) FORM(16)
#else
FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6) FORM(7) FORM(8)
#endif
#undef FORM
#undef FORM_OF
#undef TILES_OF
#undef ADD_OF
#undef JOINED
#undef ELEMENTS
#undef VECTORS
