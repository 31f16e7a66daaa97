/* Objects that Python's collector of cycles need not walk: see host/collector.py. Deallocators of lists,
   tuples, dicts and instances of Python's classes look whether their object is tracked: if they nest, they
   come to it twice. Those of functions, cells and bound methods do not, which crashes if it is not. */
#include "numpy_api.h"

typedef struct {
    PyObject *types; /* by type, whether objects are untracked; None if they never are tracked */
    PyObject *found; /* objects to be walked */
    uintptr_t *young; /* addresses that may be untracked, by their hash; those that were met end in a bit 1 */
    size_t mask;
} walk;

/* The place of an address in the table, or the free one where it would be. */
static uintptr_t *place_of(const walk *state, uintptr_t address)
{
    size_t i = (uint64_t)address * 0x9E3779B97F4A7C15 >> 32 & state->mask;
    while (state->young[i] && (state->young[i] & ~(uintptr_t)1) != address)
        i = (i + 1) & state->mask;
    return state->young + i;
}

/* Called while a container is walked: no code of Python may run here, which might change it. */
static int visit(PyObject *object, void *data)
{
    walk *state = data;
    int is_new;
    /* The collector lists tracked objects alone. */
    if (PyObject_GC_IsTracked(object)) {
        uintptr_t address = (uintptr_t)object, *place = place_of(state, address);
        is_new = *place == address;
        if (is_new)
            *place |= 1;
    } else
        is_new = PyDict_GetItem(state->types, (PyObject *)Py_TYPE(object)) == Py_None;
    return is_new ? PyList_Append(state->found, object) : 0;
}

/* The list of objects stays here, where no other thread runs: one that makes a tuple must have it alone. */
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
        /* What functions have as globals may be a module, and not the arrays and calls of a program. */
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
