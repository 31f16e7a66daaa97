/* Tokens of com.microsoft (ops/microsoft/arrays.py): hashes of n-grams and embeddings of words, of known shapes; the
   cheapest path of a matrix and the end of a repeated n-gram, whose lengths depend on data. */
// Compiler options: -ffp-contract=fast
#include "any_shape.h"
#include "math32.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_HASHES = 256 };

/* For each token and each n, the last n tokens times factors, combined by xor, modulo each of the sizes. An item is a
   text: all have equally many tokens, or end at `bounds`. */
struct ngram_hashes {
    const int64_t *ids, *factors, *sizes, *offsets, *past, *filler; /* offsets, past: or NULL */
    const int32_t *bounds;                                          /* or NULL */
    int64_t *y, *present;                                           /* present: or NULL */
    int64_t texts, length, total, before, heads;
};

/* x modulo a positive size; a division takes several times as long. The first quotient is off by few, that of the
   remainder by at most one. */
static inline int64_t modulo(int64_t x, int64_t size, double inverse)
{
    int64_t rest = (int64_t)((uint64_t)x - (uint64_t)(int64_t)((double)x * inverse) * (uint64_t)size);
    rest -= (int64_t)((double)rest * inverse) * size;
    rest += rest < 0 ? size : 0;
    rest += rest < 0 ? size : 0; /* if it was -size or less */
    return rest >= size ? rest - size : rest;
}

CHECKED_ITEMS_OF(ngram_hashes, ngram_hashes)
{
    const int64_t before = a->before, heads = a->heads, hashes = before * heads;
    double inverse[MOST_HASHES];
    for (int64_t i = 0; i < hashes; i++) {
        if (a->sizes[i] < 1)
            return 1;
        inverse[i] = (1 - 4e-16) / (double)a->sizes[i]; /* slightly less, so that no quotient overflows an integer */
    }
    for (int64_t text = begin; text < end; text++) {
        const int64_t low = a->bounds ? a->bounds[text] : text * a->length;
        const int64_t high = a->bounds ? a->bounds[text + 1] : low + a->length;
        const int64_t is_end = text == a->texts - 1;
        if (low < 0 || high > a->total || (a->bounds && (high <= low || (!text && low) || (is_end && high < a->total))))
            return 1;
        const int64_t *ids = a->ids + low, *past = a->past ? a->past + (text + 1) * before : NULL;
#define TOKEN(place) ((place) >= 0 ? ids[place] : past ? past[place] : *a->filler)
        for (int64_t i = 0; i < high - low; i++) {
            uint64_t mixed = (uint64_t)ids[i] * (uint64_t)a->factors[0];
            int64_t *y = a->y + (low + i) * hashes;
            for (int64_t n = 1, h = 0; n <= before; n++) {
                mixed ^= (uint64_t)TOKEN(i - n) * (uint64_t)a->factors[n];
                for (int64_t last = h + heads; h < last; h++)
                    y[h] = modulo((int64_t)mixed, a->sizes[h], inverse[h]) + (a->offsets ? a->offsets[h] : 0);
            }
        }
        for (int64_t i = 0; a->present && i < before; i++)
            a->present[text * before + i] = TOKEN(high - low - before + i);
    }
    return 0;
}

/* The maximum of tanh of a convolution over the characters of each word; an item is a word. `products` has the
   contribution of each character at index i of a window: [window, table, filters], padded to whole blocks of
   filters. */
struct embedded_words {
    const int32_t *words;
    const float *products, *bias;
    float *y;
    int64_t characters, window, table, filters;
};

CHECKED_ITEMS_OF(embedded_words, embedded_words)
{
    typedef float lanes __attribute__((vector_size(64)));
    typedef int32_t mask __attribute__((vector_size(64)));
    enum { FILTERS = sizeof(lanes) / sizeof(float) };
    const int64_t padded = CEIL_DIV(a->filters, FILTERS) * FILTERS;
    for (int64_t row = begin; row < end; row++) {
        const int32_t *word = a->words + row * a->characters;
        float *y = a->y + row * a->filters;
        int64_t length = 0;
        for (int64_t i = 0; i < a->characters; i++) {
            if (word[i] < 0 || word[i] >= a->table)
                return 1;
            length += word[i] > 0;
        }
        length = word[0] > 0 ? length : 0;
        const int64_t places = length > a->window ? length - a->window : 0;
        for (int64_t f = 0; f < a->filters; f += FILTERS) {
            lanes most = (lanes){0} - INFINITY;
            for (int64_t place = 0; length && place <= places; place++) {
                lanes sums = {0}, x;
                for (int64_t i = 0; i < a->window; i++) {
                    memcpy(&x, a->products + (i * a->table + word[place + i]) * padded + f, sizeof x);
                    sums += x;
                }
                const mask stays = (sums <= most) | (most != most); /* NaN does */
                most = (lanes)(((mask)most & stays) | ((mask)sums & ~stays));
            }
            for (int64_t j = 0; j < smaller(FILTERS, a->filters - f); j++)
                y[f + j] = most[j] + a->bias[f + j];
        }
        for (int64_t f = 0; f < a->filters; f++)
            y[f] = tanh32(y[f]);
        if (!length)
            memset(y, 0, a->filters * sizeof *y);
    }
    return 0;
}

/* The predecessor on the path: one row and one column before, one row before, or one column before. */
enum { BOTH, ABOVE, LEFT };

/* Update `sums` from one row of a matrix to the next, and set the predecessor of each element. */
static void next_row(const float *costs, int64_t columns, float *sums, float corner, uint8_t *from)
{
    float left = INFINITY;
    for (int64_t j = 0; j < columns; j++) {
        const float above = sums[j];
        const int both = corner < above && corner < left, only = above < corner && above < left;
        left = costs[j] + (both ? corner : only ? above : left);
        from[j] = both ? BOTH : only ? ABOVE : LEFT;
        corner = above;
        sums[j] = left;
    }
}

static PyObject *time_warping(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    enum { BETWEEN = 1 << 21, WORTH = 1 << 10 }; /* elements between two checks whether to stop; to release the lock */
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    PyObject *y = NULL;
    if (count != ARRAYS + 1 || !PyArray_Check(arguments[ARRAYS]) || PyArray_TYPE(x) != NPY_FLOAT ||
        !PyArray_ISCARRAY_RO(x) || !PyArray_SIZE(x) || PyArray_NDIM(x) < 2 || PyArray_NDIM(x) > 3 ||
        (PyArray_NDIM(x) == 3 && PyArray_DIM(x, 0) != 1))
        return count < ARRAYS ? NULL : any_shape_otherwise(arguments, count);
    const int64_t rows = PyArray_DIM(x, PyArray_NDIM(x) - 2), columns = PyArray_DIM(x, PyArray_NDIM(x) - 1);
    uint8_t *from = malloc(rows * columns);
    float *sums = malloc(columns * sizeof *sums);
    if (!from || !sums) {
        PyErr_NoMemory();
        goto done;
    }
    FILL(sums, columns, INFINITY);
    for (int64_t row = 0, next; row < rows; row = next) {
        PyThreadState *state = rows * columns < WORTH ? NULL : PyEval_SaveThread();
        next = smaller(rows, row + 1 + BETWEEN / columns);
        for (int64_t i = row; i < next; i++)
            next_row((const float *)PyArray_DATA(x) + i * columns, columns, sums, i ? INFINITY : 0, from + i * columns);
        if (state)
            PyEval_RestoreThread(state);
        PyObject *go_on = next < rows ? PyObject_CallNoArgs(arguments[CHECKPOINT]) : Py_NewRef(Py_None);
        if (!go_on)
            goto done;
        Py_DECREF(go_on);
    }
    npy_intp dims[] = {2, 0};
    for (int64_t i = rows - 1, j = columns - 1; i >= 0 && j >= 0; dims[1]++) {
        const uint8_t at = from[i * columns + j];
        i -= at != LEFT, j -= at != ABOVE;
    }
    y = PyArray_EMPTY(2, dims, NPY_INT, 0);
    int32_t *path = y ? (int32_t *)PyArray_DATA((PyArrayObject *)y) + dims[1] : NULL;
    for (int64_t i = rows - 1, j = columns - 1; y && i >= 0 && j >= 0;) {
        const uint8_t at = from[i * columns + j];
        *--path = (int32_t)i;
        path[dims[1]] = (int32_t)j;
        i -= at != LEFT, j -= at != ABOVE;
    }
done:
    free(from);
    free(sums);
    return y;
}

/* The contiguous int64 elements of an array, and their number; 0 for other arrays. */
static int are_tokens(PyObject *given, const int64_t **to, int64_t *count)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || PyArray_TYPE(x) != NPY_INT64 || PyArray_NDIM(x) != 1 || !PyArray_ISCARRAY_RO(x))
        return 0;
    *to = PyArray_DATA(x), *count = PyArray_SIZE(x);
    return 1;
}

/* Return the number of leading elements that are equal. */
static int64_t equal_elements(const int64_t *a, const int64_t *b, int64_t count)
{
    enum { BLOCK = 32 };
    int64_t i = 0;
    for (; i + BLOCK <= count && !memcmp(a + i, b + i, BLOCK * sizeof *a); i += BLOCK)
        ;
    while (i < count && a[i] == b[i])
        i++;
    return i;
}

/* The index, at or after `from`, of the next n-gram that equals the given one; -1 if there is none. */
static int64_t next_match(const int64_t *source, int64_t length, const int64_t *gram, int64_t size, int64_t from)
{
    enum { BLOCK = 32 };
    const int64_t last = length - size, first = *gram;
    for (int64_t i = from; i <= last;) {
        const int64_t end = smaller(last + 1, i + BLOCK);
        int64_t equal = end - i < BLOCK;
        for (int64_t j = 0; i + BLOCK == end && j < BLOCK; j++)
            equal |= source[i + j] == first;
        for (; equal && i < end; i++)
            if (source[i] == first && equal_elements(source + i, gram, size) == size)
                return i;
        i = end;
    }
    return -1;
}

static PyObject *bifurcation(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS;
    const int64_t *source, *current, *start, *predicted = NULL;
    int64_t sizes[2], length, own, starts, guesses = 0, taken = 0, end = -1;
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &bytes, &nbytes) < 0)
        return NULL;
    memcpy(sizes, bytes, sizeof sizes);
    if (count < ARRAYS + 3 || count > ARRAYS + 4 || !are_tokens(x[0], &source, &length) ||
        !are_tokens(x[1], &current, &own) || !are_tokens(x[2], &start, &starts) || starts != 1)
        return any_shape_otherwise(arguments, count);
    if (count > ARRAYS + 3 && x[3] != Py_None) {
        const int64_t rest = length - *start;
        if (!are_tokens(x[3], &predicted, &guesses) || *start < 0 || rest < 0 || guesses != rest + 1)
            return any_shape_otherwise(arguments, count);
        taken = equal_elements(predicted, source + *start, rest) + 1;
    }
    npy_intp dims[] = {own + taken, 1};
    PyObject *y[] = {PyArray_EMPTY(1, dims, NPY_INT64, 0), PyArray_EMPTY(1, dims + 1, NPY_INT64, 0)}, *result = NULL;
    if (y[0] && y[1]) {
        int64_t *tokens = PyArray_DATA((PyArrayObject *)y[0]);
        memcpy(tokens, current, own * sizeof *tokens);
        if (taken)
            memcpy(tokens + own, predicted, taken * sizeof *tokens);
        for (int64_t size = sizes[0]; size <= smaller(sizes[1], smaller(*dims, length)); size++) {
            const int64_t *gram = tokens + *dims - size, at = next_match(source, length, gram, size, 0);
            if (at < 0)
                break;
            end = at + size;
            if (end >= length)
                break;
            end = next_match(source, length, gram, size, at + 1) < 0 ? end : -1;
        }
        *(int64_t *)PyArray_DATA((PyArrayObject *)y[1]) = end;
        result = PyTuple_Pack(2, y[0], y[1]);
    }
    Py_XDECREF(y[0]);
    Py_XDECREF(y[1]);
    return result;
}

PyMethodDef token_functions[] = {
    {"time_warping", FAST(time_warping),
     "time_warping(otherwise, checkpoint, None, costs): the places of the cheapest path through a matrix."},
    {"bifurcation", FAST(bifurcation),
     "bifurcation(otherwise, checkpoint, sizes, source, current, start, predicted): tokens, and where a match ends."},
    {NULL, NULL, 0, NULL},
};

KERNELS(tokens, KERNEL(ngram_hashes, ngram_hashes), KERNEL(embedded_words, embedded_words))
