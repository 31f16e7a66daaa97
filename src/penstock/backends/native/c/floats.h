/* Vectors of float32, the widest that the processor has. */
#ifndef PENSTOCK_FLOATS_H
#define PENSTOCK_FLOATS_H

#include <string.h>
#include "native.h"
#include "vectors.h"

enum { LANES = VECTOR_BYTES / 4 };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

static inline vector loaded(const float *from)
{
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

#endif
