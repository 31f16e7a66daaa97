/* Programs of elementwise operations: see elementwise.c. */
#ifndef PENSTOCK_PROGRAMS_H
#define PENSTOCK_PROGRAMS_H

#include <stdint.h>

enum { REGISTERS = 32, REGISTER_BYTES = 2048, PROGRAM_RANK = 8, MOST_INPUTS = 17 };

/* How an input comes into a register. */
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
    const void *constants; /* (register, bytes of an element, element as 8 bytes) each 16 bytes */
    const int64_t *dims;
    int64_t n_inputs, n_instructions, n_constants, rank;
    int64_t tile, size, output_size; /* elements of a tile and of the result; bytes of one */
    int64_t row; /* where tiles end with each row: its elements, else 0 */
};

typedef struct {
    int32_t to, size;
    uint64_t bits;
} constant;

#endif
