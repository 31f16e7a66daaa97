/* Arguments of kernels that are also called by functions for arrays of any shapes (any_shape.h). */
#ifndef PENSTOCK_ARGUMENTS_H
#define PENSTOCK_ARGUMENTS_H

#include <stdint.h>

/* For matmul.c. */
struct product {
    const void *a, *b, *c; /* c: or NULL */
    void *y;
    int64_t rows, inner, columns;
    int64_t a_row, a_inner, b_inner, b_column; /* strides in elements */
    int64_t c_row, c_column, y_row;
    int64_t groups, strips; /* of rows, and of columns */
    int64_t padded;         /* rows of b are padded with zeros, to a multiple of 64 bytes */
    const int64_t *lead;    /* axes over products: size, strides of a, b and y */
    int64_t rank;
    double alpha, beta;
    const int64_t *chosen; /* index of b's matrix for each product, or NULL; their number and stride */
    int64_t matrices, b_matrix;
    int64_t ordered; /* the order of each sum is independent of the numbers of rows and columns */
};

/* For softmax.c. */
struct softmax {
    const void *x;
    void *y;
    int64_t outer, length, inner; /* elements before the axis, along it and after it */
    int64_t block;                /* rows or columns of an item */
    int64_t logarithm;
};

/* For index.c. */
struct top {
    const void *x;
    void *values;
    int64_t *places;
    char *work; /* length * 2 * (bytes of a key + 4) bytes; NULL for heaps */
    int64_t length, inner, k;
    int64_t sign; /* 1 for the greatest, else -1 */
    int64_t chains;
};

#endif
