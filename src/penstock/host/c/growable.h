/* Arrays that grow along an axis where they lie: see growable.c. */
#ifndef PENSTOCK_GROWABLE_H
#define PENSTOCK_GROWABLE_H

#include "numpy_api.h"

#pragma GCC visibility push(hidden)
/* An array of the type of `past` with `added` more rows along an axis; NULL with an error. The first
   rows are those of `past` if `*holds` is set, else nothing yet; the others are to be written by the
   caller alone. Nothing may be written once anyone else has the array, which is read-only. The
   memory of a new room comes from `allocate` (growable.py). */
PyArrayObject *grown(PyObject *module, PyArrayObject *past, int axis, npy_intp added, PyObject *allocate,
                     int *holds);

PyTypeObject *new_room_type(void);
#pragma GCC visibility pop

#endif
