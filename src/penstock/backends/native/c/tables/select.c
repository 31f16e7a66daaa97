/* Elements that are kept, set or moved by index: triangles of matrices, one-hot vectors, reversed sequences, rows of
   a table. An item is a row. Elements are any bytes. */
#include <math.h>
#include <string.h>
#include "families.h"

/* Rows of a matrix from a diagonal on, or up to it; zeros elsewhere. */
struct triangle {
    const char *x;
    char *y;
    int64_t rows, columns, diagonal, upper, size;
};

ITEMS_OF(triangle, triangle)
{
    const int64_t bytes = a->columns * a->size;
    for (int64_t item = begin, row = begin % a->rows; item < end; item++, row = row + 1 < a->rows ? row + 1 : 0) {
        const int64_t first = row + a->diagonal + !a->upper, border = WITHIN(first, 0, a->columns) * a->size;
        const char *x = a->x + item * bytes;
        char *y = a->y + item * bytes;
        /* Each is a call, which takes as long as a short row. */
        memset(a->upper ? y : y + border, 0, a->upper ? border : bytes - border);
        if (a->upper)
            memcpy(y + border, x + border, bytes - border);
        else
            memcpy(y, x, border);
    }
}

struct diagonal {
    char *y;
    const char *one;
    int64_t columns, diagonal, size;
};

ITEMS_OF(diagonal, diagonal)
{
    int64_t bytes = a->columns * a->size;
    memset(a->y + begin * bytes, 0, (end - begin) * bytes);
    for (int64_t row = begin; row < end; row++) {
        int64_t place = row + a->diagonal;
        if (place >= 0 && place < a->columns)
            memcpy(a->y + row * bytes + place * a->size, a->one, a->size);
    }
}

/* One-hot: vectors of `depth` elements along an axis, one of which is the second of `values`; none if the index is
   out of range. */
struct classes {
    const void *indices;
    const void *values;
    void *y;
    int64_t depth, inner; /* inner: adjacent vectors */
    int64_t wide;         /* indices have 64 bits */
    int64_t from_end;     /* negative indices count from there */
};

#define CLASSES(size, type)                                                                        \
    ITEMS_OF(classes_##size, classes)                                                              \
    {                                                                                              \
        const type off = ((const type *)a->values)[0], on = ((const type *)a->values)[1];          \
        const int64_t elements = a->depth * a->inner;                                              \
        for (int64_t item = begin; item < end; item++) {                                           \
            type *restrict y = (type *)a->y + item * elements;                                     \
            FILL(y, elements, off);                                                                \
            for (int64_t j = 0; j < a->inner; j++) {                                               \
                int64_t place = index_at(a->indices, a->wide, item * a->inner + j);                \
                place += place < 0 && a->from_end ? a->depth : 0;                                  \
                if (place >= 0 && place < a->depth)                                                \
                    y[place * a->inner + j] = on;                                                  \
            }                                                                                      \
        }                                                                                          \
    }

OF_SIZES(CLASSES)

/* The first elements of each sequence in reverse order; an item is a time or a sequence. */
struct sequences {
    const char *x;
    const int64_t *lengths;
    char *y;
    int64_t times, batches, bytes;
    int64_t time_first; /* the outer axis is that of times */
};

CHECKED_ITEMS_OF(sequences, sequences)
{
    int64_t inner = a->time_first ? a->batches : a->times;
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < inner; j++) {
            int64_t time = a->time_first ? i : j, batch = a->time_first ? j : i, length = a->lengths[batch];
            if (length < 0 || length > a->times)
                return 1;
            int64_t source = time < length ? length - 1 - time : time;
            int64_t from = a->time_first ? source * inner + batch : batch * inner + source;
            memcpy(a->y + (i * inner + j) * a->bytes, a->x + from * a->bytes, a->bytes);
        }
    return 0;
}

/* Rows of scores, with -inf for tokens that would repeat an n-gram of ids. */
struct repeated {
    const int64_t *ids;
    const float *scores;
    float *y;
    int64_t length, words, size; /* ids of a row, scores of a row, ids of an n-gram */
};

CHECKED_ITEMS_OF(repeated, repeated)
{
    const int64_t begun = a->size - 1, count = a->length - begun;
    for (int64_t row = begin; row < end; row++) {
        const int64_t *ids = a->ids + row * a->length, *last = ids + count;
        float *y = a->y + row * a->words;
        if (a->y != a->scores)
            memcpy(y, a->scores + row * a->words, a->words * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            if (begun && (ids[i] != *last || memcmp(ids + i, last, begun * sizeof *ids)))
                continue;
            if (ids[i + begun] < 0 || ids[i + begun] >= a->words)
                return 1;
            y[ids[i + begun]] = -INFINITY;
        }
    }
    return 0;
}

/* Rows of a table by sorted keys, and whether there was one; zeros where there was none. An item is a row. */
struct by_key {
    const void *wanted, *keys;
    const char *values;
    char *y;
    uint8_t *hits;
    int64_t count, bytes; /* of the table: keys, at least 1, and bytes of a row */
    int64_t wide;         /* keys have 64 bits */
};

/* The number of keys below one, without branches on them, which nothing predicts. */
INLINED int64_t keys_below(const void *keys, const int64_t wide, int64_t count, int64_t key)
{
    int64_t first = 0;
    for (int64_t half; count > 1; count -= half) {
        half = count / 2;
        first += half * (index_at(keys, wide, first + half - 1) < key);
    }
    return first + (index_at(keys, wide, first) < key);
}

ITEMS_OF(by_key, by_key)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t wide = a->wide, key = index_at(a->wanted, wide, i);
        const int64_t at = wide ? keys_below(a->keys, 1, a->count, key) : keys_below(a->keys, 0, a->count, key);
        a->hits[i] = at < a->count && index_at(a->keys, wide, at) == key;
        if (a->hits[i])
            memcpy(a->y + i * a->bytes, a->values + at * a->bytes, a->bytes);
        else
            memset(a->y + i * a->bytes, 0, a->bytes);
    }
}

/* Elements at their places of the whole result, zeros elsewhere: one item, as a place may come twice. */
struct unpooled {
    const void *x;
    const int64_t *places;
    void *y;
    int64_t count, size; /* elements of x, and of the result */
};

#define UNPOOLED(bytes, type)                                                                     \
    CHECKED_ITEMS_OF(unpooled_##bytes, unpooled)                                                  \
    {                                                                                             \
        const type *x = a->x;                                                                     \
        type *restrict y = a->y;                                                                  \
        memset(y, 0, a->size * sizeof(type));                                                     \
        for (int64_t i = 0; i < a->count; i++) {                                                  \
            if ((uint64_t)a->places[i] >= (uint64_t)a->size)                                      \
                return 1;                                                                         \
            y[a->places[i]] = x[i];                                                               \
        }                                                                                         \
        return 0;                                                                                 \
    }

UNPOOLED(2, uint16_t)
UNPOOLED(4, uint32_t)
UNPOOLED(8, uint64_t)

/* A cache whose entries are replaced from a start on, which each sample has. An item is a row of entries. */
struct updated {
    const char *x, *update;
    const void *starts; /* or NULL */
    char *y;
    int64_t rows; /* of a sample */
    int64_t size, length, bytes; /* entries of a row, those of the update, and bytes of one */
    int64_t wide, circular;
};

CHECKED_ITEMS_OF(updated, updated)
{
    for (int64_t item = begin; item < end; item++) {
        const char *update = a->update + item * a->length * a->bytes;
        char *y = a->y + item * a->size * a->bytes;
        int64_t start = a->starts ? index_at(a->starts, a->wide, item / a->rows) : 0;
        if (a->circular)
            start = (start % a->size + a->size) % a->size;
        else if (start < 0 || start > a->size - a->length)
            return 1;
        if (a->x != a->y)
            memcpy(y, a->x + item * a->size * a->bytes, a->size * a->bytes);
        const int64_t first = smaller(a->length, a->size - start);
        memcpy(y + start * a->bytes, update, first * a->bytes);
        memcpy(y, update + first * a->bytes, (a->length - first) * a->bytes);
    }
    return 0;
}

KERNELS(select, KERNEL(unpooled_2, unpooled), KERNEL(unpooled_4, unpooled), KERNEL(unpooled_8, unpooled),
        KERNEL(updated, updated), KERNEL(triangle, triangle), KERNEL(diagonal, diagonal),
        KERNELS_OF_SIZES(classes, classes), KERNEL(sequences, sequences), KERNEL(repeated, repeated),
        KERNEL(by_key, by_key))
