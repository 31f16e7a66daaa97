/* A team of threads for the parts of one kernel, of which none waits for a thread that is late. */
#ifndef PENSTOCK_TEAM_H
#define PENSTOCK_TEAM_H

#include <stdint.h>

#if defined(__linux__) && defined(__ELF__) && defined(_OPENMP)
#define HAVE_TEAM 1
#else
#define HAVE_TEAM 0
#endif

typedef void (*team_function)(void *data);

#pragma GCC visibility push(hidden)
#if HAVE_TEAM
/* Whether there is to be a team. */
void team_use(int used);

/* Begin a region of `parts` parts, of which the caller is about to run the first: `function(data)`.
   Returns 0, having begun nothing, if another thread has the team, or there is none to be had. */
int team_begin(team_function function, void *data, int parts);

/* Run the parts that no thread has started, and wait for the rest. */
void team_end(void);

/* Within a region: which part the calling thread runs, and of how many; `team_parts` is 0 outside. */
int team_part(void);
int team_parts(void);

/* Wait until all parts of the region have come to a barrier. */
void team_barrier(void);

/* How often parts were run by the thread that began a region though others were there for them, by
   the others, and how often others were woken. */
void team_counts(int64_t counts[3]);

/* Let the library that contains `address` use the team in place of libgomp's; returns whether it does. */
int team_adopt(const void *address);
#endif
#pragma GCC visibility pop

#endif
