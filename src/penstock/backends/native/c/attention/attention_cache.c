/* Attention over a cache of keys and values, to which new ones are appended. An item is a key/value head of one
   sample, with all query heads that share it. Returns 1 if a query sees no key with a finite score. Compiled with
   contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include "attention_cache.h"
#include "floats.h"
#include "math32.h"

/* Scores of a block of keys, queries that are computed together, and vectors of values for each of them: the
   accumulators of four queries fill half of the registers. */
enum { WIDE = SUM_BYTES / 4, SCORES = KEYS_AT_ONCE + WIDE, TOGETHER = 4, VECTORS = LANES / 4 };

typedef int32_t lanes __attribute__((vector_size(VECTOR_BYTES)));

/* Rotate a head by the angles of its position (rotary embedding). */
static void rotate(const struct attention_cache *a, const float *x, int64_t position, float *to)
{
    const float *cos = a->cos + position * a->half, *sin = a->sin + position * a->half;
    int64_t step = a->interleaved ? 2 : 1, other = a->interleaved ? 1 : a->half;
    for (int64_t i = 0; i < a->half; i++) {
        float left = x[i * step], right = x[i * step + other];
        to[i * step] = left * cos[i] - right * sin[i];
        to[i * step + other] = right * cos[i] + left * sin[i];
    }
    memcpy(to + 2 * a->half, x + 2 * a->half, (a->size - 2 * a->half) * sizeof *to);
}

/* Store the present of one head: the past, unless it is in place, new rows, and zeros or the rest of the past. */
static void store(const struct attention_cache *a, const float *new, int64_t row, const float *past,
                  float *to, int64_t size, int64_t cached, int turned)
{
    if (past)
        memcpy(to, past, cached * size * sizeof *to);
    for (int64_t i = 0; i < a->queries; i++) {
        float *place = to + (cached + i) * size;
        if (turned)
            rotate(a, new + i * row, cached + i, place);
        else
            memcpy(place, new + i * row, size * sizeof *to);
    }
    const int64_t end = cached + a->queries, rest = (a->kept - end) * size * sizeof *to;
    if (a->keeps)
        memcpy(to + end * size, past + end * size, rest);
    else
        memset(to + end * size, 0, rest);
}

/* Sum up each of LANES vectors; lane i of the result is the sum of vector i. Each step joins two vectors: of the
   lanes whose indices differ in one bit, one gets a partial sum of the first vector, the other of the second. */
INLINED vector sums_of(vector *x)
{
#define JOIN(bit)                                                                                      \
    UNROLLED(i, LANES / 2 / bit)                                                                       \
        x[i] = SHUFFLE(lanes, x[2 * i], x[2 * i + 1], LANES_32(WITHOUT_BIT, bit)) +                   \
               SHUFFLE(lanes, x[2 * i], x[2 * i + 1], LANES_32(WITH_BIT, bit));
    JOIN(1)
    JOIN(2)
#if defined(__AVX__)
    JOIN(4)
#endif
#if defined(__AVX512F__)
    JOIN(8)
#endif
    return x[0];
}

/* Products of `count` queries with some keys that have fewer features than a sum has lanes. */
static __attribute__((noinline)) void add_short(vector *products, const float *const *q,
                                                const float *const *rows, int64_t size, int count)
{
    int keys_at_once = LANES / count;
    for (int l = 0; l < LANES; l++)
        for (int64_t k = 0; k < size; k++)
            (*products)[l] = fused32(q[l / keys_at_once][k], rows[l % keys_at_once][k], (*products)[l]);
}

/* Scores of `n` keys for `count` queries, a constant: as many products as a vector has lanes are computed together,
   of all queries with the next keys. Each has WIDE sums, those of one vector after the other. A row of scores may be written past its end, up to a whole vector. */
INLINED void dots(float (*to)[SCORES], const float *const *q, const float *keys, int64_t n, int64_t size,
                  float scale, const int count)
{
    const int keys_at_once = LANES / count;
    int64_t whole = size < WIDE ? 0 : size, rest = size % WIDE;
    float last[TOGETHER][WIDE] = {0};
    for (int c = 0; rest && whole && c < count; c++)
        memcpy(last[c] + WIDE - rest, q[c] + size - rest, rest * sizeof *last[c]);
    for (int64_t j = 0; j < n; j += keys_at_once) {
        vector sums[LANES], x[TOGETHER], y, parts[SUM_VECTORS];
        const float *rows[LANES];
        UNROLLED(k, keys_at_once)
            rows[k] = keys + (j + k < n ? j + k : n - 1) * size;
        for (int part = 0; part < SUM_VECTORS; part++) {
            UNROLLED(l, LANES)
                sums[l] = (vector){0};
            for (int64_t i = 0; i < whole; i += WIDE) {
                /* The last vectors may begin before `i`: q has zeros for elements that were added already. */
                int64_t place = (i + WIDE <= size ? i : size - WIDE) + part * LANES;
                UNROLLED(c, count)
                    memcpy(&x[c], i + WIDE <= size ? q[c] + place : last[c] + part * LANES, sizeof y);
                UNROLLED(k, keys_at_once) {
                    memcpy(&y, rows[k] + place, sizeof y);
                    UNROLLED(c, count)
                        sums[c * keys_at_once + k] += x[c] * y;
                }
            }
            parts[part] = sums_of(sums);
        }
        vector products = joined_sums(parts);
        if (!whole)
            add_short(&products, q, rows, size, count);
        products *= scale;
        UNROLLED(c, count)
            memcpy(to[c] + j, (const float *)&products + c * keys_at_once, keys_at_once * sizeof scale);
    }
}

/* Scores of the keys of a page, [feature][position], for `count` queries, a constant. The sum for a key adds its
   features in order, whatever the number of queries. A row of scores may be written past its end, up to a whole
   page. */
INLINED void dots_of_page(float (*to)[SCORES], const float *const *q, const float *keys, int64_t n,
                          int64_t positions, int64_t size, float scale, const int count)
{
    enum { MOST = 4 };
    const int vectors = count == TOGETHER || LANES > 8 ? 2 : MOST; /* as many as there are registers for accumulators */
    for (int64_t j = 0; j < n; j += vectors * LANES) {
        vector sums[TOGETHER * MOST], x[MOST];
        UNROLLED(i, count * vectors)
            sums[i] = (vector){0};
        for (int64_t k = 0; k < size; k++) {
            UNROLLED(v, vectors)
                memcpy(&x[v], keys + k * positions + j + v * LANES, sizeof *x);
            UNROLLED(c, count)
                UNROLLED(v, vectors)
                    sums[c * vectors + v] += q[c][k] * x[v];
        }
        UNROLLED(c, count)
            UNROLLED(v, vectors) {
                const vector scores = sums[c * vectors + v] * scale;
                memcpy(to[c] + j + v * LANES, &scores, sizeof scores);
            }
    }
}

/* Some vectors of features, a constant number: `from` plus the weighted sum of `n` rows. */
INLINED void add_vectors(float *to, int64_t to_step, const float *from, const float *rows,
                         float (*weights)[SCORES], int64_t n, int64_t size, const int count,
                         const int vectors)
{
    vector sums[TOGETHER * TOGETHER], x;
    UNROLLED(c, count)
        memcpy(&sums[c * vectors], from + c * MOST_HEAD, vectors * sizeof x);
    for (int64_t j = 0; j < n; j++)
        UNROLLED(v, vectors) {
            memcpy(&x, rows + j * size + v * LANES, sizeof x);
            UNROLLED(c, count)
                sums[c * vectors + v] += weights[c][j] * x;
        }
    UNROLLED(c, count)
        memcpy(to + c * to_step, &sums[c * vectors], vectors * sizeof x);
}

/* to += the weighted sum of `n` rows. The last vector may overlap the one before: it is computed first, and written
   last. */
INLINED void add_rows(float (*to)[MOST_HEAD], const float *rows, float (*weights)[SCORES], int64_t n,
                      int64_t size, const int count)
{
    float last[TOGETHER][LANES] = {0};
    int64_t i = 0, rest = size % LANES, place = size - LANES;
    if (rest && place > 0)
        add_vectors(last[0], LANES, to[0] + place, rows + place, weights, n, size, count, 1);
    for (; i + VECTORS * LANES <= size; i += VECTORS * LANES)
        add_vectors(to[0] + i, MOST_HEAD, to[0] + i, rows + i, weights, n, size, count, VECTORS);
    for (; i + LANES <= size; i += LANES)
        add_vectors(to[0] + i, MOST_HEAD, to[0] + i, rows + i, weights, n, size, count, 1);
    for (int c = 0; rest && place > 0 && c < count; c++)
        memcpy(to[c] + place, last[c], sizeof last[c]);
    for (int64_t j = 0; place < 0 && j < n; j++)
        for (int c = 0; c < count; c++)
            for (int64_t k = 0; k < size; k++)
                to[c][k] += weights[c][j] * rows[j * size + k];
}

/* Turn scores into weights: exponentials relative to the highest score so far, `top`. The sum of all weights is added
   to `total`, and sums with the former `top` are to be multiplied by `shrink`. Only keys from `hidden` up to `seen`
   are visible. Return 1 if a score is neither finite nor -infinity. */
static int weigh(const struct attention_cache *a, float *scores, const float *bias, int64_t n, int64_t hidden,
                 int64_t seen, float *top, float *total, float *shrink)
{
    /* In whole vectors, so that sums do not depend on how many keys are masked at the end. */
    const int64_t whole = CEIL_DIV(n, WIDE) * WIDE;
    float most[WIDE], parts[WIDE] = {0}, cap = (float)a->softcap;
    for (int64_t j = 0; cap && j < n; j++)
        scores[j] = cap * tanh32(scores[j] / cap);
    for (int64_t j = 0; bias && j < n; j++)
        scores[j] += bias[j];
    for (int64_t j = smaller(n, seen > 0 ? seen : 0); j < whole; j++)
        scores[j] = -INFINITY;
    for (int64_t j = 0; j < hidden; j++)
        scores[j] = -INFINITY;
    for (int l = 0; l < WIDE; l++)
        most[l] = *top;
    for (int64_t j = 0; j < whole; j += WIDE)
        for (int l = 0; l < WIDE; l++)
            most[l] = scores[j + l] > most[l] ? scores[j + l] : most[l];
    HALVE(most, WIDE, LARGEST_OF);
    const float highest = most[0];
    *shrink = 1;
    if (highest == -INFINITY) { /* none of these keys is visible */
        int64_t j = 0;
        for (; j < n && scores[j] == -INFINITY; j++)
            scores[j] = 0;
        return j < n;
    }
    if (highest == INFINITY)
        return 1;
    if (*total)
        *shrink = exp32(*top - highest);
    for (int64_t j = 0; j < whole; j++)
        scores[j] = exp32(scores[j] - highest);
    for (int64_t j = 0; j < whole; j += WIDE)
        for (int l = 0; l < WIDE; l++)
            parts[l] += scores[j + l];
    HALVE(parts, WIDE, SUM_OF);
    *total = *total * *shrink + parts[0];
    *top = highest;
    return 0;
}

/* Queries that are computed together, of heads that share keys or of one head: strides of results and of biases
   between queries; and how many fewer keys each sees than the next one. */
typedef struct {
    int64_t y, bias, fewer;
    const int32_t *blocks; /* `count` blocks of keys that all of them see; NULL: all */
    int64_t count;
    const int64_t *pages; /* of their request, or NULL */
    const float *by_distance; /* of the first query's head, or NULL; of_query: stride between queries */
    int64_t of_query;
} apart;

/* Write the bias of the scores of `n` keys, the first of which is `distance` positions before the query; the last
   ones may be after it. */
static void numbers_by_distance(float *to, const float *table, int64_t distances, int64_t distance, int64_t n)
{
    const int64_t most = distances - 1, far = distance > most ? smaller(n, distance - most) : 0;
    const float last = table[most], further = table[distances];
    int64_t j = 0;
    for (; j < far; j++)
        to[j] = last + further * (float)(distance - most - j);
    for (; j < n && j <= distance; j++)
        to[j] = table[distance - j];
    for (; j < n; j++)
        to[j] = 0;
}

/* The address of row `from` of values, or of keys that are not in pages, of a head that begins at `base`; and how
   many of `left` rows are contiguous there. */
INLINED const float *rows_from(const struct attention_cache *a, const apart *next, const float *base, int64_t size,
                               int64_t from, int64_t left, int64_t *together)
{
    *together = left;
    if (!next->pages)
        return base + from * size;
    const int64_t within = from % a->positions;
    *together = smaller(left, a->positions - within);
    return base + next->pages[from / a->positions] * a->page + within * size;
}

/* Advance `*from` to the next visible key, and return the number of adjacent visible ones before `end`. */
static int64_t next_keys(const struct attention_cache *a, const apart *next, int64_t *from, int64_t end)
{
    int64_t at = 0, stop = end;
    if (next->blocks) {
        while (at < next->count && (next->blocks[at] + 1) * a->block <= *from)
            at++;
        if (at == next->count)
            return 0;
        *from = *from > next->blocks[at] * a->block ? *from : next->blocks[at] * a->block;
        while (at + 1 < next->count && next->blocks[at + 1] == next->blocks[at] + 1)
            at++;
        stop = smaller(end, (next->blocks[at] + 1) * a->block);
    }
    return *from < stop ? smaller(KEYS_AT_ONCE, stop - *from) : 0;
}

/* Some queries, a constant number, over the keys `first` up to `end`, a block at a time. */
INLINED int attend(const struct attention_cache *a, const float *const *q, const float *keys,
                   const float *values, const float *bias, int64_t first, int64_t end, float *y,
                   const apart *next, const int count)
{
    float scores[TOGETHER][SCORES], sums[TOGETHER][MOST_HEAD];
    float top[TOGETHER], total[TOGETHER] = {0}, shrink, added[KEYS_AT_ONCE];
    for (int c = 0; c < count; c++) {
        top[c] = -INFINITY;
        memset(sums[c], 0, a->value_size * sizeof *sums[c]);
    }
    /* Whole pages of keys; the first keys may be outside of the window. */
    for (int64_t from = next->pages ? first - first % a->positions : first, n;
         (n = next_keys(a, next, &from, end)) > 0; from += n) {
        const int64_t hidden = first > from ? first - from : 0;
        for (int64_t j = 0; next->pages && j < n; j += a->positions)
            dots_of_page((float (*)[SCORES])(scores[0] + j), q, keys + next->pages[(from + j) / a->positions] * a->page,
                         smaller(a->positions, n - j), a->positions, a->size, (float)a->scale, count);
        if (!next->pages)
            dots(scores, q, keys + from * a->size, n, a->size, (float)a->scale, count);
        for (int c = 0; c < count; c++) {
            const float *row = bias ? bias + c * next->bias + from : NULL;
            const int64_t seen = end - (count - 1 - c) * next->fewer - from;
            if (next->by_distance) {
                numbers_by_distance(added, next->by_distance + c * next->of_query, a->distances, seen - 1, n);
                row = added;
            }
            if (weigh(a, scores[c], row, n, hidden, seen, &top[c], &total[c], &shrink))
                return 1;
            for (int64_t i = 0; shrink != 1 && i < a->value_size; i++)
                sums[c][i] *= shrink;
        }
        for (int64_t j = hidden, m; j < n; j += m) {
            const float *rows = rows_from(a, next, values, a->value_size, from + j, n - j, &m);
            add_rows(sums, rows, (float (*)[SCORES])(scores[0] + j), m, a->value_size, count);
        }
    }
    for (int c = 0; c < count; c++) {
        if (!(total[c] > 0))
            return 1;
        for (int64_t i = 0; i < a->value_size; i++)
            y[c * next->y + i] = sums[c][i] / total[c];
    }
    return 0;
}

/* The code is specialized for each number of queries that are computed together. */
#define ATTEND(count)                                                                             \
    static int attend_##count(const struct attention_cache *a, const float *const *q, const float *keys,\
                              const float *values, const float *bias, int64_t first, int64_t end, float *y,\
                              const apart *next)                                                  \
    {                                                                                             \
        return attend(a, q, keys, values, bias, first, end, y, next, count);                      \
    }
ATTEND(1)
ATTEND(2)
ATTEND(4)

static int attention_cache(const void *arguments, int64_t begin, int64_t end)
{
    const struct attention_cache *a = arguments;
    int64_t group = a->heads / a->kv_heads;
    float turned[TOGETHER][MOST_HEAD];
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / a->kv_heads, head = item % a->kv_heads;
        int64_t ends = a->last ? (int64_t)a->last[b] + 1 : a->total;
        int64_t cached = a->queries == a->total ? 0 : ends - a->queries;
        float *keys = a->present_k + b * a->present_k_batch + head * a->present_k_head;
        float *values = a->present_v + b * a->present_v_batch + head * a->present_v_head;
        if (a->k) {
            const float *old_keys = a->past_k + b * a->past_k_batch + head * a->past_k_head;
            const float *old_values = a->past_v + b * a->past_v_batch + head * a->past_v_head;
            store(a, a->k + b * a->k_batch + head * a->k_head, a->k_row,
                  a->holds_k ? NULL : old_keys, keys, a->size, cached, a->cos != NULL);
            store(a, a->v + b * a->v_batch + head * a->v_head, a->v_row,
                  a->holds_v ? NULL : old_values, values, a->value_size, cached, 0);
        }
        /* If few heads share keys, queries of one head that see all earlier positions are computed together. */
        const int by_rows = (group < TOGETHER || a->block) && !a->window;
        for (int64_t i = 0, rows; i < a->queries; i += rows) {
            const int64_t position = cached + i;
            int64_t left = smaller(a->queries, a->causal ? ends - cached : a->queries) - i;
            if (a->block)
                left = smaller(left, a->block - position % a->block);
            rows = !by_rows ? 1 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const int64_t end_of_rows = position + rows;
            const int64_t last = a->causal && end_of_rows < ends ? end_of_rows : ends;
            const int64_t first = a->window && position >= a->window ? position - a->window + 1 : 0;
            if (first >= last)
                return 1;
            for (int64_t h = head * group, heads; h < (head + 1) * group; h += heads) {
                const int64_t sharing = a->layouts > 1 ? 1 : (head + 1) * group - h;
                heads = rows > 1 ? 1 : sharing >= 4 ? 4 : sharing >= 2 ? 2 : 1;
                const int64_t together = rows * heads;
                apart next = {rows > 1 ? a->y_row : a->y_head, rows > 1 ? a->bias_row : a->bias_head,
                              rows > 1 ? a->causal : 0, NULL, 0, NULL, NULL, 0};
                if (a->block) {
                    const int64_t layout = h % a->layouts;
                    const int32_t *starts = a->starts + layout * (a->blocks + 1) + position / a->block;
                    next.blocks = a->columns + layout * a->most + starts[0];
                    next.count = starts[1] - starts[0];
                }
                const float *q[TOGETHER], *bias = NULL;
                for (int c = 0; c < together; c++) {
                    const int64_t row = rows > 1 ? c : 0, own = rows > 1 ? 0 : c;
                    q[c] = a->q + b * a->q_batch + (h + own) * a->q_head + (i + row) * a->q_row;
                    if (a->cos) {
                        rotate(a, q[c], position + row, turned[c]);
                        q[c] = turned[c];
                    }
                }
                if (a->bias)
                    bias = a->bias + b * a->bias_batch + h * a->bias_head + i * a->bias_row;
                float *y = a->y + b * a->y_batch + h * a->y_head + i * a->y_row;
                if ((together == 4   ? attend_4
                     : together == 2 ? attend_2
                                     : attend_1)(a, q, keys, values, bias, first, last, y, &next))
                    return 1;
            }
        }
    }
    return 0;
}

/* Attention over pages, which hold the new keys and values already. Unless it is causal, each row sees all positions
   of its request. */
static int paged_attention(const void *arguments, int64_t begin, int64_t end)
{
    const struct attention_cache *a = arguments;
    const int64_t group = a->heads / a->kv_heads, by_rows = group < TOGETHER && !a->window;
    for (int64_t item = begin; item < end; item++) {
        const struct paged_rows *part = a->parts + item / a->kv_heads;
        const int64_t head = item % a->kv_heads;
        const float *keys = a->pool + a->keys_at + head * a->positions * a->size;
        const float *values = a->pool + a->values_at + head * a->positions * a->value_size;
        for (int64_t i = 0, rows; i < part->rows; i += rows) {
            const int64_t position = part->past + (a->causal ? i : 0), left = part->rows - i;
            rows = !by_rows ? 1 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const int64_t first = a->window && position >= a->window ? position - a->window + 1 : 0;
            for (int64_t h = head * group, heads; h < (head + 1) * group; h += heads) {
                const int64_t sharing = (head + 1) * group - h;
                heads = rows > 1 ? 1 : sharing >= 4 ? 4 : sharing >= 2 ? 2 : 1;
                const int64_t together = rows * heads;
                const int64_t of_head = a->distances + 1;
                const int64_t end_of_rows = a->causal ? position + rows : position;
                const apart next = {rows > 1 ? a->y_row : a->y_head, 0, rows > 1 && a->causal, NULL, 0,
                                    a->pages + part->pages,
                                    a->by_distance ? a->by_distance + h * of_head : NULL, rows > 1 ? 0 : of_head};
                const float *q[TOGETHER];
                for (int c = 0; c < together; c++) {
                    const int64_t row = rows > 1 ? c : 0, own = rows > 1 ? 0 : c;
                    q[c] = a->q + (h + own) * a->q_head + (part->first + i + row) * a->q_row;
                }
                float *y = a->y + h * a->y_head + (part->first + i) * a->y_row;
                if ((together == 4   ? attend_4
                     : together == 2 ? attend_2
                                     : attend_1)(a, q, keys, values, NULL, first, end_of_rows, y, &next))
                    return 1;
            }
        }
    }
    return 0;
}

KERNELS(attention_cache, KERNEL(attention_cache, attention_cache), KERNEL(paged_attention, attention_cache))
