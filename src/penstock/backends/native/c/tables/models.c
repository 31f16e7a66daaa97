/* Linear models and support vector machines. An item is a block of rows.

   decision[p] = sum over s of weight[p][s] * kernel(x, vector[s]), plus offset[p]

   The decisions of a linear model are the products x * vector[s]. All is computed in float64, except products of
   float32 features with many support vectors. Compiled with contraction to fused multiply-add. */

// Compiler options: -ffp-contract=fast
#include <string.h>
#include "families.h"
#include "math64.h"
#include "scores.h"

enum { LINEAR, POLY, RBF, SIGMOID };
enum { NO_LABEL, HIGHEST, SINGLE, EITHER, VOTES };
enum { ROWS = 4, TOGETHER = 16, FEW = 16, FEATURES = 256, VECTORS = 512, DECISIONS = 1024, CLASSES = 32 };

struct models {
    const void *x;
    int64_t *labels;
    float *scores;
    const double *vectors; /* [feature][count]; `count` is a multiple of 2 * WIDTH */
    const float *narrow;   /* the same, where float32 products suffice */
    const double *squares; /* of each vector, for RBF */
    const double *weights; /* `count` of each decision; NULL for linear models */
    const double *offsets; /* of each decision */
    const int64_t *names;
    const double *prob_a, *prob_b; /* of each pair of classes, or NULL */
    int64_t rows, width, count;
    int64_t used; /* vectors; the rest is padding */
    int64_t decisions, classes, outputs;
    int64_t kernel, degree;
    int64_t rule; /* by which the label is chosen */
    int64_t transform;
    int64_t one_class;  /* the score is only a sign */
    int64_t pair;       /* two scores follow from one, ... */
    int64_t complement; /* ... which is a probability */
    double gamma, coef0, limit;
};

/* Vectors of eight, whose elements are added one by one, for the same results on every instruction set. */
enum { WIDTH = 8 };

/* The products of some features of `n` rows with vectors, as `sums` that are VECTORS apart, or added to these if there
   were `more` features. The sums over these features have the type of the vectors. */
#define ADD_PRODUCTS(name, type, LANES)                                                           \
    typedef type name##_lanes __attribute__((vector_size(LANES * sizeof(type)), aligned(sizeof(type))));\
    typedef double name##_sums __attribute__((vector_size(LANES * sizeof(double)), aligned(sizeof(double))));\
                                                                                                  \
    INLINED void name(const type *vectors, int64_t step, const type *x, int64_t features,         \
                      int64_t count, double *sums, const int more, const int n)                   \
    {                                                                                             \
        for (int64_t s = 0; s < count; s += LANES) {                                              \
            name##_lanes sum[ROWS];                                                               \
            for (int r = 0; r < n; r++)                                                           \
                sum[r] = (name##_lanes){0};                                                       \
            for (int64_t f = 0; f < features; f++) {                                              \
                name##_lanes vector = *(const name##_lanes *)(vectors + f * step + s);            \
                UNROLLED(r, n)                                                                    \
                    sum[r] += x[r * FEATURES + f] * vector;                                       \
            }                                                                                     \
            UNROLLED(r, n) {                                                                      \
                name##_sums *const to = (name##_sums *)(sums + r * VECTORS + s);                  \
                const name##_sums own = __builtin_convertvector(sum[r], name##_sums);             \
                *to = more ? *to + own : own;                                                     \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
    static __attribute__((noinline)) void name##_of(const type *vectors, int64_t step, const type *x, int64_t features,\
                                                    int64_t count, double *sums, const int more, const int n)\
    {                                                                                             \
        if (n == 1)                                                                               \
            return name(vectors, step, x, features, count, sums, more, 1);                        \
        name(vectors, step, x, features, count, sums, more, ROWS);                                \
    }

ADD_PRODUCTS(add_products, double, WIDTH)
ADD_PRODUCTS(add_narrow_products, float, 16)

/* Turn the products of a row with vectors into kernel values; `square` is the row's squared norm. */
static void apply_kernel(const struct models *a, double *restrict k, double square, int64_t low, int64_t count)
{
    const double *restrict squares = a->squares + low;
    double gamma = a->gamma, coef0 = a->coef0;
    if (a->kernel == RBF)
        for (int64_t i = 0; i < count; i++) {
            double distance = square + squares[i] - 2 * k[i];
            k[i] = exp64(-gamma * (distance < 0 ? 0 : distance));
        }
    else if (a->kernel == SIGMOID && a->narrow)
        for (int64_t i = 0; i < count; i++)
            k[i] = tanh32((float)(gamma * k[i] + coef0));
    else if (a->kernel == SIGMOID)
        for (int64_t i = 0; i < count; i++) {
            const double x = gamma * k[i] + coef0;
            k[i] = copysign(1 - 2 / (exp64(2 * fabs(x)) + 1), x);
        }
    else if (a->kernel == POLY) {
        for (int64_t i = 0; i < count; i += 2 * WIDTH) {
            add_products_lanes *const to = (add_products_lanes *)(k + i);
            const add_products_lanes base[2] = {gamma * to[0] + coef0, gamma * to[1] + coef0};
            add_products_lanes powers[2] = {base[0], base[1]};
            for (int64_t degree = 1; degree < a->degree; degree++)
                powers[0] *= base[0], powers[1] *= base[1];
            to[0] = powers[0], to[1] = powers[1];
            for (int64_t j = i; !a->degree && j < i + 2 * WIDTH; j++)
                k[j] = 1;
        }
    }
    for (int64_t i = a->used - low; i < count; i++)
        k[i] = 0;
}

static inline double dot(const double *x, const double *y, int64_t count)
{
    add_products_lanes sum = {0}, other = {0}; /* `count` is a multiple of 2 * WIDTH */
    for (int64_t i = 0; i < count; i += 2 * WIDTH) {
        sum += *(const add_products_lanes *)(x + i) * *(const add_products_lanes *)(y + i);
        other += *(const add_products_lanes *)(x + i + WIDTH) * *(const add_products_lanes *)(y + i + WIDTH);
    }
    sum += other;
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* One-vs-one decisions to class probabilities: Platt's sigmoids, and the second method of Wu, Lin and Weng (JMLR 5,
   2004), as _coupling of ops/onnx_ml/models.py. */
static void couple(const struct models *a, double *scores)
{
    int n = (int)a->classes, pair = 0;
    double versus[CLASSES][CLASSES], q[CLASSES][CLASSES], p[CLASSES], qp[CLASSES];
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n; j++, pair++) {
            double wins = 1 - logistic(scores[pair] * a->prob_a[pair] + a->prob_b[pair]);
            wins = wins < 1e-7 ? 1e-7 : wins > 1 - 1e-7 ? 1 - 1e-7 : wins;
            versus[i][j] = wins;
            versus[j][i] = 1 - wins;
        }
    for (int j = 0; j < n; j++) {
        q[j][j] = 0;
        p[j] = 1. / n;
        for (int i = 0; i < n; i++)
            if (i != j) {
                q[j][j] += versus[i][j] * versus[i][j];
                q[j][i] = -versus[i][j] * versus[j][i];
            }
    }
    for (int step = 0; step < (n > 100 ? n : 100); step++) {
        double pqp = 0, most = 0;
        for (int t = 0; t < n; t++) {
            qp[t] = 0;
            for (int j = 0; j < n; j++)
                qp[t] += q[t][j] * p[j];
            pqp += p[t] * qp[t];
        }
        for (int t = 0; t < n; t++)
            most = fabs(qp[t] - pqp) >= most ? fabs(qp[t] - pqp) : most;
        if (most < 0.005 / n)
            break;
        for (int t = 0; t < n; t++) {
            double change = (pqp - qp[t]) / q[t][t], grown = 1 + change;
            pqp = (pqp + change * (change * q[t][t] + 2 * qp[t])) / (grown * grown);
            p[t] += change;
            for (int j = 0; j < n; j++) {
                p[j] /= grown;
                qp[j] = (qp[j] + change * q[j][t]) / grown;
            }
        }
    }
    memcpy(scores, p, n * sizeof *p);
}

static int64_t label_place(const struct models *a, const double *scores)
{
    int64_t best = 0;
    switch (a->rule) {
    case SINGLE:
        return scores[0] > a->limit;
    case EITHER: /* of two */
        best = highest(scores, 2);
        return scores[best] > a->limit ? 1 : best;
    case VOTES: {
        const int64_t n = a->classes;
        int64_t pair = 0;
        int32_t votes[CLASSES] = {0};
        for (int i = 0; i < n; i++)
            for (int j = i + 1; j < n; j++)
                votes[scores[pair++] > 0 ? i : j]++;
        for (int i = 1; i < n; i++)
            best = votes[i] > votes[best] ? i : best;
        return best;
    }
    default:
        return highest(scores, a->decisions);
    }
}

/* Write the labels and scores of `n` rows, whose decisions are `step` apart. */
static __attribute__((noinline)) void write_rows(const struct models *a, int64_t row, double *scores, int64_t step, int n)
{
    const int64_t count = a->outputs;
    double all[ROWS * (DECISIONS / ROWS + 2)]; /* scores of all rows, which are transformed together */
    for (int r = 0; r < n; r++) {
        double *const own = scores + r * step;
        for (int64_t i = 0; i < a->decisions; i++)
            own[i] += a->offsets[i];
        if (a->labels)
            a->labels[row + r] = a->names[label_place(a, own)];
        if (!a->scores)
            continue;
        if (a->one_class)
            own[0] = own[0] > 0 ? 1 : -1;
        if (a->prob_a)
            couple(a, own);
        if (a->pair)
            two_scores(own, own[0], a->transform, a->complement);
        for (int64_t i = 0; i < count; i++)
            all[r * count + i] = own[i];
    }
    if (!a->scores)
        return;
    transform_scores(all, n, count, a->pair ? pair_transform(a->transform) : a->transform);
    for (int64_t i = 0; i < n * count; i++)
        a->scores[row * count + i] = (float)all[i];
}

#define MODELS(name, type, real)                                                                  \
    INLINED void name##_rows(const struct models *a, int64_t row, const int n)                    \
    {                                                                                             \
        double scores[ROWS][DECISIONS / ROWS + 2], x[ROWS * FEATURES], k[ROWS * VECTORS];         \
        float narrow[ROWS * FEATURES];                                                            \
        const type *rows = (const type *)a->x + row * a->width;                                   \
        for (int r = 0; r < n; r++)                                                               \
            memset(scores[r], 0, a->decisions * sizeof **scores);                                 \
        for (int64_t low = 0; low < a->count; low += VECTORS) {                                   \
            int64_t rest = a->count - low, count = rest < VECTORS ? rest : VECTORS;               \
            double square[ROWS] = {0};                                                            \
            for (int64_t first = 0; first < a->width; first += FEATURES) {                        \
                int64_t left = a->width - first, features = left < FEATURES ? left : FEATURES;    \
                int64_t at = first * a->count + low;                                              \
                for (int r = 0; r < n; r++) {                                                     \
                    const type *from = rows + r * a->width + first;                               \
                    for (int64_t f = 0; a->narrow && f < features; f++)                           \
                        narrow[r * FEATURES + f] = (float)from[f];                                \
                    for (int64_t f = 0; !a->narrow && f < features; f++)                          \
                        x[r * FEATURES + f] = (real)from[f];                                      \
                    for (int64_t f = 0; a->kernel == RBF && f < features; f++)                    \
                        square[r] += x[r * FEATURES + f] * x[r * FEATURES + f];                   \
                }                                                                                 \
                if (a->narrow)                                                                    \
                    add_narrow_products_of(a->narrow + at, a->count, narrow, features, count, k, first > 0, n);\
                else                                                                              \
                    add_products_of(a->vectors + at, a->count, x, features, count, k, first > 0, n);\
            }                                                                                     \
            for (int r = 0; r < n; r++) {                                                         \
                double *products = k + r * VECTORS;                                               \
                if (a->weights) {                                                                 \
                    apply_kernel(a, products, square[r], low, count);                             \
                    for (int64_t p = 0; p < a->decisions; p++)                                    \
                        scores[r][p] += dot(products, a->weights + p * a->count + low, count);    \
                }                                                                                 \
                else                                                                              \
                    for (int64_t p = low; p < low + count && p < a->decisions; p++)               \
                        scores[r][p] = products[p - low];                                         \
            }                                                                                     \
        }                                                                                         \
        write_rows(a, row, scores[0], sizeof scores[0] / sizeof **scores, n);                     \
    }                                                                                             \
                                                                                                  \
    /* Linear models of few decisions, with a lane for each of up to TOGETHER rows. */            \
    static void name##_few(const struct models *a, int64_t row, const int n)                      \
    {                                                                                             \
        double scores[TOGETHER][FEW];                                                             \
        _Alignas(64) double x[FEATURES][TOGETHER];                                                \
        const type *rows = (const type *)a->x + row * a->width;                                   \
        for (int64_t f = 0; f < a->width; f++)                                                    \
            for (int r = 0; r < TOGETHER; r++)                                                    \
                x[f][r] = r < n ? (real)rows[r * a->width + f] : 0;                               \
        for (int64_t p = 0; p < a->decisions; p++) {                                              \
            double sum[TOGETHER] = {0};                                                           \
            for (int64_t f = 0; f < a->width; f++)                                                \
                for (int r = 0; r < TOGETHER; r++)                                                \
                    sum[r] += x[f][r] * a->vectors[f * a->count + p];                             \
            for (int r = 0; r < TOGETHER; r++)                                                    \
                scores[r][p] = sum[r];                                                            \
        }                                                                                         \
        write_rows(a, row, scores[0], FEW, n);                                                    \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, models)                                                                        \
    {                                                                                             \
        const int64_t last = smaller(end * ROWS, a->rows);                                        \
        if (!a->weights && a->decisions <= FEW && a->width <= FEATURES && a->rows > 1) {          \
            for (int64_t row = begin * ROWS; row < last; row += TOGETHER)                         \
                name##_few(a, row, (int)smaller(last - row, TOGETHER));                           \
            return;                                                                               \
        }                                                                                         \
        for (int64_t item = begin; item < end; item++)                                            \
            if (item * ROWS + ROWS <= a->rows)                                                    \
                name##_rows(a, item * ROWS, ROWS);                                                \
            else                                                                                  \
                for (int64_t row = item * ROWS; row < a->rows; row++)                             \
                    name##_rows(a, row, 1);                                                       \
    }

MODELS(models_float32, float, double)
MODELS(models_float64, double, double)
MODELS(models_int32, int32_t, float)
MODELS(models_int64, int64_t, float)

KERNELS(models, KERNELS_OF_NUMBERS(models, models))
