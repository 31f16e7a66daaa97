/* Waits between threads: they spin for as long as waking a thread takes, and then sleep. */
#ifndef PENSTOCK_WAITING_H
#define PENSTOCK_WAITING_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds. To wake a thread takes 40 us on a virtual machine, and kernels come after 1 to 20 us: so
   long a thread spins before it sleeps. A thread that waits for a part sleeps for PAUSE at a time: each
   time its core is idle, the scheduler may bring the thread that lacks one there. */
static const int64_t SPIN = 50000, PAUSE = 200000;

static inline int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static inline void pause_turn(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#pragma GCC visibility push(hidden)
/* Sleep while *word is `value`, until it is woken, for so many nanoseconds at most if that is not 0. It
   may wake up for no reason. */
void sleep_while(atomic_int *word, int value, int64_t nanoseconds);

/* Wake so many of the threads that sleep by this word, or more. */
void wake(atomic_int *word, int count);

/* The core that the calling thread runs on, -1 where the system does not tell. */
int own_core(void);

/* Go to any core but this one, if there is another; returns whether the thread has gone. */
int leave_core(int core);

/* In a forked child: no thread sleeps. */
void forget_sleepers(void);
#pragma GCC visibility pop

#endif
