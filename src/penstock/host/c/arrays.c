/* Python functions that copy arrays of any shapes and strides, and variables. */
#include "numpy_api.h"
#include "copies.h"
#include "growable.h"
#include <stdlib.h>
#include <string.h>

/* Bytes from which on the global interpreter lock is released. */
enum { WORTH_RELEASE = 1 << 16 };

/* Whether elements of an array are plain bytes of a size that can be copied. */
static int is_plain(PyArrayObject *x)
{
    int64_t size = PyArray_ITEMSIZE(x);
    return !PyDataType_REFCHK(PyArray_DESCR(x)) &&
           (size == 1 || size == 2 || size == 4 || size == 8 || size == 16);
}

static void copy(copy_plan *plan, const char *from, char *to, int64_t nbytes)
{
    PyThreadState *state = nbytes < WORTH_RELEASE ? NULL : PyEval_SaveThread();
    copy_elements(plan, from, to);
    if (state)
        PyEval_RestoreThread(state);
}

/* Copy `x` to rows of `y` that have the same layout. */
static void copy_rows(PyArrayObject *x, PyArrayObject *y, char *to)
{
    copy_plan plan = {PyArray_NDIM(x), PyArray_ITEMSIZE(x), {0}, {0}, {0}};
    for (int i = 0; i < plan.rank; i++) {
        plan.dims[i] = PyArray_DIM(x, i);
        plan.from[i] = PyArray_STRIDE(x, i);
        plan.to[i] = PyArray_STRIDE(y, i);
    }
    copy(&plan, PyArray_BYTES(x), to, PyArray_NBYTES(x));
}

/* Memory aligned to cache lines: vector stores that cross a cache line take half as long again. The pointer from
   malloc and the size are stored before it. */
enum { LINE = 64, WORTH_LINES = 1 << 15, WORTH_LARGE_PAGES = 4 << 20 }; /* NumPy requests large pages by itself */

typedef struct {
    void *block;
    size_t size;
} line_note;

static void *line_malloc(void *unused, size_t size)
{
    char *block = size > SIZE_MAX - LINE ? NULL : malloc(size + LINE);
    if (!block)
        return NULL;
    line_note *start = (line_note *)(((uintptr_t)block + LINE) & ~(uintptr_t)(LINE - 1));
    start[-1] = (line_note){block, size};
    return start;
}

static void *line_calloc(void *unused, size_t count, size_t size)
{
    void *start = size && count > SIZE_MAX / size ? NULL : line_malloc(unused, count * size);
    return start ? memset(start, 0, count * size) : NULL;
}

static void line_free(void *unused, void *start, size_t size)
{
    free(start ? ((line_note *)start)[-1].block : NULL);
}

static void *line_realloc(void *unused, void *start, size_t size)
{
    void *moved = line_malloc(unused, size);
    size_t old = start ? ((line_note *)start)[-1].size : 0;
    if (moved && start)
        memcpy(moved, start, old < size ? old : size);
    if (moved)
        line_free(unused, start, old);
    return moved;
}

static PyDataMem_Handler line_handler = {
    "penstock_lines", 1, {NULL, line_malloc, line_calloc, line_realloc, line_free}};

PyObject *array_empty(int rank, const npy_intp *dims, PyArray_Descr *dtype)
{
    npy_intp nbytes = PyDataType_ELSIZE(dtype);
    for (int i = 0; i < rank; i++)
        if (__builtin_mul_overflow(nbytes, dims[i], &nbytes))
            nbytes = 0; /* which NumPy refuses */
    PyObject *handler = NULL, *before = NULL;
    if (nbytes >= WORTH_LINES && nbytes < WORTH_LARGE_PAGES && !PyDataType_REFCHK(dtype)) {
        handler = PyCapsule_New(&line_handler, "mem_handler", NULL);
        before = handler ? PyDataMem_SetHandler(handler) : NULL;
        Py_XDECREF(handler);
        if (!before)
            return NULL;
    }
    Py_INCREF((PyObject *)dtype);
    PyObject *y = PyArray_Empty(rank, dims, dtype, 0);
    if (before) {
        Py_XDECREF(PyDataMem_SetHandler(before));
        Py_DECREF(before);
    }
    return y;
}

static PyObject *new_empty(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[NPY_MAXDIMS];
    Py_ssize_t rank = count == 2 && PyArray_DescrCheck(arguments[1]) ? PyTuple_Size(arguments[0]) : -1;
    if (rank < 0 || rank > NPY_MAXDIMS)
        return PyErr_Format(PyExc_TypeError, "empty() takes a tuple of dims, and a dtype");
    for (Py_ssize_t i = 0; i < rank; i++)
        dims[i] = PyLong_AsSsize_t(PyTuple_GetItem(arguments[0], i));
    return PyErr_Occurred() ? NULL : array_empty((int)rank, dims, (PyArray_Descr *)arguments[1]);
}

static PyArrayObject *new_array(int rank, const npy_intp *dims, PyArrayObject *like)
{
    return (PyArrayObject *)array_empty(rank, dims, PyArray_DESCR(like));
}

PyObject *array_copied(PyObject *module, PyObject *given)
{
    if (!PyArray_Check(given))
        return PyErr_Format(PyExc_TypeError, "copied() takes an array");
    PyArrayObject *x = (PyArrayObject *)given;
    int dense = PyArray_IS_C_CONTIGUOUS(x);
    if (!is_plain(x) || (dense && PyArray_NBYTES(x) >= WORTH_RELEASE))
        return PyArray_NewCopy(x, NPY_CORDER);
    PyArrayObject *y = new_array(PyArray_NDIM(x), PyArray_DIMS(x), x);
    if (y && dense)
        memcpy(PyArray_DATA(y), PyArray_DATA(x), PyArray_NBYTES(x));
    else if (y)
        copy_rows(x, y, PyArray_BYTES(y));
    return (PyObject *)y;
}

PyObject *array_contiguous(PyObject *module, PyObject *given)
{
    if (PyArray_Check(given) && !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)given))
        return array_copied(module, given);
    return Py_NewRef(given);
}

/* The first byte of an array, and the one after its last. */
static void bounds(PyArrayObject *x, const char *ends[2])
{
    ends[0] = ends[1] = PyArray_BYTES(x);
    for (int i = 0; i < PyArray_NDIM(x); i++)
        ends[PyArray_STRIDE(x, i) > 0] += PyArray_STRIDE(x, i) * (PyArray_DIM(x, i) - 1);
    ends[1] += PyArray_ITEMSIZE(x);
}

static int are_apart(PyArrayObject *x, PyArrayObject *y)
{
    const char *of_x[2], *of_y[2];
    bounds(x, of_x);
    bounds(y, of_y);
    return of_x[1] <= of_y[0] || of_y[1] <= of_x[0];
}

static PyObject *array_refilled(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyArray_Check(arguments[0]) || !PyArray_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "refilled() takes two arrays");
    PyArrayObject *y = (PyArrayObject *)arguments[0], *x = (PyArrayObject *)arguments[1];
    npy_intp nbytes = PyArray_NBYTES(y);
    int alike = PyArray_DESCR(x) == PyArray_DESCR(y) && PyArray_NBYTES(x) == nbytes && is_plain(x) &&
                PyArray_SAMESHAPE(x, y) && PyArray_IS_C_CONTIGUOUS(y) && PyArray_ISWRITEABLE(y);
    int dense = PyArray_IS_C_CONTIGUOUS(x);
    if (alike && dense && nbytes < WORTH_RELEASE)
        memmove(PyArray_DATA(y), PyArray_DATA(x), nbytes);
    else if (alike && !dense && are_apart(x, y))
        copy_rows(x, y, PyArray_BYTES(y));
    else if (PyArray_CopyInto(y, x) < 0)
        return NULL;
    return Py_NewRef(arguments[0]);
}

/* Whether `x` can be a part of a concatenation that begins with `first`. */
static int fits(PyObject *given, PyArrayObject *first, int axis)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || PyArray_NDIM(x) != PyArray_NDIM(first) ||
        !PyArray_EquivTypes(PyArray_DESCR(x), PyArray_DESCR(first)))
        return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (i != axis && PyArray_DIM(x, i) != PyArray_DIM(first, i))
            return 0;
    return 1;
}

static PyObject *array_concatenated(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[MOST_DIMS];
    PyObject *const *arrays = arguments + 2;
    if (count < 3 || !PyArray_Check(arrays[0]))
        return PyErr_Format(PyExc_TypeError, "concatenated() takes an axis, None or memory, arrays");
    PyArrayObject *first = (PyArrayObject *)arrays[0], *y = (PyArrayObject *)arguments[1];
    long axis = PyLong_AsLong(arguments[0]);
    int rank = PyArray_NDIM(first);
    int64_t length = 0;
    if (axis == -1 && PyErr_Occurred())
        return NULL;
    if (axis < -rank || axis >= rank)
        return PyErr_Format(PyExc_ValueError, "axis %ld is out of range for rank %d", axis, rank);
    axis = axis < 0 ? axis + rank : axis;
    int fit = is_plain(first);
    for (Py_ssize_t i = 0; fit && i < count - 2; i++) {
        fit = fits(arrays[i], first, axis);
        length += fit ? PyArray_DIM((PyArrayObject *)arrays[i], axis) : 0;
    }
    for (int i = 0; i < rank; i++)
        dims[i] = i == axis ? length : PyArray_DIM(first, i);
    if (fit && arguments[1] != Py_None)
        fit = fits(arguments[1], first, axis) && PyArray_DIM(y, axis) == length &&
              PyArray_ISWRITEABLE(y);
    if (!fit)
        return PyErr_Format(PyExc_ValueError, "arrays do not fit together");
    y = arguments[1] == Py_None ? new_array(rank, dims, first) : y;
    if (!y)
        return NULL;
    char *to = PyArray_BYTES(y);
    for (Py_ssize_t k = 0; k < count - 2; k++) {
        PyArrayObject *x = (PyArrayObject *)arrays[k];
        copy_rows(x, y, to);
        to += PyArray_DIM(x, axis) * PyArray_STRIDE(y, axis);
    }
    return arguments[1] == Py_None ? (PyObject *)y : Py_NewRef(Py_None);
}

static PyObject *array_appended(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4 || !PyArray_Check(arguments[2]) || !PyArray_Check(arguments[3]))
        return PyErr_Format(PyExc_TypeError, "appended() takes what allocates, an axis, two arrays");
    PyArrayObject *x = (PyArrayObject *)arguments[2], *added = (PyArrayObject *)arguments[3];
    long axis = PyLong_AsLong(arguments[1]);
    int held;
    if (axis == -1 && PyErr_Occurred())
        return NULL;
    axis = axis < 0 ? axis + PyArray_NDIM(x) : axis;
    if (axis < 0 || axis >= PyArray_NDIM(x) || !is_plain(x) || !fits(arguments[3], x, axis))
        return PyErr_Format(PyExc_ValueError, "arrays do not fit together");
    PyArrayObject *y = grown(module, x, axis, PyArray_DIM(added, axis), arguments[0], &held);
    if (!y)
        return NULL;
    if (!held)
        copy_rows(x, y, PyArray_BYTES(y));
    copy_rows(added, y, PyArray_BYTES(y) + PyArray_DIM(x, axis) * PyArray_STRIDE(y, axis));
    return (PyObject *)y;
}

/* Each dim becomes two: repetitions, with a stride of 0, and the dim itself. */
static PyObject *array_tiled(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[MOST_DIMS];
    if (count < 1 || !PyArray_Check(arguments[0]) || !is_plain((PyArrayObject *)arguments[0]))
        return PyErr_Format(PyExc_TypeError, "tiled() takes an array and a number for each axis");
    PyArrayObject *x = (PyArrayObject *)arguments[0];
    int rank = PyArray_NDIM(x);
    if (count != rank + 1 || 2 * rank > MOST_DIMS)
        return PyErr_Format(PyExc_ValueError, "%zd repetitions of %d axes", count - 1, rank);
    copy_plan plan = {2 * rank, PyArray_ITEMSIZE(x), {0}, {0}, {0}};
    for (int i = 0; i < rank; i++) {
        int64_t times = PyLong_AsLongLong(arguments[i + 1]);
        if (PyErr_Occurred())
            return NULL;
        plan.dims[2 * i] = times < 0 ? 0 : times;
        plan.dims[2 * i + 1] = PyArray_DIM(x, i);
        plan.from[2 * i + 1] = PyArray_STRIDE(x, i);
        if (__builtin_mul_overflow(plan.dims[2 * i], PyArray_DIM(x, i), &dims[i]))
            return PyErr_NoMemory();
    }
    PyArrayObject *y = new_array(rank, dims, x);
    if (!y)
        return NULL;
    for (int i = 0; i < rank; i++) {
        plan.to[2 * i + 1] = PyArray_STRIDE(y, i);
        plan.to[2 * i] = PyArray_STRIDE(y, i) * PyArray_DIM(x, i);
    }
    copy(&plan, PyArray_BYTES(x), PyArray_BYTES(y), PyArray_NBYTES(y));
    return (PyObject *)y;
}

/* Views of consecutive parts along an axis, or, without sizes, of its single elements, without the axis. */
static PyObject *array_views(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    if (count < 3 || !PyArray_Check(arguments[2]) || (arguments[1] != Py_None && !PyTuple_Check(arguments[1])))
        return PyErr_Format(PyExc_TypeError, "views() takes an axis, a tuple of sizes or None, and an array");
    PyArrayObject *x = (PyArrayObject *)arguments[2];
    const long axis = PyLong_AsLong(arguments[0]), rank = PyArray_NDIM(x);
    if (axis == -1 && PyErr_Occurred())
        return NULL;
    if (axis < 0 || axis >= rank)
        return PyErr_Format(PyExc_ValueError, "axis %ld is out of range for rank %ld", axis, rank);
    const int whole = arguments[1] != Py_None;
    const npy_intp step = PyArray_STRIDE(x, axis);
    const Py_ssize_t n = whole ? PyTuple_Size(arguments[1]) : PyArray_DIM(x, axis);
    for (int i = 0, j = 0; i < rank; i++)
        if (whole || i != axis)
            dims[j] = PyArray_DIM(x, i), strides[j++] = PyArray_STRIDE(x, i);
    PyObject *parts = PyTuple_New(n);
    npy_intp begin = 0, size = 1;
    for (Py_ssize_t k = 0; parts && k < n; k++, begin += size) {
        size = whole ? PyLong_AsSsize_t(PyTuple_GetItem(arguments[1], k)) : 1;
        if (whole)
            dims[axis] = size;
        PyObject *part = NULL;
        if (size >= 0 && size <= PyArray_DIM(x, axis) - begin)
            part = array_view(x, arguments[2], rank - !whole, dims, strides, PyArray_BYTES(x) + begin * step);
        else if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "the sizes do not fit a dim of %zd", PyArray_DIM(x, axis));
        if (!part || PyTuple_SetItem(parts, k, part) < 0)
            Py_CLEAR(parts);
    }
    return parts;
}

/* Variables (ops/tensorflow/state.py): objects with a `value`, an array that is never changed while anything else
   holds it, and the methods `read` and `assign`, which check only what differs from the previous call. */

#define VALUE(module) (((module_state *)PyModule_GetState(module))->value)

static inline int has_shape_of(PyArrayObject *x, PyArrayObject *like)
{
    if (PyArray_NDIM(x) != PyArray_NDIM(like))
        return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (PyArray_DIM(x, i) != PyArray_DIM(like, i))
            return 0;
    return 1;
}

/* The value of a variable if it is a C-contiguous array with the type and shape of `like`; NULL without an error
   otherwise. */
static PyArrayObject *value_like(PyObject *module, PyObject *variable, PyArrayObject *like)
{
    PyArrayObject *x = (PyArrayObject *)PyObject_GetAttr(variable, VALUE(module));
    /* In most reads the type is the same object, which is a faster test. */
    if (x && PyArray_Check((PyObject *)x) && PyArray_IS_C_CONTIGUOUS(x) && is_plain(x) && has_shape_of(x, like) &&
        (PyArray_DESCR(x) == PyArray_DESCR(like) || PyArray_EquivTypes(PyArray_DESCR(x), PyArray_DESCR(like))))
        return x;
    Py_XDECREF((PyObject *)x);
    return NULL;
}

static PyObject *variable_read(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyArray_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "variable_read() takes a variable, None and an array");
    PyArrayObject *y = (PyArrayObject *)arguments[2], *x = value_like(module, arguments[0], y);
    if (x && PyArray_IS_C_CONTIGUOUS(y) && PyArray_ISWRITEABLE(y)) {
        memcpy(PyArray_DATA(y), PyArray_DATA(x), PyArray_NBYTES(y));
        Py_DECREF((PyObject *)x);
        Py_RETURN_NONE;
    }
    Py_XDECREF((PyObject *)x);
    if (PyErr_Occurred())
        return NULL;
    PyObject *value = PyObject_CallMethod(arguments[0], "read", NULL);
    PyArrayObject *z = (PyArrayObject *)value;
    int status = -1;
    if (value && PyArray_Check(value) && PyArray_SAMESHAPE(z, y))
        status = PyArray_CopyInto(y, z);
    else if (value)
        PyErr_SetString(PyExc_ValueError, "the variable has another shape than its read declares");
    Py_XDECREF(value);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *variable_assign(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyArray_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "variable_assign() takes a variable, None and an array");
    PyArrayObject *given = (PyArrayObject *)arguments[2], *old = value_like(module, arguments[0], given);
    if (!old)
        return PyErr_Occurred() ? NULL : PyObject_CallMethod(arguments[0], "assign", "O", given);
    /* If no reader holds it too, its memory is reused. Without the global interpreter lock a reader may appear at any
       time, so memory is never reused. */
#ifdef Py_GIL_DISABLED
    int own = 0;
#else
    int own = Py_REFCNT((PyObject *)old) == 2 && PyArray_CHKFLAGS(old, NPY_ARRAY_OWNDATA) &&
              PyArray_IS_C_CONTIGUOUS(given) && is_plain(given);
#endif
    if (own)
        memcpy(PyArray_DATA(old), PyArray_DATA(given), PyArray_NBYTES(old));
    Py_DECREF((PyObject *)old);
    if (own)
        Py_RETURN_NONE;
    PyObject *copy = array_copied(NULL, arguments[2]);
    if (!copy)
        return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)copy, NPY_ARRAY_WRITEABLE);
    int status = PyObject_SetAttr(arguments[0], VALUE(module), copy);
    Py_DECREF(copy);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef arrays_functions[] = {
    {"contiguous", array_contiguous, METH_O, "contiguous(x): an array in C order; other values as they are."},
    {"empty", FAST(new_empty), "empty(dims, dtype): an array without contents; large ones begin with a line of the cache."},
    {"refilled", FAST(array_refilled), "refilled(y, x): y, after x is copied into it."},
    {"copied", array_copied, METH_O, "copied(x): a copy in C order."},
    {"concatenated", FAST(array_concatenated),
     "concatenated(axis, out, *arrays): the arrays joined along an axis, in `out` or a new array."},
    {"appended", FAST(array_appended),
     "appended(axis, x, added): both joined along an axis, x where it lies if it has room behind it."},
    {"tiled", FAST(array_tiled), "tiled(x, *repeats): x repeated along each axis."},
    {"views", FAST(array_views),
     "views(axis, sizes, x): views of parts of x of these sizes along an axis; of its elements, if sizes are None."},
    {"variable_read", FAST(variable_read),
     "variable_read(variable, handle, y): copy the value of a variable into y."},
    {"variable_assign", FAST(variable_assign),
     "variable_assign(variable, handle, x): replace the value of a variable by a copy of x."},
    {NULL, NULL, 0, NULL},
};
