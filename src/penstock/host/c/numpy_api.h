/* NumPy's C interface, and functions of the extension module for any arrays or strings. */
#ifndef PENSTOCK_NUMPY_API_H
#define PENSTOCK_NUMPY_API_H

#define PY_SSIZE_T_CLEAN
#include <stdio.h> /* NumPy's headers need its FILE */
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL penstock_numpy_api
#ifndef IMPORTS_NUMPY /* only module.c does */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* The entry of a module function with the fast calling convention. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

/* State of a module. */
typedef struct {
    PyTypeObject *room; /* of growable.c */
    PyObject *value;    /* the name of an attribute, for arrays.c */
} module_state;

#pragma GCC visibility push(hidden)
PyObject *array_contiguous(PyObject *module, PyObject *given);
PyObject *array_copied(PyObject *module, PyObject *given);

/* An uninitialized array. */
PyObject *array_empty(int rank, const npy_intp *dims, PyArray_Descr *dtype);
#pragma GCC visibility pop

/* A read-only array of the type of x in memory of the owner. */
static inline PyObject *array_view(PyArrayObject *x, PyObject *owner, int rank, const npy_intp *dims,
                                   const npy_intp *strides, void *data)
{
    Py_INCREF((PyObject *)PyArray_DESCR(x));
    PyObject *y = PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(x), rank, dims, strides, data, 0, NULL);
    if (y && PyArray_SetBaseObject((PyArrayObject *)y, Py_NewRef(owner)) < 0)
        Py_CLEAR(y);
    return y;
}

#endif
