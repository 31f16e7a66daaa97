/* Products of matrices whose shapes only the run knows (any_shape.h). */
#include "any_shape.h"
#include "arguments.h"

/* Rows up to which a product is computed here whatever its size, and multiplications of any other. */
enum { FEW_ROWS = 4, MOST_PRODUCTS = 400000, MOST_TAIL = 1024, PRODUCT_ROWS = 4, DOT_COLUMNS = 64 };

/* Whether one stride leads from each matrix to the next, which `to` is set to. */
static int has_one_step(PyArrayObject *x, const npy_intp *dims, int batch, int64_t *to)
{
    int64_t expected = 0;
    *to = 0;
    int first = 1;
    for (int axis = batch - 1; axis >= 0; axis--) {
        if (dims[axis] == 1)
            continue;
        int own = axis - batch + PyArray_NDIM(x) - 2;
        int64_t stride = own < 0 ? 0 : any_shape_step(x, own);
        if (first)
            *to = stride;
        else if (stride != expected)
            return 0;
        expected = stride * dims[axis];
        first = 0;
    }
    return 1;
}

static PyObject *any_shape_product(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[MOST_RANK];
    if (count != ARRAYS + 2 || !any_shape_is_readable(arguments[ARRAYS]) ||
        !any_shape_is_readable(arguments[ARRAYS + 1]))
        return count < ARRAYS ? NULL : any_shape_otherwise(arguments, count);
    PyArrayObject *a = (PyArrayObject *)arguments[ARRAYS], *b = (PyArrayObject *)arguments[ARRAYS + 1];
    int i = PyArray_NDIM(a), j = PyArray_NDIM(b), rank = i > j ? i : j, type = PyArray_TYPE(a);
    int64_t a_batch, b_batch, batches = 1;
    if (i < 2 || j < 2 || rank > MOST_RANK || (type != NPY_FLOAT && type != NPY_DOUBLE) ||
        type != PyArray_TYPE(b) || PyArray_DIM(a, i - 1) != PyArray_DIM(b, j - 2))
        return any_shape_otherwise(arguments, count);
    for (int axis = 0; axis < rank - 2; axis++) {
        int own = axis - rank + i, other = axis - rank + j;
        npy_intp x = own < 0 ? 1 : PyArray_DIM(a, own), y = other < 0 ? 1 : PyArray_DIM(b, other);
        if (x != y && x != 1 && y != 1)
            return any_shape_otherwise(arguments, count);
        dims[axis] = x == 1 ? y : x;
        batches *= dims[axis];
    }
    int64_t rows = dims[rank - 2] = PyArray_DIM(a, i - 2), inner = PyArray_DIM(a, i - 1);
    int64_t columns = dims[rank - 1] = PyArray_DIM(b, j - 1);
    int64_t lanes = 64 / PyArray_ITEMSIZE(a);
    double products = (double)batches * rows * inner * columns;
    if ((rows > FEW_ROWS && products > MOST_PRODUCTS) || !has_one_step(a, dims, rank - 2, &a_batch) ||
        !has_one_step(b, dims, rank - 2, &b_batch))
        return any_shape_otherwise(arguments, count);
    int wide = type == NPY_DOUBLE, dense = any_shape_step(b, j - 1) == 1 || columns == 1;
    PyObject *checkpoint = arguments[CHECKPOINT], *y;
    if (dense && (inner <= MOST_TAIL || columns % lanes == 0)) {
        y = PyArray_EMPTY(rank, dims, type, 0);
        struct product words = {
            PyArray_DATA(a), PyArray_DATA(b), NULL, y ? PyArray_DATA((PyArrayObject *)y) : NULL,
            rows, inner, columns, any_shape_step(a, i - 2), any_shape_step(a, i - 1), a_batch,
            any_shape_step(b, j - 2), b_batch, 0, 0, 0, 1, 0, NULL, 0, 1,
        };
        return any_shape_computed(wide ? "product_float64" : "product_float32", &words,
                             batches * ((rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS),
                             10 + 0.03 * PRODUCT_ROWS * inner * columns, checkpoint, y);
    }
    if ((any_shape_step(b, j - 2) != 1 && inner > 1) || (any_shape_step(a, i - 1) != 1 && inner > 1))
        return any_shape_otherwise(arguments, count);
    y = PyArray_EMPTY(rank, dims, type, 0);
    struct dots words = {
        PyArray_DATA(a), PyArray_DATA(b), y ? PyArray_DATA((PyArrayObject *)y) : NULL,
        rows, inner, columns, any_shape_step(a, i - 2), a_batch, any_shape_step(b, j - 1), b_batch, NULL, 0, 1,
    };
    return any_shape_computed(wide ? "dots_float64" : "dots_float32", &words,
                         batches * ((columns + DOT_COLUMNS - 1) / DOT_COLUMNS),
                         10 + 0.1 * rows * inner * DOT_COLUMNS, checkpoint, y);
}

PyMethodDef any_shape_products_functions[] = {
    {"product", FAST(any_shape_product), "product(otherwise, checkpoint, None, a, b): a @ b."},
    {NULL, NULL, 0, NULL},
};
