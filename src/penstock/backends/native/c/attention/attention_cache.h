/* Attention over a cache: see attention_cache.c. */
#ifndef PENSTOCK_ATTENTION_CACHE_H
#define PENSTOCK_ATTENTION_CACHE_H

#include <stdint.h>

enum { MOST_HEAD = 512, MOST_QUERIES = 4096 }; /* features of a head, queries of a sample */
/* Keys of a block whose scores are computed before their weights; positions of a page are a multiple of
   KEYS_OF_PAGE. */
enum { KEYS_AT_ONCE = 256, KEYS_OF_PAGE = 32 };

struct attention_cache {
    const float *q, *k, *v, *past_k, *past_v; /* the past is [batch, kv_heads, room, size]; k may be
                                                 NULL: then the present is complete */
    const float *bias;                        /* of scores, or NULL */
    const float *cos, *sin;                   /* [positions, half], or NULL */
    const int32_t *last;                      /* the last position of each sample, or NULL */
    float *y, *present_k, *present_v;         /* the present is [batch, kv_heads, kept, size] */
    int64_t heads, kv_heads, queries, size, value_size, room, kept, total;
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;
    int64_t y_batch, y_head, y_row, bias_batch, bias_head, bias_row;
    int64_t past_k_batch, past_k_head, past_v_batch, past_v_head;
    int64_t present_k_batch, present_k_head, present_v_batch, present_v_head;
    int64_t holds_k, holds_v; /* whether the present holds the past already */
    int64_t keeps;            /* whether it keeps the rows of the past after the new ones, instead of zeros */
    int64_t causal, window, half, interleaved;
    /* Block sparsity: block i of queries, in the layout of a head, sees the blocks of keys columns[starts[i]] to
       columns[starts[i + 1] - 1], with `block` positions each; block 0: dense. */
    const int32_t *starts, *columns;              /* [layouts, blocks + 1], [layouts, most] */
    int64_t block, blocks, layouts, most;
    /* Paged attention: an item is some rows of a request, with all heads of queries. Otherwise, parts is NULL. */
    const struct paged_rows *parts;
    const int64_t *pages;      /* page numbers of all requests, concatenated */
    const float *pool;         /* pages of `page` elements */
    int64_t page, positions;   /* of a page: elements, and positions */
    int64_t keys_at, values_at; /* where keys [kv_heads, size, positions] and values [kv_heads, positions, size]
                                   begin in a page */
    /* The bias of the scores by distance, [heads, distances + 1]: one for each distance, then the slope for each
       position beyond them; or NULL. */
    const float *by_distance;
    int64_t distances;
    double scale, softcap;
};

/* Some rows of a request: the first row, their number, the number of positions before them, and the index of the
   request's first page. */
struct paged_rows {
    int64_t first, rows, past, pages;
};

#endif
