/* Attention over a cache that grows (attention_cache.c, any_shape.h), of com.microsoft (GroupQueryAttention) and
   of ONNX, and over keys and values that are all there. */
#include "any_shape.h"
#include "attention_cache.h"
#include "growable.h"
#include <math.h>
#include <string.h>

typedef struct {
    int64_t heads, kv_heads, causal, window, rotary, interleaved, grouped, grows;
    double scale, softcap; /* scale 0: by the size of a head */
} attention_settings;

enum { Q, K, V, PAST_K, PAST_V, MOST_SAMPLES = 64, ITEM = sizeof(float) };
enum { LENGTHS = 5, TOTAL, COS, SIN, OF_GROUPS }; /* of GroupQueryAttention */
enum { MASK = 3, OLD_K, OLD_V, OF_ONNX };         /* of Attention */

static int is_real(PyObject *x, int rank)
{
    return any_shape_is_readable(x) && PyArray_TYPE((PyArrayObject *)x) == NPY_FLOAT &&
           PyArray_NDIM((PyArrayObject *)x) == rank;
}

/* The sizes and strides of [batch, rows, heads * size] or [batch, heads, rows, size]; 0 if features
   of a head are not side by side. */
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

/* The past as [batch, heads, room, size], each head without gaps; it may have no positions, or not be there. */
static int is_past(PyObject *given, int64_t batch, int64_t heads, int64_t size, int64_t *room,
                   int64_t *batch_step, int64_t *head_step)
{
    PyArrayObject *x = (PyArrayObject *)given;
    *room = *batch_step = *head_step = 0;
    if (given == Py_None)
        return 1;
    if (!PyArray_Check(given) || PyArray_TYPE(x) != NPY_FLOAT || PyArray_NDIM(x) != 4 ||
        !PyArray_ISALIGNED(x) || !PyArray_ISNOTSWAPPED(x) || PyArray_STRIDE(x, 0) % ITEM ||
        PyArray_STRIDE(x, 1) % ITEM)
        return 0;
    *room = PyArray_DIM(x, 2);
    *batch_step = any_shape_step(x, 0);
    *head_step = any_shape_step(x, 1);
    int dense = (PyArray_DIM(x, 3) == 1 || PyArray_STRIDE(x, 3) == ITEM) &&
                (*room < 2 || PyArray_STRIDE(x, 2) == ITEM * size);
    return (dense || !*room) && PyArray_DIM(x, 0) == batch && PyArray_DIM(x, 1) == heads &&
           PyArray_DIM(x, 3) == size;
}

/* The present of a past, which may be where that is, or in memory from `allocate` if it grows. */
static PyObject *present_of(PyObject *module, const struct attention_cache *a, PyObject *past, int grows,
                            PyObject *allocate, int64_t batch, int64_t size, int64_t *holds, float **data, int64_t *batch_step,
                            int64_t *head_step)
{
    npy_intp dims[] = {batch, a->kv_heads, a->kept, size};
    int held = 0;
    PyArrayObject *y = grows ? grown(module, (PyArrayObject *)past, 2, a->queries, allocate, &held)
                             : (PyArrayObject *)PyArray_EMPTY(4, dims, NPY_FLOAT, 0);
    *holds = held;
    if (y) {
        *data = PyArray_DATA(y);
        *batch_step = PyArray_STRIDE(y, 0) / ITEM;
        *head_step = PyArray_STRIDE(y, 1) / ITEM;
    }
    return (PyObject *)y;
}

/* The positions of the samples of GroupQueryAttention; 0 for those that NumPy explains or computes.
   The last ones are copied: the caller may change his. */
static int set_groups(struct attention_cache *a, PyObject *const *x, int64_t batch, int32_t *last_of)
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
        const int64_t before = end - a->queries;
        if (end < 1 || end > a->total || (a->queries < a->total && (before < 0 || before > a->room)))
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

/* Memory for the result, [batch, queries, heads * size] where it is `wide`, else [batch, heads, queries,
   size]. */
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

/* Run the kernel; -1 with an error where the run must stop, else 0 and the kernel's status. */
static int compute(const struct attention_cache *a, int64_t batch, PyObject *checkpoint, int *status)
{
    Call call = {0};
    int64_t sharing = a->heads / a->kv_heads * a->queries;
    call.kernel = kernel_of("attention_cache");
    call.items = batch * a->kv_heads;
    double read_ns = a->k && !a->holds_k ? 0.3 : 0.1; /* of a feature of a key, or of a value */
    call.item_ns = 50 + a->kept * (a->size + a->value_size) * (read_ns + 0.02 * sharing);
    call.checkpoint = checkpoint;
    return call.kernel ? call_run_words(&call, (const word *)a, status) : -1;
}

static PyObject *cached_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *result = NULL;
    attention_settings settings;
    struct attention_cache a = {0};
    int32_t last[MOST_SAMPLES];
    int64_t q[3], k[3], v[3], old;
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS)
        return NULL;
    PyObject *packed = PyTuple_GetItem(arguments[SETTINGS], 0);
    PyObject *allocate = packed ? PyTuple_GetItem(arguments[SETTINGS], 1) : NULL;
    if (!allocate || PyBytes_AsStringAndSize(packed, &bytes, &nbytes) < 0)
        return NULL;
    memcpy(&settings, bytes, sizeof settings);
    int past = settings.grouped ? PAST_K : OLD_K;
    if (count < ARRAYS + (!settings.grouped ? OF_ONNX : settings.rotary ? OF_GROUPS : COS))
        return any_shape_otherwise(arguments, count);
    for (Py_ssize_t i = settings.grouped ? OF_GROUPS : OF_ONNX; i < count - ARRAYS; i++)
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
    if (!is_past(x[past], q[0], a.kv_heads, a.size, &a.room, &a.past_k_batch, &a.past_k_head) ||
        !is_past(x[past + 1], q[0], a.kv_heads, a.value_size, &old, &a.past_v_batch, &a.past_v_head) ||
        a.room != old)
        return any_shape_otherwise(arguments, count);
    a.total = a.kept = a.room + a.queries;
    if (!(settings.grouped ? set_groups(&a, x, q[0], last) : set_mask(&a, x[MASK], q[0])))
        return any_shape_otherwise(arguments, count);
    /* New rows come behind all of the past, in each sample. */
    int grows = settings.grows && a.kept == a.room + a.queries && a.kept == a.total;
    for (int64_t b = 0; a.last && b < q[0]; b++)
        grows = grows && last[b] + 1 == a.total;
    PyObject *y = result_of(&a, q[0], PyArray_NDIM((PyArrayObject *)x[Q]) == 3);
    PyObject *new_k = NULL, *new_v = NULL;
    if (y)
        new_k = present_of(module, &a, x[past], grows, allocate, q[0], a.size, &a.holds_k, &a.present_k,
                           &a.present_k_batch, &a.present_k_head);
    if (new_k)
        new_v = present_of(module, &a, x[past + 1], grows, allocate, q[0], a.value_size, &a.holds_v, &a.present_v,
                           &a.present_v_batch, &a.present_v_head);
    if (new_v) {
        a.q = PyArray_DATA((PyArrayObject *)x[Q]);
        a.k = (float *)PyArray_DATA((PyArrayObject *)of_k) + (packed_rows ? a.heads * a.q_head : 0);
        a.v = (float *)PyArray_DATA((PyArrayObject *)of_v) + (packed_rows ? (a.heads + a.kv_heads) * a.q_head : 0);
        a.past_k = x[past] == Py_None ? NULL : PyArray_DATA((PyArrayObject *)x[past]);
        a.past_v = x[past + 1] == Py_None ? NULL : PyArray_DATA((PyArrayObject *)x[past + 1]);
        int status = 0;
        if (compute(&a, q[0], arguments[CHECKPOINT], &status) == 0)
            result = status ? any_shape_otherwise(arguments, count) : PyTuple_Pack(3, y, new_k, new_v);
    }
    Py_XDECREF(y);
    Py_XDECREF(new_k);
    Py_XDECREF(new_v);
    return result;
}

/* Of [batch, heads, rows, size], with keys and values for groups of heads. */
static PyObject *over_any_keys(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *result = NULL;
    struct attention_cache a = {0};
    int64_t q[3], values;
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
    if (!is_past(x[K], q[0], a.kv_heads, a.size, &a.kept, &a.present_k_batch, &a.present_k_head) ||
        !is_past(x[V], q[0], a.kv_heads, a.value_size, &values, &a.present_v_batch, &a.present_v_head) ||
        values != a.kept || a.size > MOST_HEAD || a.value_size > MOST_HEAD || a.queries > MOST_QUERIES)
        return any_shape_otherwise(arguments, count);
    a.total = a.kept;
    if (!set_mask(&a, x[MASK], q[0]))
        return any_shape_otherwise(arguments, count);
    PyObject *y = result_of(&a, q[0], 0);
    if (!y)
        return NULL;
    a.q = PyArray_DATA((PyArrayObject *)x[Q]);
    a.present_k = PyArray_DATA((PyArrayObject *)x[K]);
    a.present_v = PyArray_DATA((PyArrayObject *)x[V]);
    if (compute(&a, q[0], arguments[CHECKPOINT], &status) == 0)
        result = status ? any_shape_otherwise(arguments, count) : Py_NewRef(y);
    Py_DECREF(y);
    return result;
}

PyMethodDef attention_functions[] = {
    {"attention", FAST(over_any_keys),
     "attention(otherwise, checkpoint, scale, q, k, v, bias): attention over any number of keys."},
    {"cached_attention", FAST(cached_attention),
     "cached_attention(otherwise, checkpoint, settings, q, k, v, past_k, past_v, *others): attention "
     "over a cache; the result, and the cache with new keys and values."},
    {NULL, NULL, 0, NULL},
};
