/* Rows of equal bytes, found by a hash table with linear probing. */
#include "native.h"
#include "numpy_api.h"
#include <stdint.h>
#include <string.h>

enum { WORD = 8 };

typedef struct {
    const char *rows;
    int64_t nbytes, *numbers, found;
    uint32_t *table, *first, *counts; /* by hash, indices of distinct rows + 1; first row, and number, of each */
    uint64_t seed, mask;
} search;

/* A hash whose bits all depend on all bytes, and on a seed that is unknown to those who choose the bytes. */
INLINED uint64_t hash_of(const char *row, const int64_t nbytes, uint64_t seed)
{
    uint64_t hash = seed, word;
    for (int64_t at = 0; at < nbytes; at += WORD) {
        word = 0;
        memcpy(&word, row + at, nbytes - at < WORD ? nbytes - at : WORD);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash = (hash ^ hash >> 32) * (seed | 1);
    }
    return hash ^ hash >> 29;
}

/* Number the rows up to `end`, in the order of their first occurrence. */
INLINED void number_rows(search *s, int64_t begin, int64_t end, const int64_t nbytes)
{
    for (int64_t i = begin; i < end; i++) {
        const char *row = s->rows + i * nbytes;
        uint64_t place = hash_of(row, nbytes, s->seed) & s->mask;
        uint32_t number;
        while ((number = s->table[place]) && memcmp(s->rows + s->first[number - 1] * nbytes, row, nbytes))
            place = (place + 1) & s->mask;
        if (!number) {
            s->first[s->found] = (uint32_t)i, s->counts[s->found] = 0;
            s->table[place] = number = (uint32_t)++s->found;
        }
        s->numbers[i] = number - 1;
        s->counts[number - 1]++;
    }
}

/* Check after every `most` rows whether the run must stop. */
static int number_all(search *s, int64_t count, int64_t most, PyObject *checkpoint)
{
    for (int64_t begin = 0, end; begin < count; begin = end) {
        end = count - begin < most ? count : begin + most;
        PyObject *done = begin ? PyObject_CallNoArgs(checkpoint) : Py_NewRef(Py_None);
        if (!done)
            return 0;
        Py_DECREF(done);
        PyThreadState *state = PyEval_SaveThread();
        if (s->nbytes == 4)
            number_rows(s, begin, end, 4);
        else if (s->nbytes == 8)
            number_rows(s, begin, end, 8);
        else
            number_rows(s, begin, end, s->nbytes);
        PyEval_RestoreThread(state);
    }
    return 1;
}

static PyObject *integers(const uint32_t *from, npy_intp count)
{
    PyObject *to = PyArray_EMPTY(1, &count, NPY_INT64, 0);
    for (npy_intp i = 0; to && i < count; i++)
        ((int64_t *)PyArray_DATA((PyArrayObject *)to))[i] = from[i];
    return to;
}

static PyObject *distinct(PyObject *module, PyObject *const *arguments, Py_ssize_t count_of)
{
    PyArrayObject *x = (PyArrayObject *)arguments[0];
    const int64_t most = count_of == 3 ? PyLong_AsLongLong(arguments[1]) : 0;
    if (most < 1 || !PyArray_Check(arguments[0]) || !PyArray_ISCARRAY_RO(x) || PyArray_NDIM(x) != 2 ||
        PyDataType_REFCHK(PyArray_DESCR(x)) || PyArray_DIM(x, 0) > INT32_MAX)
        return PyErr_Format(PyExc_TypeError, "distinct() takes a matrix without gaps, a number, and a checkpoint");
    npy_intp count = PyArray_DIM(x, 0), size = 2;
    while (size < 2 * count)
        size *= 2;
    /* Python's hashes of strings have a seed of each process. */
    PyObject *numbers = PyArray_EMPTY(1, &count, NPY_INT64, 0), *all = NULL, *text = PyUnicode_FromString("seed");
    uint32_t *table = PyMem_Calloc(size + 2 * count, sizeof *table); /* one block is reused sooner than three */
    if (numbers && text && table) {
        search s = {PyArray_DATA(x), PyArray_DIM(x, 1) * PyArray_ITEMSIZE(x), PyArray_DATA((PyArrayObject *)numbers), 0,
                    table, table + size, table + size + count, (uint64_t)PyObject_Hash(text), (uint64_t)size - 1};
        if (number_all(&s, count, most, arguments[2]))
            all = Py_BuildValue("NON", integers(s.first, s.found), numbers, integers(s.counts, s.found));
    } else if (!table)
        PyErr_NoMemory();
    PyMem_Free(table);
    Py_XDECREF(text);
    Py_XDECREF(numbers);
    return all;
}

PyMethodDef distinct_functions[] = {
    {"distinct", FAST(distinct),
     "distinct(rows, most, checkpoint): the first place of each distinct row, which one each row is, and how many each "
     "is. The checkpoint is called after each `most` rows."},
    {NULL, NULL, 0, NULL},
};
