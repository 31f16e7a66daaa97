/* Sleeping and cores by system calls: on Linux by futexes. On other systems, or with PENSTOCK_PORTABLE, which tests
   define, by one condition variable for all sleepers, which is slower but correct: each checks its own word again. */
#define _GNU_SOURCE
#include "waiting.h"
#if defined(__linux__) && !defined(PENSTOCK_PORTABLE)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

void sleep_while(atomic_int *word, int value, int64_t nanoseconds)
{
    struct timespec time = {0, nanoseconds};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nanoseconds ? &time : NULL, NULL, 0);
}

void wake(atomic_int *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

int own_core(void)
{
    return sched_getcpu();
}

/* Nothing is pinned: the scheduler may move the thread again. */
int leave_core(int core)
{
    cpu_set_t allowed, others;
    if (core < 0 || sched_getaffinity(0, sizeof allowed, &allowed))
        return 0;
    others = allowed;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others))
        return 0;
    sched_setaffinity(0, sizeof allowed, &allowed);
    return sched_getcpu() != core;
}

void forget_sleepers(void)
{
}
#else
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

void sleep_while(atomic_int *word, int value, int64_t nanoseconds)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += nanoseconds;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    /* A thread that changes the word wakes all under this lock: no wake-up is lost. */
    if (atomic_load(word) == value) {
        if (nanoseconds)
            pthread_cond_timedwait(&woken, &lock, &end);
        else
            pthread_cond_wait(&woken, &lock);
    }
    pthread_mutex_unlock(&lock);
}

void wake(atomic_int *word, int count)
{
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&lock);
}

int own_core(void)
{
    return -1;
}

int leave_core(int core)
{
    return 0;
}

void forget_sleepers(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&woken, NULL);
}
#endif
