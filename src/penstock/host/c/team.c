/* The team: threads of the process that run parts of a region beside the thread that has begun it.

   A region has as many parts as there are threads, and a thread may come late: another process has its
   core. So a part belongs to no thread: each takes the next one that has not been started, and so does
   the thread that began the region when it is done with its own. A thread that is late finds nothing to
   do, and delays no one; what cannot be helped is a thread that loses its core in the middle of a part.

   Parts may wait for each other at barriers, as in some of oneDNN's kernels. That is safe: the beginner
   takes a second part when it has finished its first, so that it has passed all barriers, to which all
   parts must have come; and other threads wait for work outside of parts only.

   One thread has the team at a time; others have libgomp's in the meantime. */
#define _GNU_SOURCE
#include "team.h"
#if HAVE_TEAM
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include "waiting.h"

enum { MOST_PARTS = 1024 };

/* Nanoseconds for which a thread that comes too late stays away: doubled up to the last, which is longer
   where there are more threads than parts. */
static const int64_t FIRST_NAP = 50000, LAST_NAP = 800000, SURPLUS_NAP = 6400000;

/* Nanoseconds for which a thread that is done with its part waits for the others of a region without a
   nap: parts are not equally long, and one that naps comes late to the next region. No longer, since a
   thread that has lost its core may be brought to that of one that naps. */
static const int64_t UNEQUAL = 400000;

static struct {
    _Alignas(64) atomic_int taken;    /* whether a thread has the team */
    _Alignas(64) atomic_ullong open;  /* the region's number, its parts, and those that are started */
    _Alignas(64) atomic_int unfinished;
    atomic_int waiting;               /* whether the beginner sleeps */
    atomic_int core, other_core;      /* on which the beginner runs, and another thread of the region */
    _Alignas(64) atomic_int asleep;   /* threads that sleep */
    atomic_int calls;                 /* changes when they are to wake up */
    _Alignas(64) atomic_int arrived;  /* at a barrier */
    atomic_int barrier;               /* changes when all have arrived */
    team_function function;
    void *data;
    int threads;                      /* that have been started */
    int unused;                       /* whether the team is to be left alone */
    atomic_llong by_others;           /* parts that were run by others than the beginner */
    int64_t by_beginner, woken;       /* parts that the beginner took over, and calls of others */
} team;

static _Thread_local struct {
    int part, parts;
} mine;

/* Start the next part that has not been started; returns its number, or -1. */
static int next_part(void)
{
    unsigned long long open = atomic_load(&team.open);
    for (;;) {
        int started = open & 0xffff, parts = (open >> 16) & 0xffff;
        if (started >= parts)
            return -1;
        if (atomic_compare_exchange_weak(&team.open, &open, open + 1)) {
            mine.part = started;
            mine.parts = parts;
            return started;
        }
    }
}

static void finished(int count)
{
    if (atomic_fetch_sub(&team.unfinished, count) == count && atomic_load(&team.waiting))
        futex_wake(&team.unfinished, 1);
}

static int is_open(void)
{
    unsigned long long open = atomic_load(&team.open);
    return (open & 0xffff) < ((open >> 16) & 0xffff);
}

static unsigned number(void)
{
    return (unsigned)(atomic_load(&team.open) >> 32);
}

/* Whether the calling thread is on the core of the beginner, whom it would keep from its work. */
static int is_in_the_way(void)
{
    return sched_getcpu() == atomic_load_explicit(&team.core, memory_order_relaxed);
}

/* Wait until there are parts that have not been started, up to SPIN behind the end of a region, and not
   if that is in the way. */
static int await_parts(void)
{
    int64_t end = 0, latest = 0;
    for (int turn = 1; !is_open(); turn++) {
        pause_turn();
        if (turn % 32)
            continue;
        int64_t time = now();
        latest = latest ? latest : time + UNEQUAL;
        if (!end || (time < latest && atomic_load(&team.unfinished)))
            end = time + SPIN;
        if (time >= end || is_in_the_way())
            return 0;
    }
    return 1;
}

/* Run the parts that have not been started; returns how many. */
static int run_parts(void)
{
    int count = 0;
    for (; next_part() >= 0; count++) {
        atomic_store_explicit(&team.other_core, sched_getcpu(), memory_order_relaxed);
        team.function(team.data);
        mine.parts = 0;
        atomic_fetch_add(&team.by_others, 1);
        finished(1);
    }
    return count;
}

/* Go to another core than the beginner's: the scheduler may leave both on one while another is idle.
   Nothing is pinned, the thread may be moved again. Returns whether it has gone. */
static int move_away(void)
{
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        return 0;
    others = allowed;
    CPU_CLR(atomic_load(&team.core), &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others))
        return 0;
    sched_setaffinity(0, sizeof allowed, &allowed);
    return !is_in_the_way();
}

/* A thread spins after its last part, and then sleeps until it is woken. If regions have passed in the
   meantime of which it got no part, another process has its core, and it stays away, longer each time.
   On the core of the beginner it takes parts only of a region that has not ended while it was away: there
   the beginner may be waiting at a barrier. */
static void *serve(void *unused)
{
    int64_t nap = 0;
    unsigned before = number();
    for (;;) {
        int stays = nap && number() == before, count = 0;
        before = number();
        if (stays || (await_parts() && !is_in_the_way()))
            count = run_parts();
        if (count)
            nap = 0;
        else if (number() != before || atomic_load(&team.taken)) {
            if (is_in_the_way() && move_away())
                continue;
            int parts = (atomic_load(&team.open) >> 16) & 0xffff;
            int64_t last = team.threads < parts ? LAST_NAP : SURPLUS_NAP;
            nap = !nap ? FIRST_NAP : nap < last ? 2 * nap : last;
            nanosleep(&(struct timespec){0, nap}, NULL);
        }
        else {
            int calls = atomic_load(&team.calls);
            atomic_fetch_add(&team.asleep, 1);
            if (number() == before)
                futex_wait(&team.calls, calls, 0);
            atomic_fetch_sub(&team.asleep, 1);
            nap = 0;
        }
    }
    return unused;
}

static void forget_parent(void)
{
    team.threads = 0;
    mine.parts = 0;
    atomic_store(&team.taken, 0);
    atomic_store(&team.open, 0);
    atomic_store(&team.unfinished, 0);
    atomic_store(&team.asleep, 0);
}

/* Have one thread less than there are parts; returns whether there are. */
static int have_threads(int parts)
{
    static int registered = 0;
    if (team.threads >= parts - 1)
        return 1;
    if (!registered && pthread_atfork(NULL, NULL, forget_parent))
        return 0;
    registered = 1;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (team.threads < parts - 1 && !pthread_create(&thread, &attributes, serve, NULL))
        team.threads++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team.threads >= parts - 1;
}

void team_use(int used)
{
    team.unused = !used;
}

int team_begin(team_function function, void *data, int parts)
{
    int expected = 0;
    if (team.unused || mine.parts || parts > MOST_PARTS || !atomic_compare_exchange_strong(&team.taken, &expected, 1))
        return 0;
    if (!have_threads(parts)) {
        atomic_store(&team.taken, 0);
        return 0;
    }
    team.function = function;
    team.data = data;
    atomic_store_explicit(&team.core, sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(&team.unfinished, parts, memory_order_relaxed);
    unsigned long long number = (atomic_load(&team.open) >> 32) + 1;
    mine.part = 0;
    mine.parts = parts;
    atomic_store(&team.open, number << 32 | (unsigned long long)parts << 16 | 1);
    if (atomic_load(&team.asleep)) {
        atomic_fetch_add(&team.calls, 1);
        futex_wake(&team.calls, parts - 1);
        team.woken++;
    }
    return 1;
}

void team_end(void)
{
    int done = 1;
    for (; next_part() >= 0; done++)
        team.function(team.data);
    team.by_beginner += done - 1;
    finished(done);
    int64_t end = 0;
    int left;
    for (int turn = 1; (left = atomic_load(&team.unfinished)); turn++) {
        pause_turn();
        if (turn % 32)
            continue;
        int64_t time = now();
        end = end ? end : time + SPIN;
        if (time < end && sched_getcpu() != atomic_load(&team.other_core))
            continue;
        atomic_store(&team.waiting, 1);
        futex_wait(&team.unfinished, left, PAUSE);
        atomic_store(&team.waiting, 0);
    }
    mine.parts = 0;
    atomic_store(&team.taken, 0);
}

int team_part(void)
{
    return mine.part;
}

int team_parts(void)
{
    return mine.parts;
}

void team_barrier(void)
{
    int round = atomic_load(&team.barrier);
    if (atomic_fetch_add(&team.arrived, 1) == mine.parts - 1) {
        atomic_store(&team.arrived, 0);
        atomic_fetch_add(&team.barrier, 1);
        futex_wake(&team.barrier, INT_MAX);
        return;
    }
    for (int turn = 0; atomic_load(&team.barrier) == round; turn++) {
        if (turn < 1000)
            pause_turn();
        else
            futex_wait(&team.barrier, round, 0);
    }
}

void team_counts(int64_t counts[3])
{
    counts[0] = team.by_beginner;
    counts[1] = atomic_load(&team.by_others);
    counts[2] = team.woken;
}
#else
typedef int no_team; /* a file has at least one declaration */
#endif
