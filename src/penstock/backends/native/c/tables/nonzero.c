/* Places of the elements other than 0, for arrays of any shape. */
#include "any_shape.h"
#include "families.h"
#include <string.h>

/* Elements between two checks whether the run must stop, and that are counted in their own type; bytes of a block,
   which is skipped if all are 0. */
enum { BETWEEN = 1 << 16, WORTH_UNLOCK = 1 << 12, COUNTED = 128, BLOCK = 32, LONG_ROW = 64 };

/* Elements of `nbytes` that are not 0 if they have any bits of a mask of 8 bytes: of floats, all but the signs. */
typedef struct {
    const void *x;
    int64_t nbytes;
    uint64_t mask;
} elements;

#define COUNT(size, type)                                                          \
    case size:                                                                     \
        for (int64_t i = begin, last; i < end; i = last) {                         \
            last = smaller(i + COUNTED, end);                                      \
            type some = 0;                                                         \
            for (int64_t j = i; j < last; j++)                                     \
                some += (((const type *)e->x)[j] & (type)e->mask) != 0;            \
            count += some;                                                         \
        }                                                                          \
        break;

static int64_t count_in(const elements *e, int64_t begin, int64_t end)
{
    int64_t count = 0;
    switch (e->nbytes) {
        OF_SIZES(COUNT)
    }
    return count;
}

static inline int is_zero(const char *block, uint64_t mask)
{
    uint64_t words[BLOCK / 8];
    memcpy(words, block, BLOCK);
    return !((words[0] | words[1] | words[2] | words[3]) & mask);
}

/* Without branches on single elements, which nothing predicts: each place is stored, and kept or overwritten. */
#define PLACE(size, type)                                                                    \
    case size:                                                                               \
        for (int64_t i = begin, last; i < end && found < most; i = last) {                   \
            last = smaller(i + BLOCK / size, end);                                           \
            if (last - i == BLOCK / size && is_zero((const char *)e->x + i * size, e->mask)) \
                continue;                                                                    \
            for (; i < last && found < most; i++) {                                          \
                to[found * step] = i;                                                        \
                found += (((const type *)e->x)[i] & (type)e->mask) != 0;                     \
            }                                                                                \
        }                                                                                    \
        break;

/* Append the places from `begin` to `end`, counted over all elements; return how many there are then, `most` at most. */
static int64_t append_places(const elements *e, int64_t begin, int64_t end, int64_t *restrict to, int64_t step,
                             int64_t found, int64_t most)
{
    switch (e->nbytes) {
        OF_SIZES(PLACE)
    }
    return found;
}

/* Make places over all elements, which stand at that along the last axis, places along each axis. Quotients by inverses
   are off by one at most. */
static void split_places(const npy_intp *dims, int rank, int64_t *to, int64_t step, int64_t apart, int64_t count)
{
    for (int axis = rank - 1; axis > 0; axis--) {
        const int64_t dim = dims[axis];
        const double inverse = 1.0 / dim;
        int64_t *place = to + axis * apart, row = 0, first = 0;
        for (int64_t i = 0; i < count; i++, place += step) {
            /* Places ascend. Whether one is in the row of the last is predicted if rows are long. */
            if (dim < LONG_ROW || *place - first >= dim) {
                row = (int64_t)(*place * inverse);
                const int64_t rest = *place - row * dim;
                row += (rest >= dim) - (rest < 0);
                first = row * dim;
            }
            place[-apart] = row;
            *place -= first;
        }
    }
}

static int goes_on(PyObject *checkpoint, int64_t left)
{
    PyObject *result = left ? PyObject_CallNoArgs(checkpoint) : Py_NewRef(Py_None);
    Py_XDECREF(result);
    return result != NULL;
}

/* The setting: whether there is a row of the result for each axis, not for each place. */
static PyObject *nonzero(PyObject *module, PyObject *const *arguments, Py_ssize_t count_of)
{
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    if (count_of != ARRAYS + 1 || !PyArray_Check(arguments[ARRAYS]) || !PyArray_ISCARRAY_RO(x))
        return any_shape_otherwise(arguments, count_of);
    const int rank = PyArray_NDIM(x), by_axis = arguments[SETTINGS] == Py_True, is_float = PyArray_ISFLOAT(x);
    const int64_t size = PyArray_SIZE(x), nbytes = PyArray_ITEMSIZE(x);
    if ((!is_float && !PyArray_ISINTEGER(x) && !PyArray_ISBOOL(x)) || nbytes > 8 || !rank || !size)
        return any_shape_otherwise(arguments, count_of);
    uint64_t mask = UINT64_MAX >> (is_float ? 65 - 8 * nbytes : 0);
    for (int64_t bits = 8 * nbytes; is_float && bits < 64; bits *= 2)
        mask |= mask << bits;
    const elements e = {PyArray_DATA(x), nbytes, mask};
    int64_t total = 0, found = 0;
    for (int64_t begin = 0, end; begin < size; begin = end) {
        end = smaller(begin + BETWEEN, size);
        PyThreadState *state = size < WORTH_UNLOCK ? NULL : PyEval_SaveThread();
        total += count_in(&e, begin, end);
        if (state)
            PyEval_RestoreThread(state);
        if (!goes_on(arguments[CHECKPOINT], size - end))
            return NULL;
    }
    const npy_intp dims[] = {by_axis ? rank : total, by_axis ? total : rank};
    PyObject *y = PyArray_EMPTY(2, dims, NPY_INT64, 0);
    const int64_t step = by_axis ? 1 : rank, apart = by_axis ? total : 1;
    for (int64_t begin = 0, end; y && begin < size; begin = end) {
        int64_t *to = PyArray_DATA((PyArrayObject *)y), before = found;
        end = smaller(begin + BETWEEN, size);
        PyThreadState *state = size < WORTH_UNLOCK ? NULL : PyEval_SaveThread();
        found = append_places(&e, begin, end, to + (rank - 1) * apart, step, found, total);
        split_places(PyArray_DIMS(x), rank, to + before * step, step, apart, found - before);
        if (state)
            PyEval_RestoreThread(state);
        if (!goes_on(arguments[CHECKPOINT], size - end))
            Py_CLEAR(y);
    }
    return y;
}

PyMethodDef nonzero_functions[] = {
    {"nonzero", FAST(nonzero), "nonzero(otherwise, checkpoint, by_axis, x): the places of elements other than 0."},
    {NULL, NULL, 0, NULL},
};
