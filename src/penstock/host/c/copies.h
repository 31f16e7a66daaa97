/* Copies of tensors whose elements lie apart, or in another order of dims. */
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
/* Copy each element; the memories do not overlap. Changes the plan. */
void copy_elements(copy_plan *plan, const char *from, char *to);
#pragma GCC visibility pop

#endif
