/* Python functions that run kernels on arrays whose shapes are known only at run time. They take arrays of any shapes
   and strides, and do at run time what backends/native does ahead of time for known shapes. Cases without a kernel
   are left to `otherwise`. */
#ifndef PENSTOCK_ANY_SHAPE_H
#define PENSTOCK_ANY_SHAPE_H

#include "call.h"

/* The leading arguments of all functions. */
enum { OTHERWISE, CHECKPOINT, SETTINGS, ARRAYS };

#pragma GCC visibility push(hidden)
/* Return the result of NumPy's function on the arrays among the arguments. */
PyObject *any_shape_otherwise(PyObject *const *arguments, Py_ssize_t count);

/* Whether kernels can read an array in place, given its strides. */
int any_shape_is_readable(PyObject *given);

/* Run a kernel; return `y`, whose reference it takes, or NULL with an error. */
PyObject *any_shape_computed(const char *kernel, const void *words, int64_t items, double item_ns,
                        PyObject *checkpoint, PyObject *y);
#pragma GCC visibility pop

/* The stride of an axis in elements, 0 for an axis of length 1. */
static inline int64_t any_shape_step(PyArrayObject *x, int axis)
{
    return PyArray_DIM(x, axis) == 1 ? 0 : PyArray_STRIDE(x, axis) / PyArray_ITEMSIZE(x);
}

#endif
