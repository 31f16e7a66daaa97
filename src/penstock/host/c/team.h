/* Teams of threads for the parts of kernels, which never wait for a thread that is late. */
#ifndef PENSTOCK_TEAM_H
#define PENSTOCK_TEAM_H

#include <stdint.h>

typedef void (*team_function)(void *data);

#pragma GCC visibility push(hidden)
/* Begin a region of `parts` parts, the first of which the caller is about to run: `function(data)`. Return 0, without
   beginning one, within another region, or if no threads are available. */
int team_begin(team_function function, void *data, int parts);

/* Run the parts that no thread has started, and wait for the others. */
void team_end(void);

/* Within a region: which part the calling thread runs; 0 outside. */
int team_part(void);

/* Counts: parts that the thread that began a region ran though others were available, parts that others ran, and
   wake-ups of others. */
void team_counts(int64_t counts[3]);
#pragma GCC visibility pop

#endif
