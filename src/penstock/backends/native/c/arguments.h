/* Arguments of kernels that functions for arrays of any shapes (any_shape.h) call, too. */
#ifndef PENSTOCK_ARGUMENTS_H
#define PENSTOCK_ARGUMENTS_H

#include <stdint.h>

/* Of matmul.c. */
struct product {
    const void *a, *b, *c;
    void *y;
    int64_t rows, inner, columns;
    int64_t a_row, a_inner, a_batch; /* strides in elements */
    int64_t b_inner, b_batch;
    int64_t c_row, c_column; /* 0 where c is broadcast */
    int64_t padded;          /* rows of b go on with zeros, to a multiple of 64 bytes */
    double alpha, beta;
    const int64_t *chosen; /* the matrix of each product, of so many; null: its own */
    int64_t matrices;
    int64_t sharing; /* products in a row that have the same a, if their matrices are chosen */
};

struct dots {
    const void *a, *b;
    void *y;
    int64_t rows, inner, columns;
    int64_t a_row, a_batch, b_column, b_batch; /* strides in elements */
    const int64_t *chosen;                     /* as for products */
    int64_t matrices, sharing;
};

/* Of softmax.c. */
struct softmax {
    const void *x;
    void *y;
    int64_t outer, length, inner; /* elements before the axis, along it and behind it */
    int64_t block;                /* rows or columns of an item */
    int64_t logarithm;
};

#endif
