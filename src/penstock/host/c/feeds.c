/* Python functions around a run: most calls feed arrays of the same types as the call before. */
#include "numpy_api.h"

/* Whether all elements of an array of objects in C order are of class str. */
static int holds_strings(PyArrayObject *x)
{
    PyObject **const texts = PyArray_DATA(x);
    for (npy_intp i = 0; i < PyArray_SIZE(x); i++)
        if (!texts[i] || !PyUnicode_CheckExact(texts[i]))
            return 0;
    return 1;
}

static PyObject *feeds_are_strings(PyObject *module, PyObject *given)
{
    if (!PyArray_Check(given) || PyArray_TYPE((PyArrayObject *)given) != NPY_OBJECT)
        return PyErr_Format(PyExc_TypeError, "are_strings() takes an array of objects");
    PyObject *x = PyArray_FROM_OF(given, NPY_ARRAY_CARRAY_RO);
    const int are = x && holds_strings((PyArrayObject *)x);
    Py_XDECREF(x);
    return x ? PyBool_FromLong(are) : NULL;
}

/* Whether `given` is an array of exactly this element type and shape, whose objects are strings. */
static int is_expected(PyObject *given, PyObject *dtype, PyObject *shape)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_CheckExact(given) || (PyObject *)PyArray_DESCR(x) != dtype ||
        PyArray_NDIM(x) != PyTuple_Size(shape))
        return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (PyLong_AsSsize_t(PyTuple_GetItem(shape, i)) != PyArray_DIM(x, i))
            return 0;
    return PyArray_TYPE(x) != NPY_OBJECT || (PyArray_IS_C_CONTIGUOUS(x) && holds_strings(x));
}

/* Whether a mask in C order hides nothing, for certain: all elements are 0 or none is, and no float is at most LOWEST
   (compiler/padding.py, ops/internal/packed.py). */
static int hides_nothing(PyArrayObject *x)
{
    enum { LOWEST = -9000 };
    const npy_intp count = PyArray_SIZE(x);
    const void *const data = PyArray_DATA(x);
    int zeros = 0, others = 0, hidden = 0;
#define LOOK(type, hides)                                                                         \
    for (npy_intp i = 0; i < count; i++) {                                                        \
        const type e = ((const type *)data)[i];                                                   \
        zeros |= e == 0, others |= e != 0, hidden |= hides;                                       \
    }                                                                                             \
    return !hidden && !(zeros && others)
    if (!PyArray_IS_C_CONTIGUOUS(x))
        return 0;
    switch (PyArray_TYPE(x)) {
        case NPY_BOOL: case NPY_INT8: case NPY_UINT8: LOOK(int8_t, 0);
        case NPY_INT32: case NPY_UINT32: LOOK(int32_t, 0);
        case NPY_INT64: case NPY_UINT64: LOOK(int64_t, 0);
        case NPY_FLOAT32: LOOK(float, e <= LOWEST);
        default: return 0;
    }
#undef LOOK
}

static PyObject *feeds_taken(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyTuple_Check(arguments[0]) || !PyDict_CheckExact(arguments[1]))
        Py_RETURN_NONE;
    PyObject *expected = arguments[0], *feeds = arguments[1];
    Py_ssize_t size = PyTuple_Size(expected);
    PyObject *values = PyDict_Size(feeds) == size ? PyTuple_New(size) : Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; values && values != Py_None && i < size; i++) {
        PyObject *input = PyTuple_GetItem(expected, i);
        /* An owned reference: another thread may change the dict. */
        PyObject *value = NULL;
        for (int name = 0; !value && name < 2; name++) {
            value = PyObject_GetItem(feeds, PyTuple_GetItem(input, name));
            if (!value && PyErr_ExceptionMatches(PyExc_KeyError))
                PyErr_Clear();
        }
        if (value && is_expected(value, PyTuple_GetItem(input, 2), PyTuple_GetItem(input, 3)) &&
            (PyTuple_GetItem(input, 4) == Py_False || hides_nothing((PyArrayObject *)value)))
            PyTuple_SetItem(values, i, value);
        else {
            Py_XDECREF(value);
            Py_DECREF(values);
            values = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
    }
    return values;
}

static PyObject *outputs_named(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyTuple_Check(arguments[0]) || !PyTuple_Check(arguments[1]) ||
        PyTuple_Size(arguments[0]) > PyTuple_Size(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "named() takes names, and as many values");
    PyObject *named = PyDict_New();
    for (Py_ssize_t i = 0; named && i < PyTuple_Size(arguments[0]); i++)
        if (PyDict_SetItem(named, PyTuple_GetItem(arguments[0], i), PyTuple_GetItem(arguments[1], i)))
            Py_CLEAR(named);
    return named;
}

/* The addresses of the first byte of an array and of that behind the last. */
static void extent(PyArrayObject *x, const char **low, const char **high)
{
    *low = *high = PyArray_BYTES(x);
    for (int i = 0; i < PyArray_NDIM(x); i++) {
        const npy_intp reach = (PyArray_DIM(x, i) - 1) * PyArray_STRIDE(x, i);
        *(reach < 0 ? low : high) += reach;
    }
    *high += PyArray_SIZE(x) ? PyArray_ITEMSIZE(x) : 0;
}

static int overlap(PyArrayObject *x, PyArrayObject *y)
{
    const char *low, *high, *other, *end;
    extent(x, &low, &high), extent(y, &other, &end);
    return low < end && other < high;
}

/* Whether kernels can write to a tuple of arrays, in order and at aligned addresses, while they read others. */
static PyObject *outputs_writable(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    enum { ALIGNED = 16 }; /* as in session/run.py */
    if (count != 2 || !PyTuple_Check(arguments[0]) || !PyTuple_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "writable() takes two tuples");
    for (Py_ssize_t i = 0; i < PyTuple_Size(arguments[0]); i++) {
        PyObject *const array = PyTuple_GetItem(arguments[0], i);
        PyArrayObject *const x = (PyArrayObject *)array;
        if (!PyArray_Check(array) || !PyArray_IS_C_CONTIGUOUS(x) || !PyArray_ISWRITEABLE(x) ||
            (uintptr_t)PyArray_DATA(x) % ALIGNED)
            Py_RETURN_FALSE;
        for (int of = 0; of < 2; of++)
            for (Py_ssize_t j = 0; j < (of ? PyTuple_Size(arguments[1]) : i); j++) {
                PyObject *const other = PyTuple_GetItem(arguments[of], j);
                if (PyArray_Check(other) && overlap(x, (PyArrayObject *)other))
                    Py_RETURN_FALSE;
            }
    }
    Py_RETURN_TRUE;
}

PyMethodDef feeds_functions[] = {
    {"are_strings", feeds_are_strings, METH_O, "are_strings(x): whether all elements are of class str."},
    {"taken", FAST(feeds_taken),
     "taken(expected, feeds): the values of a dict in the order of (name, other name, dtype, shape, is a mask) in `expected`, where masks hide nothing; "
     "None if others are given, or arrays of other types."},
    {"named", FAST(outputs_named), "named(names, values): a dict."},
    {"writable", FAST(outputs_writable),
     "writable(arrays, values): whether kernels can write to a tuple of arrays while they read the values."},
    {NULL, NULL, 0, NULL},
};
