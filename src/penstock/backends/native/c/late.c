/* Functions of Python that run kernels on arrays whose shapes only the run knows: they take arrays of
   any shapes and strides, and do what backends/native does when shapes are known ahead. What they have
   no kernel for, `otherwise` computes. */
#define NO_IMPORT_ARRAY
#include "call.h"
#include "attention.h"
#include "programs.h"
#include <math.h>
#include <string.h>

/* The first arguments of all functions. */
enum { OTHERWISE, CHECKPOINT, SETTINGS, ARRAYS };

/* Rows up to which a product is computed here whatever its size, and multiplications of any other. */
enum { FEW_ROWS = 4, MOST_PRODUCTS = 400000, MOST_TAIL = 1024, PRODUCT_ROWS = 4, DOT_COLUMNS = 64 };

static PyObject *otherwise(PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *arrays = PyTuple_New(count - ARRAYS);
    for (Py_ssize_t i = 0; arrays && i < count - ARRAYS; i++)
        PyTuple_SetItem(arrays, i, Py_NewRef(arguments[ARRAYS + i]));
    PyObject *result = arrays ? PyObject_CallObject(arguments[OTHERWISE], arrays) : NULL;
    Py_XDECREF(arrays);
    return result;
}

/* Whether kernels can read an array where it is, given its strides. */
static int is_readable(PyObject *given)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || !PyArray_ISALIGNED(x) || !PyArray_ISNOTSWAPPED(x) || !PyArray_SIZE(x))
        return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (PyArray_STRIDE(x, i) % PyArray_ITEMSIZE(x))
            return 0;
    return 1;
}

/* Run a kernel; returns `y`, whose reference it takes, or NULL with an error. */
static PyObject *computed(const char *kernel, const void *words, int64_t items, double item_ns,
                          PyObject *checkpoint, PyObject *y)
{
    Call call;
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

static int64_t step(PyArrayObject *x, int axis)
{
    return PyArray_DIM(x, axis) == 1 ? 0 : PyArray_STRIDE(x, axis) / PyArray_ITEMSIZE(x);
}

/* Programs of elementwise operations (elementwise.c). The settings are bytes: this, then constants,
   operands as (register, bytes of an element, index of the array), and instructions. */
typedef struct {
    int32_t n_inputs, n_instructions, n_constants, rank; /* of the result, at least */
    int32_t type, size, widest, cost_ps;                 /* of the result; of an element of a tile */
} late_program;

typedef struct {
    int32_t to, size, array;
} late_operand;

/* The dims of the result; 0 if the arrays do not broadcast, or it has no elements. */
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

/* Lay out the operands along merged dims, which are returned in `a`. */
static void lay_out(struct elementwise *a, operand *operands, PyArrayObject **inputs, int64_t *merged,
                    const npy_intp *dims, int rank)
{
    int used = 0;
    for (int axis = 0; axis < rank; axis++) {
        if (dims[axis] == 1)
            continue;
        int64_t steps[MOST_INPUTS];
        int joins = used > 0;
        for (int64_t k = 0; k < a->n_inputs; k++) {
            int own = axis - rank + PyArray_NDIM(inputs[k]);
            steps[k] = own < 0 ? 0 : step(inputs[k], own);
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

/* After how many elements an operand repeats itself; 0 if it does not lie as the result does. */
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

/* The elements of a tile, and how each operand comes into a register. What repeats itself after a
   part of a tile is the same in all of them. Returns the operands that are gathered. */
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

PyObject *late_elementwise(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *arrays = arguments + ARRAYS;
    PyArrayObject *inputs[MOST_INPUTS];
    operand operands[MOST_INPUTS];
    npy_intp dims[PROGRAM_RANK];
    int64_t merged[PROGRAM_RANK];
    struct elementwise a = {0};
    char *settings;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &settings, &nbytes) < 0)
        return NULL;
    const late_program *p = (const late_program *)settings;
    const late_operand *own = (const late_operand *)((const constant *)(p + 1) + p->n_constants);
    int rank = p->rank;
    for (Py_ssize_t i = 0; i < count - ARRAYS; i++) {
        if (arrays[i] != Py_None && !is_readable(arrays[i]))
            return otherwise(arguments, count);
        if (arrays[i] != Py_None && PyArray_NDIM((PyArrayObject *)arrays[i]) > rank)
            rank = PyArray_NDIM((PyArrayObject *)arrays[i]);
    }
    if (rank > PROGRAM_RANK || !broadcast(arrays, count - ARRAYS, rank, dims))
        return otherwise(arguments, count);
    for (int k = 0; k < p->n_inputs; k++) {
        if (own[k].array >= count - ARRAYS || arrays[own[k].array] == Py_None)
            return otherwise(arguments, count);
        inputs[k] = (PyArrayObject *)arrays[own[k].array];
        if (PyArray_ITEMSIZE(inputs[k]) != own[k].size)
            return otherwise(arguments, count);
        a.inputs[k] = PyArray_DATA(inputs[k]);
        operands[k].to = own[k].to;
        operands[k].size = own[k].size;
    }
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
    lay_out(&a, operands, inputs, merged, dims, rank);
    int gathered = choose_tile(&a, operands, REGISTER_BYTES / p->widest);
    PyObject *y = PyArray_EMPTY(rank, dims, p->type, 0);
    if (y)
        a.output = PyArray_DATA((PyArrayObject *)y);
    double item_ns = a.tile * (p->cost_ps * 1e-3 + gathered) + 10.0 * p->n_instructions;
    return computed("elementwise", &a, (a.size + a.tile - 1) / a.tile, item_ns,
                    arguments[CHECKPOINT], y);
}

/* Products (matmul.c). */
struct product {
    const void *a, *b, *c;
    void *y;
    int64_t rows, inner, columns, a_row, a_inner, a_batch, b_inner, b_batch, c_row, c_column, padded;
    double alpha, beta;
};

struct dots {
    const void *a, *b;
    void *y;
    int64_t rows, inner, columns, a_row, a_batch, b_column, b_batch;
};

/* Whether one stride leads from each matrix to the next, which `to` is set to. */
static int has_one_step(PyArrayObject *x, const npy_intp *dims, int batch, int64_t *to)
{
    int64_t expected = 0;
    *to = 0;
    int first = 1;
    for (int axis = batch - 1; axis >= 0; axis--) {
        if (dims[axis] == 1)
            continue;
        int own = axis - batch + PyArray_NDIM(x) - 2;
        int64_t stride = own < 0 ? 0 : step(x, own);
        if (first)
            *to = stride;
        else if (stride != expected)
            return 0;
        expected = stride * dims[axis];
        first = 0;
    }
    return 1;
}

PyObject *late_product(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    npy_intp dims[MOST_RANK];
    if (count != ARRAYS + 2 || !is_readable(arguments[ARRAYS]) || !is_readable(arguments[ARRAYS + 1]))
        return count < ARRAYS ? NULL : otherwise(arguments, count);
    PyArrayObject *a = (PyArrayObject *)arguments[ARRAYS], *b = (PyArrayObject *)arguments[ARRAYS + 1];
    int i = PyArray_NDIM(a), j = PyArray_NDIM(b), rank = i > j ? i : j, type = PyArray_TYPE(a);
    int64_t a_batch, b_batch, batches = 1;
    if (i < 2 || j < 2 || rank > MOST_RANK || (type != NPY_FLOAT && type != NPY_DOUBLE) ||
        type != PyArray_TYPE(b) || PyArray_DIM(a, i - 1) != PyArray_DIM(b, j - 2))
        return otherwise(arguments, count);
    for (int axis = 0; axis < rank - 2; axis++) {
        int own = axis - rank + i, other = axis - rank + j;
        npy_intp x = own < 0 ? 1 : PyArray_DIM(a, own), y = other < 0 ? 1 : PyArray_DIM(b, other);
        if (x != y && x != 1 && y != 1)
            return otherwise(arguments, count);
        dims[axis] = x == 1 ? y : x;
        batches *= dims[axis];
    }
    int64_t rows = dims[rank - 2] = PyArray_DIM(a, i - 2), inner = PyArray_DIM(a, i - 1);
    int64_t columns = dims[rank - 1] = PyArray_DIM(b, j - 1);
    int64_t lanes = 64 / PyArray_ITEMSIZE(a);
    double products = (double)batches * rows * inner * columns;
    if ((rows > FEW_ROWS && products > MOST_PRODUCTS) || !has_one_step(a, dims, rank - 2, &a_batch) ||
        !has_one_step(b, dims, rank - 2, &b_batch))
        return otherwise(arguments, count);
    int wide = type == NPY_DOUBLE, dense = step(b, j - 1) == 1 || columns == 1;
    PyObject *checkpoint = arguments[CHECKPOINT], *y;
    if (dense && (inner <= MOST_TAIL || columns % lanes == 0)) {
        y = PyArray_EMPTY(rank, dims, type, 0);
        struct product words = {
            PyArray_DATA(a), PyArray_DATA(b), NULL, y ? PyArray_DATA((PyArrayObject *)y) : NULL,
            rows, inner, columns, step(a, i - 2), step(a, i - 1), a_batch, step(b, j - 2), b_batch,
            0, 0, 0, 1, 0,
        };
        return computed(wide ? "product_float64" : "product_float32", &words,
                        batches * ((rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS),
                        10 + 0.03 * PRODUCT_ROWS * inner * columns, checkpoint, y);
    }
    if ((step(b, j - 2) != 1 && inner > 1) || (step(a, i - 1) != 1 && inner > 1))
        return otherwise(arguments, count);
    y = PyArray_EMPTY(rank, dims, type, 0);
    struct dots words = {
        PyArray_DATA(a), PyArray_DATA(b), y ? PyArray_DATA((PyArrayObject *)y) : NULL,
        rows, inner, columns, step(a, i - 2), a_batch, step(b, j - 1), b_batch,
    };
    return computed(wide ? "dots_float64" : "dots_float32", &words,
                    batches * ((columns + DOT_COLUMNS - 1) / DOT_COLUMNS),
                    10 + 0.1 * rows * inner * DOT_COLUMNS, checkpoint, y);
}

/* Softmax along the last axis (softmax.c). */
struct softmax {
    const void *x;
    void *y;
    int64_t outer, length, inner, block, logarithm;
};

PyObject *late_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    enum { BLOCK = 2048 };
    if (count != ARRAYS + 1 || !is_readable(arguments[ARRAYS]))
        return count < ARRAYS ? NULL : otherwise(arguments, count);
    PyArrayObject *x = (PyArrayObject *)arguments[ARRAYS];
    int rank = PyArray_NDIM(x), type = PyArray_TYPE(x);
    if (!rank || !PyArray_IS_C_CONTIGUOUS(x) || (type != NPY_FLOAT && type != NPY_DOUBLE))
        return otherwise(arguments, count);
    int64_t length = PyArray_DIM(x, rank - 1), block = length < BLOCK ? BLOCK / length : 1;
    PyObject *y = PyArray_EMPTY(rank, PyArray_DIMS(x), type, 0);
    struct softmax words = {
        PyArray_DATA(x), y ? PyArray_DATA((PyArrayObject *)y) : NULL,
        PyArray_SIZE(x) / length, length, 1, block, arguments[SETTINGS] == Py_True,
    };
    int wide = type == NPY_DOUBLE;
    return computed(wide ? "softmax_float64" : "softmax_float32", &words,
                    (words.outer + block - 1) / block, 10 + block * length * (wide ? 8.0 : 0.35),
                    arguments[CHECKPOINT], y);
}

/* Attention over a cache (attention.c), of com.microsoft (GroupQueryAttention) and of ONNX. */
typedef struct {
    int64_t heads, kv_heads, causal, window, rotary, interleaved, grouped;
    double scale, softcap; /* scale 0: by the size of a head */
} late_attention_settings;

enum { Q, K, V, PAST_K, PAST_V, MOST_SAMPLES = 64 };
enum { LENGTHS = 5, TOTAL, COS, SIN, OF_GROUPS }; /* of GroupQueryAttention */
enum { MASK = 3, OLD_K, OLD_V, OF_ONNX };         /* of Attention */

static int is_real(PyObject *x, int rank)
{
    return is_readable(x) && PyArray_TYPE((PyArrayObject *)x) == NPY_FLOAT &&
           PyArray_NDIM((PyArrayObject *)x) == rank;
}

/* The sizes and strides of [batch, rows, heads * size] or [batch, heads, rows, size]; 0 if features
   of a head are not side by side. */
static int heads_of(PyObject *given, int64_t heads, int64_t *sizes, int64_t *batch, int64_t *head,
                    int64_t *row)
{
    PyArrayObject *x = (PyArrayObject *)given;
    int wide = is_real(given, 3), last = wide ? 2 : 3;
    if ((!wide && !is_real(given, 4)) || (step(x, last) != 1 && PyArray_DIM(x, last) != 1))
        return 0;
    sizes[0] = PyArray_DIM(x, 0);
    sizes[1] = PyArray_DIM(x, wide ? 1 : 2);
    sizes[2] = PyArray_DIM(x, last) / (wide ? heads : 1);
    *batch = step(x, 0);
    *row = step(x, wide ? 1 : 2);
    *head = wide ? sizes[2] : step(x, 1);
    return wide ? PyArray_DIM(x, 2) % heads == 0 : PyArray_DIM(x, 1) == heads;
}

/* The past as [batch, heads, room, size]; it may have no positions. */
static int is_past(PyObject *given, int64_t batch, int64_t heads, int64_t size, int64_t *room)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || PyArray_TYPE(x) != NPY_FLOAT || PyArray_NDIM(x) != 4 ||
        !PyArray_ISCARRAY_RO(x))
        return 0;
    *room = PyArray_DIM(x, 2);
    return PyArray_DIM(x, 0) == batch && PyArray_DIM(x, 1) == heads && PyArray_DIM(x, 3) == size;
}

/* The positions of the samples of GroupQueryAttention; 0 for those that NumPy explains or computes.
   The last ones are copied: the caller may change his. */
static int set_groups(struct attention *a, PyObject *const *x, int64_t batch, int32_t *last_of)
{
    PyArrayObject *last = (PyArrayObject *)x[LENGTHS], *total = (PyArrayObject *)x[TOTAL];
    if (!PyArray_Check(x[LENGTHS]) || !PyArray_Check(x[TOTAL]) || PyArray_TYPE(last) != NPY_INT ||
        PyArray_TYPE(total) != NPY_INT || !PyArray_ISCARRAY_RO(last) || !PyArray_ISCARRAY_RO(total) ||
        PyArray_SIZE(last) != batch || PyArray_SIZE(total) != 1 || batch > MOST_SAMPLES)
        return 0;
    memcpy(last_of, PyArray_DATA(last), batch * sizeof *last_of);
    a->last = last_of;
    a->total = *(const int32_t *)PyArray_DATA(total);
    a->kept = a->room > a->total ? a->room : a->total;
    if (a->room && a->total > a->room && a->total != a->room + a->queries)
        return 0;
    for (int64_t b = 0; b < batch; b++) {
        int64_t end = (int64_t)a->last[b] + 1;
        if (end < 1 || end > a->total || end < a->queries ||
            (a->queries < a->total && end - a->queries > a->room))
            return 0;
    }
    if (!a->half)
        return a->queries <= a->kept;
    PyArrayObject *cos = (PyArrayObject *)x[COS], *sin = (PyArrayObject *)x[SIN];
    if (!is_real(x[COS], 2) || !is_real(x[SIN], 2) || !PyArray_ISCARRAY_RO(cos) ||
        !PyArray_ISCARRAY_RO(sin) || PyArray_SIZE(cos) != PyArray_SIZE(sin) ||
        PyArray_DIM(cos, 1) != PyArray_DIM(sin, 1) || 2 * PyArray_DIM(cos, 1) > a->size ||
        PyArray_DIM(cos, 0) < a->total)
        return 0;
    a->half = PyArray_DIM(cos, 1);
    a->cos = PyArray_DATA(cos);
    a->sin = PyArray_DATA(sin);
    return 1;
}

/* The mask of ONNX's Attention, which is added to scores. */
static int set_mask(struct attention *a, PyObject *given, int64_t batch)
{
    PyArrayObject *x = (PyArrayObject *)given;
    a->total = a->kept = a->room + a->queries;
    if (given == Py_None)
        return 1;
    if (!is_real(given, 4) || PyArray_DIM(x, 3) != a->total || (step(x, 3) != 1 && a->total != 1))
        return 0;
    const int64_t wanted[] = {batch, a->heads, a->queries};
    for (int i = 0; i < 3; i++)
        if (PyArray_DIM(x, i) != 1 && PyArray_DIM(x, i) != wanted[i])
            return 0;
    a->bias = PyArray_DATA(x);
    a->bias_batch = step(x, 0);
    a->bias_head = step(x, 1);
    a->bias_row = step(x, 2);
    return 1;
}

PyObject *late_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *result = NULL;
    late_attention_settings settings;
    struct attention a = {0};
    int32_t last[MOST_SAMPLES];
    int64_t q[3], k[3], v[3], old;
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &bytes, &nbytes) < 0)
        return NULL;
    memcpy(&settings, bytes, sizeof settings);
    int past = settings.grouped ? PAST_K : OLD_K;
    if (count < ARRAYS + (!settings.grouped ? OF_ONNX : settings.rotary ? OF_GROUPS : COS))
        return otherwise(arguments, count);
    for (Py_ssize_t i = settings.grouped ? OF_GROUPS : OF_ONNX; i < count - ARRAYS; i++)
        if (x[i] != Py_None)
            return otherwise(arguments, count);
    a.heads = settings.heads;
    a.kv_heads = settings.kv_heads;
    if (!a.heads && is_real(x[Q], 4) && is_real(x[K], 4)) {
        a.heads = PyArray_DIM((PyArrayObject *)x[Q], 1);
        a.kv_heads = PyArray_DIM((PyArrayObject *)x[K], 1);
    }
    if (!a.heads || a.kv_heads < 1 || a.heads % a.kv_heads ||
        !heads_of(x[Q], a.heads, q, &a.q_batch, &a.q_head, &a.q_row) ||
        !heads_of(x[K], a.kv_heads, k, &a.k_batch, &a.k_head, &a.k_row) ||
        !heads_of(x[V], a.kv_heads, v, &a.v_batch, &a.v_head, &a.v_row) || q[0] != k[0] ||
        q[0] != v[0] || q[1] != k[1] || q[1] != v[1] || q[2] != k[2] || q[2] > MOST_HEAD ||
        v[2] > MOST_HEAD || q[1] > CACHED_ROWS)
        return otherwise(arguments, count);
    a.queries = q[1];
    a.size = q[2];
    a.value_size = v[2];
    a.causal = settings.causal;
    a.window = settings.window;
    a.interleaved = settings.interleaved;
    a.half = settings.rotary;
    a.scale = settings.scale ? settings.scale : 1 / sqrt((double)a.size);
    a.softcap = settings.softcap;
    if (!is_past(x[past], q[0], a.kv_heads, a.size, &a.room) ||
        !is_past(x[past + 1], q[0], a.kv_heads, a.value_size, &old) || a.room != old ||
        !(settings.grouped ? set_groups(&a, x, q[0], last) : set_mask(&a, x[MASK], q[0])))
        return otherwise(arguments, count);
    int wide = PyArray_NDIM((PyArrayObject *)x[Q]) == 3;
    npy_intp narrow[] = {q[0], a.heads, a.queries, a.value_size};
    npy_intp flat[] = {q[0], a.queries, a.heads * a.value_size};
    npy_intp keys[] = {q[0], a.kv_heads, a.kept, a.size};
    npy_intp values[] = {q[0], a.kv_heads, a.kept, a.value_size};
    PyObject *y = wide ? PyArray_EMPTY(3, flat, NPY_FLOAT, 0) : PyArray_EMPTY(4, narrow, NPY_FLOAT, 0);
    PyObject *new_k = PyArray_EMPTY(4, keys, NPY_FLOAT, 0);
    PyObject *new_v = PyArray_EMPTY(4, values, NPY_FLOAT, 0);
    if (y && new_k && new_v) {
        Call call = {0};
        int status = 0;
        a.q = PyArray_DATA((PyArrayObject *)x[Q]);
        a.k = PyArray_DATA((PyArrayObject *)x[K]);
        a.v = PyArray_DATA((PyArrayObject *)x[V]);
        a.past_k = PyArray_DATA((PyArrayObject *)x[past]);
        a.past_v = PyArray_DATA((PyArrayObject *)x[past + 1]);
        a.y = PyArray_DATA((PyArrayObject *)y);
        a.present_k = PyArray_DATA((PyArrayObject *)new_k);
        a.present_v = PyArray_DATA((PyArrayObject *)new_v);
        a.y_batch = a.queries * a.heads * a.value_size;
        a.y_head = wide ? a.value_size : a.queries * a.value_size;
        a.y_row = wide ? a.heads * a.value_size : a.value_size;
        call.kernel = kernel_of("cached_attention");
        call.items = q[0] * a.kv_heads;
        call.item_ns = 50 + 0.1 * a.kept * (a.size + a.value_size) * (2 + a.heads / a.kv_heads * a.queries);
        call.checkpoint = arguments[CHECKPOINT];
        if (call.kernel && call_run_words(&call, (const word *)&a, &status) == 0)
            result = status ? otherwise(arguments, count) : PyTuple_Pack(3, y, new_k, new_v);
    }
    Py_XDECREF(y);
    Py_XDECREF(new_k);
    Py_XDECREF(new_v);
    return result;
}

/* Views, and shapes that numbers of another array spell out. */

/* A view of `x` that is not to be written. */
static PyObject *view_of(PyArrayObject *x, int rank, const npy_intp *dims, const npy_intp *strides,
                         void *data)
{
    Py_INCREF((PyObject *)PyArray_DESCR(x));
    PyObject *y = PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(x), rank, dims, strides, data, 0,
                                       NULL);
    if (y && PyArray_SetBaseObject((PyArrayObject *)y, Py_NewRef((PyObject *)x)) < 0)
        Py_CLEAR(y);
    return y;
}

/* Read a list of integers; returns how many there are, -1 for what is no such list. */
static int numbers_of(PyObject *given, int64_t *to)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || !PyArray_ISCARRAY_RO(x) || PyArray_SIZE(x) > MOST_RANK ||
        (PyArray_TYPE(x) != NPY_INT64 && PyArray_TYPE(x) != NPY_INT32))
        return -1;
    for (int i = 0; i < PyArray_SIZE(x); i++)
        to[i] = PyArray_TYPE(x) == NPY_INT64 ? ((const int64_t *)PyArray_DATA(x))[i]
                                             : ((const int32_t *)PyArray_DATA(x))[i];
    return (int)PyArray_SIZE(x);
}

static int is_plain_array(PyObject *given)
{
    return PyArray_Check(given) && !PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)given));
}

PyObject *late_expand(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t target[MOST_RANK];
    npy_intp dims[MOST_RANK], strides[MOST_RANK];
    PyObject *const *given = arguments + ARRAYS;
    PyArrayObject *x = (PyArrayObject *)given[0];
    int n = count == ARRAYS + 2 && is_plain_array(given[0]) ? numbers_of(given[1], target) : -1;
    int rank = n < 0 ? 0 : n > PyArray_NDIM(x) ? n : PyArray_NDIM(x);
    if (n < 0 || rank > MOST_RANK)
        return otherwise(arguments, count);
    for (int axis = 0; axis < rank; axis++) {
        int own = axis - rank + PyArray_NDIM(x), other = axis - rank + n;
        npy_intp dim = own < 0 ? 1 : PyArray_DIM(x, own);
        int64_t wanted = other < 0 ? 1 : target[other];
        if (wanted < 0 || (dim != wanted && dim != 1 && wanted != 1))
            return otherwise(arguments, count);
        dims[axis] = dim == 1 ? wanted : dim;
        strides[axis] = dim == 1 ? 0 : PyArray_STRIDE(x, own);
    }
    return view_of(x, rank, dims, strides, PyArray_DATA(x));
}

/* NumPy's, but that elements which are seen many times are copied by compiled code. */
PyObject *late_reshape(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t target[MOST_RANK];
    npy_intp dims[MOST_RANK], known = 1;
    PyObject *const *given = arguments + ARRAYS;
    PyArrayObject *x = (PyArrayObject *)given[0];
    int rank = count == ARRAYS + 2 && is_plain_array(given[0]) ? numbers_of(given[1], target) : -1;
    int inferred = -1;
    for (int i = 0; i < rank; i++) {
        int copied = target[i] == 0 && arguments[SETTINGS] != Py_True;
        if (target[i] < -1 || (target[i] == -1 && inferred >= 0) || (copied && i >= PyArray_NDIM(x)))
            return otherwise(arguments, count);
        inferred = target[i] == -1 ? i : inferred;
        dims[i] = target[i] == -1 ? 1 : copied ? PyArray_DIM(x, i) : target[i];
        if (__builtin_mul_overflow(known, dims[i], &known))
            return otherwise(arguments, count);
    }
    if (rank < 0 || known < 1 || PyArray_SIZE(x) % known || !PyArray_SIZE(x) ||
        (inferred < 0 && PyArray_SIZE(x) != known))
        return otherwise(arguments, count);
    if (inferred >= 0)
        dims[inferred] = PyArray_SIZE(x) / known;
    PyArray_Dims shape = {dims, rank};
    int repeats = 0;
    for (int axis = 0; axis < PyArray_NDIM(x); axis++)
        repeats |= PyArray_STRIDE(x, axis) == 0 && PyArray_DIM(x, axis) > 1;
    if (!repeats)
        return PyArray_Newshape(x, &shape, NPY_CORDER);
    PyObject *copy = array_copied(NULL, given[0]);
    PyObject *y = copy ? PyArray_Newshape((PyArrayObject *)copy, &shape, NPY_CORDER) : NULL;
    Py_XDECREF(copy);
    return y;
}

PyObject *late_slice(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t bounds[4][MOST_RANK];
    npy_intp dims[MOST_RANK], strides[MOST_RANK];
    PyObject *const *given = arguments + ARRAYS;
    if (count < ARRAYS + 3 || count > ARRAYS + 5 || !is_plain_array(given[0]))
        return otherwise(arguments, count);
    PyArrayObject *x = (PyArrayObject *)given[0];
    int rank = PyArray_NDIM(x), n = numbers_of(given[1], bounds[0]), seen = 0;
    char *data = PyArray_BYTES(x);
    for (int k = 1; k < 4; k++) {
        int is_given = k < count - ARRAYS - 1 && given[k + 1] != Py_None;
        if (is_given && numbers_of(given[k + 1], bounds[k]) != n)
            return otherwise(arguments, count);
        for (int i = 0; !is_given && i < n; i++)
            bounds[k][i] = k == 2 ? i : 1;
    }
    if (n < 0 || rank > MOST_RANK)
        return otherwise(arguments, count);
    memcpy(dims, PyArray_DIMS(x), rank * sizeof *dims);
    memcpy(strides, PyArray_STRIDES(x), rank * sizeof *strides);
    for (int i = 0; i < n; i++) {
        int64_t axis = bounds[2][i] < 0 ? bounds[2][i] + rank : bounds[2][i], by = bounds[3][i];
        if (axis < 0 || axis >= rank || by < 1 || seen & 1 << axis)
            return otherwise(arguments, count);
        seen |= 1 << axis;
        int64_t dim = dims[axis], ends[2];
        for (int k = 0; k < 2; k++) {
            ends[k] = bounds[k][i] < 0 ? bounds[k][i] + dim : bounds[k][i];
            ends[k] = ends[k] < 0 ? 0 : ends[k] > dim ? dim : ends[k];
        }
        dims[axis] = ends[1] > ends[0] ? (ends[1] - ends[0] - 1) / by + 1 : 0;
        data += dims[axis] ? ends[0] * strides[axis] : 0;
        strides[axis] *= dims[axis] > 1 ? by : 1;
    }
    return view_of(x, rank, dims, strides, data);
}

/* Of int64 only. */
PyObject *late_range(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t bounds[3][MOST_RANK], length = 0;
    for (int i = 0; i < 3; i++)
        if (count != ARRAYS + 3 || numbers_of(arguments[ARRAYS + i], bounds[i]) != 1 ||
            PyArray_TYPE((PyArrayObject *)arguments[ARRAYS + i]) != NPY_INT64 ||
            bounds[i][0] != (int32_t)bounds[i][0])
            return otherwise(arguments, count);
    int64_t first = bounds[0][0], span = bounds[1][0] - first, by = bounds[2][0];
    if (!by)
        return otherwise(arguments, count);
    if ((span > 0) == (by > 0) && span)
        length = (span - (by > 0 ? 1 : -1)) / by + 1;
    if (length > MOST_PRODUCTS)
        return otherwise(arguments, count);
    PyObject *y = PyArray_EMPTY(1, (npy_intp[]){length}, NPY_INT64, 0);
    for (int64_t i = 0; y && i < length; i++)
        ((int64_t *)PyArray_DATA((PyArrayObject *)y))[i] = first + i * by;
    return y;
}
