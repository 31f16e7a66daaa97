/* Attributes and pragmas that GCC and clang spell differently. */
#ifndef PENSTOCK_COMPILERS_H
#define PENSTOCK_COMPILERS_H

/* Functions of constants, of which each caller gets a copy of its own. */
#define INLINED static inline __attribute__((always_inline))

/* A loop over i from 0 on to a constant, without a jump: elements of arrays at i may be in registers. */
#define UNROLLED(i, count) _Pragma("GCC unroll 64") for (int i = 0; i < (count); i++)

/* pointer += step, in this register: compilers would have a register for each address that is a sum of it
   and of numbers that stay the same. */
#define ADVANCE(pointer, step) \
    pointer += step;           \
    __asm__("" : "+r"(pointer))

/* SHUFFLE: the elements of two vectors at these places, constants; `lanes` is a type of vectors of integers
   as wide. PERMUTED: those of one vector at the places that another has, modulo their number. TO_INT: a
   float as the nearest int. IVDEP: iterations of the loop that follows do not depend on one another.
   NOT_UNROLLED: GCC makes vectors of the loop that follows as it is; clang does of the unrolled one. */
#if defined(__clang__)
#define SHUFFLE(lanes, a, b, ...) ((void)sizeof(lanes), __builtin_shufflevector(a, b, __VA_ARGS__))
#define PERMUTED(x, places) __builtin_shufflevector(x, places)
#define TO_INT(x) (int)__builtin_rintf(x)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#define NOT_UNROLLED
#else
#define SHUFFLE(lanes, a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#define PERMUTED(x, places) __builtin_shuffle(x, places)
#define TO_INT(x) __builtin_irintf(x)
#define IVDEP _Pragma("GCC ivdep")
#define NOT_UNROLLED _Pragma("GCC unroll 1")
#endif

#endif
