/* Common parts of functions for arrays of any shapes (any_shape.h); programs of elementwise operations, and
   softmax. */
#include "any_shape.h"
#include "arguments.h"
#include "programs.h"
#include <string.h>

PyObject *any_shape_otherwise(PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *arrays = PyTuple_New(count - ARRAYS);
    for (Py_ssize_t i = 0; arrays && i < count - ARRAYS; i++)
        PyTuple_SetItem(arrays, i, Py_NewRef(arguments[ARRAYS + i]));
    PyObject *result = arrays ? PyObject_CallObject(arguments[OTHERWISE], arrays) : NULL;
    Py_XDECREF(arrays);
    return result;
}

int any_shape_is_readable(PyObject *given)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || !PyArray_ISALIGNED(x) || !PyArray_ISNOTSWAPPED(x) || !PyArray_SIZE(x))
        return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (PyArray_STRIDE(x, i) % PyArray_ITEMSIZE(x))
            return 0;
    return 1;
}

PyObject *any_shape_computed(const char *kernel, const void *words, int64_t items, double item_ns,
                        PyObject *checkpoint, PyObject *y)
{
    Call call = {0};
    int status = 0;
    call.kernel = y ? kernel_of(kernel) : NULL;
    call.items = items;
    call.item_ns = item_ns > 0 ? item_ns : 1;
    call.checkpoint = checkpoint;
    if (call.kernel && call_run_words(&call, words, &status) == 0 && !status)
        return y;
    if (status)
        PyErr_Format(PyExc_RuntimeError, "kernel %s reports status %d", kernel, status);
    Py_XDECREF(y);
    return NULL;
}

/* Programs of elementwise operations (elementwise.c). The settings are bytes: this struct, then constants, operands
   as (register, bytes of an element, index of the array), and instructions. */
typedef struct {
    int32_t n_inputs, n_instructions, n_constants, rank; /* rank: of the result, at least */
    int32_t type, size, widest, cost_ps;                 /* of the result; of an element of a tile */
} any_shape_program;

typedef struct {
    int32_t to, size, array;
} any_shape_operand;

/* The dims of the result; 0 if the arrays do not broadcast. */
static int broadcast(PyObject *const *arrays, Py_ssize_t count, int rank, npy_intp *dims)
{
    for (int axis = 0; axis < rank; axis++)
        dims[axis] = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyArrayObject *x = (PyArrayObject *)arrays[i];
        if (arrays[i] == Py_None)
            continue;
        for (int axis = 0; axis < PyArray_NDIM(x); axis++) {
            npy_intp *dim = &dims[rank - PyArray_NDIM(x) + axis], own = PyArray_DIM(x, axis);
            if (own != 1 && *dim != 1 && own != *dim)
                return 0;
            *dim = own != 1 ? own : *dim;
        }
    }
    return 1;
}

/* Whether an input has the dims of the result, with channels last in memory, as convolutions write them. The result is
   then written in this order. */
static int is_channels_last(PyArrayObject *x, const npy_intp *dims, int rank)
{
    npy_intp step = PyArray_ITEMSIZE(x);
    if (rank < 3 || PyArray_NDIM(x) != rank || PyArray_IS_C_CONTIGUOUS(x))
        return 0;
    for (int k = rank; k > 0; k--) {
        const int axis = k == rank ? 1 : k > 1 ? k : 0;
        if (PyArray_DIM(x, axis) != dims[axis] || (dims[axis] != 1 && PyArray_STRIDE(x, axis) != step))
            return 0;
        step *= dims[axis];
    }
    return 1;
}

/* An empty array whose dims are in memory in this order. */
static PyObject *new_in_order(int rank, const npy_intp *dims, const npy_intp *order, int type)
{
    npy_intp inside[PROGRAM_RANK], back[PROGRAM_RANK];
    PyArray_Dims axes = {back, rank};
    for (int k = 0; k < rank; k++) {
        inside[k] = dims[order[k]];
        back[order[k]] = k;
    }
    PyObject *array = PyArray_EMPTY(rank, inside, type, 0), *y = NULL;
    if (array)
        y = PyArray_Transpose((PyArrayObject *)array, &axes);
    Py_XDECREF(array);
    return y;
}

/* Lay out the operands along merged dims, which are returned in `a`, in the result's order of axes. */
static void lay_out(struct elementwise *a, operand *operands, PyArrayObject **inputs, int64_t *merged,
                    const npy_intp *dims, const npy_intp *order, int rank)
{
    int used = 0;
    for (int place = 0; place < rank; place++) {
        const int axis = (int)order[place];
        if (dims[axis] == 1)
            continue;
        int64_t steps[MOST_INPUTS];
        int joins = used > 0;
        for (int64_t k = 0; k < a->n_inputs; k++) {
            int own = axis - rank + PyArray_NDIM(inputs[k]);
            steps[k] = own < 0 ? 0 : any_shape_step(inputs[k], own);
            joins = joins && operands[k].strides[used - 1] == steps[k] * dims[axis];
        }
        if (joins)
            merged[used - 1] *= dims[axis];
        else
            merged[used++] = dims[axis];
        for (int64_t k = 0; k < a->n_inputs; k++)
            operands[k].strides[used - 1] = steps[k];
    }
    if (!used) {
        merged[used++] = 1;
        for (int64_t k = 0; k < a->n_inputs; k++)
            operands[k].strides[0] = 0;
    }
    a->dims = merged;
    a->rank = used;
}

/* The number of elements after which an operand repeats; 0 if its layout differs from the result's. */
static int64_t period_of(const operand *input, const int64_t *dims, int64_t rank)
{
    int64_t outer = 0, size = 1;
    while (outer < rank && !input->strides[outer])
        outer++;
    for (int64_t axis = rank - 1; axis >= outer; axis--) {
        if (input->strides[axis] != size)
            return 0;
        size *= dims[axis];
    }
    return size;
}

static int64_t common_multiple(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y) {
        int64_t rest = x % y;
        x = y, y = rest;
    }
    return a / x * b;
}

/* Choose the elements of a tile, and how each operand is loaded into a register. Operands whose period divides a tile
   are the same in all tiles. Return the number of gathered operands. */
static int choose_tile(struct elementwise *a, operand *operands, int64_t most)
{
    int64_t periods[MOST_INPUTS], common = 1, tile = most;
    int gathered = 0;
    for (int64_t k = 0; k < a->n_inputs; k++) {
        periods[k] = period_of(&operands[k], a->dims, a->rank);
        if (periods[k] > 0 && periods[k] <= most && periods[k] < a->size && common <= most)
            common = common_multiple(common, periods[k]);
    }
    if (common > 1 && common <= most)
        tile = most / common * common;
    for (int64_t k = 0; k < a->n_inputs; k++) {
        int once = periods[k] && tile % periods[k] == 0;
        operands[k].mode = periods[k] == a->size && a->size > 1 ? 0 : once ? 2 : 1;
        gathered += operands[k].mode == 1;
    }
    a->tile = tile;
    return gathered;
}

static PyObject *any_shape_elementwise(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *arrays = arguments + ARRAYS;
    PyArrayObject *inputs[MOST_INPUTS];
    operand operands[MOST_INPUTS];
    npy_intp dims[PROGRAM_RANK], order[PROGRAM_RANK];
    int64_t merged[PROGRAM_RANK];
    struct elementwise a = {0};
    char *settings;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &settings, &nbytes) < 0)
        return NULL;
    const any_shape_program *p = (const any_shape_program *)settings;
    const any_shape_operand *own = (const any_shape_operand *)((const constant *)(p + 1) + p->n_constants);
    int rank = p->rank, empty = 0;
    for (Py_ssize_t i = 0; i < count - ARRAYS; i++) {
        const int is_empty = PyArray_Check(arrays[i]) && !PyArray_SIZE((PyArrayObject *)arrays[i]);
        if (arrays[i] != Py_None && !is_empty && !any_shape_is_readable(arrays[i]))
            return any_shape_otherwise(arguments, count);
        empty |= is_empty;
        if (arrays[i] != Py_None && PyArray_NDIM((PyArrayObject *)arrays[i]) > rank)
            rank = PyArray_NDIM((PyArrayObject *)arrays[i]);
    }
    if (rank > PROGRAM_RANK || !broadcast(arrays, count - ARRAYS, rank, dims))
        return any_shape_otherwise(arguments, count);
    for (int k = 0; k < p->n_inputs; k++) {
        if (own[k].array >= count - ARRAYS || arrays[own[k].array] == Py_None)
            return any_shape_otherwise(arguments, count);
        inputs[k] = (PyArrayObject *)arrays[own[k].array];
        if (PyArray_ITEMSIZE(inputs[k]) != own[k].size)
            return any_shape_otherwise(arguments, count);
        a.inputs[k] = PyArray_DATA(inputs[k]);
        operands[k].to = own[k].to;
        operands[k].size = own[k].size;
    }
    if (empty)
        return PyArray_EMPTY(rank, dims, p->type, 0);
    a.operands = operands;
    a.instructions = (const instruction *)(own + p->n_inputs);
    a.constants = p + 1;
    a.n_inputs = p->n_inputs;
    a.n_instructions = p->n_instructions;
    a.n_constants = p->n_constants;
    a.output_size = p->size;
    a.size = 1;
    for (int axis = 0; axis < rank; axis++)
        a.size *= dims[axis];
    int channels_last = 0;
    for (int k = 0; k < p->n_inputs; k++)
        channels_last |= is_channels_last(inputs[k], dims, rank);
    for (int axis = 0; axis < rank; axis++)
        order[axis] = !channels_last || !axis ? axis : axis == rank - 1 ? 1 : axis + 1;
    lay_out(&a, operands, inputs, merged, dims, order, rank);
    int gathered = choose_tile(&a, operands, REGISTER_BYTES / p->widest);
    PyObject *y = channels_last ? new_in_order(rank, dims, order, p->type) : PyArray_EMPTY(rank, dims, p->type, 0);
    if (y)
        a.output = PyArray_DATA((PyArrayObject *)y);
    double item_ns = a.tile * (p->cost_ps * 1e-3 + gathered) + 10.0 * p->n_instructions;
    return any_shape_computed("elementwise", &a, CEIL_DIV(a.size, a.tile), item_ns,
                         arguments[CHECKPOINT], y);
}

/* Softmax along the last axis. */
static PyObject *any_shape_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    enum { BLOCK = 2048 };
    if (count != ARRAYS + 1 || !any_shape_is_readable(arguments[ARRAYS]))
        return count < ARRAYS ? NULL : any_shape_otherwise(arguments, count);
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    int rank = PyArray_NDIM(x), type = PyArray_TYPE(x);
    if (!rank || !PyArray_IS_C_CONTIGUOUS(x) || (type != NPY_FLOAT && type != NPY_DOUBLE))
        return any_shape_otherwise(arguments, count);
    int64_t length = PyArray_DIM(x, rank - 1), block = length < BLOCK ? BLOCK / length : 1;
    PyObject *y = PyArray_EMPTY(rank, PyArray_DIMS(x), type, 0);
    struct softmax words = {
        PyArray_DATA(x), y ? PyArray_DATA((PyArrayObject *)y) : NULL,
        PyArray_SIZE(x) / length, length, 1, block, arguments[SETTINGS] == Py_True,
    };
    int wide = type == NPY_DOUBLE;
    return any_shape_computed(wide ? "softmax_float64" : "softmax_float32", &words,
                         CEIL_DIV(words.outer, block), 10 + block * length * (wide ? 8.0 : 0.35),
                         arguments[CHECKPOINT], y);
}

PyMethodDef any_shape_functions[] = {
    {"elementwise", FAST(any_shape_elementwise),
     "elementwise(otherwise, checkpoint, program, *inputs): the result of a program."},
    {"softmax", FAST(any_shape_softmax),
     "softmax(otherwise, checkpoint, logarithm, x): softmax along the last axis."},
    {NULL, NULL, 0, NULL},
};
