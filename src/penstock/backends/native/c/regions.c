/* RoiAlign and NonMaxSuppression. */
#include <math.h>
#include <string.h>
#include "native.h"

struct roi_align {
    const float *x, *regions;
    const int64_t *images; /* of each region */
    float *y;
    int64_t batch, channels, height, width, rows, columns; /* bins along either axis */
    int64_t ratio, highest, shifted;
    double scale;
};

enum { SAMPLES = 128, MOST_SAMPLES = 1 << 20 };

/* The samples of the bins of a region along an axis. */
typedef struct {
    float start, step;
    int64_t grid;        /* samples of a bin */
    int64_t first, last; /* the samples but for those that are far outside of the image */
} samples;

/* Returns 0 if there are too many. */
static int samples_of(samples *s, float start, float end, int64_t bins, int64_t ratio, int shifted)
{
    float extent = end - start;
    if (!shifted && extent < 1)
        extent = 1;
    s->start = start;
    s->step = extent / bins;
    float grid = ceilf(s->step);
    if (ratio <= 0 && grid * bins > MOST_SAMPLES)
        return 0;
    s->grid = ratio > 0 ? ratio : grid > 0 ? (int64_t)grid : 0;
    return s->grid <= MOST_SAMPLES / bins;
}

/* Bound the samples that have a weight, of an image of `size` elements. */
static void bound_samples(samples *s, int64_t bins, int64_t size)
{
    double pitch = (double)s->step / s->grid, total = s->grid * bins, start = s->start;
    double slack = 2 + (fabs(start) + fabs(s->step) * bins) * 1e-6;
    double first = (-1 - slack - start) / pitch, last = (size + slack - start) / pitch;
    s->first = pitch > 0 && first > 0 ? (int64_t)(first < total ? first : total) : 0;
    s->last = pitch > 0 && last < total ? (int64_t)(last > s->first ? last : s->first) : total;
}

/* Of sample `i` of all bins: the element before it, and the weights of that and of the next. */
static inline int64_t neighbour(const samples *s, int64_t i, int64_t size, double *weights)
{
    float at = s->start + (float)(i / s->grid) * s->step;
    at += ((float)(i % s->grid) + 0.5f) * s->step / (float)s->grid;
    int inside = at >= -1 && at <= size;
    at = at > 0 ? at : 0;
    int64_t low = (int64_t)(at < size - 1 ? at : size - 1);
    double fraction = low >= size - 1 ? 0 : (double)at - low;
    weights[0] = inside ? 1 - fraction : 0;
    weights[1] = inside ? fraction : 0;
    return low;
}

static inline float larger(float a, float b)
{
    return a > b || a != a ? a : b; /* NaN if either is */
}

/* Add the samples of one row of them to the bins of all channels. */
static void add_row(const struct roi_align *a, const float *x, float *y, const samples *across,
                    int64_t low, const double *shares)
{
    int64_t pixels = a->height * a->width, bins = a->rows * a->columns;
    int64_t down = low + 1 < a->height ? a->width : 0;
    int32_t lefts[SAMPLES], rights[SAMPLES], places[SAMPLES];
    float w00[SAMPLES], w01[SAMPLES], w10[SAMPLES], w11[SAMPLES], values[SAMPLES];
    for (int64_t from = across->first; from < across->last; from += SAMPLES) {
        int64_t count = across->last - from < SAMPLES ? across->last - from : SAMPLES;
        for (int64_t i = 0; i < count; i++) {
            double weights[2];
            int64_t left = neighbour(across, from + i, a->width, weights);
            lefts[i] = (int32_t)left;
            rights[i] = (int32_t)(left + 1 < a->width ? left + 1 : left);
            places[i] = (int32_t)((from + i) / across->grid);
            w00[i] = (float)(shares[0] * weights[0]), w01[i] = (float)(shares[0] * weights[1]);
            w10[i] = (float)(shares[1] * weights[0]), w11[i] = (float)(shares[1] * weights[1]);
        }
        for (int64_t c = 0; c < a->channels; c++) {
            const float *above = x + c * pixels + low * a->width, *below = above + down;
            float *to = y + c * bins;
            if (a->highest) {
                int nans = 0;
                for (int64_t i = 0; i < count; i++) {
                    float upper0 = w00[i] * above[lefts[i]], upper1 = w01[i] * above[rights[i]];
                    float lower0 = w10[i] * below[lefts[i]], lower1 = w11[i] * below[rights[i]];
                    float upper = upper0 > upper1 ? upper0 : upper1;
                    float lower = lower0 > lower1 ? lower0 : lower1;
                    float sum = (upper0 + upper1) + (lower0 + lower1);
                    values[i] = upper > lower ? upper : lower;
                    nans |= sum != sum;
                }
                for (int64_t i = 0; nans && i < count; i++)
                    values[i] = larger(larger(w00[i] * above[lefts[i]], w01[i] * above[rights[i]]),
                                       larger(w10[i] * below[lefts[i]], w11[i] * below[rights[i]]));
                for (int64_t i = 0; !nans && i < count; i++)
                    to[places[i]] = values[i] > to[places[i]] ? values[i] : to[places[i]];
                for (int64_t i = 0; nans && i < count; i++)
                    to[places[i]] = larger(values[i], to[places[i]]);
            }
            else {
                for (int64_t i = 0; i < count; i++)
                    values[i] = w00[i] * above[lefts[i]] + w01[i] * above[rights[i]] +
                                w10[i] * below[lefts[i]] + w11[i] * below[rights[i]];
                for (int64_t i = 0; i < count; i++)
                    to[places[i]] += values[i];
            }
        }
    }
}

/* An item is a row of bins of one region. */
static int roi_align(const void *arguments, int64_t begin, int64_t end)
{
    const struct roi_align *a = arguments;
    float scale = (float)a->scale, shift = a->shifted ? 0.5f : 0;
    int64_t bins = a->rows * a->columns;
    for (int64_t item = begin; item < end; item++) {
        int64_t region = item / a->rows, row = item % a->rows, image = a->images[region];
        float corners[4];
        for (int i = 0; i < 4; i++) {
            corners[i] = a->regions[region * 4 + i] * scale - shift;
            if (!isfinite(corners[i]))
                return 1;
        }
        samples down, across;
        if (image < 0 || image >= a->batch ||
            !samples_of(&down, corners[1], corners[3], a->rows, a->ratio, a->shifted != 0) ||
            !samples_of(&across, corners[0], corners[2], a->columns, a->ratio, a->shifted != 0))
            return 1;
        const float *x = a->x + image * a->channels * a->height * a->width;
        float *y = a->y + region * a->channels * bins + row * a->columns;
        int64_t count = down.grid * across.grid, next = (row + 1) * down.grid;
        if (count) {
            bound_samples(&down, a->rows, a->height);
            bound_samples(&across, a->columns, a->width);
        }
        int whole = a->highest && count && next - down.grid >= down.first && next <= down.last;
        for (int64_t j = 0; j < a->columns; j++) {
            int inside = j * across.grid >= across.first && (j + 1) * across.grid <= across.last;
            for (int64_t c = 0; c < a->channels; c++)
                y[c * bins + j] = whole && inside ? -INFINITY : 0; /* samples outside count as 0 */
        }
        for (int64_t i = next - down.grid; count && i < next; i++) {
            double shares[2];
            int64_t low = neighbour(&down, i, a->height, shares);
            if (i >= down.first && i < down.last)
                add_row(a, x, y, &across, low, shares);
        }
        for (int64_t c = 0; !a->highest && count && c < a->channels; c++)
            for (int64_t j = 0; j < a->columns; j++)
                y[c * bins + j] /= count;
    }
    return 0;
}

struct suppress {
    const float *boxes, *scores;
    const int64_t *most;          /* boxes to keep, or null */
    const float *threshold, *least; /* or null */
    int64_t *kept;                /* [batch * classes, capacity] */
    int64_t *counts;
    void *workspace;              /* WORDS numbers of 8 bytes a box and item */
    int64_t classes, n_boxes, capacity, centred;
};

enum { WORDS = 5, BESIDE = 32 };

/* Keys in ascending order; `spare` has room for as many. */
static void sort_keys(uint64_t *keys, uint64_t *spare, int64_t count)
{
    for (int64_t from = 0; from < count; from += 8)
        for (int64_t i = from + 1; i < count && i < from + 8; i++) {
            uint64_t key = keys[i];
            int64_t j = i;
            for (; j > from && keys[j - 1] > key; j--)
                keys[j] = keys[j - 1];
            keys[j] = key;
        }
    for (int64_t run = 8; run < count; run *= 2) {
        for (int64_t from = 0; from < count; from += 2 * run) {
            int64_t middle = from + run < count ? from + run : count;
            int64_t end = from + 2 * run < count ? from + 2 * run : count, i = from, j = middle;
            for (int64_t k = from; k < end; k++)
                spare[k] = j >= end || (i < middle && keys[i] <= keys[j]) ? keys[i++] : keys[j++];
        }
        memcpy(keys, spare, count * sizeof *keys);
    }
}

/* Least and greatest coordinate along either axis, and the area. */
static inline void corners_of(const float *box, int64_t centred, float *corners)
{
    float a = box[0], b = box[1], c = box[2], d = box[3];
    if (centred) {
        corners[0] = a - c / 2, corners[1] = a + c / 2;
        corners[2] = b - d / 2, corners[3] = b + d / 2;
    }
    else {
        corners[0] = d < b ? d : b, corners[1] = d < b ? b : d;
        corners[2] = c < a ? c : a, corners[3] = c < a ? a : c;
    }
    corners[4] = (corners[1] - corners[0]) * (corners[3] - corners[2]);
}

/* Whether any of BESIDE boxes shares more than the threshold of its union with `own`. */
static inline int overlaps(const float *restrict others, int64_t pitch, const float *own, float threshold)
{
    int any = 0;
    for (int i = 0; i < BESIDE; i++) {
        float x0 = others[i], x1 = others[pitch + i], y0 = others[2 * pitch + i];
        float y1 = others[3 * pitch + i], area = others[4 * pitch + i];
        float width = (x1 < own[1] ? x1 : own[1]) - (x0 > own[0] ? x0 : own[0]);
        float height = (y1 < own[3] ? y1 : own[3]) - (y0 > own[2] ? y0 : own[2]);
        float both = (width > 0 ? width : 0) * (height > 0 ? height : 0);
        any |= (both / (area + own[4] - both) > threshold) & (area > 0);
    }
    return any && own[4] > 0;
}

/* An item is a class of an image: boxes best first, but for those that overlap with better ones. */
static int suppress(const void *arguments, int64_t begin, int64_t end)
{
    const struct suppress *a = arguments;
    int64_t most = a->most ? *a->most : 0, n = a->n_boxes;
    float threshold = a->threshold ? *a->threshold : 0;
    if (!(threshold >= 0 && threshold <= 1))
        return 1;
    most = most < a->capacity ? most : a->capacity;
    for (int64_t item = begin; item < end; item++) {
        const float *scores = a->scores + item * n, *boxes = a->boxes + item / a->classes * n * 4;
        uint64_t *keys = (uint64_t *)a->workspace + item * WORDS * (n + BESIDE);
        int64_t candidates = 0, count = 0, pitch = n + BESIDE;
        for (int64_t i = 0; most > 0 && i < n; i++) {
            float score = scores[i] == 0 ? 0 : scores[i];
            uint32_t bits;
            memcpy(&bits, &score, sizeof bits);
            bits = score != score ? UINT32_MAX : bits >> 31 ? bits : 0x7fffffff - bits;
            keys[candidates] = (uint64_t)bits << 32 | (uint64_t)i;
            candidates += !a->least || score > *a->least;
        }
        sort_keys(keys, keys + n + BESIDE, candidates);
        float *corners = (float *)(keys + 2 * (n + BESIDE));
        for (int64_t i = 0; i < candidates && count < most; i++) {
            int64_t box = keys[i] & UINT32_MAX;
            float own[5];
            corners_of(boxes + box * 4, a->centred, own);
            int beaten = 0;
            for (int64_t j = 0; !beaten && j < count; j += BESIDE)
                beaten = overlaps(corners + j, pitch, own, threshold);
            if (beaten)
                continue;
            if (count % BESIDE == 0)
                for (int64_t k = 0; k < BESIDE; k++)
                    corners[4 * pitch + count + k] = 0;
            for (int64_t k = 0; k < 5; k++)
                corners[k * pitch + count] = own[k];
            a->kept[item * a->capacity + count++] = box;
        }
        a->counts[item] = count;
    }
    return 0;
}

/* The highest pixel of each bin of a region; 0 in one without pixels. An item is a row of bins. */
struct max_roi_pool {
    const float *x, *regions; /* of a region: its image, and two corners */
    float *y;
    int64_t batch, channels, height, width, rows, columns; /* bins along either axis */
    double scale;
};

enum { MOST_BINS = 512, MOST_WIDTH = 4096 };

/* The pixels of bin `i`; returns 0 if the region has no finite extent. */
static int bin_of(float start, float end, int64_t bins, int64_t i, int64_t size, int64_t *low,
                  int64_t *high)
{
    double length = (double)end - start + 1;
    float extent = (float)(length > 1 ? length : 1) / (float)bins;
    float from = floorf((float)i * extent) + start, to = ceilf((float)(i + 1) * extent) + start;
    if (!isfinite(from) || !isfinite(to))
        return 0;
    *low = from > 0 ? from < size ? (int64_t)from : size : 0;
    *high = to > 0 ? to < size ? (int64_t)to : size : 0;
    return 1;
}

static float rounded_away(float x)
{
    return copysignf(floorf(fabsf(x) + 0.5f), x);
}

static int max_roi_pool(const void *arguments, int64_t begin, int64_t end)
{
    const struct max_roi_pool *a = arguments;
    for (int64_t item = begin; item < end; item++) {
        int64_t region = item / a->rows, i = item % a->rows, top, bottom;
        const float *given = a->regions + 5 * region, image = given[0];
        float corners[4], highest[MOST_WIDTH];
        for (int k = 0; k < 4; k++) {
            float scaled = given[k + 1] * (float)a->scale;
            if (!isfinite(scaled))
                return 1;
            corners[k] = rounded_away(scaled);
        }
        int64_t lefts[MOST_BINS], rights[MOST_BINS];
        if (!(image >= 0 && image < a->batch) ||
            !bin_of(corners[1], corners[3], a->rows, i, a->height, &top, &bottom))
            return 1;
        for (int64_t j = 0; j < a->columns; j++)
            if (!bin_of(corners[0], corners[2], a->columns, j, a->width, &lefts[j], &rights[j]))
                return 1;
        int64_t first = lefts[0], last = rights[a->columns - 1];
        for (int64_t c = 0; c < a->channels; c++) {
            const float *x = a->x + ((int64_t)image * a->channels + c) * a->height * a->width;
            float *y = a->y + ((region * a->channels + c) * a->rows + i) * a->columns;
            for (int64_t row = top; row < bottom; row++)
                for (int64_t k = first; k < last; k++) {
                    float value = x[row * a->width + k], best = highest[k];
                    highest[k] = row == top || value > best || value != value ? value : best;
                }
            for (int64_t j = 0; j < a->columns; j++) {
                int empty = bottom <= top || rights[j] <= lefts[j];
                float best = empty ? 0 : highest[lefts[j]];
                for (int64_t k = lefts[j] + 1; !empty && k < rights[j]; k++)
                    best = highest[k] > best || highest[k] != highest[k] ? highest[k] : best;
                y[j] = best;
            }
        }
    }
    return 0;
}

const kernel_entry regions_kernels[] = {
    KERNEL(max_roi_pool, max_roi_pool),
    KERNEL(roi_align, roi_align),
    KERNEL(suppress, suppress),
    END_OF_KERNELS,
};
