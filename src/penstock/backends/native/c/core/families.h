/* Families of functions: DEFINE(suffix, type, ...) for each element type, or for each element size if elements are
   only copied, and the table entries of kernels whose names end in these suffixes. */
#ifndef PENSTOCK_FAMILIES_H
#define PENSTOCK_FAMILIES_H

#include "native.h"

#define OF_SIZES(DEFINE) DEFINE(1, uint8_t) DEFINE(2, uint16_t) DEFINE(4, uint32_t) DEFINE(8, uint64_t)
#define KERNELS_OF_SIZES(name, arguments)                                                        \
    KERNEL(name##_1, arguments), KERNEL(name##_2, arguments), KERNEL(name##_4, arguments),       \
        KERNEL(name##_8, arguments)

/* An index of 64 bits if indices are `wide`, else of 32. */
static inline int64_t index_at(const void *indices, int64_t wide, int64_t i)
{
    return wide ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
}

/* Combine two elements. Integers wrap in unsigned types. NaN is rare, so that branches on it are predicted; which of
   two numbers is higher is not. */
#define REPLACED(a, b) (b)
#define ADDED(a, b) ((a) + (b))
#define MULTIPLIED(a, b) ((a) * (b))
#define HIGHER_OF(a, b) ((b) != (b) ? (b) : (b) > (a) ? (b) : (a))
#define LOWER_OF(a, b) ((b) != (b) ? (b) : (b) < (a) ? (b) : (a))

/* With the type in which they are computed. */
#define OF_NUMBERS(DEFINE)                                                                       \
    DEFINE(float32, float, float) DEFINE(float64, double, double) DEFINE(int32, int32_t, float)  \
    DEFINE(int64, int64_t, float)
#define KERNELS_OF_FLOATS(name, arguments) KERNEL(name##_float32, arguments), KERNEL(name##_float64, arguments)
#define KERNELS_OF_NUMBERS(name, arguments)                                                      \
    KERNELS_OF_FLOATS(name, arguments), KERNEL(name##_int32, arguments), KERNEL(name##_int64, arguments)

/* Quantized codes, with their bounds. */
#define OF_CODES(DEFINE)                                                                         \
    DEFINE(u1, uint8_t, 0, 255) DEFINE(s1, int8_t, -128, 127) DEFINE(u2, uint16_t, 0, 65535)     \
    DEFINE(s2, int16_t, -32768, 32767)
#define KERNELS_OF_CODES(name, arguments)                                                        \
    KERNEL(name##_u1, arguments), KERNEL(name##_s1, arguments), KERNEL(name##_u2, arguments),    \
        KERNEL(name##_s2, arguments)

#endif
