/* Objects that Python's collector of cycles need not walk: see host/collector.py.

   Types say in their deallocators whether their objects may be untracked. Those of lists, tuples,
   dicts and instances of Python's classes do: they call PyObject_GC_UnTrack, which looks whether there
   is anything to undo, since objects that nest deeply come to them twice. Those of functions, cells and
   bound methods unlink the object without looking, which crashes once it is untracked. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NO_IMPORT_ARRAY
#include "numpy_api.h"

typedef struct {
    PyObject *types; /* by type, whether objects are untracked, or only walked through as callables
                        (False) or as bound calls, which are never tracked (None) */
    PyObject *young; /* the addresses of objects that may be untracked, and have not been walked */
    PyObject *found; /* a list of those still to be walked */
} walk;

static int visit(PyObject *object, void *data)
{
    walk *state = data;
    PyObject *untracks = PyDict_GetItemWithError(state->types, (PyObject *)Py_TYPE(object));
    if (!untracks)
        return PyErr_Occurred() ? -1 : 0;
    if (untracks == Py_None)
        return PyList_Append(state->found, object);
    if (!PyObject_GC_IsTracked(object))
        return 0;
    PyObject *address = PyLong_FromVoidPtr(object);
    int is_new = address ? PySet_Discard(state->young, address) : -1;
    Py_XDECREF(address);
    return is_new == 1 ? PyList_Append(state->found, object) : is_new;
}

/* Visit what an attribute of an object holds. */
static int visit_attribute(PyObject *object, const char *name, walk *state)
{
    PyObject *held = PyObject_GetAttrString(object, name);
    int failed = 0;
    if (!held)
        PyErr_Clear(); /* an empty cell */
    else
        failed = visit(held, state);
    Py_XDECREF(held);
    return failed;
}

/* Visit what a function, a cell or a method holds. The globals of a function are those of a module,
   which is not walked, unless they have no name: then they are the arrays and calls of a program. */
static int visit_callable(PyObject *object, walk *state)
{
    PyObject *globals = PyObject_GetAttrString(object, "__globals__");
    int failed = 0;
    if (!globals)
        PyErr_Clear();
    else if (PyDict_Check(globals) && !PyDict_GetItemString(globals, "__name__"))
        failed = visit(globals, state);
    Py_XDECREF(globals);
    if (!failed)
        failed = visit_attribute(object, "__closure__", state);
    if (!failed)
        failed = visit_attribute(object, "__self__", state);
    return failed ? failed : visit_attribute(object, "cell_contents", state);
}

static int walk_object(PyObject *object, walk *state)
{
    PyObject *untracks = PyDict_GetItemWithError(state->types, (PyObject *)Py_TYPE(object));
    if (!untracks)
        return -1;
    if (untracks == Py_False)
        return visit_callable(object, state);
    if (untracks == Py_True)
        PyObject_GC_UnTrack(object);
    traverseproc traverse = (traverseproc)PyType_GetSlot(Py_TYPE(object), Py_tp_traverse);
    return traverse ? traverse(object, visit, state) : 0;
}

static PyObject *collector_untrack(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(arguments[1]) || !PySet_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "untrack() takes an object, a dict and a set");
    walk state = {arguments[1], arguments[2], PyList_New(0)};
    int failed = state.found ? visit(arguments[0], &state) : -1;
    Py_ssize_t size;
    while (!failed && (size = PyList_Size(state.found)) > 0) {
        PyObject *object = Py_NewRef(PyList_GetItem(state.found, size - 1));
        failed = PyList_SetSlice(state.found, size - 1, size, NULL);
        if (!failed)
            failed = walk_object(object, &state);
        Py_DECREF(object);
    }
    Py_XDECREF(state.found);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef collector_functions[] = {
    {"untrack", FAST(collector_untrack),
     "untrack(root, types, young): untrack what is reachable from `root` through objects of `types`, "
     "which say whether to untrack them, with addresses in `young`, which is emptied of them."},
    {NULL, NULL, 0, NULL},
};
