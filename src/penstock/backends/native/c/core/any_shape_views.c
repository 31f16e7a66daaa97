/* Views, and reshapes to a shape given by another array (any_shape.h). */
#include "any_shape.h"
#include <math.h>
#include <string.h>

/* Longest range that is computed here, where a run cannot be stopped. */
enum { MOST_NUMBERS = 1 << 20 };

/* Read a list of integers; return their number, or -1 if it is not such a list. */
static int numbers_of(PyObject *given, int64_t *to)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || !PyArray_ISCARRAY_RO(x) || PyArray_SIZE(x) > MOST_RANK ||
        (PyArray_TYPE(x) != NPY_INT64 && PyArray_TYPE(x) != NPY_INT32))
        return -1;
    for (int i = 0; i < PyArray_SIZE(x); i++)
        to[i] = PyArray_TYPE(x) == NPY_INT64 ? ((const int64_t *)PyArray_DATA(x))[i]
                                             : ((const int32_t *)PyArray_DATA(x))[i];
    return (int)PyArray_SIZE(x);
}

static int is_plain_array(PyObject *given)
{
    return PyArray_Check(given) && !PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)given));
}

static PyObject *any_shape_expand(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t target[MOST_RANK];
    npy_intp dims[MOST_RANK], strides[MOST_RANK];
    PyObject *const *given = arguments + ARRAYS;
    PyArrayObject *x = (PyArrayObject *)given[0];
    int n = count == ARRAYS + 2 && is_plain_array(given[0]) ? numbers_of(given[1], target) : -1;
    int rank = n < 0 ? 0 : n > PyArray_NDIM(x) ? n : PyArray_NDIM(x);
    if (n < 0 || rank > MOST_RANK)
        return any_shape_otherwise(arguments, count);
    for (int axis = 0; axis < rank; axis++) {
        int own = axis - rank + PyArray_NDIM(x), other = axis - rank + n;
        npy_intp dim = own < 0 ? 1 : PyArray_DIM(x, own);
        int64_t wanted = other < 0 ? 1 : target[other];
        if (wanted < 0 || (dim != wanted && dim != 1 && wanted != 1))
            return any_shape_otherwise(arguments, count);
        dims[axis] = dim == 1 ? wanted : dim;
        strides[axis] = dim == 1 ? 0 : PyArray_STRIDE(x, own);
    }
    return array_view(x, given[0], rank, dims, strides, PyArray_DATA(x));
}

/* As NumPy's, but elements that are read many times are copied by compiled code. */
static PyObject *any_shape_reshape(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t target[MOST_RANK];
    npy_intp dims[MOST_RANK], known = 1;
    PyObject *const *given = arguments + ARRAYS;
    PyArrayObject *x = (PyArrayObject *)given[0];
    int rank = count == ARRAYS + 2 && is_plain_array(given[0]) ? numbers_of(given[1], target) : -1;
    int inferred = -1;
    for (int i = 0; i < rank; i++) {
        int copied = target[i] == 0 && arguments[SETTINGS] != Py_True;
        if (target[i] < -1 || (target[i] == -1 && inferred >= 0) || (copied && i >= PyArray_NDIM(x)))
            return any_shape_otherwise(arguments, count);
        inferred = target[i] == -1 ? i : inferred;
        dims[i] = target[i] == -1 ? 1 : copied ? PyArray_DIM(x, i) : target[i];
        if (__builtin_mul_overflow(known, dims[i], &known))
            return any_shape_otherwise(arguments, count);
    }
    if (rank < 0 || known < 1 || PyArray_SIZE(x) % known || !PyArray_SIZE(x) ||
        (inferred < 0 && PyArray_SIZE(x) != known))
        return any_shape_otherwise(arguments, count);
    if (inferred >= 0)
        dims[inferred] = PyArray_SIZE(x) / known;
    PyArray_Dims shape = {dims, rank};
    int repeats = 0;
    for (int axis = 0; axis < PyArray_NDIM(x); axis++)
        repeats |= PyArray_STRIDE(x, axis) == 0 && PyArray_DIM(x, axis) > 1;
    if (!repeats)
        return PyArray_Newshape(x, &shape, NPY_CORDER);
    PyObject *copy = array_copied(NULL, given[0]);
    PyObject *y = copy ? PyArray_Newshape((PyArrayObject *)copy, &shape, NPY_CORDER) : NULL;
    Py_XDECREF(copy);
    return y;
}

static PyObject *any_shape_slice(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t bounds[4][MOST_RANK];
    npy_intp dims[MOST_RANK], strides[MOST_RANK];
    PyObject *const *given = arguments + ARRAYS;
    if (count < ARRAYS + 3 || count > ARRAYS + 5 || !is_plain_array(given[0]))
        return any_shape_otherwise(arguments, count);
    PyArrayObject *x = (PyArrayObject *)given[0];
    int rank = PyArray_NDIM(x), n = numbers_of(given[1], bounds[0]), seen = 0;
    char *data = PyArray_BYTES(x);
    for (int k = 1; k < 4; k++) {
        int is_given = k < count - ARRAYS - 1 && given[k + 1] != Py_None;
        if (is_given && numbers_of(given[k + 1], bounds[k]) != n)
            return any_shape_otherwise(arguments, count);
        for (int i = 0; !is_given && i < n; i++)
            bounds[k][i] = k == 2 ? i : 1;
    }
    if (n < 0 || rank > MOST_RANK)
        return any_shape_otherwise(arguments, count);
    memcpy(dims, PyArray_DIMS(x), rank * sizeof *dims);
    memcpy(strides, PyArray_STRIDES(x), rank * sizeof *strides);
    for (int i = 0; i < n; i++) {
        int64_t axis = bounds[2][i] < 0 ? bounds[2][i] + rank : bounds[2][i], by = bounds[3][i];
        if (axis < 0 || axis >= rank || by < 1 || seen & 1 << axis)
            return any_shape_otherwise(arguments, count);
        seen |= 1 << axis;
        int64_t dim = dims[axis], ends[2];
        for (int k = 0; k < 2; k++) {
            ends[k] = bounds[k][i] < 0 ? bounds[k][i] + dim : bounds[k][i];
            ends[k] = ends[k] < 0 ? 0 : ends[k] > dim ? dim : ends[k];
        }
        dims[axis] = ends[1] > ends[0] ? (ends[1] - ends[0] - 1) / by + 1 : 0;
        data += dims[axis] ? ends[0] * strides[axis] : 0;
        strides[axis] *= dims[axis] > 1 ? by : 1;
    }
    return array_view(x, given[0], rank, dims, strides, data);
}

/* As NumPy's kernel, which computes floats as float64. */
#define NUMBERS_OF(type, first, by)                                                               \
    IVDEP for (int64_t i = 0; i < length; i++) ((type *)data)[i] = (type)((first) + i * (by))

/* For int32, int64, float32 and float64. */
static PyObject *any_shape_range(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t bounds[3][MOST_RANK] = {{0}}, length = 0;
    double reals[3] = {0};
    int type = -1;
    if (count != ARRAYS + 3)
        return any_shape_otherwise(arguments, count);
    for (int i = 0; i < 3; i++) {
        PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS + i];
        if (!PyArray_Check(arguments[ARRAYS + i]) || !PyArray_ISCARRAY_RO(x) || PyArray_SIZE(x) != 1 ||
            (i && PyArray_TYPE(x) != type))
            return any_shape_otherwise(arguments, count);
        type = PyArray_TYPE(x);
        if (type == NPY_FLOAT || type == NPY_DOUBLE)
            reals[i] = type == NPY_FLOAT ? *(const float *)PyArray_DATA(x) : *(const double *)PyArray_DATA(x);
        else if (numbers_of(arguments[ARRAYS + i], bounds[i]) != 1 ||
                 bounds[i][0] != (int32_t)bounds[i][0])
            return any_shape_otherwise(arguments, count);
    }
    const int64_t first = bounds[0][0], span = bounds[1][0] - first, by = bounds[2][0];
    const double numbers = ceil((reals[1] - reals[0]) / reals[2]);
    if (type == NPY_FLOAT || type == NPY_DOUBLE)
        length = numbers > -INFINITY && numbers <= MOST_NUMBERS ? numbers > 0 ? (int64_t)numbers : 0 : -1;
    else if (by && (span > 0) == (by > 0) && span)
        length = (span - (by > 0 ? 1 : -1)) / by + 1;
    if (length < 0 || length > MOST_NUMBERS || (!by && !reals[2]))
        return any_shape_otherwise(arguments, count);
    PyObject *y = PyArray_EMPTY(1, (npy_intp[]){length}, type, 0);
    void *data = y ? PyArray_DATA((PyArrayObject *)y) : NULL;
    if (y && type == NPY_INT64)
        NUMBERS_OF(int64_t, first, by);
    else if (y && type == NPY_INT32)
        NUMBERS_OF(int32_t, first, by);
    else if (y && type == NPY_FLOAT)
        NUMBERS_OF(float, reals[0], reals[2]);
    else if (y)
        NUMBERS_OF(double, reals[0], reals[2]);
    return y;
}

PyMethodDef any_shape_views_functions[] = {
    {"expand", FAST(any_shape_expand), "expand(otherwise, checkpoint, None, x, shape): a view of x."},
    {"range", FAST(any_shape_range), "range(otherwise, checkpoint, None, start, limit, delta)."},
    {"reshape", FAST(any_shape_reshape), "reshape(otherwise, checkpoint, allowzero, x, shape)."},
    {"slice", FAST(any_shape_slice), "slice(otherwise, checkpoint, None, x, *bounds): a view of x."},
    {NULL, NULL, 0, NULL},
};
