/* Attributes and pragmas that GCC and clang spell differently. */
#ifndef PENSTOCK_COMPILERS_H
#define PENSTOCK_COMPILERS_H

/* For functions of constants: each call is specialized. */
#define INLINED static inline __attribute__((always_inline))

/* An unrolled loop over i from 0 up to a constant: array elements at i may be kept in registers. */
#define UNROLLED(i, count) _Pragma("GCC unroll 64") for (int i = 0; i < (count); i++)

/* pointer += step, in this register: compilers would otherwise keep a register for each sum of the pointer and a loop
   invariant. */
#define ADVANCE(pointer, step) \
    pointer += step;           \
    __asm__("" : "+r"(pointer))

/* SHUFFLE: the elements of two vectors at constant indices; `lanes` is an integer vector type of the same width.
   PERMUTED: the elements of one vector at the indices in another, modulo their number; OF_TWO: of two vectors of
   `count` elements. TO_INT: a float rounded to the
   nearest int. IVDEP: iterations of the following loop are independent. NOT_UNROLLED: GCC vectorizes the following
   loop as it is; clang vectorizes the unrolled one. */
#if defined(__clang__)
#define SHUFFLE(lanes, a, b, ...) ((void)sizeof(lanes), __builtin_shufflevector(a, b, __VA_ARGS__))
#define PERMUTED(x, places) __builtin_shufflevector(x, places)
#define OF_TWO(count, a, b, places)                                                               \
    ((__typeof__(a))(((__typeof__(places))PERMUTED(a, places) & ((places) < (count))) |           \
                     ((__typeof__(places))PERMUTED(b, places) & ((places) >= (count)))))
#define TO_INT(x) (int)__builtin_rintf(x)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#define NOT_UNROLLED
#else
#define SHUFFLE(lanes, a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#define PERMUTED(x, places) __builtin_shuffle(x, places)
#define OF_TWO(count, a, b, places) __builtin_shuffle(a, b, places)
#define TO_INT(x) __builtin_irintf(x)
#define IVDEP _Pragma("GCC ivdep")
#define NOT_UNROLLED _Pragma("GCC unroll 1")
#endif

#endif
