/* Arrays that grow in place along an axis: see growable.c. */
#ifndef PENSTOCK_GROWABLE_H
#define PENSTOCK_GROWABLE_H

#include "numpy_api.h"

#pragma GCC visibility push(hidden)
/* Return an array of the type of `past` with `added` more rows along an axis; NULL with an error. If `*holds` is set,
   the first rows are those of `past`, else uninitialized; only the caller may write the others, and only until anyone
   else has the array, which is read-only. The memory of a new room comes from `allocate` (growable.py). */
PyArrayObject *grown(PyObject *module, PyArrayObject *past, int axis, npy_intp added, PyObject *allocate,
                     int *holds);

PyTypeObject *new_room_type(void);
#pragma GCC visibility pop

#endif
