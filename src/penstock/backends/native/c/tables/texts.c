/* Python functions on strings, which are objects: lookups in a table, hashes, tokens, n-grams, and rows as
   dictionaries. */
#include "numpy_api.h"
#include <string.h>
#include "native.h"

/* Strings between two checks whether the run must stop. */
enum { BETWEEN_CHECKS = 1 << 14 };

static int expected(Py_ssize_t count, Py_ssize_t wanted)
{
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", count, wanted);
    return count == wanted;
}

/* An array of one element type in C order, as a new reference. */
static PyArrayObject *array_of(PyObject *given, int type)
{
    if (!PyArray_Check(given) || PyArray_TYPE((PyArrayObject *)given) != type)
        return (PyArrayObject *)PyErr_Format(PyExc_TypeError, "an array of another type is expected");
    return (PyArrayObject *)PyArray_FROM_OF(given, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);
}

static PyArrayObject *new_array(int rank, const npy_intp *dims, int type)
{
    return (PyArrayObject *)PyArray_SimpleNew(rank, dims, type);
}

/* A string of an array, a borrowed reference. */
static PyObject *text_at(PyArrayObject *x, npy_intp i)
{
    PyObject *text = ((PyObject **)PyArray_DATA(x))[i];
    return text ? text : Py_None;
}

/* After the string at `i`: 0 if the run must stop, with an error. */
static int goes_on(npy_intp i, PyObject *checkpoint)
{
    if (i % BETWEEN_CHECKS != BETWEEN_CHECKS - 1)
        return 1;
    PyObject *result = PyObject_CallNoArgs(checkpoint);
    Py_XDECREF(result);
    return result != NULL;
}

static PyObject *text_places(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 3) || !PyDict_Check(arguments[1]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "places() takes a dict");
    int64_t missing = PyLong_AsLongLong(arguments[2]);
    PyArrayObject *x = array_of(arguments[0], NPY_OBJECT);
    PyArrayObject *y = x ? new_array(PyArray_NDIM(x), PyArray_DIMS(x), NPY_INT64) : NULL;
    if (y) {
        int64_t *places = PyArray_DATA(y);
        for (npy_intp i = 0; i < PyArray_SIZE(x) && !PyErr_Occurred(); i++) {
            PyObject *place = PyDict_GetItemWithError(arguments[1], text_at(x, i));
            places[i] = place ? PyLong_AsLongLong(place) : missing;
        }
        if (PyErr_Occurred())
            Py_CLEAR(y);
    }
    Py_XDECREF((PyObject *)x);
    return (PyObject *)y;
}

static inline uint32_t rotated(uint32_t x, int bits)
{
    return x << bits | x >> (32 - bits);
}

/* MurmurHash3_x86_32 (Appleby, 2011) of `size` bytes. */
INLINED uint32_t hash_of(const char *bytes, const Py_ssize_t size, uint32_t seed)
{
    uint32_t hash = seed;
    for (Py_ssize_t at = 0; at < size; at += 4) {
        const Py_ssize_t left = size - at < 4 ? size - at : 4;
        uint32_t word = 0;
        for (Py_ssize_t i = 0; i < left; i++)
            word |= (uint32_t)(unsigned char)bytes[at + i] << 8 * i;
        hash ^= rotated(word * 0xcc9e2d51u, 15) * 0x1b873593u;
        if (left == 4)
            hash = rotated(hash, 13) * 5 + 0xe6546b64u;
    }
    hash ^= (uint32_t)size;
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    return hash ^ hash >> 16;
}

#define HASHES_OF(size) for (int i = 0; i < AT_ONCE; i++) to[i] = hash_of(bytes + i * size, size, seed)
/* Hash numbers up to the next check whether a run must stop; return how many. */
static npy_intp hashes_of_numbers(const char *bytes, int64_t size, uint32_t seed, npy_intp left, uint32_t *restrict to)
{
    enum { AT_ONCE = 64 };
    if (left >= AT_ONCE && size == 4)
        HASHES_OF(4);
    else if (left >= AT_ONCE && size == 8)
        HASHES_OF(8);
    else
        to[0] = hash_of(bytes, size, seed), left = 1;
    return smaller(left, AT_ONCE);
}

static PyObject *text_hashes(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 3) || !PyArray_Check(arguments[0]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "hashes() takes an array");
    const int type = PyArray_TYPE((PyArrayObject *)arguments[0]);
    const uint32_t seed = (uint32_t)PyLong_AsUnsignedLong(arguments[1]);
    PyArrayObject *x = PyErr_Occurred() ? NULL : array_of(arguments[0], type);
    PyArrayObject *y = x ? new_array(PyArray_NDIM(x), PyArray_DIMS(x), NPY_UINT32) : NULL;
    for (npy_intp i = 0, hashed = 1; y && i < PyArray_SIZE(x); i += hashed) {
        Py_ssize_t size = PyArray_ITEMSIZE(x);
        const char *bytes = (const char *)PyArray_DATA(x) + i * size;
        uint32_t *to = (uint32_t *)PyArray_DATA(y) + i;
        if (type != NPY_OBJECT)
            hashed = hashes_of_numbers(bytes, size, seed, PyArray_SIZE(x) - i, to);
        else if ((bytes = PyUnicode_AsUTF8AndSize(text_at(x, i), &size)))
            to[0] = hash_of(bytes, size, seed);
        if (!bytes || !goes_on(i + hashed - 1, arguments[2]))
            Py_CLEAR(y);
    }
    Py_XDECREF((PyObject *)x);
    return (PyObject *)y;
}

/* Set the value of each label; among equal labels, the last one wins. */
static int set_row(PyObject *row, PyObject *labels, const float *values, Py_ssize_t width)
{
    for (Py_ssize_t i = 0; i < width; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        int failed = !value || PyDict_SetItem(row, PyTuple_GetItem(labels, i), value) < 0;
        Py_XDECREF(value);
        if (failed)
            return -1;
    }
    return 0;
}

static PyObject *text_zip_map(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 2) || !PyTuple_Check(arguments[1]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "labels are a tuple");
    Py_ssize_t width = PyTuple_Size(arguments[1]);
    PyArrayObject *x = array_of(arguments[0], NPY_FLOAT);
    if (!x)
        return NULL;
    int rank = PyArray_NDIM(x);
    Py_ssize_t length = rank == 2 ? PyArray_DIM(x, 0) : 1;
    PyObject *rows = NULL, *row = NULL;
    if (rank < 1 || rank > 2 || PyArray_DIM(x, rank - 1) != width)
        PyErr_Format(PyExc_ValueError, "%zd labels do not fit", width);
    else
        rows = PyList_New(length);
    for (Py_ssize_t i = 0; rows && i < length; i++) {
        row = row ? PyDict_Copy(row) : PyDict_New();
        if (!row || PyList_SetItem(rows, i, row) < 0 ||
            set_row(row, arguments[1], (const float *)PyArray_DATA(x) + i * width, width) < 0)
            Py_CLEAR(rows);
    }
    Py_DECREF((PyObject *)x);
    return rows;
}

typedef struct {
    const char *members; /* of 128 bytes */
    int others, single;
    int64_t least;
} token_class;

static inline int is_first(char byte)
{
    return ((unsigned char)byte & 0xC0) != 0x80;
}

/* Append the tokens of a text; return their number, or -1. */
static int64_t append_tokens(PyObject *tokens, PyObject *string, const void *settings)
{
    const token_class *c = settings;
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(string, &size);
    int64_t number = text ? 0 : -1;
    size = text ? size : 0;
    for (Py_ssize_t begin = 0, end; begin < size; begin = end) {
        int64_t characters = 0;
        for (end = begin; end < size; end++) {
            int first = is_first(text[end]);
            if (first && ((unsigned char)text[end] < 128 ? !c->members[(unsigned char)text[end]] : !c->others))
                break;
            if (first && c->single && characters)
                break;
            characters += first;
        }
        if (end == begin) {
            for (end++; end < size && !is_first(text[end]); end++)
                ;
            continue;
        }
        if (characters < c->least)
            continue;
        PyObject *token = PyUnicode_FromStringAndSize(text + begin, end - begin);
        int failed = !token || PyList_Append(tokens, token) < 0;
        Py_XDECREF(token);
        if (failed)
            return -1;
        number++;
    }
    return number;
}

typedef int64_t (*appending)(PyObject *tokens, PyObject *text, const void *settings);

/* Concatenate what `append` appends for all strings into a list, with an array of counts: it has the dims of x, or
   one dim if it is `flat`. */
static PyObject *all_tokens(PyObject *given, int flat, appending append, const void *settings,
                            PyObject *checkpoint)
{
    PyArrayObject *x = PyErr_Occurred() ? NULL : array_of(given, NPY_OBJECT);
    npy_intp length = x ? PyArray_SIZE(x) : 0;
    const npy_intp *dims = flat || !x ? &length : PyArray_DIMS(x);
    PyArrayObject *counts = x ? new_array(flat ? 1 : PyArray_NDIM(x), dims, NPY_INT64) : NULL;
    PyObject *tokens = counts ? PyList_New(0) : NULL;
    int failed = !tokens;
    for (npy_intp i = 0; !failed && i < length; i++) {
        int64_t number = append(tokens, text_at(x, i), settings);
        ((int64_t *)PyArray_DATA(counts))[i] = number;
        failed = number < 0 || !goes_on(i, checkpoint);
    }
    PyObject *result = failed ? NULL : PyTuple_Pack(2, tokens, counts);
    Py_XDECREF(tokens);
    Py_XDECREF((PyObject *)counts);
    Py_XDECREF((PyObject *)x);
    return result;
}

static PyObject *text_tokens(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 6) || PyBytes_Size(arguments[1]) != 128)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "members are 128 bytes");
    token_class c = {PyBytes_AsString(arguments[1]), PyObject_IsTrue(arguments[2]),
                     PyObject_IsTrue(arguments[3]), PyLong_AsLongLong(arguments[4])};
    return all_tokens(arguments[0], 1, append_tokens, &c, arguments[5]);
}

/* Match a UTF-8 text with a deterministic automaton: 1 if it does not match, 2 if it does, 0 if the automaton does
   not know yet. A row of `moves` is a state (0: none); a character leads to the state of its move minus 1, and the
   end of the text is column 0. */
static int match(const char *text, Py_ssize_t size, const uint8_t *columns, const uint8_t *moves)
{
    uint32_t state = 1;
    for (Py_ssize_t i = 0; i < size;) {
        uint32_t c = (unsigned char)text[i++];
        if (c >= 0xF0)
            return 0;
        if (c >= 0xC0) {
            int more = c >= 0xE0 ? 2 : 1;
            for (c &= more == 2 ? 15 : 31; more; more--)
                c = c << 6 | ((unsigned char)text[i++] & 63);
        }
        uint32_t move = columns[c] ? moves[state << 8 | columns[c]] : 0;
        if (move < 2)
            return (int)move;
        state = move - 1;
    }
    return moves[state << 8];
}

/* Characters between two checks whether the run must stop, and of the longest text matched here. */
enum { MATCH_BETWEEN = 1 << 22, LONGEST_TEXT = 1 << 20 };

static PyObject *text_matches(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    static const int types[] = {NPY_OBJECT, NPY_UINT8, NPY_UINT8, NPY_BOOL};
    PyArrayObject *arrays[4] = {NULL};
    int good = expected(count, 6);
    for (int i = 0; good && i < 4; i++)
        good = (arrays[i] = array_of(arguments[i], types[i])) != NULL;
    npy_intp at = good ? PyLong_AsSsize_t(arguments[4]) : 0, end = good ? PyArray_SIZE(arrays[0]) : 0;
    if (good && (PyArray_SIZE(arrays[1]) < 1 << 16 || PyArray_SIZE(arrays[2]) < 1 << 16 ||
                 PyArray_SIZE(arrays[3]) != end || at < 0))
        PyErr_SetString(PyExc_ValueError, "tables or results do not fit");
    Py_ssize_t total = 0;
    for (; good && !PyErr_Occurred() && at < end; at++) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(text_at(arrays[0], at), &size);
        PyErr_Clear(); /* the caller handles what is not text, or not valid UTF-8 */
        int found = text && size <= LONGEST_TEXT
                        ? match(text, size, PyArray_DATA(arrays[1]), PyArray_DATA(arrays[2]))
                        : 0;
        if (!found)
            break;
        ((npy_bool *)PyArray_DATA(arrays[3]))[at] = found == 2;
        total += size;
        if (total > MATCH_BETWEEN) {
            Py_XDECREF(PyObject_CallNoArgs(arguments[5]));
            total = 0;
        }
    }
    for (int i = 0; i < 4; i++)
        Py_XDECREF((PyObject *)arrays[i]);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(at);
}

/* Splitting of texts: at separators, or at white space (NULL), at most `most` times. */
typedef struct {
    PyObject *separator;
    Py_ssize_t most;
} splitting;

/* Append the parts of a text; return their number, or -1. */
static int64_t append_parts(PyObject *tokens, PyObject *text, const void *settings)
{
    const splitting *s = settings;
    PyObject *parts = PyUnicode_Split(text, s->separator, s->most);
    Py_ssize_t number = parts ? PyList_Size(parts) : -1;
    /* White space at the end is dropped, even from the part that is not split further. */
    if (number > 0 && !s->separator && number == s->most + 1) {
        PyObject *last = PyObject_CallMethod(PyList_GetItem(parts, s->most), "rstrip", NULL);
        if (!last || PyList_SetItem(parts, s->most, last) < 0)
            number = -1;
    }
    for (Py_ssize_t i = 0, length = number; i < length && number >= 0; i++)
        if (PyList_Append(tokens, PyList_GetItem(parts, i)) < 0)
            number = -1;
    Py_XDECREF(parts);
    return number;
}

static PyObject *text_parts(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 4))
        return NULL;
    splitting s = {arguments[1] == Py_None ? NULL : arguments[1], PyLong_AsSsize_t(arguments[2])};
    return all_tokens(arguments[0], 0, append_parts, &s, arguments[3]);
}

/* Put a new reference to an object where another one may be. */
static inline void put(PyObject **to, PyObject *x)
{
    Py_INCREF(x);
    Py_XDECREF(*to);
    *to = x;
}

static PyObject *text_padded(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 6) || !PyList_Check(arguments[0]) || !PyArray_Check(arguments[2]) ||
        !PyTuple_Check(arguments[3]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "tokens are a list");
    PyObject *tokens = arguments[0], *marks = arguments[3];
    PyArrayObject *x = (PyArrayObject *)arguments[2], *counts = array_of(arguments[1], NPY_INT64), *y = NULL;
    if (!counts)
        return NULL;
    const npy_intp rows = PyArray_SIZE(counts), rank = PyArray_NDIM(x);
    const Py_ssize_t margin = PyTuple_Size(marks) / 2;
    const int64_t *numbers = PyArray_DATA(counts);
    npy_intp dims[NPY_MAXDIMS], *width = dims + rank;
    Py_ssize_t total = 0, at = 0;
    int64_t least = 0, most = 0;
    for (npy_intp i = 0; i < rows; i++) {
        total += numbers[i];
        least = numbers[i] < least ? numbers[i] : least, most = numbers[i] > most ? numbers[i] : most;
    }
    if (rows != PyArray_SIZE(x) || rank >= NPY_MAXDIMS || least < 0 || total != PyList_Size(tokens)) {
        PyErr_SetString(PyExc_ValueError, "tokens do not fit");
    } else {
        for (npy_intp i = 0; i < rank; i++)
            dims[i] = PyArray_DIM(x, i);
        *width = most + 2 * margin;
        PyObject *reserved = PyObject_CallFunction(arguments[5], "L", (long long)(rows * *width * sizeof(PyObject *)));
        y = reserved ? new_array((int)rank + 1, dims, NPY_OBJECT) : NULL;
        Py_XDECREF(reserved);
    }
    for (npy_intp i = 0; y && i < rows; i++) {
        PyObject **row = (PyObject **)PyArray_DATA(y) + i * *width;
        for (npy_intp j = 0; j < *width; j++) {
            int64_t place = j - margin;
            put(row + j, place < 0                     ? PyTuple_GetItem(marks, 0)
                         : place < numbers[i]          ? PyList_GetItem(tokens, at++)
                         : place < numbers[i] + margin ? PyTuple_GetItem(marks, 1)
                                                       : arguments[4]);
        }
    }
    Py_DECREF((PyObject *)counts);
    return (PyObject *)y;
}

/* Texts without those that are in a set, perhaps in lower case, by a method of str; one empty text if none is left. */
static PyObject *text_normalized(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 5))
        return NULL;
    PyObject *stop = arguments[1], *fold = arguments[2], *change = arguments[3];
    PyArrayObject *x = array_of(arguments[0], NPY_OBJECT), *y = NULL;
    PyObject *kept = x ? PyList_New(0) : NULL;
    int failed = !kept;
    for (npy_intp i = 0; !failed && i < PyArray_SIZE(x); i++) {
        PyObject *text = text_at(x, i), *key = stop == Py_None ? NULL : text, *changed = text;
        Py_INCREF(text);
        if (key && fold != Py_None)
            key = PyObject_CallFunctionObjArgs(fold, text, NULL);
        const int found = stop == Py_None ? 0 : key ? PySet_Contains(stop, key) : -1;
        if (key && key != text)
            Py_DECREF(key);
        if (!found && change != Py_None)
            changed = PyObject_CallFunctionObjArgs(change, text, NULL);
        failed = found < 0 || !changed || (!found && PyList_Append(kept, changed) < 0) || !goes_on(i, arguments[4]);
        if (changed != text)
            Py_XDECREF(changed);
        Py_DECREF(text);
    }
    if (!failed && !PyList_Size(kept)) {
        PyObject *empty = PyUnicode_FromString("");
        failed = !empty || PyList_Append(kept, empty) < 0;
        Py_XDECREF(empty);
    }
    if (!failed) {
        const npy_intp dims[] = {1, PyList_Size(kept)};
        y = PyArray_NDIM(x) == 2 ? new_array(2, dims, NPY_OBJECT) : new_array(1, dims + 1, NPY_OBJECT);
    }
    for (npy_intp i = 0; y && i < PyArray_SIZE(y); i++)
        put((PyObject **)PyArray_DATA(y) + i, PyList_GetItem(kept, i));
    Py_XDECREF(kept);
    Py_XDECREF((PyObject *)x);
    return (PyObject *)y;
}

/* The words of a text, and a sequence of some of them. */
typedef struct {
    const char **words;
    Py_ssize_t *sizes, *next, *ends; /* next: the word to be tried at each place of the sequence; ends: bytes up to there */
    Py_ssize_t count, most;          /* words in all, and of a sequence */
    char *text;
} sequence;

/* Append all sequences of `least` to `most` words, between which up to `skip` others are left out, each before what it
   begins with. Return 0 with an error. */
static int append_grams(PyObject *grams, sequence *s, Py_ssize_t skip, Py_ssize_t least, PyObject *checkpoint)
{
    s->next[0] = 0;
    for (Py_ssize_t size = 0, steps = 0;; steps++) {
        const Py_ssize_t end = size ? smaller(s->next[size - 1] + skip + 1, s->count) : s->count;
        if (size < s->most && s->next[size] < end) {
            const Py_ssize_t word = s->next[size]++;
            char *to = s->text + (size ? s->ends[size - 1] : 0);
            if (size)
                *to++ = ' ';
            memcpy(to, s->words[word], s->sizes[word]);
            s->ends[size++] = to + s->sizes[word] - s->text;
            if (size < s->most)
                s->next[size] = word + 1;
            continue;
        }
        if (!size)
            return 1;
        if (size >= least) {
            PyObject *gram = PyUnicode_DecodeUTF8(s->text, s->ends[size - 1], "surrogatepass");
            const int failed = !gram || PyList_Append(grams, gram) < 0;
            Py_XDECREF(gram);
            if (failed)
                return 0;
        }
        size--;
        if (!goes_on(steps, checkpoint))
            return 0;
    }
}

/* The bytes of a word of a list, which keeps them. */
static const char *bytes_of(PyObject *words, Py_ssize_t i, Py_ssize_t *size)
{
    const char *bytes = PyUnicode_AsUTF8AndSize(PyList_GetItem(words, i), size);
    if (bytes)
        return bytes;
    PyErr_Clear();
    PyObject *encoded = PyUnicode_AsEncodedString(PyList_GetItem(words, i), "utf-8", "surrogatepass");
    if (!encoded || PyList_SetItem(words, i, encoded) < 0)
        return NULL;
    *size = PyBytes_Size(encoded);
    return PyBytes_AsString(encoded);
}

/* A list of all sequences of words of a list. */
static PyObject *grams_of(PyObject *words, Py_ssize_t most, Py_ssize_t skip, Py_ssize_t least, PyObject *checkpoint)
{
    const Py_ssize_t count = PyList_Size(words);
    PyObject *grams = PyList_New(0);
    if (!grams || most < 1 || most > count)
        return grams;
    Py_ssize_t bytes = count, *numbers = PyMem_Malloc(4 * count * sizeof *numbers);
    sequence s = {(const char **)numbers, numbers + count, numbers + 2 * count, numbers + 3 * count, count, most, NULL};
    for (Py_ssize_t i = 0; numbers && i < count; i++) {
        s.words[i] = bytes_of(words, i, s.sizes + i);
        if (!s.words[i])
            break;
        bytes += s.sizes[i];
    }
    s.text = PyErr_Occurred() ? NULL : PyMem_Malloc(bytes);
    if (!PyErr_Occurred() && (!numbers || !s.text))
        PyErr_NoMemory();
    if (PyErr_Occurred() || !append_grams(grams, &s, skip, least, checkpoint))
        Py_CLEAR(grams);
    PyMem_Free(s.text);
    PyMem_Free(numbers);
    return grams;
}

static PyObject *text_grams(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expected(count, 5))
        return NULL;
    Py_ssize_t numbers[3];
    for (int i = 0; i < 3; i++)
        numbers[i] = PyLong_AsSsize_t(arguments[1 + i]);
    PyArrayObject *x = PyErr_Occurred() ? NULL : array_of(arguments[0], NPY_OBJECT), *y = NULL;
    if (x && !PyArray_SIZE(x))
        PyErr_SetString(PyExc_IndexError, "there is no text");
    PyObject *text = x && PyArray_SIZE(x) ? PyObject_Str(text_at(x, 0)) : NULL;
    PyObject *words = text ? PyUnicode_Split(text, NULL, -1) : NULL;
    PyObject *grams = words ? grams_of(words, numbers[0], numbers[1], numbers[2], arguments[4]) : NULL;
    if (grams) {
        const npy_intp size = PyList_Size(grams);
        y = new_array(1, &size, NPY_OBJECT);
        for (npy_intp i = 0; y && i < size; i++)
            put((PyObject **)PyArray_DATA(y) + i, PyList_GetItem(grams, i));
    }
    Py_XDECREF(grams);
    Py_XDECREF(words);
    Py_XDECREF(text);
    Py_XDECREF((PyObject *)x);
    return (PyObject *)y;
}

/* A trie of n-grams. The node of token t at the first level is first[t]; below, there is an edge to node target for
   each key = node * base + token, in ascending order; those of level d are from starts[d] up to starts[d + 1]. */
typedef struct {
    const int64_t *first, *keys, *targets, *starts, *columns;
    int64_t firsts, levels, base;
} trie;

static inline int64_t below(const trie *t, int64_t depth, int64_t node, int64_t token)
{
    if (!depth)
        return token >= 0 && token < t->firsts ? t->first[token] : -1;
    int64_t key = node * t->base + token, low = t->starts[depth], high = t->starts[depth + 1];
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (t->keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < t->starts[depth + 1] && t->keys[low] == key ? t->targets[low] : -1;
}

static void count_row(const trie *t, const int64_t *tokens, int64_t length, int64_t shortest,
                      int64_t skips, float *counts)
{
    for (int64_t distance = 1; distance <= skips + 1 && (distance < length || distance == 1); distance++)
        for (int64_t begin = 0; begin < length; begin++) {
            int64_t node = 0;
            for (int64_t depth = 0, at = begin; depth < t->levels && at < length;
                 depth++, at += distance) {
                node = below(t, depth, node, tokens[at]);
                if (node < 0)
                    break;
                /* Single tokens have no distance: they count once. */
                if (depth + 1 >= shortest && (depth || distance == 1) && t->columns[node] >= 0)
                    counts[t->columns[node]]++;
            }
        }
}

static PyObject *text_ngrams(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyArrayObject *arrays[6] = {NULL}, *y = NULL;
    int good = expected(count, 10);
    for (int i = 0; good && i < 6; i++)
        good = (arrays[i] = array_of(arguments[i], NPY_INT64)) != NULL;
    if (good) {
        trie t = {PyArray_DATA(arrays[1]), PyArray_DATA(arrays[2]), PyArray_DATA(arrays[3]),
                  PyArray_DATA(arrays[4]), PyArray_DATA(arrays[5]), PyArray_SIZE(arrays[1]),
                  PyArray_SIZE(arrays[4]) - 1, PyLong_AsLongLong(arguments[6])};
        int64_t shortest = PyLong_AsLongLong(arguments[7]), skips = PyLong_AsLongLong(arguments[8]);
        int is_matrix = PyArray_NDIM(arrays[0]) == 2;
        npy_intp rows = is_matrix ? PyArray_DIM(arrays[0], 0) : 0;
        npy_intp length = is_matrix ? PyArray_DIM(arrays[0], 1) : 0;
        npy_intp dims[2] = {rows, PyLong_AsSsize_t(arguments[9])};
        if (!is_matrix)
            PyErr_SetString(PyExc_ValueError, "tokens are a matrix");
        if (!PyErr_Occurred())
            y = (PyArrayObject *)PyArray_ZEROS(2, dims, NPY_FLOAT, 0);
        if (y) {
            Py_BEGIN_ALLOW_THREADS
            for (npy_intp i = 0; i < rows; i++)
                count_row(&t, (const int64_t *)PyArray_DATA(arrays[0]) + i * length, length, shortest,
                          skips, (float *)PyArray_DATA(y) + i * dims[1]);
            Py_END_ALLOW_THREADS
        }
    }
    for (int i = 0; i < 6; i++)
        Py_XDECREF((PyObject *)arrays[i]);
    return (PyObject *)y;
}

PyMethodDef texts_functions[] = {
    {"places", FAST(text_places), "places(x, places, missing): the place of each string."},
    {"hashes", FAST(text_hashes),
     "hashes(x, seed, checkpoint): MurmurHash3 of each string, or of the bytes of each number."},
    {"zip_map", FAST(text_zip_map), "zip_map(x, labels): a dict of each row, float by label."},
    {"tokens", FAST(text_tokens),
     "tokens(x, members, others, single, least, checkpoint): the list of all runs of characters in "
     "`members`, or `others` beyond ASCII, and how many there are of each string."},
    {"matches", FAST(text_matches),
     "matches(x, columns, moves, result, start, checkpoint): whether each string from `start` on "
     "matches an automaton; returns the place of the first of which that is not known."},
    {"parts", FAST(text_parts),
     "parts(x, separator, most, checkpoint): the list of the parts of all strings, of which one is "
     "split at most `most` times, and how many there are of each."},
    {"padded", FAST(text_padded),
     "padded(tokens, counts, x, marks, pad, reserve): a row of tokens for each string of x, between marks and before "
     "pads, once reserve(bytes) has returned."},
    {"normalized", FAST(text_normalized),
     "normalized(x, stop, fold, change, checkpoint): fold(text) is looked up in `stop`, and change(text) is kept; each "
     "may be None."},
    {"grams", FAST(text_grams),
     "grams(x, most, skip, least, checkpoint): all sequences of `least` to `most` words of the first text of x, "
     "between which up to `skip` others are left out."},
    {"ngrams", FAST(text_ngrams),
     "ngrams(tokens, first, keys, targets, starts, columns, base, shortest, skips, width): how "
     "often each n-gram occurs in each row."},
    {NULL, NULL, 0, NULL},
};
