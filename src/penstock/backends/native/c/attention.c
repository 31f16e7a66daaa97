/* Attention of few queries over a cache of keys and values, which new ones are added to. An item is a
   head of keys of one sample, with all heads of queries that share it. Returns 1 where a query sees no
   key with a finite score. Compiled with contraction to fused multiply-add. */
#include <string.h>
#include "attention.h"
#include "math32.h"
#include "native.h"
#include "vectors.h"

enum { LANES = VECTOR_BYTES / 4, KEYS = 256, TOGETHER = 4 };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

/* Turn a head by the angles of its position. */
static void rotate(const struct attention *a, const float *x, int64_t position, float *to)
{
    const float *cos = a->cos + position * a->half, *sin = a->sin + position * a->half;
    int64_t step = a->interleaved ? 2 : 1, other = a->interleaved ? 1 : a->half;
    for (int64_t i = 0; i < a->half; i++) {
        float left = x[i * step], right = x[i * step + other];
        to[i * step] = left * cos[i] - right * sin[i];
        to[i * step + other] = right * cos[i] + left * sin[i];
    }
    memcpy(to + 2 * a->half, x + 2 * a->half, (a->size - 2 * a->half) * sizeof *to);
}

/* The present of one head: the past, unless it is there, new rows, and zeros. */
static void store(const struct attention *a, const float *new, int64_t row, const float *past,
                  float *to, int64_t size, int64_t cached, int turned)
{
    if (past)
        memcpy(to, past, cached * size * sizeof *to);
    for (int64_t i = 0; i < a->queries; i++) {
        float *place = to + (cached + i) * size;
        if (turned)
            rotate(a, new + i * row, cached + i, place);
        else
            memcpy(place, new + i * row, size * sizeof *to);
    }
    int64_t end = cached + a->queries;
    memset(to + end * size, 0, (a->kept - end) * size * sizeof *to);
}

/* Lanes to the largest of them, or to their sum, in halves: each is one instruction. */
static inline float largest(float *lanes)
{
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; l++)
            lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
    return lanes[0];
}

static inline float sum_of(float *lanes)
{
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}

/* Products of q with some keys, a constant number of them, whose sums are under way together. */
static inline __attribute__((always_inline)) void dots(float *to, const float *q, const float *keys,
                                                       int64_t size, float scale, int count)
{
    vector sums[TOGETHER] = {0}, x, y;
    float parts[TOGETHER][LANES];
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        memcpy(&x, q + i, sizeof x);
#pragma GCC unroll 4
        for (int j = 0; j < count; j++) {
            memcpy(&y, keys + j * size + i, sizeof y);
            sums[j] += x * y;
        }
    }
    memcpy(parts, sums, sizeof parts);
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) {
        float sum = sum_of(parts[j]);
        for (int64_t k = i; k < size; k++)
            sum += q[k] * keys[j * size + k];
        to[j] = scale * sum;
    }
}

/* to += the sum of `n` rows, each times its weight */
static void add_rows(float *restrict to, const float *restrict rows, const float *restrict weights,
                     int64_t n, int64_t size)
{
    int64_t j = 0;
    for (; j + TOGETHER <= n; j += TOGETHER) {
        const float *row = rows + j * size;
        float a = weights[j], b = weights[j + 1], c = weights[j + 2], d = weights[j + 3];
        for (int64_t i = 0; i < size; i++)
            to[i] += a * row[i] + b * row[i + size] + c * row[i + 2 * size] + d * row[i + 3 * size];
    }
    for (; j < n; j++)
        for (int64_t i = 0; i < size; i++)
            to[i] += weights[j] * rows[j * size + i];
}

/* One query over the keys from `first` up to `end`, a block of them at a time. */
static int attend(const struct attention *a, const float *q, const float *keys, const float *values,
                  const float *bias, int64_t first, int64_t end, float *y)
{
    float scores[KEYS], sums[MOST_HEAD] = {0}, top = -INFINITY, total = 0;
    float scale = (float)a->scale, cap = (float)a->softcap;
    for (int64_t from = first; from < end; from += KEYS) {
        int64_t n = end - from < KEYS ? end - from : KEYS;
        int64_t whole = n / LANES * LANES, j = 0;
        float most[LANES], parts[LANES] = {0};
        for (; j + TOGETHER <= n; j += TOGETHER)
            dots(scores + j, q, keys + (from + j) * a->size, a->size, scale, TOGETHER);
        for (; j < n; j++)
            dots(scores + j, q, keys + (from + j) * a->size, a->size, scale, 1);
        for (j = 0; cap && j < n; j++)
            scores[j] = cap * tanh32(scores[j] / cap);
        for (j = 0; bias && j < n; j++)
            scores[j] += bias[from + j];
        for (int l = 0; l < LANES; l++)
            most[l] = top;
        for (j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++)
                most[l] = scores[j + l] > most[l] ? scores[j + l] : most[l];
        float highest = largest(most);
        for (; j < n; j++)
            highest = scores[j] > highest ? scores[j] : highest;
        if (!(highest > -INFINITY && highest < INFINITY))
            return 1;
        float shrink = total ? exp32(top - highest) : 0;
        for (int64_t i = 0; total && i < a->value_size; i++)
            sums[i] *= shrink;
        total *= shrink;
        for (j = 0; j < n; j++)
            scores[j] = exp32(scores[j] - highest);
        for (j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++)
                parts[l] += scores[j + l];
        for (total += sum_of(parts); j < n; j++)
            total += scores[j];
        add_rows(sums, values + from * a->value_size, scores, n, a->value_size);
        top = highest;
    }
    for (int64_t i = 0; i < a->value_size; i++)
        y[i] = sums[i] / total;
    return !(total > 0);
}

static int cached_attention(const void *arguments, int64_t begin, int64_t end)
{
    const struct attention *a = arguments;
    int64_t group = a->heads / a->kv_heads;
    float turned[MOST_HEAD];
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / a->kv_heads, head = item % a->kv_heads;
        int64_t ends = a->last ? (int64_t)a->last[b] + 1 : a->total;
        int64_t cached = a->queries == a->total ? 0 : ends - a->queries;
        float *keys = a->present_k + b * a->present_k_batch + head * a->present_k_head;
        float *values = a->present_v + b * a->present_v_batch + head * a->present_v_head;
        if (a->k) {
            const float *old_keys = a->past_k + b * a->past_k_batch + head * a->past_k_head;
            const float *old_values = a->past_v + b * a->past_v_batch + head * a->past_v_head;
            store(a, a->k + b * a->k_batch + head * a->k_head, a->k_row,
                  a->holds_k ? NULL : old_keys, keys, a->size, cached, a->cos != NULL);
            store(a, a->v + b * a->v_batch + head * a->v_head, a->v_row,
                  a->holds_v ? NULL : old_values, values, a->value_size, cached, 0);
        }
        for (int64_t h = head * group; h < (head + 1) * group; h++)
            for (int64_t i = 0; i < a->queries; i++) {
                const float *q = a->q + b * a->q_batch + h * a->q_head + i * a->q_row, *bias = NULL;
                int64_t position = cached + i;
                int64_t last = a->causal && position + 1 < ends ? position + 1 : ends;
                int64_t first = a->window && position >= a->window ? position - a->window + 1 : 0;
                if (a->cos) {
                    rotate(a, q, position, turned);
                    q = turned;
                }
                if (a->bias)
                    bias = a->bias + b * a->bias_batch + h * a->bias_head + i * a->bias_row;
                float *y = a->y + b * a->y_batch + h * a->y_head + i * a->y_row;
                if (first >= last || attend(a, q, keys, values, bias, first, last, y))
                    return 1;
            }
    }
    return 0;
}

const kernel_entry attention_kernels[] = {
    KERNEL(cached_attention, attention),
    END_OF_KERNELS,
};
