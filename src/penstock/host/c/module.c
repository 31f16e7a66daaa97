/* The extension module: bound calls of kernels.

   This file is compiled for the baseline of the architecture, so that importing a module for an instruction set that
   the processor lacks fails with an error. LEVEL is the name of the instruction set. */
#define IMPORTS_NUMPY
#include "call.h"
#include "generated_tables.h"
#include "growable.h"
#include "stages.h"
#include "team.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)

#define ADDRESS(table) table,
static const kernel_entry *const families[] = {KERNEL_TABLES(ADDRESS)};
static PyMethodDef *const function_tables[] = {FUNCTION_TABLES(ADDRESS)};

/* The most threads that a kernel called by this thread uses. */
static _Thread_local int most_threads = 1;

/* Items of a call, in chunks. Each part has a share of adjacent chunks, since adjacent data is often used by the same
   thread before and after; then it takes chunks of other shares. */
typedef struct {
    const Call *call;
    const word *words;
    int64_t begin, items, chunks;
    int parts;
    atomic_int status;
    struct {
        _Alignas(64) atomic_llong next;
        int64_t end;
    } shares[MOST_SHARES];
} division;

static int run_each_stage(const Call *call, const word *words, int64_t first, int64_t count)
{
    int status = 0;
    for (int64_t i = first; i < first + count && !status; i++)
        status = call->kernel->stage(words, i, 0, call->pieces);
    return status;
}

static int run_kernel(const Call *call, const word *words, int64_t begin, int64_t end)
{
    if (call->kernel->run)
        return call->kernel->run(words, begin, end);
    return run_each_stage(call, words, begin * call->stages, (end - begin) * call->stages);
}

static void run_chunk(division *work, int64_t i)
{
    int64_t each = work->items / work->chunks, more = work->items % work->chunks;
    int64_t first = work->begin + each * i + (i < more ? i : more);
    int status = run_kernel(work->call, work->words, first, first + each + (i < more));
    if (status)
        atomic_store(&work->status, status);
}

static void run_chunks(void *data)
{
    division *work = data;
    int64_t chunk;
    for (int i = 0, own = team_part(); i < work->parts; i++) {
        int share = (own + i) % work->parts;
        while ((chunk = atomic_fetch_add(&work->shares[share].next, 1)) < work->shares[share].end)
            run_chunk(work, chunk);
    }
}

/* Run `count` stages from `first` on, each on several threads if that is worth it. */
static int run_stages(const Call *call, const word *words, int64_t first, int64_t count)
{
    int64_t threads = call->item_ns < call->stages * WORTH_STAGE ? 1 : most_threads;
    threads = smaller(threads, smaller(MOST_SHARES, call->pieces));
    if (threads > 1) {
        staged_work work;
        stages_prepare(&work, call->kernel->stage, words, first, count, call->pieces, (int)threads);
        if (team_begin(stages_run, &work, (int)threads)) {
            stages_run(&work);
            team_end();
            return atomic_load(&work.status);
        }
    }
    return run_each_stage(call, words, first, count);
}

/* Run the items from begin up to end, on several threads if they are worth it. */
static int run_items(const Call *call, const word *words, int64_t begin, int64_t end)
{
    double worth = (end - begin) * call->item_ns / WORTH_THREAD;
    int64_t chunks = worth < 2 ? 1 : worth < 1e6 ? (int64_t)worth : 1000000;
    /* Threads share items that cannot be divided evenly. */
    if (chunks > 1 && call->stages && (end - begin) % most_threads)
        return run_stages(call, words, begin * call->stages, (end - begin) * call->stages);
    chunks = smaller(chunks, end - begin);
    int64_t threads = chunks < 2 ? 1 : most_threads;
    if (threads < 2)
        return run_kernel(call, words, begin, end);
    chunks = smaller(chunks, 16 * threads);
    const int parts = (int)smaller(chunks, smaller(threads, MOST_SHARES));
    division work;
    work.call = call, work.words = words, work.begin = begin, work.items = end - begin;
    work.chunks = chunks, work.parts = parts;
    atomic_init(&work.status, 0);
    for (int i = 0; i < parts; i++) {
        atomic_init(&work.shares[i].next, chunks * i / parts);
        work.shares[i].end = chunks * (i + 1) / parts;
    }
    const int shared = team_begin(run_chunks, &work, parts);
    run_chunks(&work);
    if (shared)
        team_end();
    return atomic_load(&work.status);
}

int call_run_words(const Call *call, const word *words, int *status)
{
    double total = call->items * call->item_ns, each_ns = call->item_ns;
    if (total < WORTH_RELEASE) {
        *status = call->items ? run_kernel(call, words, 0, call->items) : 0;
        return 0;
    }
    int64_t count = call->items, batch;
    int staged = call->stages && each_ns > BETWEEN_CHECKS; /* an item is too long to wait for */
    if (staged) {
        count *= call->stages;
        each_ns /= call->stages;
    }
    batch = count;
    if (total > BETWEEN_CHECKS) {
        batch = (int64_t)(BETWEEN_CHECKS / each_ns * most_threads);
        batch = batch < 1 ? 1 : batch < INT_MAX / 2 ? batch : INT_MAX / 2;
    }
    for (int64_t begin = 0; begin < count; begin += batch) {
        int64_t end = count - begin < batch ? count : begin + batch;
        Py_BEGIN_ALLOW_THREADS
        *status = staged ? run_stages(call, words, begin, end - begin) : run_items(call, words, begin, end);
        Py_END_ALLOW_THREADS
        if (*status)
            return 0;
        if (end < count) {
            PyObject *result = PyObject_CallNoArgs(call->checkpoint);
            if (!result)
                return -1;
            Py_DECREF(result);
        }
    }
    return 0;
}

int call_is_plain(const Call *call)
{
    return !call->n_runtime && call->items * call->item_ns <= BETWEEN_CHECKS;
}

int call_run_plain(const Call *call)
{
    return call->items ? run_items(call, call->words, 0, call->items) : 0;
}

/* Whether an array is contiguous with its dims in this order. */
static int is_dense(PyArrayObject *x, uint64_t order)
{
    npy_intp stride = PyArray_ITEMSIZE(x);
    if (!order)
        return PyArray_IS_C_CONTIGUOUS(x);
    int rank = PyArray_NDIM(x);
    for (int k = rank - 1; k >= 0; k--) {
        const int dim = order >> 4 * k & 15;
        if (PyArray_DIM(x, dim) != 1 && PyArray_STRIDE(x, dim) != stride)
            return 0;
        stride *= PyArray_DIM(x, dim);
    }
    return 1;
}

/* The array with its dims in this order, as a new reference. */
static PyObject *in_order(PyObject *given, uint64_t order)
{
    npy_intp dims[MOST_RANK];
    PyArray_Dims all = {dims, (int)(order >> 60)};
    for (int k = 0; k < all.len; k++)
        dims[k] = order >> 4 * k & 15;
    return order ? PyArray_Transpose((PyArrayObject *)given, &all) : Py_NewRef(given);
}

/* The array that a kernel can read or write in place of `given`, as a new reference. */
static PyArrayObject *usable(PyObject *given, const runtime_array *runtime)
{
    PyArrayObject *array = NULL, *x = (PyArrayObject *)given;
    const uint64_t order = runtime->order;
    if (order && (!PyArray_Check(given) || PyArray_NDIM(x) != (int)(order >> 60)))
        return PyErr_SetString(PyExc_ValueError, "an array of another rank is given"), NULL;
    if (PyArray_Check(given) && PyArray_ISALIGNED(x) && PyArray_ISNOTSWAPPED(x) && is_dense(x, order) &&
        (!runtime->written || PyArray_ISWRITEABLE(x)))
        array = (PyArrayObject *)Py_NewRef(given);
    else if (!runtime->written) {
        PyObject *turned = in_order(given, order), *dense = turned ? array_contiguous(NULL, turned) : NULL;
        Py_XDECREF(turned);
        if (dense)
            array = (PyArrayObject *)PyArray_FROM_OF(dense, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);
        Py_XDECREF(dense);
    } else
        PyErr_SetString(PyExc_ValueError, "memory for a result is not contiguous, or read-only");
    if (array && PyArray_NBYTES(array) != (npy_intp)runtime->nbytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes is given for one of %lld",
                     (Py_ssize_t)PyArray_NBYTES(array), (long long)runtime->nbytes);
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *tuple_of(PyObject *const *items, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(items[i]));
    return tuple;
}

PyObject *call_report(const Call *call, int status, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *runtime = tuple_of(arguments, count);
    PyObject *result = runtime ? PyObject_CallFunction(call->failed, "iN", status, runtime) : NULL;
    Py_XDECREF(result);
    if (result)
        PyErr_Format(PyExc_RuntimeError, "kernel %s reports status %d", call->kernel->name, status);
    return NULL;
}

PyObject *call_run(Call *self, PyObject *const *arguments, Py_ssize_t count)
{
    word words[MOST_WORDS];
    PyArrayObject *arrays[MOST_RUNTIME];
    PyObject *result = NULL;
    int status = 0;
    int64_t used = 0;
    if (count != self->n_runtime)
        return PyErr_Format(PyExc_TypeError, "kernel %s takes %lld arrays, not %zd", self->kernel->name,
                            (long long)self->n_runtime, count);
    memcpy(words, self->words, sizeof(word) * self->kernel->words);
    for (; used < count; used++) {
        uint64_t places = self->runtime[used].words;
        if (!places) {
            arrays[used] = NULL;
            continue;
        }
        arrays[used] = usable(arguments[used], &self->runtime[used]);
        if (!arrays[used])
            goto done;
        for (; places; places &= places - 1)
            words[__builtin_ctzll(places)].pointer = PyArray_DATA(arrays[used]);
    }
    if (call_run_words(self, words, &status) < 0)
        goto done;
    result = status ? call_report(self, status, arguments, count) : Py_NewRef(Py_None);
done:
    while (used--)
        Py_XDECREF((PyObject *)arrays[used]);
    return result;
}

static PyObject *Call_make(Call *self, PyObject *const *given, Py_ssize_t count)
{
    PyObject *arguments[MOST_RUNTIME], *result = NULL;
    int64_t inputs = self->n_runtime - self->n_results, made = 0;
    if (!self->n_results || count != inputs)
        return PyErr_Format(PyExc_TypeError, "kernel %s takes %lld inputs, not %zd",
                            self->kernel->name, (long long)inputs, count);
    memcpy(arguments, given, sizeof *arguments * count);
    for (; made < self->n_results; made++) {
        result_type *type = &self->results[made];
        arguments[inputs + made] = array_empty(type->rank, type->dims, type->dtype);
        if (!arguments[inputs + made])
            goto done;
    }
    PyObject *done = call_run(self, arguments, self->n_runtime);
    if (!done)
        goto done;
    Py_DECREF(done);
    result = made == 1 ? Py_NewRef(arguments[inputs]) : tuple_of(arguments + inputs, made);
done:
    while (made--)
        Py_DECREF(arguments[inputs + made]);
    return result;
}

static int set_word(Call *self, int64_t i, PyObject *value)
{
    if (value == Py_None)
        self->words[i].pointer = NULL;
    else if (PyFloat_Check(value))
        self->words[i].real = PyFloat_AsDouble(value);
    else if (!PyArray_Check(value))
        self->words[i].integer = PyLong_AsLongLong(value);
    else if (PyArray_ISALIGNED((PyArrayObject *)value) && PyArray_ISNOTSWAPPED((PyArrayObject *)value))
        self->words[i].pointer = PyArray_DATA((PyArrayObject *)value);
    else
        PyErr_SetString(PyExc_ValueError, "a bound array is not aligned");
    return PyErr_Occurred() ? -1 : 0;
}

const kernel_entry *kernel_of(const char *name)
{
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (const kernel_entry *kernel = families[f]; kernel->name; kernel++)
            if (*kernel->name == *name && !strcmp(kernel->name, name)) /* most differ in the first character */
                return kernel;
    PyErr_Format(PyExc_KeyError, "there is no kernel %s", name);
    return NULL;
}

static int set_runtime(Call *self, PyObject *runtime)
{
    Py_ssize_t count = PyTuple_Size(runtime);
    if (count > MOST_RUNTIME)
        return PyErr_Format(PyExc_ValueError, "%zd arrays are too many for a call", count), -1;
    for (self->n_runtime = 0; self->n_runtime < count; self->n_runtime++) {
        unsigned long long places, order;
        long long nbytes;
        int written;
        if (!PyArg_ParseTuple(PyTuple_GetItem(runtime, self->n_runtime), "KLpK", &places, &nbytes, &written, &order))
            return -1;
        for (uint64_t k = 0; k < order >> 60; k++)
            if ((order >> 4 * k & 15) >= order >> 60)
                return PyErr_SetString(PyExc_ValueError, "an order of other dims"), -1;
        if (self->kernel->words < 64 && places >> self->kernel->words) {
            PyErr_Format(PyExc_ValueError, "kernel %s has no argument %lld", self->kernel->name,
                         63LL - __builtin_clzll(places));
            return -1;
        }
        self->runtime[self->n_runtime] = (runtime_array){places, (uint64_t)nbytes, written != 0, order};
    }
    return 0;
}

static int set_results(Call *self, PyObject *results)
{
    Py_ssize_t count = PyTuple_Size(results);
    if (count > MOST_RESULTS || count > self->n_runtime)
        return PyErr_Format(PyExc_ValueError, "%zd results are too many for a call", count), -1;
    for (self->n_results = 0; self->n_results < count; self->n_results++) {
        result_type *type = &self->results[self->n_results];
        PyObject *dtype, *dims;
        if (!PyArg_ParseTuple(PyTuple_GetItem(results, self->n_results), "OO!", &dtype, &PyTuple_Type, &dims))
            return -1;
        type->rank = (int)PyTuple_Size(dims);
        if (type->rank > MOST_RANK) {
            PyErr_Format(PyExc_ValueError, "a result of rank %d", type->rank);
            return -1;
        }
        for (int i = 0; i < type->rank; i++)
            type->dims[i] = PyLong_AsSsize_t(PyTuple_GetItem(dims, i));
        if (PyErr_Occurred() || !PyArray_DescrConverter(dtype, &type->dtype))
            return -1;
    }
    return 0;
}

static PyObject *Call_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    const char *name;
    PyObject *words, *kept, *runtime, *results, *failed, *checkpoint;
    long long items, stages, pieces;
    double item_ns;
    if (!PyArg_ParseTuple(arguments, "sO!OO!O!LdLLOO", &name, &PyTuple_Type, &words, &kept, &PyTuple_Type,
                          &runtime, &PyTuple_Type, &results, &items, &item_ns, &stages, &pieces, &failed,
                          &checkpoint))
        return NULL;
    const kernel_entry *kernel = kernel_of(name);
    if (!kernel)
        return NULL;
    if (PyTuple_Size(words) != kernel->words || kernel->words > MOST_WORDS)
        return PyErr_Format(PyExc_ValueError, "kernel %s takes %lld arguments, not %zd", name,
                            (long long)kernel->words, PyTuple_Size(words));
    int64_t given = smaller(PyTuple_Size(runtime), MOST_RUNTIME);
    int64_t made = smaller(PyTuple_Size(results), MOST_RESULTS);
    size_t behind = sizeof(result_type) * made + sizeof(word) * kernel->words;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Call *self = (Call *)allocate(type, given + (Py_ssize_t)(behind / sizeof(runtime_array)) + 1);
    if (!self)
        return NULL;
    self->results = (result_type *)(self->runtime + given), self->words = (word *)(self->results + made);
    self->kernel = kernel, self->items = items;
    self->item_ns = item_ns > 0 ? item_ns : 1;
    self->stages = kernel->stage ? stages : 0, self->pieces = pieces;
    self->arrays = Py_NewRef(words), self->kept = Py_NewRef(kept);
    self->failed = Py_NewRef(failed);
    self->checkpoint = Py_NewRef(checkpoint);
    int status = 0;
    for (int64_t i = 0; !status && i < kernel->words; i++)
        status = set_word(self, i, PyTuple_GetItem(words, i));
    if (status || set_runtime(self, runtime) < 0 || set_results(self, results) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void Call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int64_t i = 0; i < self->n_results; i++)
        Py_XDECREF((PyObject *)self->results[i].dtype);
    Py_XDECREF(self->arrays);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->failed);
    Py_XDECREF(self->checkpoint);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static int Call_traverse(Call *self, visitproc visit, void *arg) /* for collector.c */
{
    Py_VISIT(self->arrays);
    return 0;
}

static PyMethodDef Call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))call_run, METH_FASTCALL,
     "run(*runtime): compute; takes the arrays that were not known when the call was made."},
    {"make", (PyCFunction)(void (*)(void))Call_make, METH_FASTCALL,
     "make(*inputs): compute into new arrays, which are returned."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Call_slots[] = {
    {Py_tp_new, Call_new},
    {Py_tp_dealloc, Call_dealloc},
    {Py_tp_traverse, Call_traverse},
    {Py_tp_methods, Call_methods},
    {Py_tp_doc, "Call(kernel, words, kept, runtime, results, items, item_ns, stages, pieces, failed, checkpoint)"},
    {0, NULL},
};

static PyType_Spec Call_spec = {
    .name = "penstock.backends.native." TEXT(LEVEL) ".Call",
    .basicsize = sizeof(Call),
    .itemsize = sizeof(runtime_array),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = Call_slots,
};

static PyObject *set_threads(PyObject *module, PyObject *threads)
{
    long number = PyLong_AsLong(threads);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    most_threads = number < 1 ? 1 : number < INT_MAX ? (int)number : INT_MAX;
    Py_RETURN_NONE;
}

static PyObject *team_told(PyObject *module, PyObject *unused)
{
    int64_t counts[3];
    team_counts(counts);
    return Py_BuildValue("LLL", (long long)counts[0], (long long)counts[1], (long long)counts[2]);
}

static PyMethodDef module_methods[] = {
    {"set_threads", set_threads, METH_O, "Set the most threads that kernels of the calling thread use."},
    {"team_counts", team_told, METH_NOARGS,
     "team_counts(): parts that the thread took over which had begun their region, parts that other "
     "threads ran, and how often those were woken."},
    {NULL, NULL, 0, NULL},
};

int features;

#if defined(__x86_64__)
static int all(unsigned word, unsigned bits)
{
    return (word & bits) == bits;
}

/* Detected from CPUID, and from the register state that the system saves. */
static int features_found(void)
{
#define BIT(n) (1u << n)
    unsigned a = 0, b = 0, c = 0, d = 0, basic = 0, more = 0, kept = 0, unused, width = 0;
    __get_cpuid(0x8000001a, &width, &b, &c, &d); /* on AMD's processors: FP256, FP512 */
    __get_cpuid(1, &a, &b, &basic, &d);
    if (basic & BIT(27)) /* else xgetbv is not available */
        __asm__("xgetbv" : "=a"(kept), "=d"(unused) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        b = c = d = 0;
    else if (a)
        __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
    int found = all(basic, BIT(20) | BIT(23)) ? LEVEL_2 : 0; /* SSE4.2, POPCNT */
    if (!all(kept, 6) || !all(basic, BIT(12))) /* FMA */
        return found;
    if (all(b, BIT(3) | BIT(5) | BIT(8))) /* BMI, AVX2, BMI2 */
        found |= LEVEL_3 | (more & BIT(4) ? AVX_VNNI : 0);
    if (all(kept, 0xe6) && all(b, BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31))) /* F, DQ, CD, BW, VL */
        found |= LEVEL_4 | (c & BIT(11) ? AVX512_VNNI : 0) | (c & BIT(1) ? AVX512_VBMI : 0) |
                 (more & BIT(5) ? AVX512_BF16 : 0) | ((width & (BIT(2) | BIT(3))) == BIT(2) ? HALF_VECTORS : 0) |
                 (all(kept, 0x60000) && all(d, BIT(22) | BIT(24) | BIT(25)) ? AMX : 0);
    return found;
}
#endif

static int supported(void)
{
#if defined(__x86_64__)
    features = features_found();
#endif
#if defined(NATIVE_X86_64_V4)
    return features & LEVEL_4;
#elif defined(NATIVE_X86_64_V3)
    return features & LEVEL_3;
#elif defined(NATIVE_X86_64_V2)
    return features & LEVEL_2;
#else
    return 1;
#endif
}

static int append_name(PyObject *names, const char *text)
{
    PyObject *name = PyUnicode_FromString(text);
    int failed = name ? PyList_Append(names, name) : -1;
    Py_XDECREF(name);
    return failed;
}

static int set_up(PyObject *module)
{
    if (!supported()) {
        PyErr_SetString(PyExc_ImportError, "the processor lacks instructions of " TEXT(LEVEL));
        return -1;
    }
    /* Teams and the table of NumPy's functions are per process; NumPy supports a single interpreter, too. */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "compiled kernels are for the main interpreter alone");
        return -1;
    }
    import_array1(-1);
    module_state *state = PyModule_GetState(module);
    PyObject *names = PyList_New(0);
    PyObject *type = PyType_FromSpec(&Call_spec), *sequence = PyType_FromSpec(&Sequence_spec);
    state->room = new_room_type();
    state->value = PyUnicode_InternFromString("value");
    int failed = !names || !type || !sequence || !state->room || !state->value;
    for (size_t f = 0; !failed && f < sizeof function_tables / sizeof *function_tables; f++)
        failed = PyModule_AddFunctions(module, function_tables[f]) < 0;
    for (size_t f = 0; !failed && f < sizeof families / sizeof *families; f++)
        for (const kernel_entry *kernel = families[f]; !failed && kernel->name; kernel++)
            failed = append_name(names, kernel->name) < 0;
    failed = failed || PyModule_AddObjectRef(module, "kernels", names) < 0 ||
             PyModule_AddStringConstant(module, "checksum", CHECKSUM) < 0 ||
             PyModule_AddObjectRef(module, "Call", type) < 0 ||
             PyModule_AddObjectRef(module, "Sequence", sequence) < 0;
    Py_XDECREF(names);
    Py_XDECREF(type);
    Py_XDECREF(sequence);
    return failed ? -1 : 0;
}

static void free_state(void *module)
{
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->room);
    Py_CLEAR(state->value);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, set_up},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = TEXT(LEVEL),
    .m_doc = "Kernels compiled for one instruction set.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_free = free_state,
};

PyMODINIT_FUNC JOINED(PyInit_, LEVEL)(void)
{
    return PyModuleDef_Init(&definition);
}
