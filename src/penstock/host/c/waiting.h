/* How threads wait for each other: they spin for as long as waking a thread takes, and then sleep. */
#ifndef PENSTOCK_WAITING_H
#define PENSTOCK_WAITING_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

static inline void futex_wait(atomic_int *word, int value, int64_t nanoseconds)
{
    struct timespec time = {0, nanoseconds};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nanoseconds ? &time : NULL, NULL, 0);
}

static inline void futex_wake(atomic_int *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

#endif
