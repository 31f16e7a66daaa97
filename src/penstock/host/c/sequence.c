/* Sequences: consecutive bound calls, executed by one call from Python.

   A step is a call of a kernel, or a Python function. Adjacent steps that do not need Python run without the global
   interpreter lock; none of them takes so long that it would have to check whether the run must stop. */
#include "call.h"

typedef struct {
    PyObject *function, *arguments; /* as Python calls it; None for arrays of the sequence */
    Py_ssize_t count;
    int16_t places[MOST_RUNTIME]; /* index of each argument among those of the sequence, or -1 */
    int is_fixed;              /* all are known */
    Call *call;                /* if the function is a method of one */
    Py_ssize_t end; /* of the steps from here on that do not need Python */
    int is_long;    /* whether these are worth releasing the lock */
} sequence_step;

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_steps, n_arrays;
    sequence_step *steps;
} Sequence;

static int is_plain(const sequence_step *step)
{
    return step->call && call_is_plain(step->call);
}

static PyObject *argument(const sequence_step *step, Py_ssize_t i, PyObject *const *given)
{
    return step->places[i] < 0 ? PyTuple_GetItem(step->arguments, i) : given[step->places[i]];
}

static PyObject *run_in_python(const sequence_step *step, PyObject *const *given)
{
    PyObject *values[MOST_RUNTIME];
    if (step->call) {
        for (Py_ssize_t i = 0; i < step->count; i++)
            values[i] = argument(step, i, given);
        return call_run(step->call, values, step->count);
    }
    PyObject *arguments = step->is_fixed ? Py_NewRef(step->arguments) : PyTuple_New(step->count);
    if (!arguments)
        return NULL;
    for (Py_ssize_t i = 0; i < step->count && !step->is_fixed; i++)
        PyTuple_SetItem(arguments, i, Py_NewRef(argument(step, i, given)));
    PyObject *result = PyObject_Call(step->function, arguments, NULL);
    Py_DECREF(arguments);
    return result;
}

/* Add to the error which step raised it, as `place_in_sequence`. */
static PyObject *placed(Py_ssize_t place)
{
    PyObject *type, *value, *trace, *number = PyLong_FromSsize_t(place);
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (number && value && PyObject_SetAttrString(value, "place_in_sequence", number) < 0)
        PyErr_Clear();
    Py_XDECREF(number);
    PyErr_Restore(type, value, trace);
    return NULL;
}

static PyObject *Sequence_run(Sequence *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != self->n_arrays)
        return PyErr_Format(PyExc_TypeError, "a sequence takes %zd arrays, not %zd", self->n_arrays, count);
    for (Py_ssize_t i = 0; i < self->n_steps;) {
        const sequence_step *step = &self->steps[i];
        if (step->end > i) {
            Py_ssize_t end = step->end;
            int status = 0;
            PyThreadState *state = step->is_long ? PyEval_SaveThread() : NULL;
            while (i < end && !(status = call_run_plain(self->steps[i].call)))
                i++;
            if (state)
                PyEval_RestoreThread(state);
            if (status) {
                call_report(self->steps[i].call, status, NULL, 0);
                return placed(i);
            }
            continue;
        }
        PyObject *result = run_in_python(step, given);
        if (!result)
            return placed(i);
        Py_DECREF(result);
        i++;
    }
    Py_RETURN_NONE;
}

static int set_step(sequence_step *step, PyObject *given, Py_ssize_t n_arrays, PyTypeObject *calls)
{
    PyObject *native, *places;
    if (!PyArg_ParseTuple(given, "OO!O!O", &step->function, &PyTuple_Type, &step->arguments,
                          &PyTuple_Type, &places, &native)) {
        step->function = step->arguments = NULL;
        return -1;
    }
    Py_INCREF(step->function);
    Py_INCREF(step->arguments);
    step->count = PyTuple_Size(step->arguments);
    if (step->count > MOST_RUNTIME || PyTuple_Size(places) != step->count) {
        PyErr_Format(PyExc_ValueError, "%zd arguments and %zd places", step->count, PyTuple_Size(places));
        return -1;
    }
    step->is_fixed = 1;
    for (Py_ssize_t i = 0; i < step->count; i++) {
        long place = PyLong_AsLong(PyTuple_GetItem(places, i));
        if (PyErr_Occurred() || place < -1 || place >= n_arrays) {
            PyErr_SetString(PyExc_ValueError, "a place is beyond the arrays of a sequence");
            return -1;
        }
        step->places[i] = (int16_t)place;
        step->is_fixed &= place < 0;
    }
    if (PyObject_TypeCheck(native, calls))
        step->call = (Call *)native; /* the function keeps it alive */
    return 0;
}

static void find_ends(Sequence *self)
{
    Py_ssize_t end = 0;
    double total = 0;
    for (Py_ssize_t i = self->n_steps; i--;) {
        sequence_step *step = &self->steps[i];
        if (!is_plain(step)) {
            total = end = 0;
            continue;
        }
        end = end ? end : i + 1;
        total += step->call->items * step->call->item_ns;
        step->end = end;
        step->is_long = total >= WORTH_RELEASE;
    }
}

static PyObject *Sequence_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *steps, *calls;
    Py_ssize_t n_arrays;
    if (!PyArg_ParseTuple(arguments, "O!nO!", &PyTuple_Type, &steps, &n_arrays, &PyType_Type, &calls))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sequence *self = (Sequence *)allocate(type, 0);
    if (!self)
        return NULL;
    Py_ssize_t count = PyTuple_Size(steps);
    self->n_arrays = n_arrays;
    self->steps = PyMem_Calloc(count ? count : 1, sizeof *self->steps);
    if (!self->steps)
        PyErr_NoMemory();
    for (; self->steps && self->n_steps < count; self->n_steps++) {
        PyObject *step = PyTuple_GetItem(steps, self->n_steps);
        if (set_step(&self->steps[self->n_steps], step, n_arrays, (PyTypeObject *)calls) < 0)
            break;
    }
    if (PyErr_Occurred()) {
        self->n_steps = self->steps ? count : 0; /* those that are not set are zero */
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    find_ends(self);
    return (PyObject *)self;
}

static void Sequence_dealloc(Sequence *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t i = 0; i < self->n_steps; i++) {
        Py_XDECREF(self->steps[i].function);
        Py_XDECREF(self->steps[i].arguments);
    }
    PyMem_Free(self->steps);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static int Sequence_traverse(Sequence *self, visitproc visit, void *arg) /* for collector.c */
{
    for (Py_ssize_t i = 0; i < self->n_steps; i++) {
        Py_VISIT(self->steps[i].function);
        Py_VISIT(self->steps[i].arguments);
    }
    return 0;
}

static PyMethodDef Sequence_methods[] = {
    {"run", (PyCFunction)(void (*)(void))Sequence_run, METH_FASTCALL,
     "run(*arrays): make the calls; takes the arrays that are known only during the run."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Sequence_slots[] = {
    {Py_tp_new, Sequence_new},
    {Py_tp_dealloc, Sequence_dealloc},
    {Py_tp_traverse, Sequence_traverse},
    {Py_tp_methods, Sequence_methods},
    {Py_tp_doc, "Sequence(steps, n_arrays, Call): each step is (function, arguments, places, native)"},
    {0, NULL},
};

PyType_Spec Sequence_spec = {
    "penstock.backends.native.Sequence", sizeof(Sequence), 0, Py_TPFLAGS_DEFAULT, Sequence_slots,
};
