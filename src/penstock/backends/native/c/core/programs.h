/* Programs of elementwise operations: see elementwise.c. */
#ifndef PENSTOCK_PROGRAMS_H
#define PENSTOCK_PROGRAMS_H

#include <stdint.h>

enum { REGISTERS = 32, REGISTER_BYTES = 2048, PROGRAM_RANK = 8, MOST_INPUTS = 17 };

/* Ways to load an input into a register. */
enum { DIRECT, GATHERED, ONCE };

typedef struct {
    int32_t operation, to, a, b, c;
} instruction;

typedef struct {
    int32_t to, mode, size; /* register, bytes of an element */
    int32_t unused;
    int64_t strides[PROGRAM_RANK]; /* in elements, by dim of the result */
} operand;

struct elementwise {
    const void *inputs[MOST_INPUTS];
    void *output;
    const operand *operands;
    const instruction *instructions;
    const void *constants; /* 16-byte records: register, bytes of an element, element as 8 bytes */
    const int64_t *dims;
    int64_t n_inputs, n_instructions, n_constants, rank;
    int64_t tile, size, output_size; /* elements of a tile and of the result; bytes of an element */
    int64_t row; /* elements of a row if tiles end with each row, else 0 */
};

#pragma GCC visibility push(hidden)
/* Names of the operations; the last is NULL. */
extern const char *const elementwise_operations[];

/* Run a program whose tiles end with rows on `rows` rows from `first` on: on elements `begin` to `end` of each row,
   at most a tile. */
void run_in_rows(const struct elementwise *a, int64_t first, int64_t rows, int64_t begin, int64_t end);
#pragma GCC visibility pop

typedef struct {
    int32_t to, size;
    uint64_t bits;
} constant;

#endif
