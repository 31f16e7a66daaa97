/* Objects that Python's collector of cycles need not walk: see host/collector.py. Deallocators of lists,
   tuples, dicts and instances of Python's classes look whether their object is tracked: if they nest, they
   come to it twice. Those of functions, cells and bound methods do not, which crashes if it is not. */
#include "numpy_api.h"

typedef struct {
    PyObject *types; /* by type, whether objects are untracked; None if they never are tracked */
    PyObject *young, *found; /* addresses of objects that may be untracked; those to be walked */
} walk;

/* Called while a container is walked: no code of Python may run here, which might change it. */
static int visit(PyObject *object, void *data)
{
    walk *state = data;
    PyObject *address = PyLong_FromVoidPtr(object);
    int is_new = address ? PySet_Discard(state->young, address) : -1;
    Py_XDECREF(address);
    if (!is_new && !PyObject_GC_IsTracked(object))
        is_new = PyDict_GetItem(state->types, (PyObject *)Py_TYPE(object)) == Py_None;
    return is_new == 1 ? PyList_Append(state->found, object) : is_new;
}

/* The list of objects stays here, where no other thread runs: one that makes a tuple must have it alone. */
static PyObject *young_addresses(PyObject *gc)
{
    PyObject *objects = PyObject_CallMethod(gc, "get_objects", "i", 0);
    PyObject *addresses = objects ? PySet_New(NULL) : NULL;
    for (Py_ssize_t i = 0; addresses && i < PyList_Size(objects); i++) {
        PyObject *address = PyLong_FromVoidPtr(PyList_GetItem(objects, i));
        if (!address || PySet_Add(addresses, address) < 0)
            Py_CLEAR(addresses);
        Py_XDECREF(address);
    }
    Py_XDECREF(objects);
    return addresses;
}

static PyObject *collector_untrack(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "untrack() takes an object, a dict and the module gc");
    walk state = {arguments[1], young_addresses(arguments[2]), PyList_New(0)};
    int failed = state.young && state.found ? visit(arguments[0], &state) : -1;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(state.found); i++) {
        PyObject *object = PyList_GetItem(state.found, i), *type = (PyObject *)Py_TYPE(object);
        PyObject *untracks = PyObject_GetItem(state.types, type);
        /* What functions have as globals may be a module, and not the arrays and calls of a program. */
        int is_module = PyDict_CheckExact(object) && PyDict_GetItemString(object, "__name__");
        int left = is_module || untracks == Py_Ellipsis;
        if (untracks == Py_True && !left)
            PyObject_GC_UnTrack(object);
        traverseproc traverse = (traverseproc)PyType_GetSlot((PyTypeObject *)type, Py_tp_traverse);
        failed = !untracks ? -1 : left ? 0 : traverse(object, visit, &state);
        Py_XDECREF(untracks);
    }
    Py_XDECREF(state.young);
    Py_XDECREF(state.found);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyMethodDef collector_functions[] = {
    {"untrack", FAST(collector_untrack), "untrack(root, types, gc): as host/collector.py says."},
    {NULL, NULL, 0, NULL},
};
