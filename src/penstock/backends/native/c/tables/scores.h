/* What classical models do to the scores of a row, in float64 as ops/onnx_ml/models.py. */
#ifndef PENSTOCK_SCORES_H
#define PENSTOCK_SCORES_H

#include <math.h>
#include "math64.h"
#include "native.h"

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

static inline void softmax(double *scores, int64_t count, double least)
{
    double most = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++)
        most = scores[i] > most ? scores[i] : most;
    for (int64_t i = 0; i < count; i++)
        scores[i] = fabs(scores[i]) <= least ? 0 : exp64(scores[i] - most);
    for (int64_t i = 0; i < count; i++)
        total += scores[i];
    for (int64_t i = 0; i < count; i++)
        scores[i] /= least >= 0 && total == 0 ? 1 : total;
}

/* A single score is only subject to PROBIT. */
static inline void transform_scores(double *scores, int64_t count, int64_t transform)
{
    if (transform == NONE || (count == 1 && transform != PROBIT))
        return;
    if (transform == SOFTMAX || transform == SOFTMAX_ZERO)
        softmax(scores, count, transform == SOFTMAX ? -1 : 1e-7);
    else
        for (int64_t i = 0; i < count; i++)
            scores[i] = transform == PROBIT ? probit(scores[i]) : logistic(scores[i]);
}

/* The scores of two classes, from that of the second. */
static inline void two_scores(double *scores, double score, int64_t transform, int64_t complement)
{
    scores[0] = complement && transform != LOGISTIC ? 1 - score : -score;
    scores[1] = score;
    if (transform == LOGISTIC || transform == PROBIT)
        transform_scores(scores, 2, transform);
}

/* The first of the highest scores, as NumPy's argmax: NaN is higher than all. */
static inline int64_t highest(const double *scores, int64_t count)
{
    int64_t best = 0;
    for (int64_t i = 1; i < count && scores[best] == scores[best]; i++)
        if (!(scores[i] <= scores[best]))
            best = i;
    return best;
}

#endif
