/* Work in sequential stages, each of pieces that several threads share. */
#ifndef PENSTOCK_STAGES_H
#define PENSTOCK_STAGES_H

#include <stdatomic.h>
#include "native.h"
#include "team.h"

enum { MOST_SHARES = 64 }; /* for several threads in the same work */

/* State of a thread's share that others read: the stage, how many of its pieces have been taken, and the core of the
   thread. */
typedef struct {
    _Alignas(64) atomic_ullong taken;
    atomic_int core;
} share;

typedef struct {
    stage_function function;
    const void *arguments;
    int64_t first, stages, pieces; /* first stage, number of stages, pieces of a stage */
    int shares;
    atomic_int threads, status;    /* that have arrived, and of the function */
    _Alignas(64) atomic_int stage; /* counted from 1 */
    atomic_int waiting;
    atomic_llong finished; /* pieces of all stages */
    share of[MOST_SHARES];
} staged_work;

#pragma GCC visibility push(hidden)
/* Set up the work of `stages` stages from `first` on, for up to MOST_SHARES threads. */
void stages_prepare(staged_work *work, stage_function function, const void *arguments, int64_t first,
                    int64_t stages, int64_t pieces, int shares);

/* Take part in the work, a `staged_work *`, until it is done. */
void stages_run(void *work);
#pragma GCC visibility pop

#endif
