/* Copies of tensors that are strided, or have another order of dims. */
#ifndef PENSTOCK_COPIES_H
#define PENSTOCK_COPIES_H

#include <stdint.h>

enum { MOST_DIMS = 64 };

typedef struct {
    int rank;
    int64_t size; /* bytes of an element */
    int64_t dims[MOST_DIMS];
    int64_t from[MOST_DIMS], to[MOST_DIMS]; /* strides in bytes */
} copy_plan;

#pragma GCC visibility push(hidden)
/* Copy each element; source and destination must not overlap. Modifies the plan. */
void copy_elements(copy_plan *plan, const char *from, char *to);
#pragma GCC visibility pop

#endif
