/* Gathers and scatters by index, and the k largest or smallest elements along an axis. Indices come from models and
   feeds: each is checked before it is used. */
#include <math.h>
#include <string.h>
#include "arguments.h"
#include "copies.h"
#include "families.h"

/* An index of an axis of `dim` elements, counted from the end if it is negative; -1 if out of range. */
static inline int64_t checked(int64_t index, int64_t dim)
{
    index = index < 0 ? index + dim : index;
    return index >= 0 && index < dim ? index : -1;
}

/* GatherElements and ScatterElements: elements at `indices`, which replace the index of one axis. An item is a row of
   them along the last axis. */
struct elements {
    const void *x;
    const void *indices;
    const void *updates;
    void *y;
    const int64_t *dims;    /* of the indices, without the last axis */
    const int64_t *strides; /* of the data at these axes; 0 for the indexed axis */
    int64_t rank;           /* of the indices */
    int64_t length;         /* of a row */
    int64_t last;           /* stride of the data along a row; 0 if it is the indexed axis */
    int64_t dim, stride;    /* of the indexed axis */
    int64_t wide;           /* indices have 64 bits */
    int64_t rows, bytes;    /* of all indices; of the data, to copy */
};

static inline int64_t row_offset(const struct elements *a, int64_t row)
{
    int64_t offset = 0;
    for (int64_t d = a->rank - 2; d >= 0; d--) {
        offset += row % a->dims[d] * a->strides[d];
        row /= a->dims[d];
    }
    return offset;
}

/* Negative indices are rare, so that branches on them are predicted. */
#define GATHER_ROW(index_type, stride, last)                                                       \
    for (int64_t j = 0; j < a->length; j++) {                                                      \
        int64_t at = ((const index_type *)a->indices)[row * a->length + j];                        \
        if ((uint64_t)at >= (uint64_t)a->dim && (uint64_t)(at += a->dim) >= (uint64_t)a->dim)      \
            return 1;                                                                              \
        y[j] = x[at * (stride) + j * (last)];                                                      \
    }

#define GATHER_ELEMENTS(size, type)                                                                \
    CHECKED_ITEMS_OF(gatherelements_##size, elements)                                              \
    {                                                                                              \
        for (int64_t row = begin; row < end; row++) {                                              \
            const type *x = (const type *)a->x + row_offset(a, row);                               \
            type *restrict y = (type *)a->y + row * a->length;                                     \
            if (a->wide && a->stride == 1)                                                         \
                GATHER_ROW(int64_t, 1, 0)                                                          \
            else if (a->wide)                                                                      \
                GATHER_ROW(int64_t, a->stride, a->last)                                            \
            else                                                                                   \
                GATHER_ROW(int32_t, a->stride, a->last)                                            \
        }                                                                                          \
        return 0;                                                                                  \
    }

OF_SIZES(GATHER_ELEMENTS)

static int all_in_range(const void *indices, int64_t wide, int64_t count, int64_t dim)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < count; i++)
        bad |= checked(index_at(indices, wide, i), dim);
    return bad >= 0;
}

/* One item: an element may occur several times. Nothing is written if an index is invalid, as the result may share
   the memory of the data. */
#define SCATTER_ELEMENTS(name, type, COMBINE)                                                      \
    CHECKED_ITEMS_OF(name, elements)                                                               \
    {                                                                                              \
        if (!all_in_range(a->indices, a->wide, a->rows * a->length, a->dim))                       \
            return 1;                                                                              \
        if (a->x != a->y)                                                                          \
            memcpy(a->y, a->x, a->bytes);                                                          \
        for (int64_t row = 0; row < a->rows; row++) {                                              \
            type *y = (type *)a->y + row_offset(a, row);                                           \
            const type *updates = (const type *)a->updates + row * a->length;                      \
            for (int64_t j = 0; j < a->length; j++) {                                              \
                int64_t at = checked(index_at(a->indices, a->wide, row * a->length + j), a->dim);  \
                if (at < 0) /* changed meanwhile by another thread */                              \
                    return 1;                                                                      \
                type *to = y + at * a->stride + j * a->last;                                       \
                *to = COMBINE(*to, updates[j]);                                                    \
            }                                                                                      \
        }                                                                                          \
        return 0;                                                                                  \
    }

/* Slices at indices of one axis: an item is a slice of the result. */
struct gather {
    const char *x;
    const void *indices;
    char *y;
    int64_t dim, count, bytes; /* of the axis, indices, of a slice */
    int64_t wide;
};

CHECKED_ITEMS_OF(gather, gather)
{
    for (int64_t i = begin; i < end; i++) {
        int64_t at = checked(index_at(a->indices, a->wide, i % a->count), a->dim);
        if (at < 0)
            return 1;
        const char *from = a->x + (i / a->count * a->dim + at) * a->bytes;
        char *to = a->y + i * a->bytes;
        if (a->bytes == 4)
            memcpy(to, from, 4);
        else if (a->bytes == 8)
            memcpy(to, from, 8);
        else
            memcpy(to, from, a->bytes);
    }
    return 0;
}

/* The same along the first axis of bit-packed codes, dequantized: the codes of a block along the last axis share a
   scale and a zero point. Where an index is out of range, results are 0. */
struct gather_blocks {
    const uint8_t *codes;
    const void *indices;
    const float *scales;
    const uint8_t *zeros; /* also packed; or NULL */
    float *y;
    int64_t dim, rows, width, block, bits; /* of the axis, rows of a slice, their codes, those of a block */
    int64_t wide;
};

INLINED int code_at(const uint8_t *codes, int64_t i, const int bits)
{
    return codes[i * bits / 8] >> i * bits % 8 & ((1 << bits) - 1);
}

INLINED void reals_of_row(const struct gather_blocks *a, int64_t row, float *y, const int bits)
{
    enum { SOME = 32 };
    const int64_t blocks = CEIL_DIV(a->width, a->block);
    const uint8_t *codes = a->codes + row * a->width * bits / 8;
    const uint8_t *zeros = a->zeros ? a->zeros + row * ((blocks * bits + 7) / 8) : NULL;
    for (int64_t block = 0, j = 0; block < blocks; block++) {
        const int zero = zeros ? code_at(zeros, block, bits) : 1 << (bits - 1);
        const float scale = a->scales[row * blocks + block];
        const int64_t end = smaller(j + a->block, a->width);
        for (; end - j >= SOME; j += SOME)
            for (int i = 0; i < SOME * bits / 8; i++)
                UNROLLED(k, 8 / bits)
                    y[j + i * 8 / bits + k] = (float)(code_at(codes + j * bits / 8 + i, k, bits) - zero) * scale;
        for (; j < end; j++)
            y[j] = (float)(code_at(codes, j, bits) - zero) * scale;
    }
}

ITEMS_OF(gather_blocks, gather_blocks)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t at = checked(index_at(a->indices, a->wide, i), a->dim);
        float *y = a->y + i * a->rows * a->width;
        if (at < 0)
            FILL(y, a->rows * a->width, 0);
        for (int64_t k = 0; at >= 0 && k < a->rows; k++, y += a->width)
            if (a->bits == 4)
                reals_of_row(a, at * a->rows + k, y, 4);
            else if (a->bits == 8)
                reals_of_row(a, at * a->rows + k, y, 8);
            else
                reals_of_row(a, at * a->rows + k, y, 2);
    }
}

/* Slices at tuples of indices into the leading axes of the data, or of each of its batches. */
struct slices {
    const void *x;
    const void *indices;
    const void *updates;
    void *y;
    const int64_t *dims;    /* of the indexed axes */
    const int64_t *strides; /* in elements */
    int64_t depth, size;    /* of a tuple, elements of a slice */
    int64_t tuples;         /* in a batch */
    int64_t batch;          /* elements of a batch of the data */
    int64_t count, bytes;   /* tuples in all; of the data, to copy */
    const void *fill;       /* an element in place of the data, or NULL */
    int64_t wide, mode;     /* indices have 64 bits; how those out of range are treated */
};

/* Out-of-range indices: negative ones count from the end, or are faults, or are skipped; or all are skipped, or
   clamped to the nearest index. */
enum { FROM_END, EXACT, FROM_ZERO, INSIDE, NEAREST };
enum { FAULT = -1, SKIPPED = -2 };

/* The offset of the slice of a tuple, or one of the above. */
static inline int64_t slice_offset(const struct slices *a, int64_t tuple)
{
    int64_t offset = 0, outside = 0;
    for (int64_t d = 0; d < a->depth; d++) {
        int64_t at = index_at(a->indices, a->wide, tuple * a->depth + d);
        const int64_t dim = a->dims[d];
        at += at < 0 && a->mode == FROM_END ? dim : 0;
        if (at < 0 || at >= dim) {
            if (a->mode != NEAREST)
                outside = a->mode == INSIDE || (a->mode == FROM_ZERO && at < 0) ? SKIPPED : FAULT;
            at = a->mode == NEAREST && at >= dim ? dim - 1 : 0;
        }
        offset += at * a->strides[d];
    }
    return outside ? outside : offset;
}

#define GATHER_ND(bytes, type)                                                                     \
    CHECKED_ITEMS_OF(gathernd_##bytes, slices)                                                     \
    {                                                                                              \
        for (int64_t tuple = begin; tuple < end; tuple++) {                                        \
            int64_t offset = slice_offset(a, tuple);                                               \
            if (offset < 0)                                                                        \
                return 1;                                                                          \
            const type *x = (const type *)a->x + tuple / a->tuples * a->batch + offset;            \
            type *y = (type *)a->y + tuple * a->size;                                              \
            if (a->size == 1)                                                                      \
                *y = *x;                                                                           \
            else                                                                                   \
                memcpy(y, x, a->size * sizeof(type));                                              \
        }                                                                                          \
        return 0;                                                                                  \
    }

OF_SIZES(GATHER_ND)

#define SCATTER_ND(name, type, COMBINE)                                                            \
    CHECKED_ITEMS_OF(name, slices)                                                                 \
    {                                                                                              \
        for (int64_t tuple = 0; tuple < a->count; tuple++)                                         \
            if (slice_offset(a, tuple) == FAULT)                                                   \
                return 1;                                                                          \
        type *restrict all = a->y;                                                                 \
        const int64_t elements = a->bytes / (int64_t)sizeof(type), size = a->size;                 \
        const type fill = a->fill ? *(const type *)a->fill : 0;                                    \
        if (a->fill)                                                                               \
            FILL(all, elements, fill);                                                             \
        else if (a->x != a->y)                                                                     \
            memcpy(a->y, a->x, a->bytes);                                                          \
        for (int64_t tuple = 0; tuple < a->count; tuple++) {                                       \
            int64_t offset = slice_offset(a, tuple);                                               \
            if (offset == SKIPPED)                                                                 \
                continue;                                                                          \
            if (offset < 0)                                                                        \
                return 1;                                                                          \
            type *restrict y = (type *)a->y + offset;                                              \
            const type *restrict updates = (const type *)a->updates + tuple * size;                \
            for (int64_t j = 0; j < size; j++)                                                     \
                y[j] = COMBINE(y[j], updates[j]);                                                  \
        }                                                                                          \
        return 0;                                                                                  \
    }

#define SCATTERS(reduction, suffix, type, COMBINE)                                                 \
    SCATTER_ELEMENTS(scatterelements_##reduction##_##suffix, type, COMBINE)                        \
    SCATTER_ND(scatternd_##reduction##_##suffix, type, COMBINE)

#define REPLACEMENTS(size, type) SCATTERS(none, size, type, REPLACED)
OF_SIZES(REPLACEMENTS)

#define REDUCTIONS(suffix, type, sum)                                                              \
    SCATTERS(add, suffix, sum, ADDED)                                                              \
    SCATTERS(mul, suffix, sum, MULTIPLIED)                                                         \
    SCATTERS(max, suffix, type, HIGHER_OF)                                                            \
    SCATTERS(min, suffix, type, LOWER_OF)

REDUCTIONS(float32, float, float)
REDUCTIONS(float64, double, double)
REDUCTIONS(int32, int32_t, uint32_t)
REDUCTIONS(int64, int64_t, uint64_t)
SCATTER_ND(scatternd_add_uint8, uint8_t, ADDED)
SCATTER_ND(scatternd_add_uint16, uint16_t, ADDED)
SCATTER_ND(scatternd_max_uint8, uint8_t, HIGHER_OF)

/* For each element, the number of sorted bounds that are not above it. An item is a block of elements; if bounds are
   few, each is compared with the whole block. */
struct buckets {
    const void *x;
    int32_t *y;
    const void *bounds;
    int64_t count, length; /* of the bounds; of the elements */
};

enum { BUCKETED = 1024, FEW_BOUNDS = 24 };

#define BUCKETS(suffix, type, of)                                                                  \
    ITEMS_OF(buckets_##suffix, buckets)                                                            \
    {                                                                                              \
        const of *bounds = a->bounds;                                                              \
        for (int64_t i = begin * BUCKETED; i < smaller(end * BUCKETED, a->length); i += BUCKETED) {\
            const int64_t count = smaller(BUCKETED, a->length - i);                                \
            const type *x = (const type *)a->x + i;                                                \
            int32_t *restrict y = a->y + i;                                                        \
            if (a->count <= FEW_BOUNDS)                                                            \
                FILL(y, count, 0);                                                                 \
            for (int64_t k = 0; a->count <= FEW_BOUNDS && k < a->count; k++)                       \
                for (int64_t j = 0; j < count; j++)                                                \
                    y[j] += !((of)x[j] < bounds[k]);                                               \
            for (int64_t j = 0; a->count > FEW_BOUNDS && j < count; j++) {                         \
                const of *at = bounds;                                                             \
                for (int64_t left = a->count; left; left -= (left + 1) / 2)                        \
                    at += (of)x[j] < at[(left - 1) / 2] ? 0 : (left + 1) / 2;                      \
                y[j] = (int32_t)(at - bounds);                                                     \
            }                                                                                      \
        }                                                                                          \
    }

BUCKETS(float32, float, float)
BUCKETS(float64, double, double)
BUCKETS(int32, int32_t, double)
BUCKETS(int64, int64_t, double)

/* An array with another inserted, at an offset that is clamped so that it fits. One item. */
struct update {
    const char *x, *part;
    const void *place;
    char *y;
    const int64_t *dims; /* of both */
    int64_t rank, size, bytes, wide;
};

ITEMS_OF(update_slice, update)
{
    copy_plan plan = {.rank = (int)a->rank, .size = a->size};
    int64_t offset = 0, stride = a->size, own = a->size;
    if (a->x != a->y)
        memcpy(a->y, a->x, a->bytes);
    for (int64_t i = a->rank - 1; i >= 0; i--) {
        const int64_t dim = a->dims[i], part = a->dims[a->rank + i];
        offset += WITHIN(index_at(a->place, a->wide, i), 0, dim - part) * stride;
        plan.dims[i] = part, plan.from[i] = own, plan.to[i] = stride;
        stride *= dim, own *= part;
    }
    copy_elements(&plan, a->part, a->y + offset);
}

/* The k greatest or least along an axis: an item is one chain of elements, or TOP_COLUMNS adjacent ones. The indices
   of a chain, in the result, are kept in order, or, if they are many, in a heap whose root is the last of them, and
   sorted at the end. Or a chain is radix-sorted, least significant digit first, skipping digits that are equal in all
   keys: then all chains are one item, as its workspace holds the keys and indices of one. Keys are integers in the
   order of the elements: -0 equals 0, and NaN is above all others. */
#define KEY(suffix, type, key, most)                                                               \
    static inline key key_##suffix(type x)                                                         \
    {                                                                                              \
        key bits;                                                                                  \
        x = x + 0;                                                                                 \
        memcpy(&bits, &x, sizeof x);                                                               \
        return x != x ? most : bits ^ (bits >> (8 * sizeof x - 1) & most);                         \
    }

KEY(float32, float, int32_t, INT32_MAX)
KEY(float64, double, int64_t, INT64_MAX)
#define key_int8(x) (x)
#define key_uint8(x) (x)
#define key_int16(x) (x)
#define key_int32(x) (x)
#define key_int64(x) (x)

enum { TOP_BLOCK = 32, MOST_SORTED = 64, TOP_COLUMNS = 16, MOST_INSERTED = 128 };
enum { MOST_DIGITS = 8, MOST_BUCKETS = 2048, LONG_CHAIN = 8192 };

/* Keys of 32 bits and their indices, as integers in the same order. */
enum { MOST_SELECTED = 1024, RANKED = 64 };
#define PAIRED(key, place) ((int64_t)(key) * ((int64_t)1 << 32) + (place))

static inline void rank_pairs(const int64_t *from, int64_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t place = 0;
        for (int64_t j = 0; j < count; j++)
            place += from[j] < from[i];
        to[place] = from[i];
    }
}

/* Merge sorted pairs up to `count`; each list ends with a pair above all others, or holds enough. */
static inline void merge_pairs(const int64_t *a, const int64_t *b, int64_t *restrict to, int64_t count)
{
    for (int64_t i = 0, j = 0; i + j < count;) {
        const int64_t first = a[i], second = b[j], of_b = second < first;
        to[i + j] = of_b ? second : first;
        i += !of_b, j += of_b;
    }
}

/* Sort pairs without branches on their order: by counting those before each in blocks, which are merged. Return where
   they are: in one of the buffers, which have room for a pair behind each block. */
static int64_t *sort_pairs(int64_t *pairs, int64_t *spare, int64_t count)
{
    int64_t size = RANKED;
    for (int64_t i = 0; i < count; i += size)
        rank_pairs(pairs + i, spare + i, smaller(size, count - i));
    for (; size < count; size *= 2) {
        int64_t *from = spare;
        spare = pairs, pairs = from;
        for (int64_t i = 0; i < count; i += 2 * size) {
            const int64_t first = smaller(size, count - i), second = smaller(size, count - i - first);
            int64_t a = i, b = i + first, to = i;
            while (a < i + first && b < i + first + second) {
                const int64_t of_b = from[b] < from[a];
                spare[to++] = from[of_b ? b : a];
                a += !of_b, b += of_b;
            }
            memcpy(spare + to, from + a, (i + first - a) * sizeof *from);
            memcpy(spare + to + i + first - a, from + b, (i + first + second - b) * sizeof *from);
        }
    }
    return spare;
}

#define TOP(suffix, type, key, unsigned_key)                                                       \
    /* The ascending key of the element at index i: the first result has the least. */             \
    static inline key suffix##_at(const type *x, int64_t i, int64_t inner, key flip)               \
    {                                                                                              \
        return key_##suffix(x[i * inner]) ^ flip;                                                  \
    }                                                                                              \
                                                                                                   \
    /* Sift element `place` down from `hole` in a heap of `count`. Indices are also `inner` apart. */\
    INLINED void suffix##_sink(const type *x, int64_t *heap, int64_t count, const int64_t inner, key flip,\
                               int64_t hole, int64_t place)                                        \
    {                                                                                              \
        key sinking = suffix##_at(x, place, inner, flip);                                          \
        for (int64_t child; (child = 2 * hole + 1) < count; hole = child) {                        \
            key below = suffix##_at(x, heap[child * inner], inner, flip);                          \
            if (child + 1 < count) {                                                               \
                key other = suffix##_at(x, heap[(child + 1) * inner], inner, flip);                \
                if (other > below || (other == below && heap[(child + 1) * inner] > heap[child * inner])) {\
                    child++;                                                                       \
                    below = other;                                                                 \
                }                                                                                  \
            }                                                                                      \
            if (below < sinking || (below == sinking && heap[child * inner] < place))              \
                break;                                                                             \
            heap[hole * inner] = heap[child * inner];                                              \
        }                                                                                          \
        heap[hole * inner] = place;                                                                \
    }                                                                                              \
                                                                                                   \
    /* Insert element `place` into the sorted ones before it; the last of `count` is dropped. */   \
    INLINED void suffix##_insert(key *keys, int64_t *places, int64_t count, const int64_t inner, key inserted,\
                                 int64_t place)                                                    \
    {                                                                                              \
        int64_t i = count - 1;                                                                     \
        for (; i > 0 && keys[i - 1] > inserted; i--)                                               \
            keys[i] = keys[i - 1], places[i * inner] = places[(i - 1) * inner];                    \
        keys[i] = inserted, places[i * inner] = place;                                             \
    }                                                                                              \
                                                                                                   \
    /* Insert element `place` into the first k before it, and return the key of the last one. */   \
    INLINED key suffix##_enter(const struct top *a, const type *x, key *keys, int64_t *places,     \
                               const int64_t inner, key flip, int64_t place)                       \
    {                                                                                              \
        if (a->k > MOST_SORTED) {                                                                  \
            suffix##_sink(x, places, a->k, inner, flip, 0, place);                                 \
            return suffix##_at(x, places[0], inner, flip);                                         \
        }                                                                                          \
        suffix##_insert(keys, places, a->k, inner, suffix##_at(x, place, inner, flip), place);     \
        return keys[a->k - 1];                                                                     \
    }                                                                                              \
                                                                                                   \
    /* A few adjacent chains: some rows at once are compared with the last of those found so far. */\
    INLINED void suffix##_few(const struct top *a, const type *x, type *values, int64_t *places,   \
                              const int64_t inner, const int64_t columns, key flip)                \
    {                                                                                              \
        const int64_t k = a->k, heaps = k > MOST_SORTED, rows = columns == inner ? TOP_BLOCK / columns : 1;\
        key keys[TOP_COLUMNS][MOST_SORTED], limits[TOP_BLOCK];                                     \
        for (int64_t c = 0; c < columns; c++) {                                                    \
            const type *own = x + c;                                                               \
            int64_t *heap = places + c;                                                            \
            for (int64_t i = 0; i < k; i++)                                                        \
                if (heaps)                                                                         \
                    heap[i * inner] = i;                                                           \
                else                                                                               \
                    suffix##_insert(keys[c], heap, i + 1, inner, suffix##_at(own, i, inner, flip), i);\
            for (int64_t i = heaps ? k / 2 : 0; i-- > 0;)                                          \
                suffix##_sink(own, heap, k, inner, flip, i, heap[i * inner]);                      \
            for (int64_t j = c; j < TOP_BLOCK; j += columns)                                       \
                limits[j] = heaps ? suffix##_at(own, heap[0], inner, flip) : keys[c][k - 1];       \
        }                                                                                          \
        for (int64_t i = k; i < a->length; i += rows) {                                            \
            /* If less than a block is left, all elements are examined. */                         \
            const int64_t left = (a->length - 1 - i) * inner + columns;                            \
            const int64_t some = smaller(rows, a->length - i) * columns;                           \
            const unsigned_key those = ~(unsigned_key)0 >> (8 * sizeof(key) - some);               \
            unsigned_key ahead = left < TOP_BLOCK ? those : 0;                                     \
            for (int64_t j = 0; left >= TOP_BLOCK && j < TOP_BLOCK; j++)                           \
                ahead |= (unsigned_key)(suffix##_at(x + i * inner, j, 1, flip) < limits[j]) << j;  \
            for (ahead &= those; ahead; ahead &= ahead - 1) {                                      \
                const uint32_t at = (uint32_t)__builtin_ctzll(ahead), c = at % (uint32_t)columns;  \
                const int64_t place = i + at / (uint32_t)columns;                                  \
                if (suffix##_at(x + c, place, inner, flip) >= limits[c])                           \
                    continue;                                                                      \
                const key limit = suffix##_enter(a, x + c, keys[c], places + c, inner, flip, place);\
                for (int64_t j = c; j < TOP_BLOCK; j += columns)                                   \
                    limits[j] = limit;                                                             \
            }                                                                                      \
        }                                                                                          \
        for (int64_t c = 0; c < columns; c++) {                                                    \
            int64_t *heap = places + c;                                                            \
            for (int64_t left = heaps ? k : 0; left-- > 1;) {                                      \
                int64_t last = heap[left * inner];                                                 \
                heap[left * inner] = heap[0];                                                      \
                suffix##_sink(x + c, heap, left, inner, flip, 0, last);                            \
            }                                                                                      \
            for (int64_t i = 0; values && i < k; i++)                                              \
                values[i * inner + c] = x[heap[i * inner] * inner + c];                            \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    /* Many of a chain: elements before the last of the best so far are gathered, and merged with these once they are\
       as many, so that hardly a branch depends on their order. */                                 \
    static void suffix##_select(const struct top *a, const type *x, type *values, int64_t *places, key flip)\
    {                                                                                              \
        const int64_t k = a->k, length = a->length;                                                \
        int64_t buffers[4][MOST_SELECTED + TOP_BLOCK + 1], *best = buffers[0], *spare = buffers[1];\
        int64_t *fresh = buffers[2], *other = buffers[3], count = 0, held = 0;                     \
        key limit = 0;                                                                             \
        for (int64_t i = 0; i < length;) {                                                         \
            const int64_t some = smaller(held ? TOP_BLOCK : k, length - i);                        \
            unsigned_key ahead = 0;                                                                \
            for (int64_t j = 0; held && j < some; j++)                                             \
                ahead |= (unsigned_key)(suffix##_at(x, i + j, 1, flip) < limit) << j;              \
            for (int64_t j = 0; !held && j < some; j++)                                            \
                fresh[count++] = PAIRED(suffix##_at(x, j, 1, flip), j);                            \
            for (; ahead; ahead &= ahead - 1) {                                                    \
                const int64_t place = i + __builtin_ctzll(ahead);                                  \
                fresh[count++] = PAIRED(suffix##_at(x, place, 1, flip), place);                    \
            }                                                                                      \
            i += some;                                                                             \
            if (count < k && i < length)                                                           \
                continue;                                                                          \
            int64_t *sorted = sort_pairs(fresh, other, count);                                     \
            best[held] = sorted[count] = INT64_MAX;                                                \
            merge_pairs(best, sorted, spare, k);                                                   \
            int64_t *merged = spare;                                                               \
            spare = best, best = merged, held = k, count = 0;                                      \
            limit = (key)(best[k - 1] >> 32);                                                      \
        }                                                                                          \
        for (int64_t i = 0; i < k; i++) {                                                          \
            places[i] = best[i] & UINT32_MAX;                                                      \
            if (values)                                                                            \
                values[i] = x[places[i]];                                                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void suffix##_chain(const struct top *a, const type *x, type *values, int64_t *places, key flip)\
    {                                                                                              \
        if (sizeof(key) == 4 && a->k > MOST_SORTED && a->k <= MOST_SELECTED)                       \
            suffix##_select(a, x, values, places, flip);                                           \
        else                                                                                       \
            suffix##_few(a, x, values, places, 1, 1, flip);                                        \
    }                                                                                              \
                                                                                                   \
    static void suffix##_chains(const struct top *a, const type *x, type *values, int64_t *places, \
                                int64_t columns, key flip)                                         \
    {                                                                                              \
        suffix##_few(a, x, values, places, a->inner, columns, flip);                               \
    }                                                                                              \
                                                                                                   \
    /* For chains little longer than k: each row is inserted into the sorted ones before it. */    \
    static void suffix##_rows(const struct top *a, const type *x, type *values, int64_t *places,   \
                              int64_t columns, key flip)                                           \
    {                                                                                              \
        key best[MOST_INSERTED][TOP_COLUMNS], row[TOP_COLUMNS] = {0};                              \
        int32_t at[MOST_INSERTED][TOP_COLUMNS], place[TOP_COLUMNS];                                \
        key beaten[TOP_COLUMNS];                                                                   \
        for (int64_t i = 0; i < a->length; i++, x += a->inner) {                                   \
            int64_t count = i < a->k ? i : a->k;                                                   \
            int any = i < a->k;                                                                    \
            if (columns == TOP_COLUMNS)                                                            \
                NOT_UNROLLED for (int64_t j = 0; j < TOP_COLUMNS; j++)                             \
                    row[j] = key_##suffix(x[j]) ^ flip;                                            \
            else                                                                                   \
                for (int64_t j = 0; j < columns; j++)                                              \
                    row[j] = key_##suffix(x[j]) ^ flip;                                            \
            if (!any)                                                                              \
                NOT_UNROLLED for (int64_t j = 0; j < TOP_COLUMNS; j++)                             \
                    any |= row[j] < best[count - 1][j];                                            \
            if (!any)                                                                              \
                continue;                                                                          \
            NOT_UNROLLED for (int64_t j = 0; j < TOP_COLUMNS; j++)                                 \
                place[j] = (int32_t)i, beaten[j] = 0;                                              \
            for (int64_t t = 0; t < count; t++)                                                    \
                NOT_UNROLLED for (int64_t j = 0; j < TOP_COLUMNS; j++) {                           \
                    key other = best[t][j];                                                        \
                    int32_t its_place = at[t][j];                                                  \
                    beaten[j] |= row[j] < other;                                                   \
                    best[t][j] = beaten[j] ? row[j] : other;                                       \
                    at[t][j] = beaten[j] ? place[j] : its_place;                                   \
                    row[j] = beaten[j] ? other : row[j];                                           \
                    place[j] = beaten[j] ? its_place : place[j];                                   \
                }                                                                                  \
            if (i < a->k) {                                                                        \
                memcpy(best[i], row, sizeof row);                                                  \
                memcpy(at[i], place, sizeof place);                                                \
            }                                                                                      \
        }                                                                                          \
        x -= a->length * a->inner;                                                                 \
        for (int64_t t = 0; t < a->k; t++)                                                         \
            for (int64_t j = 0; j < columns; j++) {                                                \
                places[t * a->inner + j] = at[t][j];                                               \
                if (values)                                                                        \
                    values[t * a->inner + j] = x[at[t][j] * a->inner + j];                         \
            }                                                                                      \
    }                                                                                              \
                                                                                                   \
    static void suffix##_sort(const struct top *a, const type *x, type *values, int64_t *places, key flip)\
    {                                                                                              \
        const int bits = a->length < LONG_CHAIN ? 8 : 11, width = 8 * sizeof(key);                 \
        const int digits = CEIL_DIV(width, bits), buckets = 1 << bits;                             \
        const unsigned_key highest = (unsigned_key)1 << (width - 1);                               \
        const int64_t length = a->length;                                                          \
        unsigned_key *keys = (unsigned_key *)a->work, *next_keys = keys + length;                  \
        uint32_t *order = (uint32_t *)(next_keys + length), *next_order = order + length;          \
        uint32_t counts[MOST_DIGITS][MOST_BUCKETS];                                                \
        for (int d = 0; d < digits; d++)                                                           \
            memset(counts[d], 0, buckets * sizeof(uint32_t));                                      \
        for (int64_t i = 0; i < length; i++) {                                                     \
            keys[i] = (unsigned_key)suffix##_at(x, i, a->inner, flip) ^ highest;                   \
            order[i] = (uint32_t)i;                                                                \
            for (int d = 0; d < digits; d++)                                                       \
                counts[d][keys[i] >> (d * bits) & (buckets - 1)]++;                                \
        }                                                                                          \
        for (int d = 0; d < digits; d++) {                                                         \
            uint32_t total = 0, *starts = counts[d];                                               \
            if (starts[keys[0] >> (d * bits) & (buckets - 1)] == length)                           \
                continue;                                                                          \
            for (int b = 0; b < buckets; b++) {                                                    \
                uint32_t count = starts[b];                                                        \
                starts[b] = total;                                                                 \
                total += count;                                                                    \
            }                                                                                      \
            for (int64_t i = 0; i < length; i++) {                                                 \
                uint32_t to = starts[keys[i] >> (d * bits) & (buckets - 1)]++;                     \
                next_keys[to] = keys[i];                                                           \
                next_order[to] = order[i];                                                         \
            }                                                                                      \
            unsigned_key *old_keys = keys;                                                         \
            uint32_t *old_order = order;                                                           \
            keys = next_keys, next_keys = old_keys;                                                \
            order = next_order, next_order = old_order;                                            \
        }                                                                                          \
        for (int64_t i = 0; i < a->k; i++) {                                                       \
            places[i * a->inner] = order[i];                                                       \
            if (values)                                                                            \
                values[i * a->inner] = x[order[i] * a->inner];                                     \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    ITEMS_OF(topk_##suffix, top)                                                                   \
    {                                                                                              \
        const int64_t inner = a->inner, wide = a->work ? 1 : TOP_COLUMNS, blocks = CEIL_DIV(inner, wide);    \
        const key flip = a->sign > 0 ? (key)-1 : 0;                                                \
        for (int64_t item = begin; item < (a->work ? a->chains : end); item++) {                   \
            const int64_t block = item / blocks, column = item % blocks * wide;                    \
            const int64_t to = block * a->k * inner + column;                                      \
            const type *x = (const type *)a->x + block * a->length * inner + column;               \
            type *values = a->values ? (type *)a->values + to : NULL;                              \
            if (a->work)                                                                           \
                suffix##_sort(a, x, values, a->places + to, flip);                                 \
            else if (inner == 1)                                                                   \
                suffix##_chain(a, x, values, a->places + to, flip);                                \
            else if (a->k <= MOST_INSERTED && a->length < 32 * a->k)                                \
                suffix##_rows(a, x, values, a->places + to, smaller(inner - column, TOP_COLUMNS), flip);\
            else                                                                                   \
                suffix##_chains(a, x, values, a->places + to, smaller(inner - column, TOP_COLUMNS), flip);\
        }                                                                                          \
    }

TOP(int8, int8_t, int32_t, uint32_t)
TOP(uint8, uint8_t, int32_t, uint32_t)
TOP(int16, int16_t, int32_t, uint32_t)
TOP(float32, float, int32_t, uint32_t)
TOP(float64, double, int64_t, uint64_t)
TOP(int32, int32_t, int32_t, uint32_t)
TOP(int64, int64_t, int64_t, uint64_t)

#define SCATTER_ENTRIES(OF, name) OF(scatterelements_##name, elements), OF(scatternd_##name, slices)

KERNELS(index, KERNEL(gather, gather), KERNEL(gather_blocks, gather_blocks),
        KERNELS_OF_SIZES(gatherelements, elements), KERNELS_OF_SIZES(gathernd, slices),
        SCATTER_ENTRIES(KERNELS_OF_SIZES, none), SCATTER_ENTRIES(KERNELS_OF_NUMBERS, add),
        SCATTER_ENTRIES(KERNELS_OF_NUMBERS, mul), SCATTER_ENTRIES(KERNELS_OF_NUMBERS, max),
        SCATTER_ENTRIES(KERNELS_OF_NUMBERS, min), KERNELS_OF_NUMBERS(topk, top), KERNEL(topk_int8, top),
        KERNEL(topk_uint8, top), KERNEL(topk_int16, top), KERNEL(scatternd_add_uint8, slices),
        KERNEL(scatternd_add_uint16, slices), KERNEL(scatternd_max_uint8, slices),
        KERNELS_OF_NUMBERS(buckets, buckets), KERNEL(update_slice, update))
