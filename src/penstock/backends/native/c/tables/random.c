/* Random bits of counters, by Threefry-2x32 and Philox-4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
   SC 2011), of which an item is a block of counters; and draws from rows of logits, by NumPy's generators. */
#include "any_shape.h"
#include "math64.h"
#include <math.h>
#include <numpy/random/bitgen.h>
#include <stdlib.h>
#include <string.h>

struct random_bits {
    const uint64_t *state; /* key, counter, and perhaps more of Philox's counter */
    uint64_t *next;        /* the state behind all bits */
    uint32_t *y;
    int64_t words, count; /* of the state, of 8 bytes, and of y, of 4 */
    int64_t threefry;
};

enum { BLOCK = 64, WIDEST = 4 };
typedef uint32_t lanes[BLOCK];

INLINED void threefry(const uint32_t k0, const uint32_t k1, lanes x0, lanes x1)
{
    static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    for (int l = 0; l < BLOCK; l++)
        x0[l] += k0, x1[l] += k1;
    for (int group = 0; group < 5; group++) {
        for (int i = 0; i < 4; i++) {
            const int turn = rotations[group % 2][i];
            for (int l = 0; l < BLOCK; l++) {
                x0[l] += x1[l];
                x1[l] = (x1[l] << turn | x1[l] >> (32 - turn)) ^ x0[l];
            }
        }
        for (int l = 0; l < BLOCK; l++)
            x0[l] += keys[(group + 1) % 3], x1[l] += keys[(group + 2) % 3] + group + 1;
    }
}

INLINED void philox(uint32_t k0, uint32_t k1, lanes x0, lanes x1, lanes x2, lanes x3)
{
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int l = 0; l < BLOCK; l++) {
            const uint64_t first = (uint64_t)0xD2511F53u * x0[l], second = (uint64_t)0xCD9E8D57u * x2[l];
            x0[l] = (uint32_t)(second >> 32) ^ x1[l] ^ k0;
            x2[l] = (uint32_t)(first >> 32) ^ x3[l] ^ k1;
            x1[l] = (uint32_t)second, x3[l] = (uint32_t)first;
        }
}

/* Write the words of all lanes in turn. */
INLINED void interleave(lanes *x, const int width, uint32_t *restrict to)
{
    for (int l = 0; l < BLOCK; l++)
        for (int i = 0; i < width; i++)
            to[l * width + i] = x[i][l];
}

ITEMS_OF(random_bits, random_bits)
{
    const int width = a->threefry ? 2 : 4;
    const uint32_t k0 = (uint32_t)a->state[0], k1 = (uint32_t)(a->state[0] >> 32);
    const uint64_t rest = a->state[a->words == 3 ? 2 : 0];
    if (!begin) {
        memcpy(a->next, a->state, a->words * sizeof *a->next);
        a->next[1] += CEIL_DIV(a->count, width);
    }
    for (int64_t item = begin; item < end; item++) {
        lanes x[WIDEST];
        uint32_t last[BLOCK * WIDEST];
        for (int l = 0; l < BLOCK; l++) {
            const uint64_t counter = a->state[1] + item * BLOCK + l;
            x[0][l] = (uint32_t)counter, x[1][l] = (uint32_t)(counter >> 32);
            x[2][l] = (uint32_t)rest, x[3][l] = (uint32_t)(rest >> 32);
        }
        const int64_t at = item * BLOCK * width, left = smaller(a->count - at, BLOCK * width);
        uint32_t *y = left < BLOCK * width ? last : a->y + at;
        if (width == 2) {
            threefry(k0, k1, x[0], x[1]);
            interleave(x, 2, y);
        } else {
            philox(k0, k1, x[0], x[1], x[2], x[3]);
            interleave(x, 4, y);
        }
        if (y == last)
            memcpy(a->y + at, last, left * sizeof *last);
    }
}

struct multinomial {
    const void *x;
    const double *draws; /* [row, count], from 0 up to 1 */
    void *y;
    int64_t classes, count;
    int64_t wide_x, wide_y; /* x and y have 64 bits */
};

/* Sums of exponentials of a row less its maximum, up to each class. */
INLINED void sum_up(double *sums, int64_t classes)
{
    enum { LANES = 16 };
    double most[LANES], sum = 0;
    FILL(most, LANES, sums[0]);
    for (int64_t i = 0; i + LANES <= classes; i += LANES)
        for (int l = 0; l < LANES; l++)
            most[l] = sums[i + l] > most[l] ? sums[i + l] : most[l];
    for (int64_t i = classes - classes % LANES; i < classes; i++)
        most[0] = sums[i] > most[0] ? sums[i] : most[0];
    for (int l = 1; l < LANES; l++)
        most[0] = most[l] > most[0] ? most[l] : most[0];
    const double highest = most[0];
    for (int64_t i = 0; i < classes; i++)
        sums[i] = exp64(sums[i] - highest);
    for (int64_t i = 0; i < classes; i++)
        sums[i] = sum += sums[i];
}

/* The number of sums up to a bound, but for the last sum; without branches on them, which nothing predicts. */
INLINED int64_t sums_up_to(const double *sums, int64_t classes, double bound)
{
    int64_t first = 0;
    for (int64_t left = classes, half; left > 1; left -= half) {
        half = left / 2;
        first += half * (sums[first + half - 1] <= bound);
    }
    return smaller(first + (sums[first] <= bound), classes - 1);
}

CHECKED_ITEMS_OF(multinomial, multinomial)
{
    double *sums = malloc(a->classes * sizeof *sums);
    for (int64_t row = begin; sums && row < end; row++) {
        const float *x = (const float *)a->x + row * a->classes;
        if (a->wide_x)
            memcpy(sums, (const double *)a->x + row * a->classes, a->classes * sizeof *sums);
        else
            for (int64_t i = 0; i < a->classes; i++)
                sums[i] = x[i];
        sum_up(sums, a->classes);
        for (int64_t i = row * a->count; i < (row + 1) * a->count; i++) {
            const int64_t picked = sums_up_to(sums, a->classes, a->draws[i] * sums[a->classes - 1]);
            if (a->wide_y)
                ((int64_t *)a->y)[i] = picked;
            else
                ((int32_t *)a->y)[i] = (int32_t)picked;
        }
    }
    free(sums);
    return !sums;
}

KERNELS(random, KERNEL(random_bits, random_bits), KERNEL(multinomial, multinomial))

/* The settings are the capsule of a bit generator, the number of draws of a row, and whether results have 64 bits. */
static PyObject *random_multinomial(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    if (count != ARRAYS + 1 || !PyArray_Check(arguments[ARRAYS]) || !PyArray_ISCARRAY_RO(x) || PyArray_NDIM(x) != 2 ||
        !PyArray_DIM(x, 1) || (PyArray_TYPE(x) != NPY_FLOAT && PyArray_TYPE(x) != NPY_DOUBLE))
        return any_shape_otherwise(arguments, count);
    PyObject *const settings = arguments[SETTINGS], *y = NULL;
    bitgen_t *const bits = PyCapsule_GetPointer(PyTuple_GetItem(settings, 0), "BitGenerator");
    const npy_intp dims[] = {PyArray_DIM(x, 0), PyLong_AsSsize_t(PyTuple_GetItem(settings, 1))};
    const int wide = PyTuple_GetItem(settings, 2) == Py_True;
    if (!PyErr_Occurred())
        y = PyArray_EMPTY(2, dims, wide ? NPY_INT64 : NPY_INT32, 0);
    const int64_t size = y ? dims[0] * dims[1] : 0;
    double *draws = y ? PyMem_Malloc(size * sizeof *draws) : NULL;
    if (y && !draws) {
        Py_CLEAR(y);
        PyErr_NoMemory();
    }
#ifdef Py_GIL_DISABLED /* else no other thread draws meanwhile */
    Py_BEGIN_CRITICAL_SECTION(settings);
#endif
    for (int64_t i = 0; draws && i < size; i++)
        draws[i] = bits->next_double(bits->state);
#ifdef Py_GIL_DISABLED
    Py_END_CRITICAL_SECTION();
#endif
    if (draws && size) {
        const int64_t classes = PyArray_DIM(x, 1);
        const struct multinomial words = {PyArray_DATA(x), draws, PyArray_DATA((PyArrayObject *)y), classes, dims[1],
                                          PyArray_TYPE(x) == NPY_DOUBLE, wide};
        y = any_shape_computed("multinomial", &words, dims[0], 3.0 * classes + 30.0 * dims[1],
                               arguments[CHECKPOINT], y);
    }
    PyMem_Free(draws);
    return y;
}

PyMethodDef random_functions[] = {
    {"multinomial", FAST(random_multinomial), "multinomial(otherwise, checkpoint, settings, x): draws from rows of x."},
    {NULL, NULL, 0, NULL},
};
