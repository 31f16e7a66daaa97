/* Cumulative sums and products along an axis, in the same order as NumPy's. An item is a block of adjacent columns,
   or of rows if the axis is the last one. Up to BLOCKS of columns are computed together: short pieces of long rows
   are too far apart for the hardware prefetcher. */
#include "families.h"

struct cumulative {
    const void *x;
    void *y;
    int64_t outer;  /* elements before the axis */
    int64_t length; /* of the axis */
    int64_t inner;  /* elements after it */
    int64_t exclusive, reverse;
};

enum { COLUMNS = 128, BLOCKS = 16, ROWS = 8 };

/* Compute `count` chains of `length` elements, whose first elements are `apart` elements apart, with `step` between
   elements of a chain. Chains are independent, so that additions overlap. */
#define CHAINS(name, type, operator, identity)                                                    \
    static inline void name##_chains(const type *restrict x, type *restrict y, int64_t count,     \
                                     int64_t apart, int64_t length, int64_t step,                 \
                                     int64_t exclusive)                                           \
    {                                                                                             \
        int64_t i = exclusive ? 2 : 1;                                                            \
        for (int64_t j = 0; exclusive && j < count; j++)                                          \
            y[j * apart] = identity;                                                              \
        for (int64_t j = 0; i <= length && j < count; j++)                                        \
            y[(i - 1) * step + j * apart] = x[j * apart];                                         \
        for (; i < length; i++) {                                                                 \
            const type *restrict from = x + (i - exclusive) * step;                               \
            type *restrict to = y + i * step;                                                     \
            for (int64_t j = 0; j < count; j++)                                                   \
                to[j * apart] = to[j * apart - step] operator from[j * apart];                    \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, cumulative)                                                                    \
    {                                                                                             \
        int64_t inner = a->inner, length = a->length, exclusive = a->exclusive != 0;              \
        int64_t step = a->reverse ? -inner : inner, back = a->reverse ? (length - 1) * inner : 0; \
        int64_t blocks = CEIL_DIV(inner, COLUMNS);                                                \
        for (int64_t item = begin, next; item < end; item = next)                                 \
            if (inner == 1) {                                                                     \
                int64_t row = item * ROWS, rest = a->outer - row;                                 \
                const type *x = (const type *)a->x + row * length + back;                         \
                type *y = (type *)a->y + row * length + back;                                     \
                next = item + 1;                                                                  \
                if (rest >= ROWS)                                                                 \
                    name##_chains(x, y, ROWS, length, length, step, exclusive);                   \
                else                                                                              \
                    name##_chains(x, y, rest, length, length, step, exclusive);                   \
            }                                                                                     \
            else {                                                                                \
                int64_t column = item % blocks * COLUMNS;                                         \
                int64_t first = item / blocks * length * inner + column + back;                   \
                next = smaller(smaller(item + BLOCKS, end), item - item % blocks + blocks);       \
                name##_chains((const type *)a->x + first, (type *)a->y + first,                   \
                              smaller((next - item) * COLUMNS, inner - column), 1, length, step, exclusive);\
            }                                                                                     \
    }

#define SUMS(suffix, type, real) CHAINS(cumsum_##suffix, type, +, 0)
#define PRODUCTS(suffix, type, real) CHAINS(cumprod_##suffix, type, *, 1)
OF_NUMBERS(SUMS)
OF_NUMBERS(PRODUCTS)

KERNELS(cumulative, KERNELS_OF_NUMBERS(cumsum, cumulative), KERNELS_OF_NUMBERS(cumprod, cumulative))
