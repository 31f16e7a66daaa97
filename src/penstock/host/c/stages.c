/* Work in sequential stages, such as the steps of a recurrent layer, each of which depends on all of the one before.

   The pieces of a stage are divided into shares of adjacent pieces, one for each thread: a thread begins with its own
   share in every stage, so that what its pieces read, such as weights, stays in its caches. Then it steals pieces of
   threads that are late. So no thread waits for one that has not arrived, or was preempted between two pieces; one
   that is preempted within a piece cannot be helped.

   A share is taken by halves:  |.......|  pieces 0-3, 4-5, 6, 7; in the next stage from the other end, since caches
   still hold the last pieces. */
#include "stages.h"
#include <limits.h>
#include "waiting.h"

void stages_prepare(staged_work *work, stage_function function, const void *arguments, int64_t first,
                    int64_t stages, int64_t pieces, int shares)
{
    work->function = function;
    work->arguments = arguments;
    work->first = first;
    work->stages = stages;
    work->pieces = pieces;
    work->shares = shares;
    atomic_init(&work->threads, 0);
    atomic_init(&work->status, 0);
    atomic_init(&work->stage, 1);
    atomic_init(&work->waiting, 0);
    atomic_init(&work->finished, 0);
    for (int i = 0; i < shares; i++) {
        atomic_init(&work->of[i].taken, 0);
        atomic_init(&work->of[i].core, -1);
    }
}

/* Take pieces of a share of `size`, from `*begun` on; return their number, 0 if all are taken. */
static int64_t take(share *from, int stage, int64_t size, int64_t *begun)
{
    unsigned long long seen = atomic_load(&from->taken);
    for (;;) {
        int at = (int)(seen >> 32);
        int64_t taken = at == stage ? (int64_t)(seen & 0xffffffff) : 0, some = (size - taken + 1) / 2;
        if (at > stage || !some)
            return 0;
        unsigned long long next = (unsigned long long)stage << 32 | (unsigned long long)(taken + some);
        if (atomic_compare_exchange_weak(&from->taken, &seen, next)) {
            *begun = taken;
            return some;
        }
    }
}

/* Run the pieces of a stage that are not taken; return their number, or -1 if the work has failed. */
static int64_t run_pieces(staged_work *work, int own, int stage)
{
    int64_t count = 0, some, begun;
    for (int i = 0; i < work->shares; i++) {
        int which = (own + i) % work->shares;
        int64_t low = which * work->pieces / work->shares;
        int64_t high = (which + 1) * work->pieces / work->shares;
        while ((some = take(&work->of[which], stage, high - low, &begun))) {
            int64_t number = work->first + stage - 1;
            int64_t from = number % 2 ? high - begun - some : low + begun;
            int status = work->function(work->arguments, number, from, from + some);
            if (status) {
                atomic_store(&work->status, status);
                atomic_store(&work->stage, INT_MAX);
                wake(&work->stage, INT_MAX);
                return -1;
            }
            count += some;
        }
    }
    return count;
}

/* Whether a thread of another share was last seen on this core, which a waiting thread would keep from working. */
static int is_shared(const staged_work *work, int own, int core)
{
    for (int i = 0; i < work->shares; i++)
        if (i != own && core >= 0 && atomic_load_explicit(&work->of[i].core, memory_order_relaxed) == core)
            return 1;
    return 0;
}

static void await_stage(staged_work *work, int own, int stage)
{
    int64_t end = 0;
    for (int turn = 1; atomic_load(&work->stage) == stage; turn++) {
        pause_turn();
        if (turn % 32)
            continue;
        int64_t time = now();
        int core = own_core();
        atomic_store_explicit(&work->of[own].core, core, memory_order_relaxed);
        end = end ? end : time + SPIN;
        if (time < end && !is_shared(work, own, core))
            continue;
        atomic_fetch_add(&work->waiting, 1);
        sleep_while(&work->stage, stage, PAUSE);
        atomic_fetch_sub(&work->waiting, 1);
    }
}

void stages_run(void *data)
{
    staged_work *work = data;
    int own = atomic_fetch_add(&work->threads, 1) % work->shares, stage;
    atomic_store_explicit(&work->of[own].core, own_core(), memory_order_relaxed);
    while ((stage = atomic_load(&work->stage)) <= work->stages) {
        int64_t count = run_pieces(work, own, stage);
        if (count < 0)
            return;
        if (count && atomic_fetch_add(&work->finished, count) + count == stage * work->pieces) {
            atomic_store(&work->stage, stage + 1);
            if (atomic_load(&work->waiting))
                wake(&work->stage, INT_MAX);
        } else
            await_stage(work, own, stage);
    }
}
