/* Objects that Python's cycle collector need not traverse: see host/collector.py. Deallocators of lists, tuples,
   dicts and instances of Python classes check whether their object is tracked: if they nest, they run twice for it.
   Those of functions, cells and bound methods do not check, and crash if it is untracked. */
#include "numpy_api.h"

typedef struct {
    PyObject *types; /* by type, whether to untrack objects; None if they are never tracked */
    PyObject *found; /* objects to be traversed */
    uintptr_t *young; /* hash table of addresses that may be untracked; bit 0 is set once visited */
    size_t mask;
} walk;

/* The slot of an address in the table, or the free slot where it would be. */
static uintptr_t *place_of(const walk *state, uintptr_t address)
{
    size_t i = (uint64_t)address * 0x9E3779B97F4A7C15 >> 32 & state->mask;
    while (state->young[i] && (state->young[i] & ~(uintptr_t)1) != address)
        i = (i + 1) & state->mask;
    return state->young + i;
}

/* Called while a container is traversed: no Python code may run here, as it might change the container. */
static int visit(PyObject *object, void *data)
{
    walk *state = data;
    int is_new;
    /* The collector lists only tracked objects. */
    if (PyObject_GC_IsTracked(object)) {
        uintptr_t address = (uintptr_t)object, *place = place_of(state, address);
        is_new = *place == address;
        if (is_new)
            *place |= 1;
    } else
        is_new = PyDict_GetItem(state->types, (PyObject *)Py_TYPE(object)) == Py_None;
    return is_new ? PyList_Append(state->found, object) : 0;
}

/* The list of objects stays in this function, where no other thread runs: a thread that makes a tuple must own it
   alone. */
static int note_young(walk *state, PyObject *gc)
{
    PyObject *objects = PyObject_CallMethod(gc, "get_objects", "i", 0);
    Py_ssize_t count = objects ? PyList_Size(objects) : -1;
    size_t size = 16;
    while (count > 0 && size < 2 * (size_t)count)
        size *= 2;
    state->mask = size - 1;
    state->young = count < 0 ? NULL : PyMem_Calloc(size, sizeof *state->young);
    for (Py_ssize_t i = 0; state->young && i < count; i++) {
        uintptr_t address = (uintptr_t)PyList_GetItem(objects, i);
        *place_of(state, address) = address;
    }
    Py_XDECREF(objects);
    if (count >= 0 && !state->young)
        PyErr_NoMemory();
    return state->young ? 0 : -1;
}

static PyObject *collector_untrack(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "untrack() takes an object, a dict and the module gc");
    walk state = {arguments[1], PyList_New(0), NULL, 0};
    int failed = state.found ? note_young(&state, arguments[2]) : -1;
    failed = failed ? failed : visit(arguments[0], &state);
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(state.found); i++) {
        PyObject *object = PyList_GetItem(state.found, i), *type = (PyObject *)Py_TYPE(object);
        PyObject *untracks = PyObject_GetItem(state.types, type);
        /* The globals of a function may be a module, rather than the arrays and calls of a program. */
        int is_module = PyDict_CheckExact(object) && PyDict_GetItemString(object, "__name__");
        int left = is_module || untracks == Py_Ellipsis;
        if (untracks == Py_True && !left)
            PyObject_GC_UnTrack(object);
        traverseproc traverse = (traverseproc)PyType_GetSlot((PyTypeObject *)type, Py_tp_traverse);
        failed = !untracks ? -1 : left ? 0 : traverse(object, visit, &state);
        Py_XDECREF(untracks);
    }
    PyMem_Free(state.young);
    Py_XDECREF(state.found);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyMethodDef collector_functions[] = {
    {"untrack", FAST(collector_untrack), "untrack(root, types, gc): as host/collector.py says."},
    {NULL, NULL, 0, NULL},
};
