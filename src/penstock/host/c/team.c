/* Teams: threads of the process that run parts of a region beside the thread that began it.

   A region has as many parts as threads, and a thread may be late if another process has its core. So no part belongs
   to a thread: each takes the next part that has not been started, and so does the thread that began the region when
   it is done with its own. A late thread finds nothing to do, and delays no one; a thread that is preempted within a
   part cannot be helped.

   A thread owns a team while its region lasts. Threads that begin regions meanwhile take other teams, each its
   previous one if that is free: the caches of its threads still hold their data. */
#include "team.h"
#include <pthread.h>
#include <signal.h>
#include "waiting.h"

#if defined(_WIN32) /* there is no fork, and no signals for processes */
#undef pthread_sigmask
#undef pthread_atfork
typedef int sigset_t;
#define pthread_sigmask(how, new, old) (void)(old)
#define sigfillset(signals) (void)(signals)
#define pthread_atfork(before, in_parent, in_child) ((void)(in_child), 0)
#endif

enum { MOST_PARTS = 1024, MOST_TEAMS = 64, STACK = 1 << 20 }; /* STACK: musl's default is 128 KiB */

/* Nanoseconds for which a thread that was late sleeps: doubled up to LAST_NAP, or SURPLUS_NAP if there are more
   threads than parts. */
static const int64_t FIRST_NAP = 50000, LAST_NAP = 800000, SURPLUS_NAP = 6400000;

/* Nanoseconds for which a thread that is done waits for the other parts of a region without sleeping: parts are of
   unequal length, and a thread that sleeps is late for the next region. No longer, since the scheduler may move a
   thread that was preempted to the core of a sleeping one. */
static const int64_t UNEQUAL = 400000;

typedef struct {
    _Alignas(64) atomic_int taken;    /* whether a thread owns the team */
    _Alignas(64) atomic_ullong open;  /* the region's number, its parts, and how many are started */
    _Alignas(64) atomic_int unfinished;
    atomic_int waiting;               /* whether the beginner sleeps */
    atomic_int core, other_core;      /* the cores of the beginner, and of another thread of the region */
    _Alignas(64) atomic_int asleep;   /* number of sleeping threads */
    atomic_int calls;                 /* changes to wake them up */
    team_function function;
    void *data;
    atomic_int threads;               /* number of started threads */
    atomic_llong by_others;           /* parts that were run by threads other than the beginner */
    atomic_llong by_beginner, woken;  /* parts that the beginner took over, and wake-ups of others */
} team;

static team teams[MOST_TEAMS];

/* The part that the calling thread runs, and the team that it owns, or owned last. */
static _Thread_local struct {
    int part, parts, team;
} mine;

/* Take the next part that has not been started; return its number, or -1. */
static int next_part(team *own)
{
    unsigned long long open = atomic_load(&own->open);
    for (;;) {
        int started = open & 0xffff, parts = (open >> 16) & 0xffff;
        if (started >= parts)
            return -1;
        if (atomic_compare_exchange_weak(&own->open, &open, open + 1)) {
            mine.part = started;
            mine.parts = parts;
            return started;
        }
    }
}

static void finished(team *own, int count)
{
    if (atomic_fetch_sub(&own->unfinished, count) == count && atomic_load(&own->waiting))
        wake(&own->unfinished, 1);
}

static int is_open(team *own)
{
    unsigned long long open = atomic_load(&own->open);
    return (open & 0xffff) < ((open >> 16) & 0xffff);
}

static unsigned number(team *own)
{
    return (unsigned)(atomic_load(&own->open) >> 32);
}

/* Whether the calling thread is on the core of the beginner, which it would keep from working. */
static int is_in_the_way(team *own)
{
    int core = own_core();
    return core >= 0 && core == atomic_load_explicit(&own->core, memory_order_relaxed);
}

/* Wait until there are parts to start, for up to SPIN after the end of a region, and not if that keeps the beginner
   from working. */
static int await_parts(team *own)
{
    int64_t end = 0, latest = 0;
    for (int turn = 1; !is_open(own); turn++) {
        pause_turn();
        if (turn % 32)
            continue;
        int64_t time = now();
        latest = latest ? latest : time + UNEQUAL;
        if (!end || (time < latest && atomic_load(&own->unfinished)))
            end = time + SPIN;
        if (time >= end || is_in_the_way(own))
            return 0;
    }
    return 1;
}

/* Run the parts that have not been started; return their number. */
static int run_parts(team *own)
{
    int count = 0;
    for (; next_part(own) >= 0; count++) {
        atomic_store_explicit(&own->other_core, own_core(), memory_order_relaxed);
        own->function(own->data);
        mine.parts = 0;
        atomic_fetch_add(&own->by_others, 1);
        finished(own, 1);
    }
    return count;
}

/* A thread spins after its last part, and then sleeps until it is woken. If it got no part of the regions since,
   another process has its core, and it stays away, longer each time. On the core of the beginner it takes no parts,
   but moves to another core: the scheduler may leave both on one core while another is idle. */
static void *serve(void *of)
{
    team *own = of;
    int64_t nap = 0;
    unsigned before = number(own);
    for (;;) {
        int stays = nap && number(own) == before, count = 0;
        before = number(own);
        if (stays || (await_parts(own) && !is_in_the_way(own)))
            count = run_parts(own);
        if (count)
            nap = 0;
        else if (number(own) != before || atomic_load(&own->taken)) {
            if (is_in_the_way(own) && leave_core(atomic_load(&own->core)))
                continue;
            int parts = (atomic_load(&own->open) >> 16) & 0xffff;
            int64_t last = own->threads < parts ? LAST_NAP : SURPLUS_NAP;
            nap = !nap ? FIRST_NAP : nap < last ? 2 * nap : last;
            nanosleep(&(struct timespec){0, nap}, NULL);
        } else {
            int calls = atomic_load(&own->calls);
            atomic_fetch_add(&own->asleep, 1);
            if (number(own) == before)
                sleep_while(&own->calls, calls, 0);
            atomic_fetch_sub(&own->asleep, 1);
            nap = 0;
        }
    }
    return NULL;
}

/* After a fork: the threads belong to the parent. */
static void forget_parent(void)
{
    mine.parts = 0;
    for (team *own = teams; own < teams + MOST_TEAMS; own++) {
        own->threads = 0;
        atomic_store(&own->taken, 0);
        atomic_store(&own->open, 0);
        atomic_store(&own->unfinished, 0);
        atomic_store(&own->asleep, 0);
    }
    forget_sleepers();
}

/* Start one thread fewer than there are parts; return whether that succeeded. */
static int have_threads(team *own, int parts)
{
    static atomic_int registered;
    if (own->threads >= parts - 1)
        return 1;
    int expected = 0;
    if (atomic_compare_exchange_strong(&registered, &expected, 1) && pthread_atfork(NULL, NULL, forget_parent))
        return 0;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (own->threads < parts - 1 && !pthread_create(&thread, &attributes, serve, own))
        own->threads++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return own->threads >= parts - 1;
}

/* Acquire a free team for the calling thread; NULL if there is none. */
static team *free_team(void)
{
    for (int i = 0; i < MOST_TEAMS; i++) {
        int which = (mine.team + i) % MOST_TEAMS, expected = 0;
        if (atomic_compare_exchange_strong(&teams[which].taken, &expected, 1)) {
            mine.team = which;
            return &teams[which];
        }
    }
    return NULL;
}

int team_begin(team_function function, void *data, int parts)
{
    team *own = mine.parts || parts > MOST_PARTS ? NULL : free_team();
    if (!own)
        return 0;
    if (!have_threads(own, parts)) {
        atomic_store(&own->taken, 0);
        return 0;
    }
    own->function = function;
    own->data = data;
    atomic_store_explicit(&own->core, own_core(), memory_order_relaxed);
    atomic_store_explicit(&own->unfinished, parts, memory_order_relaxed);
    unsigned long long next = (atomic_load(&own->open) >> 32) + 1;
    mine.part = 0;
    mine.parts = parts;
    atomic_store(&own->open, next << 32 | (unsigned long long)parts << 16 | 1);
    if (atomic_load(&own->asleep)) {
        atomic_fetch_add(&own->calls, 1);
        wake(&own->calls, parts - 1);
        own->woken++;
    }
    return 1;
}

void team_end(void)
{
    team *own = &teams[mine.team];
    int done = 1;
    for (; next_part(own) >= 0; done++)
        own->function(own->data);
    own->by_beginner += done - 1;
    finished(own, done);
    int64_t end = 0;
    int left;
    for (int turn = 1; (left = atomic_load(&own->unfinished)); turn++) {
        pause_turn();
        if (turn % 32)
            continue;
        int64_t time = now();
        end = end ? end : time + SPIN;
        int core = own_core();
        if (time < end && (core < 0 || core != atomic_load(&own->other_core)))
            continue;
        atomic_store(&own->waiting, 1);
        sleep_while(&own->unfinished, left, PAUSE);
        atomic_store(&own->waiting, 0);
    }
    mine.parts = 0;
    atomic_store(&own->taken, 0);
}

int team_part(void)
{
    return mine.parts ? mine.part : 0;
}

void team_counts(int64_t counts[3])
{
    counts[0] = counts[1] = counts[2] = 0;
    for (team *own = teams; own < teams + MOST_TEAMS; own++) {
        counts[0] += own->by_beginner;
        counts[1] += atomic_load(&own->by_others);
        counts[2] += own->woken;
    }
}
