/* Attention on arrays of any shapes (any_shape.h): over a growing cache (attention_cache.c), for com.microsoft
   (GroupQueryAttention) and ONNX; over complete keys and values, and within samples of packed rows (attention.c). */
#include "any_shape.h"
#include "arguments.h"
#include "attention.h"
#include "attention_cache.h"
#include "growable.h"
#include <math.h>
#include <string.h>

typedef struct {
    int64_t heads, kv_heads, causal, window, rotary, interleaved, form, stacked, grows, block;
    double scale, softcap; /* scale 0: from the size of a head */
} attention_settings;

enum { Q, K, V, PAST_K, PAST_V, MOST_SAMPLES = 64, ITEM = sizeof(float) };
enum { LENGTHS = 5, TOTAL, COS, SIN, OF_GROUPS }; /* of GroupQueryAttention */
enum { MASK = 3, OLD_K, OLD_V, OF_ONNX };         /* of Attention */
enum { ADDED = 4, BUFFER_K, BUFFER_V, USED, OF_BUFFERS }; /* of DecoderMaskedMultiHeadAttention, as is MASK */
enum { STARTS = 5, COLUMNS, SPARSE_TOTAL, SPARSE_LENGTHS, SPARSE_COS, OF_SPARSE = 11 }; /* of SparseAttention */
enum { ONNX, GROUPS, BUFFERS, SPARSE };

static int is_real(PyObject *x, int rank)
{
    return any_shape_is_readable(x) && PyArray_TYPE((PyArrayObject *)x) == NPY_FLOAT &&
           PyArray_NDIM((PyArrayObject *)x) == rank;
}

/* The sizes and strides of [batch, rows, heads * size] or [batch, heads, rows, size]; 0 if the features of a head are
   not contiguous. */
static int heads_of(PyObject *given, int64_t heads, int64_t *sizes, int64_t *batch, int64_t *head, int64_t *row)
{
    PyArrayObject *x = (PyArrayObject *)given;
    int wide = is_real(given, 3), last = wide ? 2 : 3;
    if ((!wide && !is_real(given, 4)) || (any_shape_step(x, last) != 1 && PyArray_DIM(x, last) != 1))
        return 0;
    sizes[0] = PyArray_DIM(x, 0);
    sizes[1] = PyArray_DIM(x, wide ? 1 : 2);
    sizes[2] = PyArray_DIM(x, last) / (wide ? heads : 1);
    *batch = any_shape_step(x, 0);
    *row = any_shape_step(x, wide ? 1 : 2);
    *head = wide ? sizes[2] : any_shape_step(x, 1);
    return wide ? PyArray_DIM(x, 2) % heads == 0 : PyArray_DIM(x, 1) == heads;
}

/* Keys, or values, of a cache, as [batch, heads, positions, size]; a `stacked` cache has both, along another leading
   dim. */
typedef struct {
    const npy_intp *dims, *strides;
    float *data;
    int64_t batch, head; /* strides in elements */
} cached;

static cached half_of(PyObject *cache, int stacked, int values)
{
    PyArrayObject *x = (PyArrayObject *)cache;
    cached half = {PyArray_DIMS(x) + stacked, PyArray_STRIDES(x) + stacked, NULL, 0, 0};
    half.data = (float *)(PyArray_BYTES(x) + (stacked && values ? PyArray_STRIDE(x, 0) : 0));
    half.batch = any_shape_step(x, stacked);
    half.head = any_shape_step(x, 1 + stacked);
    return half;
}

/* Keys, or values, of the past, each head contiguous; there may be no positions, or no past. */
static int is_past(PyObject *given, int stacked, int values, int64_t batch, int64_t heads, int64_t size, cached *past)
{
    PyArrayObject *x = (PyArrayObject *)given;
    static const npy_intp none[4];
    *past = (cached){none, none, NULL, 0, 0};
    if (given == Py_None)
        return 1;
    if (!PyArray_Check(given) || PyArray_TYPE(x) != NPY_FLOAT || PyArray_NDIM(x) != 4 + stacked ||
        !PyArray_ISALIGNED(x) || !PyArray_ISNOTSWAPPED(x) || (stacked && PyArray_DIM(x, 0) != 2))
        return 0;
    *past = half_of(given, stacked, values);
    const npy_intp *dims = past->dims, *strides = past->strides;
    int dense = (dims[3] == 1 || strides[3] == ITEM) && (dims[2] < 2 || strides[2] == ITEM * size);
    for (int i = 0; i < 2 + stacked; i++)
        dense = dense && PyArray_STRIDE(x, i) % ITEM == 0;
    return (dense || !dims[2]) && dims[0] == batch && dims[1] == heads && dims[3] == size;
}

/* The present for a past: in place, or in memory from `allocate` if it grows. */
static PyObject *present_of(PyObject *module, const struct attention_cache *a, PyObject *past, int stacked,
                            PyObject *allocate, int grows, int64_t batch, int64_t size, int64_t *holds)
{
    npy_intp dims[] = {2, batch, a->kv_heads, a->kept, size};
    int held = 0;
    PyArrayObject *y = grows ? grown(module, (PyArrayObject *)past, 2 + stacked, a->queries, allocate, &held)
                             : (PyArrayObject *)PyArray_EMPTY(4 + stacked, dims + !stacked, NPY_FLOAT, 0);
    *holds = held;
    return (PyObject *)y;
}

/* The `size` contiguous int32 elements of an array; NULL for other arrays. */
static const int32_t *integers_of(PyObject *given, int64_t size)
{
    PyArrayObject *x = (PyArrayObject *)given;
    const int fits = PyArray_Check(given) && PyArray_TYPE(x) == NPY_INT && PyArray_ISCARRAY_RO(x);
    return fits && PyArray_SIZE(x) == size ? PyArray_DATA(x) : NULL;
}

/* Set the positions of the samples of GroupQueryAttention, or of SparseAttention; 0 for cases that NumPy computes or
   rejects. `last` is copied, as the caller may change it. */
static int set_groups(struct attention_cache *a, PyObject *const *x, int64_t batch, int sparse, int32_t *last_of)
{
    const int32_t *last = integers_of(x[sparse ? SPARSE_LENGTHS : LENGTHS], batch);
    const int32_t *total = integers_of(x[sparse ? SPARSE_TOTAL : TOTAL], 1);
    if (!last || !total || batch > MOST_SAMPLES)
        return 0;
    for (int64_t b = 0; b < batch; b++)
        last_of[b] = (int32_t)((uint32_t)last[b] - (uint32_t)sparse);
    a->last = last_of;
    a->total = *total;
    a->kept = a->room > a->total ? a->room : a->total;
    if ((a->room || sparse) && a->total > a->room && (sparse || a->total != a->room + a->queries))
        return 0;
    for (int64_t b = 0; b < batch; b++) {
        int64_t end = (int64_t)a->last[b] + 1;
        const int64_t before = end - a->queries;
        if (end < 1 || end > a->total || (a->queries < a->total && (before < 0 || before > a->room)))
            return 0;
    }
    if (!a->half)
        return a->queries <= a->kept;
    PyObject *const *angles = x + (sparse ? SPARSE_COS : COS);
    PyArrayObject *cos = (PyArrayObject *)angles[0], *sin = (PyArrayObject *)angles[1];
    if (!is_real(angles[0], 2) || !is_real(angles[1], 2) || !PyArray_ISCARRAY_RO(cos) ||
        !PyArray_ISCARRAY_RO(sin) || PyArray_SIZE(cos) != PyArray_SIZE(sin) ||
        PyArray_DIM(cos, 1) != PyArray_DIM(sin, 1) || 2 * PyArray_DIM(cos, 1) > a->size ||
        PyArray_DIM(cos, 0) < a->total)
        return 0;
    a->half = PyArray_DIM(cos, 1);
    a->cos = PyArray_DATA(cos);
    a->sin = PyArray_DATA(sin);
    return 1;
}

/* Set the key blocks that each block of queries sees, in order; 0 if indices are invalid, or not in order. */
static int set_blocks(struct attention_cache *a, PyObject *const *x, int64_t block)
{
    PyArrayObject *starts = (PyArrayObject *)x[STARTS], *columns = (PyArrayObject *)x[COLUMNS];
    if (!PyArray_Check(x[STARTS]) || !PyArray_Check(x[COLUMNS]) || PyArray_NDIM(starts) != 2 ||
        PyArray_NDIM(columns) != 2)
        return 0;
    a->layouts = PyArray_DIM(starts, 0);
    a->blocks = PyArray_DIM(starts, 1) - 1;
    a->most = PyArray_DIM(columns, 1);
    a->starts = integers_of(x[STARTS], PyArray_SIZE(starts));
    a->columns = integers_of(x[COLUMNS], PyArray_SIZE(columns));
    a->block = block;
    if (!a->starts || !a->columns || block < 1 || block > INT32_MAX || a->blocks < 1 || a->layouts < 1 || a->heads % a->layouts ||
        PyArray_DIM(columns, 0) != a->layouts || (a->total - 1) / block >= a->blocks)
        return 0;
    for (int64_t layout = 0; layout < a->layouts; layout++) {
        const int32_t *start = a->starts + layout * (a->blocks + 1), *column = a->columns + layout * a->most;
        if (start[0])
            return 0;
        for (int64_t i = 0; i < a->blocks; i++) {
            if (start[i + 1] < start[i] || start[i + 1] > a->most)
                return 0;
            for (int64_t j = start[i]; j < start[i + 1]; j++)
                if (column[j] < 0 || column[j] >= a->blocks || (j > start[i] && column[j] <= column[j - 1]))
                    return 0;
        }
    }
    return 1;
}

/* Set the positions of a buffer that is unchanged except for the new rows; 0 for what NumPy computes or rejects. */
static int set_buffers(struct attention_cache *a, PyObject *const *x)
{
    const int32_t *used = integers_of(x[USED], 1);
    if (x[MASK] != Py_None || x[ADDED] != Py_None || !used)
        return 0;
    a->total = *used + a->queries;
    a->kept = a->room;
    a->keeps = 1;
    return *used >= 0 && a->total <= a->room;
}

/* Set the mask of ONNX's Attention, which is added to scores. */
static int set_mask(struct attention_cache *a, PyObject *given, int64_t batch)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (given == Py_None)
        return 1;
    if (!is_real(given, 4) || PyArray_DIM(x, 3) != a->total || (any_shape_step(x, 3) != 1 && a->total != 1))
        return 0;
    const int64_t wanted[] = {batch, a->heads, a->queries};
    for (int i = 0; i < 3; i++)
        if (PyArray_DIM(x, i) != 1 && PyArray_DIM(x, i) != wanted[i])
            return 0;
    a->bias = PyArray_DATA(x);
    a->bias_batch = any_shape_step(x, 0);
    a->bias_head = any_shape_step(x, 1);
    a->bias_row = any_shape_step(x, 2);
    return 1;
}

/* Allocate the result, [batch, queries, heads * size] if `wide`, else [batch, heads, queries, size]. */
static PyObject *result_of(struct attention_cache *a, int64_t batch, int wide)
{
    npy_intp narrow[] = {batch, a->heads, a->queries, a->value_size};
    npy_intp flat[] = {batch, a->queries, a->heads * a->value_size};
    PyObject *y = wide ? PyArray_EMPTY(3, flat, NPY_FLOAT, 0) : PyArray_EMPTY(4, narrow, NPY_FLOAT, 0);
    a->y = y ? PyArray_DATA((PyArrayObject *)y) : NULL;
    a->y_batch = a->queries * a->heads * a->value_size;
    a->y_head = wide ? a->value_size : a->queries * a->value_size;
    a->y_row = wide ? a->heads * a->value_size : a->value_size;
    return y;
}

/* Run the kernel; -1 with an error if the run must stop, else 0 and the kernel's status. */
static int compute(const struct attention_cache *a, int64_t batch, PyObject *checkpoint, int *status)
{
    Call call = {0};
    int64_t sharing = a->heads / a->kv_heads * a->queries;
    call.kernel = kernel_of("attention_cache");
    call.items = batch * a->kv_heads;
    double read_ns = a->k && !a->holds_k ? 0.3 : 0.1; /* per feature of a key, or of a value */
    call.item_ns = 50 + a->kept * (a->size + a->value_size) * (read_ns + 0.02 * sharing);
    call.checkpoint = checkpoint;
    return call.kernel ? call_run_words(&call, (const word *)a, status) : -1;
}

/* Set the addresses and strides of past and present keys and values. */
static void set_caches(struct attention_cache *a, const cached *old, const cached *new)
{
    a->past_k = old[0].data, a->past_k_batch = old[0].batch, a->past_k_head = old[0].head;
    a->past_v = old[1].data, a->past_v_batch = old[1].batch, a->past_v_head = old[1].head;
    a->present_k = new[0].data, a->present_k_batch = new[0].batch, a->present_k_head = new[0].head;
    a->present_v = new[1].data, a->present_v_batch = new[1].batch, a->present_v_head = new[1].head;
}

static PyObject *cached_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *result = NULL;
    attention_settings settings;
    struct attention_cache a = {0};
    int32_t last[MOST_SAMPLES];
    int64_t q[3], k[3], v[3];
    cached old[2], new[2];
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS)
        return NULL;
    PyObject *packed = PyTuple_GetItem(arguments[SETTINGS], 0);
    PyObject *allocate = packed ? PyTuple_GetItem(arguments[SETTINGS], 1) : NULL;
    if (!allocate || PyBytes_AsStringAndSize(packed, &bytes, &nbytes) < 0)
        return NULL;
    memcpy(&settings, bytes, sizeof settings);
    static const int pasts[] = {OLD_K, PAST_K, BUFFER_K, PAST_K};
    static const int ends[] = {OF_ONNX, OF_GROUPS, OF_BUFFERS, OF_SPARSE};
    const int form = (int)settings.form, stacked = (int)settings.stacked, past = pasts[form], past_v = past + !stacked;
    const int end = ends[form] - stacked, angles = form == GROUPS || form == SPARSE ? 2 : 0;
    if (count < ARRAYS + end - (settings.rotary ? 0 : angles))
        return any_shape_otherwise(arguments, count);
    for (Py_ssize_t i = end; i < count - ARRAYS; i++)
        if (x[i] != Py_None)
            return any_shape_otherwise(arguments, count);
    a.heads = settings.heads;
    a.kv_heads = settings.kv_heads;
    if (!a.heads && is_real(x[Q], 4) && is_real(x[K], 4)) {
        a.heads = PyArray_DIM((PyArrayObject *)x[Q], 1);
        a.kv_heads = PyArray_DIM((PyArrayObject *)x[K], 1);
    }
    /* Keys and values may follow the queries in each row. */
    const int packed_rows = x[K] == Py_None;
    PyObject *of_k = packed_rows ? x[Q] : x[K], *of_v = packed_rows ? x[Q] : x[V];
    const int64_t more = packed_rows ? 2 * a.kv_heads : 0, k_heads = packed_rows ? a.heads + more : a.kv_heads;
    if (!a.heads || a.kv_heads < 1 || a.heads % a.kv_heads || (packed_rows && !is_real(x[Q], 3)) ||
        !heads_of(x[Q], a.heads + more, q, &a.q_batch, &a.q_head, &a.q_row) ||
        !heads_of(of_k, k_heads, k, &a.k_batch, &a.k_head, &a.k_row) ||
        !heads_of(of_v, k_heads, v, &a.v_batch, &a.v_head, &a.v_row) || q[0] != k[0] ||
        q[0] != v[0] || q[1] != k[1] || q[1] != v[1] || q[2] != k[2] || q[2] > MOST_HEAD ||
        v[2] > MOST_HEAD || q[1] > MOST_QUERIES)
        return any_shape_otherwise(arguments, count);
    a.queries = q[1];
    a.size = q[2];
    a.value_size = v[2];
    a.causal = settings.causal;
    a.window = settings.window;
    a.interleaved = settings.interleaved;
    a.half = settings.rotary;
    a.scale = settings.scale ? settings.scale : 1 / sqrt((double)a.size);
    a.softcap = settings.softcap;
    if (!is_past(x[past], stacked, 0, q[0], a.kv_heads, a.size, &old[0]) ||
        !is_past(x[past_v], stacked, 1, q[0], a.kv_heads, a.value_size, &old[1]) || old[0].dims[2] != old[1].dims[2])
        return any_shape_otherwise(arguments, count);
    a.room = old[0].dims[2];
    a.total = a.kept = a.room + a.queries;
    if (!(angles              ? set_groups(&a, x, q[0], form == SPARSE, last)
          : form == BUFFERS ? set_buffers(&a, x)
                            : set_mask(&a, x[MASK], q[0])) ||
        (form == SPARSE && !set_blocks(&a, x, settings.block)))
        return any_shape_otherwise(arguments, count);
    /* New rows are appended to the whole past, in each sample. */
    int grows = settings.grows && a.kept == a.room + a.queries && a.kept == a.total;
    for (int64_t b = 0; a.last && b < q[0]; b++)
        grows = grows && last[b] + 1 == a.total;
    PyObject *y = result_of(&a, q[0], PyArray_NDIM((PyArrayObject *)x[Q]) == 3);
    PyObject *keys = NULL, *values = NULL;
    if (y)
        keys = present_of(module, &a, x[past], stacked, allocate, grows, q[0], a.size, &a.holds_k);
    if (keys && stacked) {
        values = Py_NewRef(keys);
        a.holds_v = a.holds_k;
    } else if (keys)
        values = present_of(module, &a, x[past_v], 0, allocate, grows, q[0], a.value_size, &a.holds_v);
    if (values) {
        new[0] = half_of(keys, stacked, 0);
        new[1] = half_of(values, stacked, 1);
        a.q = PyArray_DATA((PyArrayObject *)x[Q]);
        a.k = (float *)PyArray_DATA((PyArrayObject *)of_k) + (packed_rows ? a.heads * a.q_head : 0);
        a.v = (float *)PyArray_DATA((PyArrayObject *)of_v) + (packed_rows ? (a.heads + a.kv_heads) * a.q_head : 0);
        set_caches(&a, old, new);
        int status = 0;
        if (compute(&a, q[0], arguments[CHECKPOINT], &status) == 0)
            result = status    ? any_shape_otherwise(arguments, count)
                     : stacked ? PyTuple_Pack(2, y, keys)
                               : PyTuple_Pack(3, y, keys, values);
    }
    Py_XDECREF(y);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    return result;
}

/* For [batch, heads, rows, size], with keys and values for groups of heads. */
static PyObject *over_any_keys(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *result = NULL;
    struct attention_cache a = {0};
    int64_t q[3];
    cached all[2];
    int status = 0;
    if (count < ARRAYS)
        return NULL;
    if (count != ARRAYS + MASK + 1 || !is_real(x[Q], 4) || !is_real(x[K], 4) || !is_real(x[V], 4))
        return any_shape_otherwise(arguments, count);
    a.heads = PyArray_DIM((PyArrayObject *)x[Q], 1);
    a.kv_heads = PyArray_DIM((PyArrayObject *)x[K], 1);
    a.value_size = PyArray_DIM((PyArrayObject *)x[V], 3);
    if (a.heads % a.kv_heads || !heads_of(x[Q], a.heads, q, &a.q_batch, &a.q_head, &a.q_row))
        return any_shape_otherwise(arguments, count);
    a.queries = q[1];
    a.size = q[2];
    a.scale = PyFloat_AsDouble(arguments[SETTINGS]);
    if (!is_past(x[K], 0, 0, q[0], a.kv_heads, a.size, &all[0]) ||
        !is_past(x[V], 0, 0, q[0], a.kv_heads, a.value_size, &all[1]) || all[0].dims[2] != all[1].dims[2] ||
        a.size > MOST_HEAD || a.value_size > MOST_HEAD || a.queries > MOST_QUERIES)
        return any_shape_otherwise(arguments, count);
    a.total = a.kept = all[0].dims[2];
    set_caches(&a, all, all);
    if (!set_mask(&a, x[MASK], q[0]))
        return any_shape_otherwise(arguments, count);
    PyObject *y = result_of(&a, q[0], 0);
    if (!y)
        return NULL;
    a.q = PyArray_DATA((PyArrayObject *)x[Q]);
    if (compute(&a, q[0], arguments[CHECKPOINT], &status) == 0)
        result = status ? any_shape_otherwise(arguments, count) : Py_NewRef(y);
    Py_DECREF(y);
    return result;
}

/* For packed rows [1, heads, T, size], as ops/internal/packed.py defines. */

typedef struct {
    double scale, softcap;
    int64_t zeros, keys_last;
} packed_settings;

enum { RANGES = 3, BIASES, LEAD = 3, STEPS = LEAD + 2 };

/* Check contiguous ranges of rows, at most `rows`: set their `total` and the `longest`. Return the row at which the
   last one ends in its padded sample; 0 if invalid. */
static int64_t end_of(PyObject *given, int64_t rows, int64_t *total, int64_t *longest)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (!PyArray_Check(given) || PyArray_TYPE(x) != NPY_INT64 || PyArray_NDIM(x) != 2 || PyArray_DIM(x, 1) != 3 ||
        !PyArray_ISCARRAY_RO(x))
        return 0;
    const int64_t *range = PyArray_DATA(x);
    int64_t end = 0;
    *total = *longest = 0;
    for (npy_intp i = 0; i < PyArray_DIM(x, 0); i++, range += 3) {
        if (range[0] < 0 || range[1] < 0 || range[0] > INT32_MAX || range[1] > rows - *total || range[2] != *total)
            return 0;
        *total += range[1];
        *longest = range[1] > *longest ? range[1] : *longest;
        end = range[0] + range[1] > end ? range[0] + range[1] : end;
    }
    return end;
}

/* Set the strides of a bias that broadcasts to [batch, heads, rows, rows]; 0 for other shapes. */
static int set_bias(struct attention *a, int number, PyObject *given, int64_t *steps, int64_t end)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (given == Py_None)
        return 1;
    const int rank = PyArray_Check(given) ? PyArray_NDIM(x) : 5;
    if (rank > 4 || !is_real(given, rank))
        return 0;
    const int64_t group = a->dims[2], heads = a->dims[1] * group, wanted[] = {a->dims[0], heads, end, end};
    int64_t own[4] = {0};
    for (int axis = 4 - rank; axis < 4; axis++) {
        const int64_t size = PyArray_DIM(x, axis - 4 + rank);
        if (size != 1 && (axis < 2 ? size != wanted[axis] : size < wanted[axis]))
            return 0;
        own[axis] = any_shape_step(x, axis - 4 + rank);
    }
    const int64_t all[] = {own[0], own[1] * group, own[1], own[2], own[3]};
    memcpy(steps, all, sizeof all);
    a->terms[number] = PyArray_DATA(x);
    return 1;
}

static PyObject *packed_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS;
    packed_settings settings;
    int64_t dims[LEAD], steps[4 + TERMS][STEPS] = {0}, total = 0, longest = 0;
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &bytes, &nbytes) < 0)
        return NULL;
    memcpy(&settings, bytes, sizeof settings);
    if (count < ARRAYS + BIASES || count > ARRAYS + BIASES + TERMS || !is_real(x[Q], 4) || !is_real(x[K], 4) ||
        !is_real(x[V], 4))
        return any_shape_otherwise(arguments, count);
    PyArrayObject *q = (PyArrayObject *)x[Q], *k = (PyArrayObject *)x[K], *v = (PyArrayObject *)x[V];
    const int last = settings.keys_last != 0, of_key = last ? 3 : 2, of_size = last ? 2 : 3;
    const int64_t rows = PyArray_DIM(q, 2), heads = PyArray_DIM(q, 1), groups = PyArray_DIM(k, 1);
    const int64_t end = end_of(x[RANGES], rows, &total, &longest);
    struct attention a = {
        .q = PyArray_DATA(q), .k = PyArray_DATA(k), .v = PyArray_DATA(v), .rank = LEAD, .dims = dims,
        .steps = steps[0], .queries = rows, .keys = rows, .width = PyArray_DIM(q, 3), .out = PyArray_DIM(v, 3),
        .parts = 1 + longest / PART, .scale = settings.scale, .softcap = settings.softcap, .zeros = settings.zeros,
    };
    const int64_t wider = a.width > a.out ? a.width : a.out;
    a.most = COPIED / ((wider + 15) / 16 * 16) / 16 * 16;
    a.most = a.most > KEYS ? KEYS : a.most;
    if (!end || PyArray_DIM(q, 0) != 1 || PyArray_DIM(k, 0) != 1 || PyArray_DIM(v, 0) != 1 || heads % groups ||
        PyArray_DIM(v, 1) != groups || PyArray_DIM(k, of_key) != rows || PyArray_DIM(v, 2) != rows ||
        PyArray_DIM(k, of_size) != a.width || !a.most || a.out > KEYS)
        return any_shape_otherwise(arguments, count);
    const int64_t group = heads / groups, batch = PyArray_DIM((PyArrayObject *)x[RANGES], 0);
    dims[0] = batch, dims[1] = groups, dims[2] = group;
    for (int i = 0; i < count - ARRAYS - BIASES; i++)
        if (!set_bias(&a, i, x[BIASES + i], steps[3 + i], end))
            return any_shape_otherwise(arguments, count);
    npy_intp shape[] = {1, rows, heads, a.out};
    PyArrayObject *y = (PyArrayObject *)PyArray_EMPTY(4, shape, NPY_FLOAT, 0);
    if (!y)
        return NULL;
    const int64_t own_q = any_shape_step(q, 1), own_y = a.out, row_y = heads * a.out;
    const int64_t all[][STEPS] = {
        {0, own_q * group, own_q, any_shape_step(q, 2), any_shape_step(q, 3)},
        {0, any_shape_step(k, 1), 0, any_shape_step(k, of_size), any_shape_step(k, of_key)}, /* transposed */
        {0, any_shape_step(v, 1), 0, any_shape_step(v, 2), any_shape_step(v, 3)},
    };
    const int64_t result[] = {0, own_y * group, own_y, row_y, 1};
    memcpy(steps, all, sizeof all);
    memcpy(steps[3 + TERMS], result, sizeof result);
    a.y = PyArray_DATA(y);
    a.ranges = PyArray_DATA((PyArrayObject *)x[RANGES]);
    /* Rows after the last range are not used, but must not be subnormal or NaN, which are slow. */
    memset(a.y + total * row_y, 0, (rows - total) * row_y * sizeof *a.y);
    const double each = (double)total / batch / a.parts;
    PyObject *done = any_shape_computed("attention", &a, batch * heads * a.parts,
                                        50 + each * longest * (a.width + a.out) * 0.02, arguments[CHECKPOINT],
                                        (PyObject *)y);
    PyObject *heads_first = done ? PyArray_SwapAxes(y, 1, 2) : NULL;
    Py_XDECREF(done);
    return heads_first;
}

/* Over pages. */

enum { POOL = 3, RUNS, PAGES, BY_DISTANCE, OF_PAGES, ROWS_OF_PART = 32 };

typedef struct {
    int64_t positions, keys_at, values_at, window;
    int64_t groups, value_size; /* of keys and values that are all in pages, without new ones */
    double scale, softcap;
} paged_settings;

/* The data of a contiguous int64 array with `rank` dims; NULL for other arrays. */
static const int64_t *numbers_of(PyObject *given, int rank)
{
    PyArrayObject *x = (PyArrayObject *)given;
    const int fits = PyArray_Check(given) && PyArray_TYPE(x) == NPY_INT64 && PyArray_ISCARRAY_RO(x);
    return fits && PyArray_NDIM(x) == rank ? PyArray_DATA(x) : NULL;
}

/* Return the number of parts of the rows of all requests; -1 if rows or pages are out of range. `adds`: whether pages
   need room for new rows as well. */
static int64_t parts_of(PyArrayObject *runs, PyArrayObject *pages, int64_t rows, int64_t pool, int64_t positions,
                        int adds)
{
    const int64_t *run = PyArray_DATA(runs), *page = PyArray_DATA(pages), used = PyArray_DIM(pages, 0);
    int64_t parts = 0;
    for (int64_t i = 0; i < used; i++)
        if (page[i] < 0 || page[i] >= pool)
            return -1;
    for (int64_t i = 0; i < PyArray_DIM(runs, 0); i++, run += 4) {
        if (run[0] < 0 || run[1] < 0 || run[1] > rows || run[0] > rows - run[1] || run[2] < 0 || run[2] > INT32_MAX ||
            run[3] < 0 || run[3] > used)
            return -1;
        if (((adds ? run[1] : 0) + run[2] + positions - 1) / positions > used - run[3])
            return -1;
        parts += CEIL_DIV(run[1], ROWS_OF_PART);
    }
    return parts;
}

/* Write new keys (transposed), or values, into the pages of a request. */
static void store_rows(const struct attention_cache *a, const int64_t *run, const float *new, int64_t head,
                       int64_t row, int64_t size, int64_t begins, int keys)
{
    for (int64_t i = 0; i < run[1]; i++) {
        const int64_t position = run[2] + i, within = position % a->positions;
        float *page = (float *)a->pool + a->pages[run[3] + position / a->positions] * a->page + begins;
        for (int64_t h = 0; h < a->kv_heads; h++, page += a->positions * size) {
            const float *from = new + h * head + (run[0] + i) * row;
            for (int64_t k = 0; keys && k < size; k++)
                page[k * a->positions + within] = from[k];
            if (!keys)
                memcpy(page + within * size, from, size * sizeof *page);
        }
    }
}

/* Set new keys and values, if any: otherwise the numbers of groups and features are settings. 0 for other sizes. */
static int set_new_rows(struct attention_cache *a, PyObject *const *x, const paged_settings *settings)
{
    int64_t of_k[3], of_v[3], batch;
    a->kv_heads = settings->groups, a->value_size = settings->value_size;
    if (x[K] == Py_None && x[V] == Py_None)
        return 1;
    if (!is_real(x[K], 4) || !is_real(x[V], 4))
        return 0;
    a->kv_heads = PyArray_DIM((PyArrayObject *)x[K], 1);
    if (!heads_of(x[K], a->kv_heads, of_k, &batch, &a->k_head, &a->k_row) ||
        !heads_of(x[V], a->kv_heads, of_v, &batch, &a->v_head, &a->v_row))
        return 0;
    a->k = PyArray_DATA((PyArrayObject *)x[K]), a->v = PyArray_DATA((PyArrayObject *)x[V]);
    a->value_size = of_v[2], a->causal = 1;
    return of_k[0] == 1 && of_v[0] == 1 && of_k[1] == a->queries && of_v[1] == a->queries && of_k[2] == a->size;
}

/* Set the biases by distance, [heads, distances + 1]; 0 for other shapes. */
static int set_distances(struct attention_cache *a, PyObject *given)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (given == Py_None)
        return 1;
    if (!is_real(given, 2) || !PyArray_ISCARRAY_RO(x) || PyArray_DIM(x, 0) != a->heads || PyArray_DIM(x, 1) < 2 || !a->k)
        return 0;
    a->by_distance = PyArray_DATA(x), a->distances = PyArray_DIM(x, 1) - 1;
    return 1;
}

static PyObject *paged_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS;
    paged_settings settings;
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &bytes, &nbytes) < 0)
        return NULL;
    memcpy(&settings, bytes, sizeof settings);
    int64_t of_q[3], batch;
    struct attention_cache a = {.scale = settings.scale, .softcap = settings.softcap, .window = settings.window,
                                .positions = settings.positions, .keys_at = settings.keys_at,
                                .values_at = settings.values_at};
    if (count < ARRAYS + BY_DISTANCE || count > ARRAYS + OF_PAGES || !is_real(x[Q], 4) || !is_real(x[POOL], 2) ||
        !numbers_of(x[RUNS], 2) || !numbers_of(x[PAGES], 1))
        return any_shape_otherwise(arguments, count);
    PyArrayObject *q = (PyArrayObject *)x[Q], *pool = (PyArrayObject *)x[POOL];
    PyArrayObject *runs = (PyArrayObject *)x[RUNS], *pages = (PyArrayObject *)x[PAGES];
    a.heads = PyArray_DIM(q, 1), a.queries = PyArray_DIM(q, 2);
    if (!heads_of(x[Q], a.heads, of_q, &batch, &a.q_head, &a.q_row) || of_q[0] != 1 || !PyArray_ISCARRAY(pool) ||
        PyArray_DIM(runs, 1) != 4)
        return any_shape_otherwise(arguments, count);
    a.q = PyArray_DATA(q), a.pool = PyArray_DATA(pool), a.pages = PyArray_DATA(pages), a.page = PyArray_DIM(pool, 1);
    a.size = of_q[2];
    if (!set_new_rows(&a, x, &settings) ||
        !set_distances(&a, count > ARRAYS + BY_DISTANCE ? x[BY_DISTANCE] : Py_None))
        return any_shape_otherwise(arguments, count);
    const int64_t of_head = a.positions * a.kv_heads, requests = PyArray_DIM(runs, 0), *run = PyArray_DATA(runs);
    const int fits = a.positions > 0 && a.positions % KEYS_OF_PAGE == 0 && KEYS_AT_ONCE % a.positions == 0;
    const int64_t parts = fits ? parts_of(runs, pages, a.queries, PyArray_DIM(pool, 0), a.positions, a.k != NULL) : -1;
    if (parts < 0 || a.kv_heads < 1 || a.kv_heads > a.heads || a.heads % a.kv_heads || !a.size || a.value_size < 1 ||
        a.size > MOST_HEAD || a.value_size > MOST_HEAD || a.keys_at < 0 || a.values_at < 0 ||
        a.keys_at + of_head * a.size > a.page || a.values_at + of_head * a.value_size > a.page)
        return any_shape_otherwise(arguments, count);
    npy_intp shape[] = {1, a.queries, a.heads, a.value_size};
    struct paged_rows *part = PyMem_Malloc((parts + 1) * sizeof *part);
    PyArrayObject *y = part ? (PyArrayObject *)PyArray_EMPTY(4, shape, NPY_FLOAT, 0) : NULL;
    if (!y) {
        PyMem_Free(part);
        return part ? NULL : PyErr_NoMemory();
    }
    a.y = PyArray_DATA(y), a.y_head = a.value_size, a.y_row = a.heads * a.value_size, a.parts = part;
    int64_t covered = 0, seen = 0;
    for (int64_t i = 0; i < requests; i++, run += 4) {
        if (a.k) {
            store_rows(&a, run, a.k, a.k_head, a.k_row, a.size, a.keys_at, 1);
            store_rows(&a, run, a.v, a.v_head, a.v_row, a.value_size, a.values_at, 0);
        }
        for (int64_t row = 0; row < run[1]; row += ROWS_OF_PART)
            *part++ = (struct paged_rows){run[0] + row,
                                          run[1] - row < ROWS_OF_PART ? run[1] - row : ROWS_OF_PART,
                                          run[2] + (a.k ? row : 0), run[3]};
        covered += run[1], seen += run[1] * (run[2] + (a.k ? run[1] / 2 + 1 : 0));
    }
    if (covered != a.queries) /* rows of no request, or of two */
        memset(a.y, 0, PyArray_NBYTES(y));
    const int64_t items = parts * a.kv_heads;
    const double work = 50 + (double)seen * a.heads * (a.size + a.value_size) * 0.05 / (items ? items : 1);
    int status = 0;
    PyObject *result = NULL;
    Call call = {.kernel = kernel_of("paged_attention"), .items = items, .item_ns = work,
                 .checkpoint = arguments[CHECKPOINT]};
    if (call.kernel && call_run_words(&call, (const word *)&a, &status) == 0)
        result = status ? any_shape_otherwise(arguments, count) : PyArray_SwapAxes(y, 1, 2);
    PyMem_Free((void *)a.parts);
    Py_DECREF(y);
    return result;
}

PyMethodDef attention_functions[] = {
    {"attention", FAST(over_any_keys),
     "attention(otherwise, checkpoint, scale, q, k, v, bias): attention over any number of keys."},
    {"cached_attention", FAST(cached_attention),
     "cached_attention(otherwise, checkpoint, settings, q, k, v, past_k, past_v, *others): attention "
     "over a cache; the result, and the cache with new keys and values."},
    {"packed_attention", FAST(packed_attention),
     "packed_attention(otherwise, checkpoint, settings, q, k, v, ranges, *biases): attention within samples."},
    {"paged_attention", FAST(paged_attention),
     "paged_attention(otherwise, checkpoint, settings, q, k, v, pool, runs, pages, by_distance): attention over "
     "pages."},
    {NULL, NULL, 0, NULL},
};
