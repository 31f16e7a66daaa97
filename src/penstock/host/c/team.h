/* Teams of threads for the parts of kernels, of which none waits for a thread that is late. */
#ifndef PENSTOCK_TEAM_H
#define PENSTOCK_TEAM_H

#include <stdint.h>

typedef void (*team_function)(void *data);

#pragma GCC visibility push(hidden)
/* Begin a region of `parts` parts, of which the caller is about to run the first: `function(data)`.
   Returns 0, having begun nothing, within another region, or if there are no threads to be had. */
int team_begin(team_function function, void *data, int parts);

/* Run the parts that no thread has started, and wait for the rest. */
void team_end(void);

/* Within a region: which part the calling thread runs; 0 outside. */
int team_part(void);

/* Counts: parts run by the thread that began a region though others were available, parts run by the
   others, and wake-ups of others. */
void team_counts(int64_t counts[3]);
#pragma GCC visibility pop

#endif
