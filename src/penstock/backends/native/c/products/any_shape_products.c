/* Products of matrices whose shapes are known only at run time (any_shape.h). */
#include "any_shape.h"
#include "arguments.h"

/* Bytes of a strip of columns, and rows of an item, as in matmul.py. With a constant matrix and more rows or
   multiplications than these, kernels compiled for known shapes are faster. */
enum { STRIP = 256, MOST_ROWS = 256, FEW_ROWS = 4, MOST_PRODUCTS = 400000 };

static PyObject *any_shape_product(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[MOST_RANK];
    int64_t lead[MOST_RANK][4], products = 1;
    if (count != ARRAYS + 2 || !any_shape_is_readable(arguments[ARRAYS]) ||
        !any_shape_is_readable(arguments[ARRAYS + 1]))
        return count < ARRAYS ? NULL : any_shape_otherwise(arguments, count);
    PyArrayObject *a = (PyArrayObject *)arguments[ARRAYS], *b = (PyArrayObject *)arguments[ARRAYS + 1];
    int i = PyArray_NDIM(a), j = PyArray_NDIM(b), rank = i > j ? i : j, type = PyArray_TYPE(a);
    if (i < 2 || j < 2 || rank > MOST_RANK || (type != NPY_FLOAT && type != NPY_DOUBLE) ||
        type != PyArray_TYPE(b) || PyArray_DIM(a, i - 1) != PyArray_DIM(b, j - 2))
        return any_shape_otherwise(arguments, count);
    int64_t rows = dims[rank - 2] = PyArray_DIM(a, i - 2), inner = PyArray_DIM(a, i - 1);
    int64_t columns = dims[rank - 1] = PyArray_DIM(b, j - 1), after = rows * columns;
    for (int axis = rank - 3; axis >= 0; axis--) {
        int own = axis - rank + i, other = axis - rank + j;
        npy_intp x = own < 0 ? 1 : PyArray_DIM(a, own), y = other < 0 ? 1 : PyArray_DIM(b, other);
        if (x != y && x != 1 && y != 1)
            return any_shape_otherwise(arguments, count);
        lead[axis][0] = dims[axis] = x == 1 ? y : x;
        lead[axis][1] = own < 0 ? 0 : any_shape_step(a, own);
        lead[axis][2] = other < 0 ? 0 : any_shape_step(b, other);
        lead[axis][3] = after;
        products *= dims[axis];
        after *= dims[axis];
    }
    const double macs = (double)products * rows * inner * columns;
    if (arguments[SETTINGS] == Py_True && rows > FEW_ROWS && macs > MOST_PRODUCTS)
        return any_shape_otherwise(arguments, count);
    PyObject *y = PyArray_EMPTY(rank, dims, type, 0);
    struct product p = {
        .a = PyArray_DATA(a), .b = PyArray_DATA(b), .y = y ? PyArray_DATA((PyArrayObject *)y) : NULL,
        .rows = rows, .inner = inner, .columns = columns, .a_row = any_shape_step(a, i - 2),
        .a_inner = any_shape_step(a, i - 1), .b_inner = any_shape_step(b, j - 2),
        .b_column = any_shape_step(b, j - 1), .y_row = columns, .lead = lead[0],
        .rank = rank - 2, .alpha = 1,
    };
    /* A leading axis along which the right matrix is broadcast becomes rows. */
    int64_t *last = rank > 2 ? lead[rank - 3] : NULL;
    if (last && !last[2] && (rows == 1 || last[1] == rows * p.a_row)) {
        p.a_row = rows == 1 ? last[1] : p.a_row;
        p.rows = rows * last[0];
        products /= last[0];
        p.rank--;
    }
    /* A single column is contiguous: compute it as a row of the transposed product. */
    if (columns == 1) {
        struct product q = p;
        p.a = q.b, p.a_inner = q.b_inner, p.a_row = 0, p.rows = 1;
        p.b = q.a, p.b_inner = q.a_inner, p.b_column = q.a_row, p.columns = q.rows;
        for (int axis = 0; axis < rank - 2; axis++) {
            int64_t step = lead[axis][1];
            lead[axis][1] = lead[axis][2], lead[axis][2] = step;
        }
    }
    p.strips = CEIL_DIV(p.columns * PyArray_ITEMSIZE(a), STRIP);
    p.groups = CEIL_DIV(p.rows, MOST_ROWS);
    int64_t items = products * p.groups * p.strips;
    const double ns = 0.02 * PyArray_ITEMSIZE(a) / 4 * macs / items;
    return any_shape_computed(type == NPY_DOUBLE ? "product_float64" : "product_float32", &p, items,
                              10 + ns, arguments[CHECKPOINT], y);
}

PyMethodDef any_shape_products_functions[] = {
    {"product", FAST(any_shape_product), "product(otherwise, checkpoint, constant, a, b): a @ b; `constant`: whether b is."},
    {NULL, NULL, 0, NULL},
};
