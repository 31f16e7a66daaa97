/* RoiAlign and NonMaxSuppression. */
#include <math.h>
#include <string.h>
#include "native.h"

enum { SAMPLES = 128, MOST_SAMPLES = 1 << 20, SPAN = 256, ROWS = 32 };

#define REAL float
#define OF(name) name
#include "roi_align_of.h"
#undef REAL
#undef OF
#define REAL double
#define OF(name) name##_float64
#include "roi_align_of.h"

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
    } else {
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
CHECKED_ITEMS_OF(suppress, suppress)
{
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
static int bin_of(float start, float end, int64_t bins, int64_t i, int64_t size, int64_t *low, int64_t *high)
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

CHECKED_ITEMS_OF(max_roi_pool, max_roi_pool)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t region = item / a->rows, i = item % a->rows, top, bottom;
        const float *given = a->regions + 5 * region, image = given[0];
        float corners[4], highest[MOST_WIDTH];
        for (int k = 0; k < 4; k++) {
            float scaled = given[k + 1] * (float)a->scale;
            if (!isfinite(scaled))
                return 1;
            corners[k] = copysignf(floorf(fabsf(scaled) + 0.5f), scaled); /* halves away from 0 */
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

/* Samples of boxes, (top, left, bottom, right) in parts of an image; an item is a row of samples of a box.
   Steps are from one channel, row and column to the next, of images and of results. */
struct crop_and_resize {
    const float *x, *boxes;
    const int32_t *images; /* of each box */
    float *y;
    int64_t batch, channels, height, width, rows, columns;
    const int64_t *x_steps, *y_steps;
    int64_t nearest, exact_ends; /* whether the last sample lies on the end of a box, however others are rounded */
    double outside;              /* what samples beyond the image are */
};

/* The pixels before and behind sample `i`, and how near it is to the second; returns 0 beyond the image. */
static int pixels_of(const struct crop_and_resize *a, const float *box, int64_t size, int64_t count, int64_t i,
                     int64_t pixels[2], float *part)
{
    const float low = box[0], high = box[2], last = (float)(size - 1);
    float at = count == 1 ? 0.5f * (low + high) * last : low * last + (float)i * ((high - low) * last / (float)(count - 1));
    at = count > 1 && i == count - 1 && a->exact_ends ? high * last : at;
    if (!(at >= 0 && at <= last))
        return 0;
    pixels[0] = (int64_t)(a->nearest ? at + 0.5f : at);
    pixels[1] = a->nearest ? pixels[0] : (int64_t)ceilf(at);
    *part = at - (float)pixels[0];
    return 1;
}

CHECKED_ITEMS_OF(crop_and_resize, crop_and_resize)
{
    const int64_t c_step = a->x_steps[0], pixels = a->height * a->width * a->channels;
    for (int64_t item = begin; item < end; item++) {
        const int64_t box = item / a->rows, i = item % a->rows, image = a->images[box];
        int64_t rows[2], columns[2];
        float down, across;
        if (image < 0 || image >= a->batch)
            return 1;
        const int inside = pixels_of(a, a->boxes + 4 * box, a->height, a->rows, i, rows, &down);
        float *y = a->y + box * a->channels * a->rows * a->columns + i * a->y_steps[1];
        for (int64_t j = 0; j < a->columns; j++, y += a->y_steps[2]) {
            if (!inside || !pixels_of(a, a->boxes + 4 * box + 1, a->width, a->columns, j, columns, &across)) {
                for (int64_t c = 0; c < a->channels; c++)
                    y[c * a->y_steps[0]] = (float)a->outside;
                continue;
            }
            const float *x = a->x + image * pixels, *upper = x + rows[0] * a->x_steps[1], *lower = x + rows[1] * a->x_steps[1];
            const int64_t left = columns[0] * a->x_steps[2], right = columns[1] * a->x_steps[2];
            for (int64_t c = 0, at = 0; c < a->channels; c++, at += c_step) {
                const float above = upper[at + left] + (upper[at + right] - upper[at + left]) * across;
                const float below = lower[at + left] + (lower[at + right] - lower[at + left]) * across;
                y[c * a->y_steps[0]] = a->nearest ? upper[at + left] : above + (below - above) * down;
            }
        }
    }
    return 0;
}

KERNELS(regions, KERNEL(max_roi_pool, max_roi_pool), KERNEL(crop_and_resize, crop_and_resize),
        KERNEL(roi_align, roi_align), KERNEL(roi_align_float64, roi_align_float64), KERNEL(suppress, suppress))
