/* Kernels, as the call object of module.c sees them.

   A kernel computes the items `begin` up to `end` of its work: rows, windows, trees. Items are independent, so that
   the caller can divide them among threads, and check between them whether a run must stop. The arguments are a
   struct with fields of 8 bytes only: pointers, int64_t and double. Returns 0, or another number if the inputs are
   invalid: the NumPy kernel of the same node then raises the precise error.

   If items are few and long, threads can share each item: a kernel may have a function for a piece of a stage. The
   stages of an item are sequential: all pieces of a stage depend on all pieces of the one before.

   Results must not depend on the number of threads or the division into items and pieces. Files are compiled once for
   each instruction set, without contraction to fused multiply-add unless they say so. */
#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include "compilers.h"

typedef int (*kernel_function)(const void *arguments, int64_t begin, int64_t end);

/* The pieces of a stage from `first` up to `last`; stages are counted over all items. In odd stages the last pieces
   come first, since caches still hold what they read in the stage before. */
typedef int (*stage_function)(const void *arguments, int64_t stage, int64_t first, int64_t last);

typedef struct {
    const char *name;
    kernel_function run;  /* NULL if the kernel has only stages */
    int64_t words;        /* fields of the arguments */
    stage_function stage; /* NULL if the kernel has no stages */
} kernel_entry;

/* Begin the function of a kernel; `a` points to its arguments, a struct of that name. CHECKED_ITEMS_OF returns
   whether the inputs are invalid, ITEMS_OF nothing. */
#define ITEMS_OF(name, arguments) KERNEL_OF(name, arguments, void, , return 0;)
#define CHECKED_ITEMS_OF(name, arguments) KERNEL_OF(name, arguments, int, return, )
#define KERNEL_OF(name, arguments, result, before, behind)                                        \
    static result name##_items(const struct arguments *a, int64_t begin, int64_t end);            \
    static int name(const void *given, int64_t begin, int64_t end) { before name##_items(given, begin, end); behind }\
    static result name##_items(const struct arguments *a, int64_t begin, int64_t end)

#define KERNEL(name, arguments) {#name, name, sizeof(struct arguments) / 8, NULL}
#define STAGED_KERNEL(name, arguments, run, stage) {#name, run, sizeof(struct arguments) / 8, stage}
/* The table of the kernels of a file, which setup.py finds. */
#define KERNELS(name, ...) const kernel_entry name##_kernels[] = {__VA_ARGS__, {NULL, NULL, 0, NULL}};

/* a / b rounded up, of a >= 0 and b > 0. A macro: it has the types of its arguments, and may be a constant. */
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Set elements of an array to a value. */
#define FILL(to, count, value)                                                                    \
    for (int64_t place_of = 0; place_of < (count); place_of++)                                    \
        (to)[place_of] = (value)

/* x clamped to these bounds; the lower one if x is NaN. In this order, compilers use one instruction for each. */
#define WITHIN(x, low, high)                                                                      \
    ({                                                                                            \
        const __typeof__(x) any_x = (x), high_x = any_x > (low) ? any_x : (low);                  \
        high_x < (high) ? high_x : (high);                                                        \
    })

/* Names that occur in the modules of several instruction sets are local to each. */
#pragma GCC visibility push(hidden)

/* Features of the processor and the system, which module.c detects once: x86-64 instructions that zig's library does
   not report; AMX: tiles of int8 and of bfloat16; HALF_VECTORS: 512-bit vectors are computed in two halves. */
enum { LEVEL_2 = 1, LEVEL_3 = 2, LEVEL_4 = 4, AVX_VNNI = 8, AVX512_VNNI = 16 };
enum { AVX512_VBMI = 32, AVX512_BF16 = 64, AMX = 128, HALF_VECTORS = 256 };
extern int features;

#pragma GCC visibility pop

#endif
