/* RoiAlign in the type REAL, with functions named OF(name): regions.c includes this once for each type. */
#include <tgmath.h>

struct OF(roi_align) {
    const REAL *x, *regions;
    const int64_t *images; /* of each region */
    REAL *y;
    int64_t batch, channels, height, width, rows, columns; /* bins along either axis */
    int64_t ratio, highest, shifted;
    double scale;
};

/* The samples of the bins of a region along an axis. */
typedef struct {
    REAL start, step;
    int64_t grid;        /* samples of a bin */
    int64_t first, last; /* the range of samples that are not far outside of the image */
} OF(samples);

/* Return 0 if there are too many. */
static int OF(samples_of)(OF(samples) *s, REAL start, REAL end, int64_t bins, int64_t ratio, int shifted)
{
    REAL extent = end - start;
    if (!shifted && extent < 1)
        extent = 1;
    s->start = start;
    s->step = extent / bins;
    REAL grid = ceil(s->step);
    if (ratio <= 0 && grid * bins > MOST_SAMPLES)
        return 0;
    s->grid = ratio > 0 ? ratio : grid > 0 ? (int64_t)grid : 0;
    return s->grid <= MOST_SAMPLES / bins;
}

/* Find the range of samples with nonzero weights, for an image of `size` elements. */
static void OF(bound_samples)(OF(samples) *s, int64_t bins, int64_t size)
{
    double pitch = (double)s->step / s->grid, total = s->grid * bins, start = s->start;
    double slack = 2 + (fabs(start) + fabs((double)s->step) * bins) * 1e-6;
    /* Sample i is i + 0.5 pitches from the start, and a pitch may be longer than the slack. */
    double first = (-1 - slack - start) / pitch, last = (size + slack - start) / pitch + 1;
    s->first = pitch > 0 && first > 0 ? (int64_t)(first < total ? first : total) : 0;
    s->last = pitch > 0 && last < total ? (int64_t)(last > s->first ? last : s->first) : total;
}

/* For sample `i` of all bins: the element before it, and the weights of that and the next. */
static inline int64_t OF(neighbour)(const OF(samples) *s, int64_t i, int64_t size, double *weights)
{
    REAL at = s->start + (REAL)(i / s->grid) * s->step;
    at += ((REAL)(i % s->grid) + (REAL)0.5) * s->step / (REAL)s->grid;
    int inside = at >= -1 && at <= size;
    at = at > 0 ? at : 0;
    int64_t low = (int64_t)(at < size - 1 ? at : size - 1);
    double fraction = low >= size - 1 ? 0 : (double)at - low;
    weights[0] = inside ? 1 - fraction : 0;
    weights[1] = inside ? fraction : 0;
    return low;
}

static inline REAL OF(larger)(REAL a, REAL b)
{
    return a > b || a != a ? a : b; /* NaN if either is */
}

/* The columns that some samples of a row read: both neighbours, with weights, and bins. */
typedef struct {
    int64_t count, low, high; /* the first column, and the last + 1 */
    int32_t lefts[SAMPLES], rights[SAMPLES], places[SAMPLES];
    double left_weights[SAMPLES], right_weights[SAMPLES];
} OF(column_reads);

/* Samples from `from` on that lie within SPAN columns; SAMPLES at most. */
static void OF(look_across)(OF(column_reads) *to, const struct OF(roi_align) *a, const OF(samples) *s,
                            int64_t from)
{
    int64_t most = s->last - from < SAMPLES ? s->last - from : SAMPLES, i = 0;
    to->low = a->width, to->high = 0;
    for (; i < most; i++) {
        double weights[2];
        int64_t left = OF(neighbour)(s, from + i, a->width, weights);
        int64_t right = left + 1 < a->width ? left + 1 : left;
        int64_t low = left < to->low ? left : to->low, high = right >= to->high ? right + 1 : to->high;
        if (i && high - low > SPAN)
            break;
        to->low = low, to->high = high;
        to->lefts[i] = (int32_t)left, to->rights[i] = (int32_t)right;
        to->places[i] = (int32_t)((from + i) / s->grid);
        to->left_weights[i] = weights[0], to->right_weights[i] = weights[1];
    }
    to->count = i;
}

/* Add the samples of one row of bins to the means of all channels: pixel rows are interpolated to one first. */
static void OF(add_means)(const struct OF(roi_align) *a, const REAL *x, REAL *y, const OF(samples) *down,
                          int64_t from, int64_t to, const OF(samples) *across, int64_t samples)
{
    int64_t pixels = a->height * a->width, bins = a->rows * a->columns, next;
    OF(column_reads) columns;
    for (; from < to; from = next) {
        REAL shares[2 * ROWS];
        int64_t rows[2 * ROWS], count = 0;
        next = from + ROWS < to ? from + ROWS : to;
        for (int64_t i = from; i < next; i++) {
            double weights[2];
            int64_t low = OF(neighbour)(down, i, a->height, weights);
            for (int64_t k = 0; k < 2; k++) {
                int64_t row = low + k < a->height ? low + k : low, same = count;
                for (int64_t j = count > 2 ? count - 2 : 0; j < count; j++)
                    same = rows[j] == row ? j : same;
                shares[same] = (same < count ? shares[same] : 0) + (REAL)(weights[k] / samples);
                rows[same] = row;
                count += same == count;
            }
        }
        for (int64_t first = across->first; first < across->last; first += columns.count) {
            REAL sum[SPAN], left[SAMPLES], right[SAMPLES], values[SAMPLES];
            OF(look_across)(&columns, a, across, first);
            for (int64_t i = 0; i < columns.count; i++) {
                left[i] = (REAL)columns.left_weights[i], right[i] = (REAL)columns.right_weights[i];
                columns.lefts[i] -= columns.low, columns.rights[i] -= columns.low;
            }
            int64_t span = columns.high - columns.low;
            for (int64_t c = 0; c < a->channels; c++) {
                const REAL *image = x + c * pixels + columns.low;
                REAL *means = y + c * bins;
                for (int64_t r = 0; r < count; r++) {
                    const REAL *row = image + rows[r] * a->width;
                    if (r == 0)
                        for (int64_t k = 0; k < span; k++)
                            sum[k] = row[k] * shares[0];
                    else
                        for (int64_t k = 0; k < span; k++)
                            sum[k] += row[k] * shares[r];
                }
                for (int64_t i = 0; i < columns.count; i++)
                    values[i] = left[i] * sum[columns.lefts[i]] + right[i] * sum[columns.rights[i]];
                for (int64_t i = 0; i < columns.count; i++)
                    means[columns.places[i]] += values[i];
            }
        }
    }
}

/* Raise the bins of all channels to the maximum of the weighted neighbours of the samples of one row. */
static void OF(raise_bins)(const struct OF(roi_align) *a, const REAL *x, REAL *y,
                           const OF(samples) *across, int64_t low, const double *shares)
{
    int64_t pixels = a->height * a->width, bins = a->rows * a->columns;
    int64_t down = low + 1 < a->height ? a->width : 0;
    OF(column_reads) columns;
    for (int64_t from = across->first; from < across->last; from += columns.count) {
        REAL w00[SAMPLES], w01[SAMPLES], w10[SAMPLES], w11[SAMPLES], values[SAMPLES];
        OF(look_across)(&columns, a, across, from);
        const int32_t *lefts = columns.lefts, *rights = columns.rights, *places = columns.places;
        int64_t count = columns.count;
        for (int64_t i = 0; i < count; i++) {
            double left = columns.left_weights[i], right = columns.right_weights[i];
            w00[i] = (REAL)(shares[0] * left), w01[i] = (REAL)(shares[0] * right);
            w10[i] = (REAL)(shares[1] * left), w11[i] = (REAL)(shares[1] * right);
        }
        for (int64_t c = 0; c < a->channels; c++) {
            const REAL *above = x + c * pixels + low * a->width, *below = above + down;
            REAL *to = y + c * bins;
            int nans = 0;
            for (int64_t i = 0; i < count; i++) {
                REAL upper0 = w00[i] * above[lefts[i]], upper1 = w01[i] * above[rights[i]];
                REAL lower0 = w10[i] * below[lefts[i]], lower1 = w11[i] * below[rights[i]];
                REAL upper = upper0 > upper1 ? upper0 : upper1;
                REAL lower = lower0 > lower1 ? lower0 : lower1;
                REAL sum = (upper0 + upper1) + (lower0 + lower1);
                values[i] = upper > lower ? upper : lower;
                nans |= sum != sum;
            }
            for (int64_t i = 0; nans && i < count; i++)
                values[i] =
                    OF(larger)(OF(larger)(w00[i] * above[lefts[i]], w01[i] * above[rights[i]]),
                               OF(larger)(w10[i] * below[lefts[i]], w11[i] * below[rights[i]]));
            for (int64_t i = 0; !nans && i < count; i++)
                to[places[i]] = values[i] > to[places[i]] ? values[i] : to[places[i]];
            for (int64_t i = 0; nans && i < count; i++)
                to[places[i]] = OF(larger)(values[i], to[places[i]]);
        }
    }
}

/* An item is a row of bins of one region. */
CHECKED_ITEMS_OF(OF(roi_align), OF(roi_align))
{
    REAL scale = (REAL)a->scale, shift = a->shifted ? (REAL)0.5 : 0;
    int64_t bins = a->rows * a->columns;
    for (int64_t item = begin; item < end; item++) {
        int64_t region = item / a->rows, row = item % a->rows, image = a->images[region];
        REAL corners[4];
        for (int i = 0; i < 4; i++) {
            corners[i] = a->regions[region * 4 + i] * scale - shift;
            if (!isfinite(corners[i]))
                return 1;
        }
        OF(samples) down, across;
        int shifted = a->shifted != 0;
        if (image < 0 || image >= a->batch ||
            !OF(samples_of)(&down, corners[1], corners[3], a->rows, a->ratio, shifted) ||
            !OF(samples_of)(&across, corners[0], corners[2], a->columns, a->ratio, shifted))
            return 1;
        const REAL *x = a->x + image * a->channels * a->height * a->width;
        REAL *y = a->y + region * a->channels * bins + row * a->columns;
        int64_t count = down.grid * across.grid, first = row * down.grid, next = first + down.grid;
        if (count) {
            OF(bound_samples)(&down, a->rows, a->height);
            OF(bound_samples)(&across, a->columns, a->width);
        }
        int whole = a->highest && count && first >= down.first && next <= down.last;
        for (int64_t j = 0; j < a->columns; j++) {
            int inside = j * across.grid >= across.first && (j + 1) * across.grid <= across.last;
            for (int64_t c = 0; c < a->channels; c++)
                y[c * bins + j] = whole && inside ? -INFINITY : 0; /* samples outside count as 0 */
        }
        if (!count)
            continue;
        first = first > down.first ? first : down.first;
        next = next < down.last ? next : down.last;
        if (!a->highest)
            OF(add_means)(a, x, y, &down, first, next, &across, count);
        for (int64_t i = first; a->highest && i < next; i++) {
            double shares[2];
            int64_t low = OF(neighbour)(&down, i, a->height, shares);
            OF(raise_bins)(a, x, y, &across, low, shares);
        }
    }
    return 0;
}
