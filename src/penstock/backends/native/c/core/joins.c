/* Concatenation of tensors of known shapes and strides. An item is a slice of the result's outermost dim: of all
   tensors, or of one if they are joined along that dim. */
#include "copies.h"
#include "native.h"

enum { MOST_PARTS = 16 };

/* `table` has the rank, the bytes of an element, the dim of the slices and the number of parts. For each part, it has
   the offset in the result, in bytes, and the item of its first slice; then for each dim the length and the strides,
   in bytes, of the part and of the result. */
struct join {
    const int64_t *table;
    char *y;
    const char *x[MOST_PARTS];
};

ITEMS_OF(join, join)
{
    const int64_t rank = a->table[0], outer = a->table[2], *entry = a->table + 4;
    for (int64_t part = 0; part < a->table[3]; part++, entry += 2 + 3 * rank) {
        const int64_t *dims = entry + 2, *sliced = dims + 3 * outer;
        const int64_t first = begin > entry[1] ? begin - entry[1] : 0, last = smaller(end - entry[1], sliced[0]);
        copy_plan plan;
        plan.rank = (int)rank;
        plan.size = a->table[1];
        for (int64_t i = 0; i < rank; i++, dims += 3)
            plan.dims[i] = dims[0], plan.from[i] = dims[1], plan.to[i] = dims[2];
        plan.dims[outer] = last - first;
        if (first < last)
            copy_elements(&plan, a->x[part] + first * sliced[1], a->y + entry[0] + first * sliced[2]);
    }
}

KERNELS(joins, KERNEL(join, join))
