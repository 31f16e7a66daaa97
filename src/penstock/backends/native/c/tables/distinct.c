/* Rows of equal bytes, found by a hash table with linear probing. */
#include "any_shape.h"
#include "families.h"
#include <stdint.h>
#include <string.h>

enum { BYTES, WORDS, FLOATS }; /* rows of bytes, of one number that is equal in these alone, and of one float */
static const uint64_t NOT_A_NUMBER = UINT64_MAX;
enum { WORD = 8, BETWEEN = 1 << 18 }; /* BETWEEN: elements between two checks whether the run must stop */

typedef struct {
    const char *rows;
    int64_t nbytes, found;
    uint32_t *table, *first, *counts; /* by hash, indices of distinct rows + 1; first row, and number, of each */
    void *numbers;                    /* the index of each row among them, of 64 bits if they are `wide`, else of 32 */
    int wide;
    PyObject *indices; /* the array of numbers */
    uint64_t seed, mask;
    int is_float, apart; /* of one float each; no NaN equals another one */
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

/* The bits of a row of up to 8 bytes; of floats, those of 0 for -0, and the same for all NaNs. */
INLINED uint64_t key_at(const char *row, const int64_t nbytes, const int of)
{
    const uint64_t sign = 1ull << (8 * nbytes - 1);
    const uint64_t infinity = nbytes == 2 ? 0x7c00 : nbytes == 4 ? 0x7f800000 : 0x7ff0000000000000;
    uint64_t key = 0;
    memcpy(&key, row, nbytes);
    if (of == FLOATS)
        key = key == sign ? 0 : (key & ~sign) > infinity ? NOT_A_NUMBER : key;
    return key;
}

INLINED void set_number(const search *s, int64_t i, uint32_t number)
{
    if (s->wide)
        ((int64_t *)s->numbers)[i] = number;
    else
        ((int32_t *)s->numbers)[i] = (int32_t)number;
}

/* Number the rows up to `end`, in the order of their first occurrence. */
INLINED void number_rows(search *shared, int64_t begin, int64_t end, const int64_t nbytes, const int of)
{
    search own = *shared, *const s = &own; /* a copy, which no other pointer leads to */
    for (int64_t i = begin; i < end; i++) {
        const char *row = s->rows + i * nbytes;
        const uint64_t key = of == BYTES ? 0 : key_at(row, nbytes, of);
        uint64_t place = hash_of(of == BYTES ? row : (const char *)&key, nbytes, s->seed) & s->mask;
        uint32_t number = 0;
        if (of != FLOATS || !s->apart || key != NOT_A_NUMBER) {
            while ((number = s->table[place])) {
                const char *other = s->rows + s->first[number - 1] * nbytes;
                if (of == BYTES ? !memcmp(row, other, nbytes) : key_at(other, nbytes, of) == key)
                    break;
                place = (place + 1) & s->mask;
            }
            if (!number)
                s->table[place] = (uint32_t)s->found + 1;
        }
        if (!number) {
            s->first[s->found] = (uint32_t)i, s->counts[s->found] = 0;
            number = (uint32_t)++s->found;
        }
        set_number(s, i, number - 1);
        s->counts[number - 1]++;
    }
    shared->found = s->found;
}

#define NUMBER_ROWS(size, type)                             \
    case 2 * size:                                          \
        number_rows(s, begin, end, size, WORDS);            \
        break;                                              \
    case 2 * size + 1:                                      \
        number_rows(s, begin, end, size, size > 1 ? FLOATS : WORDS); \
        break;

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
        switch (2 * s->nbytes + s->is_float) {
            OF_SIZES(NUMBER_ROWS)
        default:
            number_rows(s, begin, end, s->nbytes, BYTES);
        }
        PyEval_RestoreThread(state);
    }
    return 1;
}

/* Number the rows of equal bytes, or equal elements, in new integers of a type. Return the memory to be freed, or NULL
   with an error. */
static void *searched(search *s, PyArrayObject *x, npy_intp count, int type, int64_t most, PyObject *checkpoint)
{
    int64_t size = 2;
    while (size < 2 * count)
        size *= 2;
    /* Python's hashes of strings have a seed of each process. */
    PyObject *numbers = PyArray_EMPTY(1, &count, type, 0), *text = PyUnicode_FromString("seed");
    uint32_t *table = PyMem_Calloc(size + 2 * count, sizeof *table); /* one block is reused sooner than three */
    if (!table)
        PyErr_NoMemory();
    s->rows = PyArray_DATA(x), s->indices = numbers;
    s->numbers = numbers ? PyArray_DATA((PyArrayObject *)numbers) : NULL, s->wide = type == NPY_INT64;
    s->seed = text ? (uint64_t)PyObject_Hash(text) : 0, s->mask = (uint64_t)size - 1;
    s->table = table, s->first = table + size, s->counts = s->first + count;
    Py_XDECREF(text);
    if (PyErr_Occurred() || !number_all(s, count, most, checkpoint)) {
        PyMem_Free(table);
        Py_XDECREF(numbers);
        return NULL;
    }
    return table;
}

static PyObject *integers(const uint32_t *from, npy_intp count, int type)
{
    PyObject *to = PyArray_EMPTY(1, &count, type, 0);
    for (npy_intp i = 0; to && i < count; i++)
        if (type == NPY_INT64)
            ((int64_t *)PyArray_DATA((PyArrayObject *)to))[i] = from[i];
        else
            ((int32_t *)PyArray_DATA((PyArrayObject *)to))[i] = (int32_t)from[i];
    return to;
}

static PyObject *distinct(PyObject *module, PyObject *const *arguments, Py_ssize_t count_of)
{
    PyArrayObject *x = (PyArrayObject *)arguments[0];
    const int64_t most = count_of == 3 ? PyLong_AsLongLong(arguments[1]) : 0;
    if (most < 1 || !PyArray_Check(arguments[0]) || !PyArray_ISCARRAY_RO(x) || PyArray_NDIM(x) != 2 ||
        PyDataType_REFCHK(PyArray_DESCR(x)) || PyArray_DIM(x, 0) > INT32_MAX)
        return PyErr_Format(PyExc_TypeError, "distinct() takes a matrix without gaps, a number, and a checkpoint");
    const npy_intp count = PyArray_DIM(x, 0);
    search s = {.nbytes = PyArray_DIM(x, 1) * PyArray_ITEMSIZE(x)};
    void *memory = searched(&s, x, count, NPY_INT64, most, arguments[2]);
    if (!memory)
        return NULL;
    PyObject *all = Py_BuildValue("NNN", integers(s.first, s.found, NPY_INT64), s.indices,
                                  integers(s.counts, s.found, NPY_INT64));
    PyMem_Free(memory);
    return all;
}

#define TAKE(size, type)                               \
    case size:                                         \
        for (int64_t i = 0; i < s->found; i++)         \
            ((type *)to)[i] = ((const type *)s->rows)[s->first[i]]; \
        break;

/* The distinct elements. */
static PyObject *elements(const search *s, PyArrayObject *x)
{
    const npy_intp found = s->found;
    PyObject *values = PyArray_EMPTY(1, &found, PyArray_TYPE(x), 0);
    void *to = values ? PyArray_DATA((PyArrayObject *)values) : NULL;
    switch (to ? s->nbytes : 0) {
        OF_SIZES(TAKE)
    }
    return values;
}

/* Put distinct elements in ascending order. Return 0 with an error. */
static int sort(search *s, PyArrayObject *x, int64_t count)
{
    PyObject *values = elements(s, x);
    PyObject *sorted = values ? PyArray_ArgSort((PyArrayObject *)values, 0, NPY_QUICKSORT) : NULL;
    Py_XDECREF(values);
    if (!sorted)
        return 0;
    const npy_intp *order = PyArray_DATA((PyArrayObject *)sorted);
    uint32_t *first = s->table, *counts = first + s->found;
    for (int64_t i = 0; i < s->found; i++)
        first[order[i]] = (uint32_t)i;
    for (int64_t i = 0; i < count; i++)
        set_number(s, i, first[s->wide ? ((int64_t *)s->numbers)[i] : ((int32_t *)s->numbers)[i]]);
    for (int64_t i = 0; i < s->found; i++)
        first[i] = s->first[order[i]], counts[i] = s->counts[order[i]];
    s->first = first, s->counts = counts;
    Py_DECREF(sorted);
    return 1;
}

/* Bits of the settings of Unique: no NaN equals another one, elements in ascending order, results as ONNX has them,
   with first places, and 32 bits of indices; above them the number of results. */
enum { APART = 1, SORTED = 2, ONNX = 4, NARROW = 8, RESULTS = 16 };

static PyObject *unique(PyObject *module, PyObject *const *arguments, Py_ssize_t count_of)
{
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    if (count_of != ARRAYS + 1 || !PyArray_Check(arguments[ARRAYS]) || !PyArray_ISCARRAY_RO(x))
        return any_shape_otherwise(arguments, count_of);
    const long settings = PyLong_AsLong(arguments[SETTINGS]), results = settings / RESULTS;
    const int type = settings & NARROW ? NPY_INT32 : NPY_INT64, is_float = PyArray_ISFLOAT(x);
    const int64_t count = PyArray_SIZE(x), nbytes = PyArray_ITEMSIZE(x);
    if ((!is_float && !PyArray_ISINTEGER(x) && !PyArray_ISBOOL(x)) || nbytes > WORD || !count || count > INT32_MAX ||
        (!(settings & ONNX) && PyArray_NDIM(x) != 1))
        return any_shape_otherwise(arguments, count_of);
    search s = {.nbytes = nbytes, .is_float = is_float, .apart = (settings & APART) != 0};
    void *memory = searched(&s, x, count, type, BETWEEN, arguments[CHECKPOINT]);
    if (!memory)
        return NULL;
    const int done = !(settings & SORTED) || sort(&s, x, count);
    PyObject *all[4] = {done ? elements(&s, x) : NULL};
    long made = 1;
    if (settings & ONNX && made < results)
        all[made++] = integers(s.first, s.found, type);
    if (made < results)
        all[made++] = Py_NewRef(s.indices);
    if (made < results)
        all[made++] = integers(s.counts, s.found, type);
    Py_DECREF(s.indices);
    PyMem_Free(memory);
    return Py_BuildValue("NNNN" + 4 - made, all[0], all[1], all[2], all[3]); /* of one, no tuple */
}

PyMethodDef distinct_functions[] = {
    {"distinct", FAST(distinct),
     "distinct(rows, most, checkpoint): the first place of each distinct row, which one each row is, and how many each "
     "is. The checkpoint is called after each `most` rows."},
    {"unique", FAST(unique), "unique(otherwise, checkpoint, settings, x): the results of Unique."},
    {NULL, NULL, 0, NULL},
};
