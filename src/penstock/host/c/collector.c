/* Objects that Python's collector of cycles need not walk: see host/collector.py. Deallocators of lists,
   tuples, dicts and instances of Python's classes look whether their object is tracked: if they nest, they
   come to it twice. Those of functions, cells and bound methods do not, which crashes if it is not. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NO_IMPORT_ARRAY
#include "numpy_api.h"

typedef struct {
    PyObject *types; /* by type, whether objects are untracked, or only walked; None if never tracked */
    PyObject *young; /* the addresses of objects that may be untracked, and have not been walked */
    PyObject *found; /* a list of those still to be walked */
} walk;

static int visit(PyObject *object, void *data)
{
    walk *state = data;
    PyObject *untracks = PyDict_GetItemWithError(state->types, (PyObject *)Py_TYPE(object));
    if (untracks == Py_None)
        return PyList_Append(state->found, object);
    /* What functions have as globals may be a module, and not the arrays and calls of a program. */
    if (!untracks || !PyObject_GC_IsTracked(object) ||
        (PyDict_CheckExact(object) && PyDict_GetItemString(object, "__name__")))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *address = PyLong_FromVoidPtr(object);
    int is_new = address ? PySet_Discard(state->young, address) : -1;
    Py_XDECREF(address);
    return is_new == 1 ? PyList_Append(state->found, object) : is_new;
}

static PyObject *collector_untrack(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(arguments[1]) || !PySet_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "untrack() takes an object, a dict and a set");
    walk state = {arguments[1], arguments[2], PyList_New(0)};
    int failed = state.found ? visit(arguments[0], &state) : -1;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(state.found); i++) {
        PyObject *object = PyList_GetItem(state.found, i);
        if (PyDict_GetItemWithError(state.types, (PyObject *)Py_TYPE(object)) == Py_True)
            PyObject_GC_UnTrack(object);
        failed = ((traverseproc)PyType_GetSlot(Py_TYPE(object), Py_tp_traverse))(object, visit, &state);
    }
    Py_XDECREF(state.found);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyMethodDef collector_functions[] = {
    {"untrack", FAST(collector_untrack),
     "untrack(root, types, young): untrack what `root` reaches, as host/collector.py says."},
    {NULL, NULL, 0, NULL},
};
