/* Products of integers and scales, bit-exact with ops/common/fixed_point.py. */
#ifndef PENSTOCK_RESCALING_H
#define PENSTOCK_RESCALING_H

#include <stdint.h>
#include "compilers.h"
#include "native.h"

INLINED int32_t shifted_right(int32_t x, int bits)
{
    return bits ? (x + (1 << bits >> 1) + (x >> 31)) >> bits : x;
}

/* The product with a multiplier, before the right shift. */
INLINED int32_t multiplied(int32_t x, int32_t multiplier, int32_t shift)
{
    const int left = shift < 0 ? -shift : 0;
    const int64_t whole = (int64_t)(int32_t)((uint32_t)x << left) * multiplier + (1 << 30);
    return (int32_t)((uint64_t)whole >> 31);
}

INLINED int32_t rescaled_integer(int32_t x, int32_t multiplier, int32_t shift)
{
    return shifted_right(multiplied(x, multiplier, shift), shift < 0 ? 0 : shift);
}

/* The same for sums so large that adding a half to the product may overflow; slower. */
INLINED int32_t rescaled_large(int32_t x, int32_t multiplier, int32_t shift)
{
    const int right = shift < 0 ? 0 : shift;
    const int32_t high = multiplied(x, multiplier, shift), lost = (int32_t)((1u << right) - 1);
    return (high >> right) + ((high & lost) > (lost >> 1) + (high < 0));
}

/* Saturate to 16 bits. */
INLINED int32_t bounded(int32_t x)
{
    return WITHIN(x, -32768, 32767);
}

#endif
