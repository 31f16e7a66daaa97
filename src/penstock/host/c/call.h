/* Bound calls of kernels, as module.c creates them and sequence.c runs them. */
#ifndef PENSTOCK_CALL_H
#define PENSTOCK_CALL_H

#include "numpy_api.h"
#include "native.h"

enum { MOST_WORDS = 72, MOST_RUNTIME = MOST_WORDS, MOST_RESULTS = 4, MOST_RANK = 16 };

/* Nanoseconds of work that are worth a thread, and the release of the global interpreter lock; between two checks
   whether the run must stop; and of a stage that is worth sharing among threads, since each begins the next stage
   only when all have finished it. */
static const double WORTH_THREAD = 5e3, WORTH_RELEASE = 3e3, BETWEEN_CHECKS = 4e6, WORTH_STAGE = 1500;

typedef union {
    int64_t integer;
    double real;
    const void *pointer;
} word;

typedef struct {
    uint64_t words; /* bit mask of the words that are this array; 0 if the kernel does not read it */
    uint64_t nbytes : 63, written : 1;
    uint64_t order; /* dims in memory, the outermost in the lowest 4 bits, their number in the highest; 0: their own */
} runtime_array;

typedef struct {
    PyArray_Descr *dtype;
    int rank;
    npy_intp dims[MOST_RANK];
} result_type;

typedef struct {
    PyObject_VAR_HEAD /* a network has a call for each step: each is only as large as its arrays need */
    const kernel_entry *kernel;
    int64_t items;
    double item_ns;
    int64_t stages, pieces; /* of an item, and of a stage; no stages: threads share no item */
    int64_t n_runtime;
    int64_t n_results; /* the last of the arrays given at run time, which `make` allocates */
    word *words;       /* stored after the call, like all its arrays */
    result_type *results;
    PyObject *arrays;     /* keeps those in `words` alive */
    PyObject *kept;       /* the objects that own them */
    PyObject *failed;     /* called with the status and these arrays; raises */
    PyObject *checkpoint; /* called between parts of long work; raises if the run must stop */
    runtime_array runtime[];
} Call;

#pragma GCC visibility push(hidden)
/* Whether a call may run in a group without the global interpreter lock and without pauses. */
int call_is_plain(const Call *call);

/* Compute a plain call; return the kernel's status. */
int call_run_plain(const Call *call);

/* Compute all items of a call with these words instead of its own. Return -1 with an error if the run must stop, else
   0 and the kernel's status. */
int call_run_words(const Call *call, const word *words, int *status);

/* Find a kernel by name; NULL with an error if it does not exist. */
const kernel_entry *kernel_of(const char *name);

/* The method `run` of a call. */
PyObject *call_run(Call *self, PyObject *const *arguments, Py_ssize_t count);

/* Raise the error of a status, given the arrays that the call was given at run time; return NULL. */
PyObject *call_report(const Call *call, int status, PyObject *const *arguments, Py_ssize_t count);

extern PyType_Spec Sequence_spec;
#pragma GCC visibility pop

#endif
