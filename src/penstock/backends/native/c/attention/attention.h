/* Attention of many queries: see attention.c. */
#ifndef PENSTOCK_ATTENTION_H
#define PENSTOCK_ATTENTION_H

#include <stdint.h>

/* Upper limits: keys of a block (also elements of a row of the result), elements of a copy of keys or values, queries
   of an item, and blocks. The number of terms. */
enum { KEYS = 256, COPIED = 32768, PART = 768, MOST_BLOCKS = 1 << 24, TERMS = 2 };

struct attention {
    const float *q, *k, *v;    /* per head: [queries, width], [width, keys], [keys, out] */
    const float *terms[TERMS]; /* per head: [queries, keys]; NULL: none */
    float *y;                  /* per head: [queries, out] */
    int64_t rank;              /* number of dims of the heads, ... */
    const int64_t *dims;       /* ... and their sizes */
    const int64_t *steps; /* of q, k, v, the terms and y: strides in elements along these dims, along rows,
                             and along columns */
    int64_t queries, width, keys, out;
    int64_t parts;  /* of about equally many queries, each an item */
    int64_t blocks; /* of about equally many keys */
    double scale, softcap; /* softcap: bound of scores before terms are added, or 0 */
    int64_t zeros;         /* which rows of weights become 0 */
    /* If rows are packed, for each sample (the first of the dims): its first row in the padded batch, the number of
       rows, and its first row in the packed batch; else NULL. `most`: keys of a block. */
    const int64_t *ranges;
    int64_t most;
};

#endif
