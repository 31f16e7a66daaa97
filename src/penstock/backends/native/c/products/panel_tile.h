/* Products of a tile of rows with columns of a panel, in the form FORM: panels.c includes this for each. */

/* Add the products of the number i behind `k` times `by` bytes from x on with one to four vectors to `sums`, which are
   `apart` from one to the next; `apart`, `by`, i and `vectors` are constants.
   Written in C, sums move to other registers with each product, and some to memory, since there are few
   registers more than sums. A function for the processors that multiply pairs, with intrinsics, could have no
   part in those for all. */
INLINED void NAMED(add_products)(vector *sums, int apart, const float *x, int64_t k, int by, int i,
                                 const vector *columns, int vectors)
{
#if defined(__FMA__)
    vector all;
#define SUMS_1 [s0] "+v"(sums[0])
#define SUMS_2 SUMS_1, [s1] "+v"(sums[1 * apart])
#define SUMS_3 SUMS_2, [s2] "+v"(sums[2 * apart])
#define SUMS_4 SUMS_3, [s3] "+v"(sums[3 * apart])
#define COLUMNS_1 [c0] "v"(columns[0])
#define COLUMNS_2 COLUMNS_1, [c1] "v"(columns[1])
#define COLUMNS_3 COLUMNS_2, [c2] "v"(columns[2])
#define COLUMNS_4 COLUMNS_3, [c3] "v"(columns[3])
#define TIMES(operation, i, of) operation " %" of "[c" #i "], %" of "[all], %" of "[s" #i "]\n\t"
#define ADD_1(operation, of) TIMES(operation, 0, of)
#define ADD_2(operation, of) ADD_1(operation, "") TIMES(operation, 1, of)
#define ADD_3(operation, of) ADD_2(operation, "") TIMES(operation, 2, of)
#define ADD_4(operation, of) ADD_3(operation, "") TIMES(operation, 3, of)
#define ADD(operation, number, of, load)                                                           \
    __asm__(load " %c[at](%[x],%[k],%c[by]), %[all]\n\t" ADD_##number(operation, of)               \
            : [all] "=&v"(all), SUMS_##number                                                      \
            : COLUMNS_##number, [x] "r"(x), [k] "r"(k), [by] "i"(by), [at] "i"(4 * i),             \
              "m"(*(const float(*)[DEPTH])x))
#define OF(number)                                                                                 \
    if (vectors == number && FORM == PAIRS)                                                        \
        ADD("vdpbf16ps", number, "", "vbroadcastss");                                              \
    else if (vectors == number && FORM == HALVES)                                                  \
        ADD("vfmadd231ps", number, "t", "vbroadcastss");                                           \
    else if (vectors == number && TWO_ROWS)                                                        \
        ADD("vfmadd231ps", number, "", "vbroadcastsd");                                            \
    else if (vectors == number)                                                                    \
        ADD("vfmadd231ps", number, "", "vbroadcastss")
#if defined(__AVX512F__)
/* What is used once is no more work as an operand in memory. */
#define ONE(operation, to, of)                                                                     \
    __asm__(operation " %c[at](%[x],%[k],%c[by])%{" to "%}, %" of "[c0], %" of "[s0]"              \
            : SUMS_1                                                                               \
            : COLUMNS_1, [x] "r"(x), [k] "r"(k), [by] "i"(by), [at] "i"(4 * i),                    \
              "m"(*(const float(*)[DEPTH])x))
    if (vectors == 1 && FORM == PAIRS)
        ONE("vdpbf16ps", "1to16", "");
    else if (vectors == 1 && FORM == HALVES)
        ONE("vfmadd231ps", "1to8", "t");
    else if (vectors == 1 && !TWO_ROWS)
        ONE("vfmadd231ps", "1to16", "");
    else
        OF(1);
    OF(4);
#else
    OF(1);
#endif
    OF(2);
    OF(3);
#undef OF
#else
    UNROLLED(j, vectors)
        sums[j * apart] += x[k * by / 4 + i] * columns[j];
#endif
}

/* The product of `tiles` times `rows` rows of x with the columns of a panel from `first` to `end`, `vectors`
   vectors at a time; both numbers are constants. `before`, if not NULL, are sums of products before. */
INLINED void NAMED(multiply)(operands x, const float *panel, int64_t width, const float *before, const target *to,
                             fetching *f, int64_t first, int64_t end, int64_t tiles, int rows, int vectors)
{
    /* A single vector of few rows has two sums of each, since one would wait for the multiplication before. */
    enum { ODD = SUMS / 2 };
    const int twice = vectors == 1 && rows < FEW;
    /* Of three vectors, GCC copies sums from one register to another between the forms of the loop. */
    const int ends = BY_WIDTH(vectors != 3 && rows > 2, 0, 0);
    const int64_t depth = x.depth, limit = x.begin + depth, ready = x.parts * depth >= LONG && !to->unfinished;
    const activation *const active = &to->activation;
    const int bounded = active->low > -INFINITY || active->high < INFINITY;
    /* Rows of a tall tile are found by the addresses of each group and few multiples of what is between rows. */
    const int group = TALL_TILE ? (rows + 1) / 2 : rows;
    const int upper = (1 << group) - 1, lower = (1 << rows) - 1 - upper;
    const int plain = to->count >= end && !(to->addend || active->slopes || active->gate || bounded);
    float *first_y = to->y;
    const float *first_addend = to->addend;
    for (int64_t tile = 0; tile < tiles; tile++) {
        for (int64_t column = first; column < end; column += vectors * LANES) {
            float *y = first_y + column;
            const float *const addend = moved(first_addend, column), *const bias = moved(to->bias, column);
            const float *w = panel + column;
            const char *next = f->next;
            const int64_t lines = next < f->end ? f->lines * (AHEAD / 4) : 0;
            const int64_t ahead = lines && AHEAD > 4 ? AHEAD : depth;
            vector own[TALL_SUMS];
            UNROLLED(i, TALL_SUMS)
                own[i] = (vector){0};
            if (bias && !TWO_ROWS)
                EACH(rows, vectors) own[r * vectors + j] = loaded(bias + j * LANES);
            if (ready)
                fetch_rows(to, y, addend, rows, vectors);
/* Where a row of a tall tile is: an odd number of steps, times a power of 2, from its group on. */
#define BY(r) (((r) % group + 1) & -((r) % group + 1))
#define GROUP_ROW(r) group_at[(r) / group] + k, steps[((r) % group + 1) / BY(r) / 2], BY(r)
#define STEP(i, without, even)                                                                     \
    {                                                                                              \
        vector some[MOST_VECTORS];                                                                 \
        UNROLLED(j, vectors) some[j] = loaded(w + j * LANES);                                      \
        UNROLLED(r, rows)                                                                          \
        {                                                                                          \
            vector *const sum = own + twice * ((i) / (1 + TWO_ROWS)) % 2 * ODD + r * vectors;      \
            if (even && !((without) >> r & 1))                                                     \
                NAMED(add_products)(sum, 1, GROUP_ROW(r), i, some, vectors);                       \
            else if (!((without) >> r & 1))                                                        \
                NAMED(add_products)(sum, 1, at[r], k, 4, i, some, vectors);                        \
        }                                                                                          \
        w += (1 + TWO_ROWS) * width;                                                               \
    }
/* As STEP, of three taps: most elements of a line are loaded once for all of them. */
#define STEP_OF_TAPS(i)                                                                            \
    {                                                                                              \
        vector some[3];                                                                            \
        UNROLLED(t, 3) some[t] = loaded(w + t * depth * width);                                    \
        NAMED(add_products)(own, 1, left, k, 4, i, some, 1);                                       \
        NAMED(add_products)(own + 1, -1, GROUP_ROW(0), i, some, 2);                                \
        UNROLLED(r, rows - 2)                                                                      \
            NAMED(add_products)(own + r + 2, -1, GROUP_ROW(r + 1), i, some, 3);                    \
        NAMED(add_products)(own + rows - 1, -1, GROUP_ROW(rows - 1), i, some + 1, 2);              \
        NAMED(add_products)(own + rows - 1, 1, right, k, 4, i, some + 2, 1);                       \
        w += (1 + TWO_ROWS) * width;                                                               \
    }
#define FETCH(now)                                                                                 \
    for (int64_t i = 0; (now) && i < lines; i++, next += LINE)                                     \
        __builtin_prefetch(next, 0, 2);
/* A part of all rows but for some, told by bits; `even`: of a tall tile, equally far apart. */
#define PART(without, even)                                                                        \
    {                                                                                              \
        const float *at[TALL_SUMS];                                                                \
        UNROLLED(r, rows)                                                                          \
            at[r] = of_part[r];                                                                    \
        for (int64_t k = x.begin; k < limit;) {                                                    \
            const int64_t stop = smaller(k + ahead, limit);                                        \
            FETCH(AHEAD > 4)                                                                       \
            for (; k + 4 <= stop; k += 4) {                                                        \
                FETCH(AHEAD == 4)                                                                  \
                STEP(0, without, even)                                                             \
                if (!TWO_ROWS)                                                                     \
                    STEP(1, without, even)                                                         \
                STEP(2, without, even)                                                             \
                if (!TWO_ROWS)                                                                     \
                    STEP(3, without, even)                                                         \
            }                                                                                      \
            for (; k < stop; k += 1 + TWO_ROWS)                                                    \
                STEP(0, without, even)                                                             \
        }                                                                                          \
    }
            for (int64_t part = 0; part < x.parts; part++) {
                const float *const *of_part = x.rows + part * x.apart;
                const int is_row = x.taps == 3 && part % 3 == 0 && part + 3 <= x.parts && rows <= x.line;
                int64_t step = 0;
                const float *group_at[2] = {0};
#define FIND_GROUPS(seen) UNROLLED(i, 2) group_at[i] = (const float *)((intptr_t)(seen)[i * group + 1] - 2 * step)
                if (TALL_TILE && vectors == 1 && is_row &&
                    !outside_of(of_part + x.apart, x.zeros, rows, group, &step)) {
                    const float *const left = of_part[0], *const right = of_part[2 * x.apart + rows - 1];
                    const int64_t steps[] = {step, 3 * step, 5 * step, 7 * step};
                    FIND_GROUPS(of_part + x.apart);
                    for (int64_t k = x.begin; k < limit; k += 1 + TWO_ROWS)
                        STEP_OF_TAPS(0)
                    w += 2 * depth * width, part += 2;
                    continue;
                }
                const int outside = TALL_TILE ? outside_of(of_part, x.zeros, rows, group, &step) : 0;
                const int64_t steps[] = {step, 3 * step, 5 * step, 7 * step};
                if (TALL_TILE ? outside == ALL_ROWS : all_at(x.zeros, of_part, rows)) {
                    w += depth * width;
                    continue;
                }
                if (TALL_TILE)
                    FIND_GROUPS(of_part);
                /* At the edges of an image, the first or the last row of a tile is often outside. */
#define EVEN(bits) if (TALL_TILE && outside == (bits)) PART(bits, 1) else
                EVEN(0) EVEN(1) EVEN(1 << (rows - 1)) EVEN(1 | 1 << group) EVEN(1 << (group - 1) | 1 << (rows - 1))
                if (TALL_TILE) {
                    const float *const from = w;
                    if (!all_at(x.zeros, of_part, group))
                        PART(lower, 0)
                    w = from;
                    if (!all_at(x.zeros, of_part + group, rows - group))
                        PART(upper, 0)
                    w = from + depth * width;
                } else if (ends && of_part[0] == x.zeros)
                    PART(1, 0)
                else if (ends && of_part[rows - 1] == x.zeros)
                    PART(1 << (rows - 1), 0)
                else
                    PART(0, 0)
            }
#undef PART
#undef FETCH
#undef STEP
#undef FIND_GROUPS
#undef EVEN
#undef STEP_OF_TAPS
#undef BY
#undef GROUP_ROW
            f->next = next;
#pragma GCC unroll 16
            for (int r = 0; r < rows && twice; r++)
                own[r] += own[ODD + r];
            /* Sums of parts, added up at last, are closer to the product than one long sum. */
            if (before)
                EACH(rows, vectors) own[r * vectors + j] += loaded(before + column + r * SUMS_STEP(width) + j * LANES);
#if defined(__AVX512F__)
            if (TWO_ROWS && !to->unfinished)
                UNROLLED(r, rows) {
                    own[r] += (vector)_mm512_permute_ps((__m512)own[r], 0xb1);
                    own[r] = (vector)_mm512_maskz_compress_ps(0x5555, (__m512)own[r]);
                    own[r] += bias ? load_some(bias, to->count) : (vector){0};
                }
#endif
            /* The last vector may have columns that are none of the result's. */
            const int64_t rest = to->count - column - (vectors - 1) * LANES;
            if (plain)
                UNROLLED(r, rows) {
                    UNROLLED(j, vectors)
                        memcpy(y + j * LANES, &own[r * vectors + j], VECTOR_BYTES);
                    ADVANCE(y, to->step);
                }
            else
                put_vectors(own, to, y, addend, column, rest, rows, vectors);
        }
        x.rows += rows;
        first_y += rows * to->step;
        first_addend = moved(first_addend, rows * to->addend_step);
        before = moved(before, rows * SUMS_STEP(width));
    }
}
#undef FORM
