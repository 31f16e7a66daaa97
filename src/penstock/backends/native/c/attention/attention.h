/* Attention of many queries: see attention.c. */
#ifndef PENSTOCK_ATTENTION_H
#define PENSTOCK_ATTENTION_H

#include <stdint.h>

/* At most: keys of a block, also numbers of a result, elements of a copy of keys or of values, queries of an item,
   and blocks. The number of terms. */
enum { KEYS = 256, COPIED = 32768, PART = 768, MOST_BLOCKS = 1 << 24, TERMS = 2 };

struct attention {
    const float *q, *k, *v;    /* of each head: [queries, width], [width, keys], [keys, out] */
    const float *terms[TERMS]; /* of each head: [queries, keys]; null: none */
    float *y;                  /* of each head: [queries, out] */
    int64_t rank;              /* dims of the heads, ... */
    const int64_t *dims;       /* ... and what they are */
    const int64_t *steps; /* of q, k, v, the terms and y: elements from one to the next along these dims, along
                             rows, and along columns */
    int64_t queries, width, keys, out;
    int64_t parts;  /* of about as many queries, each an item */
    int64_t blocks; /* of about as many keys */
    double scale, softcap; /* the highest score before terms are added, or 0 */
    int64_t zeros;         /* which rows of weights become 0 */
    /* Of each sample, the first of the dims, if rows are packed: its first row, their number, and where they begin;
       else NULL. A block then has at most as many keys. */
    const int64_t *ranges;
    int64_t most;
};

#endif
