/* The negative log-likelihood of targets. An item is a block of targets; their sum or mean is one item. */
#include "families.h"

enum { EACH, SUM, MEAN };

struct loss {
    const void *x; /* [outer, classes, inner] */
    const void *targets; /* [outer, inner] */
    const void *weights; /* of each class, or NULL */
    void *y;
    int64_t size, classes, inner, block;
    int64_t wide; /* targets of 64 bits */
    int64_t ignores, ignored;
    int64_t reduction;
};

#define LOSS(suffix, type)                                                                        \
    CHECKED_ITEMS_OF(loss_##suffix, loss)                                                         \
    {                                                                                             \
        const type *x = a->x, *weights = a->weights;                                              \
        type *y = a->y;                                                                           \
        const int64_t first = begin * a->block, last = smaller(end * a->block, a->size);          \
        double total = 0, shares = 0;                                                             \
        int64_t row = first / a->inner * a->classes, at = first % a->inner;                       \
        for (int64_t i = first; i < last; i++, at++) {                                            \
            const int64_t target = index_at(a->targets, a->wide, i);                              \
            const int ignored = a->ignores && target == a->ignored;                               \
            type share = 0, own = 0;                                                              \
            if (at == a->inner)                                                                   \
                row += a->classes, at = 0;                                                        \
            if (!ignored) {                                                                       \
                if (target < 0 || target >= a->classes)                                           \
                    return 1;                                                                     \
                share = weights ? weights[target] : 1;                                            \
                own = -x[(row + target) * a->inner + at] * share;                                 \
            }                                                                                     \
            if (a->reduction == EACH)                                                             \
                y[i] = own;                                                                       \
            total += own;                                                                         \
            shares += share;                                                                      \
        }                                                                                         \
        if (a->reduction != EACH)                                                                 \
            *y = (type)(a->reduction == MEAN ? total / shares : total);                           \
        return 0;                                                                                 \
    }

LOSS(float32, float)
LOSS(float64, double)

KERNELS(loss, KERNELS_OF_FLOATS(loss, loss))
