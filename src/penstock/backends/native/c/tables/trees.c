/* Ensembles of decision trees. An item is a block of rows.

   All tests are x <= threshold; children are adjacent. A leaf is its own child, so that several rows, or several
   trees of one row, can descend in lockstep and overlap their loads. Votes are added in the order of the trees. */
#include "families.h"
#include "scores.h"

struct tree_node {
    double threshold;
    int32_t child;   /* for rows that pass the test; the next node is for the others */
    int32_t feature; /* times two, plus one if NaN passes */
};

struct vote {
    double weight;
    int64_t target;
};

struct trees {
    const void *x;
    int64_t *labels;
    void *scores;
    const struct tree_node *nodes;
    const int32_t *roots;
    const int32_t *first_vote; /* of each node; one more ends the last */
    const struct vote *votes;
    const double *base; /* of each target, or NULL */
    const int64_t *names;
    int64_t rows, width, trees, targets;
    int64_t block; /* rows of an item */
    int64_t aggregate, transform;
    int64_t single; /* the target that alone decides the label; -1: the highest */
    int64_t pair;   /* scores of two classes follow from that */
    int64_t positive, wide;
    double limit;
};

enum { LANES = 8, SCORES = 4096 };
enum { AVERAGE, SUM, MIN, MAX };

static inline void add_votes(const struct trees *a, int32_t leaf, double *restrict scores)
{
    for (int32_t i = a->first_vote[leaf]; i < a->first_vote[leaf + 1]; i++) {
        double weight = a->votes[i].weight, *score = scores + a->votes[i].target;
        if (a->aggregate <= SUM)
            *score += weight;
        else if (*score == *score && !(a->aggregate == MIN ? *score < weight : *score > weight))
            *score = weight;
    }
}

/* The scores of a row before their transformation, and the label that follows from them. */
static inline void finish_row(const struct trees *a, int64_t row, double *scores)
{
    int64_t targets = a->targets;
    for (int64_t i = 0; i < targets; i++) {
        if (a->aggregate == AVERAGE)
            scores[i] /= a->trees;
        if (a->aggregate > SUM && isinf(scores[i]))
            scores[i] = 0;
        if (a->base)
            scores[i] += a->base[i];
    }
    if (a->labels) {
        int64_t alone = a->single;
        int64_t place = alone < 0 ? highest(scores, targets) : scores[alone] > a->limit;
        a->labels[row] = a->names[place];
    }
    if (a->pair)
        two_scores(scores, scores[a->single], a->transform, a->positive);
}

static void write_rows(const struct trees *a, int64_t row, int64_t rows, double *scores)
{
    int64_t at = row * a->targets, count = rows * a->targets;
    for (int64_t i = 0; i < rows; i++)
        finish_row(a, row + i, scores + i * a->targets);
    transform_scores(scores, rows, a->targets, a->pair ? pair_transform(a->transform) : a->transform);
    for (int64_t i = 0; a->scores && a->wide && i < count; i++)
        ((double *)a->scores)[at + i] = scores[i];
    for (int64_t i = 0; a->scores && !a->wide && i < count; i++)
        ((float *)a->scores)[at + i] = (float)scores[i];
}

#define TREES(suffix, type, real)                                                                 \
    static inline void descend_##suffix(const struct tree_node *nodes, const type *const *x, int32_t *at)\
    {                                                                                             \
        int32_t moved;                                                                            \
        do {                                                                                      \
            moved = 0;                                                                            \
            for (int i = 0; i < LANES; i++) {                                                     \
                const struct tree_node *node = nodes + at[i];                                     \
                double value = (double)x[i][node->feature >> 1];                                  \
                int32_t fails = !(value <= node->threshold);                                      \
                int32_t next = node->child + (fails ^ ((value != value) & node->feature));        \
                moved |= next ^ at[i];                                                            \
                at[i] = next;                                                                     \
            }                                                                                     \
        } while (moved);                                                                          \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(trees_##suffix, trees)                                                               \
    {                                                                                             \
        int64_t targets = a->targets;                                                             \
        double scores[SCORES];                                                                    \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t start = item * a->block, count = smaller(a->block, a->rows - start);          \
            double first = a->aggregate <= SUM ? 0 : a->aggregate == MIN ? INFINITY : -INFINITY;  \
            FILL(scores, count * targets, first);                                                 \
            /* Lanes are rows of a tree, or trees of a row if there are few rows. */              \
            int64_t of_rows = count >= LANES, steps = of_rows ? count : a->trees;                 \
            for (int64_t outer = 0; outer < (of_rows ? a->trees : count); outer++)                \
                for (int64_t low = 0; low < steps; low += LANES) {                                \
                    const type *x[LANES];                                                         \
                    int32_t at[LANES];                                                            \
                    int used = steps - low < LANES ? (int)(steps - low) : LANES;                  \
                    for (int i = 0; i < LANES; i++) {                                             \
                        int64_t lane = low + (i < used ? i : 0);                                  \
                        int64_t row = of_rows ? lane : outer;                                     \
                        x[i] = (const type *)a->x + (start + row) * a->width;                     \
                        at[i] = a->roots[of_rows ? outer : lane];                                 \
                    }                                                                             \
                    descend_##suffix(a->nodes, x, at);                                            \
                    for (int i = 0; i < used; i++)                                                \
                        add_votes(a, at[i], scores + (of_rows ? low + i : outer) * targets);      \
                }                                                                                 \
            write_rows(a, start, count, scores);                                                  \
        }                                                                                         \
    }

OF_NUMBERS(TREES)

KERNELS(trees, KERNELS_OF_NUMBERS(trees, trees))
