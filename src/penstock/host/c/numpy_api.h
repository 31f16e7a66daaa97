/* NumPy's C interface, and the functions of the extension module that take any arrays or strings. */
#ifndef PENSTOCK_NUMPY_API_H
#define PENSTOCK_NUMPY_API_H

#define PY_SSIZE_T_CLEAN
#include <stdio.h> /* whose FILE the headers of NumPy need */
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL penstock_numpy_api
#ifndef IMPORTS_NUMPY /* as module.c alone does */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* The entry of a function of the module that takes its arguments as an array. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

/* State of a module. */
typedef struct {
    PyTypeObject *room; /* of growable.c */
    PyObject *value;    /* the name of an attribute, for arrays.c */
} module_state;

#pragma GCC visibility push(hidden)
PyObject *array_contiguous(PyObject *module, PyObject *given);
PyObject *array_copied(PyObject *module, PyObject *given);

/* An array without contents. */
PyObject *array_empty(int rank, const npy_intp *dims, PyArray_Descr *dtype);

/* An array of the type of x in memory of the owner that is not to be written. */
PyObject *array_view(PyArrayObject *x, PyObject *owner, int rank, const npy_intp *dims, const npy_intp *strides,
                     void *data);
#pragma GCC visibility pop

#endif
