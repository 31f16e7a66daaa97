/* Waits between threads: they spin for as long as waking a thread takes, and then sleep. */
#ifndef PENSTOCK_WAITING_H
#define PENSTOCK_WAITING_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds. Waking a thread takes 40 us on a virtual machine, and kernels follow after 1 to 20 us: a thread spins
   that long before it sleeps. A thread that waits for a part sleeps for PAUSE at a time: whenever its core is idle,
   the scheduler may move a thread there that has none. */
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
/* Sleep while *word is `value`, until woken, for at most `nanoseconds` if that is not 0. Wake-ups may be spurious. */
void sleep_while(atomic_int *word, int value, int64_t nanoseconds);

/* Wake at least `count` of the threads that sleep on this word. */
void wake(atomic_int *word, int count);

/* The core that the calling thread runs on, -1 if unknown. */
int own_core(void);

/* Move to any other core than this one, if there is one; return whether the thread has moved. */
int leave_core(int core);

/* In a forked child: no thread sleeps. */
void forget_sleepers(void);
#pragma GCC visibility pop

#endif
