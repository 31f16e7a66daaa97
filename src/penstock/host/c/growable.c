/* Arrays that grow in place along an axis, as the caches of decoders do.

   A room is memory with capacity for more rows than any array shows yet:

       past     rows 0 1 2          room:  0 1 2 . . .
       present  rows 0 1 2 3        room:  0 1 2 3 . .     nothing copied but row 3
       a second present of past     a room of its own, with copies of rows 0 1 2

   Rows that an array shows are never written again: a room hands out each row once, so that only the array with all
   rows handed out so far can grow in place, and only once. Its arrays are read-only, since they share rows; so are
   older arrays that users keep. A full room is replaced by one of twice the size, so that each row is copied about
   once in all. Threads may append to the same array at the same time: one gets the rows after it, the others rooms of
   their own. */
#include "growable.h"
#include <stdatomic.h>
#include <string.h>

enum { LEAST_ROWS = 16 };

typedef struct {
    PyObject_HEAD
    PyArrayObject *memory; /* all rows */
    _Atomic(npy_intp) used; /* those handed out */
} Room;

static void room_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF((PyObject *)((Room *)self)->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot room_slots[] = {
    {Py_tp_dealloc, room_dealloc},
    {Py_tp_doc, "Memory that arrays grow into; made by kernels."},
    {0, NULL},
};

static PyType_Spec Room_spec = {
    .name = "penstock.backends.native.Room",
    .basicsize = sizeof(Room),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = room_slots,
};

/* The rows of a room that have been handed out. */
static PyArrayObject *rows_of(Room *room, int axis, npy_intp used)
{
    PyArrayObject *memory = room->memory;
    npy_intp dims[NPY_MAXDIMS];
    memcpy(dims, PyArray_DIMS(memory), PyArray_NDIM(memory) * sizeof *dims);
    dims[axis] = used;
    return (PyArrayObject *)array_view(memory, (PyObject *)room, PyArray_NDIM(memory), dims,
                                       PyArray_STRIDES(memory), PyArray_DATA(memory));
}

/* The room of `past`, with `added` more rows handed out; NULL if it cannot grow there. */
static Room *own_room(PyTypeObject *type, PyArrayObject *past, int axis, npy_intp added)
{
    PyObject *base = PyArray_BASE(past);
    if (!base || Py_TYPE(base) != type)
        return NULL;
    Room *room = (Room *)base;
    PyArrayObject *memory = room->memory;
    int rank = PyArray_NDIM(memory);
    npy_intp shown = PyArray_DIM(past, axis);
    if (PyArray_DATA(past) != PyArray_DATA(memory) || PyArray_NDIM(past) != rank ||
        PyArray_DESCR(past) != PyArray_DESCR(memory) || shown > PyArray_DIM(memory, axis) - added ||
        memcmp(PyArray_STRIDES(past), PyArray_STRIDES(memory), rank * sizeof(npy_intp)))
        return NULL;
    for (int i = 0; i < rank; i++)
        if (i != axis && PyArray_DIM(past, i) != PyArray_DIM(memory, i))
            return NULL;
    return atomic_compare_exchange_strong(&room->used, &shown, shown + added) ? room : NULL;
}

/* All rows of a new room: those in use, and as many again if `allocate` can provide them. */
static PyArrayObject *new_memory(PyObject *allocate, PyArrayObject *past, int axis, npy_intp used,
                                 npy_intp capacity)
{
    PyObject *memory = PyObject_CallFunction(allocate, "Oinn", past, axis, capacity, used);
    if (memory && (!PyArray_Check(memory) || PyArray_NDIM((PyArrayObject *)memory) != PyArray_NDIM(past) ||
                   PyArray_DIM((PyArrayObject *)memory, axis) < used)) {
        PyErr_SetString(PyExc_TypeError, "no memory of an array that grows");
        Py_CLEAR(memory);
    }
    return (PyArrayObject *)memory;
}

PyArrayObject *grown(PyObject *module, PyArrayObject *past, int axis, npy_intp added, PyObject *allocate,
                     int *holds)
{
    npy_intp used, capacity;
    PyTypeObject *type = ((module_state *)PyModule_GetState(module))->room;
    if (__builtin_add_overflow(PyArray_DIM(past, axis), added, &used) ||
        __builtin_mul_overflow(used < LEAST_ROWS ? LEAST_ROWS : used, 2, &capacity))
        return (PyArrayObject *)PyErr_NoMemory();
    Room *room = own_room(type, past, axis, added);
    *holds = room != NULL;
    if (room)
        return rows_of(room, axis, used);
    PyArrayObject *memory = new_memory(allocate, past, axis, used, capacity);
    room = memory ? PyObject_New(Room, type) : NULL;
    if (!room) {
        Py_XDECREF((PyObject *)memory);
        return NULL;
    }
    room->memory = memory;
    atomic_init(&room->used, used);
    PyArrayObject *y = rows_of(room, axis, used);
    Py_DECREF((PyObject *)room);
    return y;
}

/* Budgets (host/current_run.py) ask memory that is not an array whether it was counted when allocated. */
PyTypeObject *new_room_type(void)
{
    PyObject *type = PyType_FromSpec(&Room_spec);
    if (type && PyObject_SetAttrString(type, "counted", Py_True) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}
