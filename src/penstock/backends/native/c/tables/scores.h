/* Post-transforms of a row's scores in classical models, in float64 as in ops/onnx_ml/models.py. */
#ifndef PENSTOCK_SCORES_H
#define PENSTOCK_SCORES_H

#include <math.h>
#include "math64.h"
#include "native.h"
#include "vectors.h"

enum { NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO, PROBIT };

static inline double probit(double score)
{
    const double pi = 3.14159265358979323846;
    double x = 2 * score - 1, logarithm = log((1 - x) * (1 + x));
    double a = 2 / (pi * 0.147) + logarithm / 2;
    return copysign(sqrt(sqrt(a * a - logarithm / 0.147) - a), x) * sqrt(2);
}

static inline double logistic(double score)
{
    return 1 / (1 + exp64(-score));
}

/* The largest score (ignoring NaN), and the sum of all, in parts that are independent of each other. */
enum { PARTS = 8 };
#define IN_PARTS(name, first, JOIN)                                                               \
    static inline double name(const double *scores, int64_t count)                                \
    {                                                                                             \
        double parts[PARTS];                                                                      \
        int64_t i = 0;                                                                            \
        FILL(parts, PARTS, first);                                                                \
        for (; i + PARTS <= count; i += PARTS)                                                    \
            for (int64_t j = 0; j < PARTS; j++)                                                   \
                parts[j] = JOIN(parts[j], scores[i + j]);                                         \
        if (i)                                                                                    \
            HALVE(parts, PARTS, JOIN);                                                            \
        for (; i < count; i++)                                                                    \
            parts[0] = JOIN(parts[0], scores[i]);                                                 \
        return parts[0];                                                                          \
    }
IN_PARTS(largest, -INFINITY, LARGEST_OF)
IN_PARTS(sum_of, 0, SUM_OF)

static inline void softmax(double *scores, int64_t rows, int64_t count, double least)
{
    for (int64_t row = 0; row < rows * count; row += count) {
        const double most = largest(scores + row, count);
        for (int64_t i = row; i < row + count; i++)
            scores[i] = fabs(scores[i]) <= least ? -INFINITY : scores[i] - most;
    }
    for (int64_t i = 0; i < rows * count; i++) /* of all rows together, in vectors */
        scores[i] = exp64(scores[i]);
    for (int64_t row = 0; row < rows * count; row += count) {
        const double total = sum_of(scores + row, count);
        for (int64_t i = row; i < row + count; i++)
            scores[i] /= least >= 0 && total == 0 ? 1 : total;
    }
}

/* Only PROBIT applies to a single score. */
static inline void transform_scores(double *scores, int64_t rows, int64_t count, int64_t transform)
{
    if (transform == NONE || (count == 1 && transform != PROBIT))
        return;
    if (transform == SOFTMAX || transform == SOFTMAX_ZERO)
        softmax(scores, rows, count, transform == SOFTMAX ? -1 : 1e-7);
    else if (transform == PROBIT)
        for (int64_t i = 0; i < rows * count; i++)
            scores[i] = probit(scores[i]);
    else
        for (int64_t i = 0; i < rows * count; i++) /* in vectors */
            scores[i] = logistic(scores[i]);
}

/* The scores of two classes, from that of the second, before `pair_transform`. */
static inline void two_scores(double *scores, double score, int64_t transform, int64_t complement)
{
    scores[0] = complement && transform != LOGISTIC ? 1 - score : -score;
    scores[1] = score;
}

static inline int64_t pair_transform(int64_t transform)
{
    return transform == LOGISTIC || transform == PROBIT ? transform : NONE;
}

/* The first of the highest scores, as NumPy's argmax: NaN is higher than all numbers. */
static inline int64_t highest(const double *scores, int64_t count)
{
    int64_t best = 0, nan = 0;
    if (count < PARTS) {
        for (int64_t i = 1; i < count; i++)
            best = scores[i] > scores[best] || (scores[i] != scores[i] && scores[best] == scores[best]) ? i : best;
        return best;
    }
    const double most = largest(scores, count);
    for (int64_t i = 0; i < count; i++)
        nan |= scores[i] != scores[i];
    while (best < count - 1 && (nan ? scores[best] == scores[best] : scores[best] != most))
        best++;
    return best;
}

#endif
