/* Fused multiply-adds of a broadcast element with some vectors, the building block of tiles in panels.c and
   elements.c. */
#ifndef PENSTOCK_ADDITIONS_H
#define PENSTOCK_ADDITIONS_H

#include "floats.h"

enum { MOST_DEPTH = 768 }; /* elements past an address that a tile may read */

/* Multiply the element i past x + `k` * `by` bytes with one to four vectors and accumulate into `sums`, `apart` sums
   apart; `apart`, `by` and i are constants. There is a function for each number of vectors and each kind. In plain C,
   the compiler moves sums to other registers with each product, and spills some, as there are few registers more than
   sums. A function with intrinsics, compiled for the processors that multiply pairs, could not be inlined into those
   for all processors. */
#if defined(__AVX512F__) && !defined(__clang__) /* clang 22 writes mask registers for single halves */
#define HAS_HALVES 1
#else
#define HAS_HALVES 0
#endif
#define ADD_FUNCTION(number, kind)                                                                 \
    INLINED void add_##number##_##kind(vector *sums, int apart, const float *x, int64_t k, int by, int i, \
                                       const vector *columns)
#if defined(__FMA__)
#define SUMS_1 [s0] "+v"(sums[0])
#define SUMS_2 SUMS_1, [s1] "+v"(sums[1 * apart])
#define SUMS_3 SUMS_2, [s2] "+v"(sums[2 * apart])
#define SUMS_4 SUMS_3, [s3] "+v"(sums[3 * apart])
#define COLUMNS_1 [c0] "v"(columns[0])
#define COLUMNS_2 COLUMNS_1, [c1] "v"(columns[1])
#define COLUMNS_3 COLUMNS_2, [c2] "v"(columns[2])
#define COLUMNS_4 COLUMNS_3, [c3] "v"(columns[3])
#define TIMES(operation, i, of) operation " %" of "[c" #i "], %" of "[all], %" of "[s" #i "]\n\t"
#define TIMES_1(operation, of) TIMES(operation, 0, of)
#define TIMES_2(operation, of) TIMES_1(operation, "") TIMES(operation, 1, of)
#define TIMES_3(operation, of) TIMES_2(operation, "") TIMES(operation, 2, of)
#define TIMES_4(operation, of) TIMES_3(operation, "") TIMES(operation, 3, of)
#define ELEMENT [x] "r"(x), [k] "r"(k), [by] "i"(by), [at] "i"(4 * i), "m"(*(const float(*)[MOST_DEPTH])x)
#define LOADED(number, kind, operation, of, load)                                                  \
    ADD_FUNCTION(number, kind)                                                                     \
    {                                                                                              \
        vector all;                                                                                \
        __asm__(load " %c[at](%[x],%[k],%c[by]), %[all]\n\t" TIMES_##number(operation, of)         \
                : [all] "=&v"(all), SUMS_##number                                                  \
                : COLUMNS_##number, ELEMENT);                                                      \
    }
#define SEVERAL(kind, operation, of, load)                                                         \
    LOADED(2, kind, operation, of, load) LOADED(3, kind, operation, of, load) LOADED(4, kind, operation, of, load)
#if defined(__AVX512F__)
/* A broadcast that is used once costs nothing extra as a memory operand. */
#define SINGLE(kind, operation, to, of)                                                            \
    ADD_FUNCTION(1, kind)                                                                          \
    {                                                                                              \
        __asm__(operation " %c[at](%[x],%[k],%c[by])%{" to "%}, %" of "[c0], %" of "[s0]"          \
                : SUMS_1                                                                           \
                : COLUMNS_1, ELEMENT);                                                             \
    }
SINGLE(FLOATS, "vfmadd231ps", "1to16", "")
SEVERAL(FLOATS, "vfmadd231ps", "", "vbroadcastss")
SINGLE(PAIRS, "vdpbf16ps", "1to16", "")
SEVERAL(PAIRS, "vdpbf16ps", "", "vbroadcastss")
#if HAS_HALVES
SINGLE(HALVES, "vfmadd231ps", "1to8", "t")
SEVERAL(HALVES, "vfmadd231ps", "t", "vbroadcastss")
#endif
LOADED(1, TWOS, "vfmadd231ps", "", "vbroadcastsd")
SEVERAL(TWOS, "vfmadd231ps", "", "vbroadcastsd")
#else
LOADED(1, FLOATS, "vfmadd231ps", "", "vbroadcastss")
SEVERAL(FLOATS, "vfmadd231ps", "", "vbroadcastss")
#endif
#else
#define IN_C(number)                                                                               \
    ADD_FUNCTION(number, FLOATS)                                                                   \
    {                                                                                              \
        UNROLLED(j, number)                                                                        \
            sums[j * apart] += x[k * by / 4 + i] * columns[j];                                     \
    }
IN_C(1) IN_C(2) IN_C(3) IN_C(4)
#endif

#endif
