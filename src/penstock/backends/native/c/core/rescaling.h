/* Integers times scales, as ops/common/fixed_point.py has them. */
#ifndef PENSTOCK_RESCALING_H
#define PENSTOCK_RESCALING_H

#include <stdint.h>
#include "compilers.h"
#include "native.h"

INLINED int32_t shifted_right(int32_t x, int bits)
{
    const int32_t below = (int32_t)((1u << bits) - 1); /* the bits that are lost; a half may not fit beside x */
    return (x >> bits) + ((x & below) > (below >> 1) + (x < 0));
}

INLINED int32_t rescaled_integer(int32_t x, int32_t multiplier, int32_t shift)
{
    const int left = shift < 0 ? -shift : 0, right = shift < 0 ? 0 : shift;
    const int64_t whole = (int64_t)(int32_t)((uint32_t)x << left) * multiplier + (1 << 30);
    return shifted_right((int32_t)((uint64_t)whole >> 31), right);
}

/* What fits into 16 bits. */
INLINED int32_t bounded(int32_t x)
{
    return WITHIN(x, -32768, 32767);
}

#endif
