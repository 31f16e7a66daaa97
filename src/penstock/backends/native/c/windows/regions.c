/* Pooling and crops of image regions, and non-maximum suppression. */
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

enum { WORDS = 4, BESIDE = 32 }; /* 8-byte words of a box: key; as halves, comparison count and five floats */

struct suppress {
    const float *boxes, *scores;
    const int64_t *most;                    /* boxes to keep of a class, or NULL: the capacity */
    const float *threshold, *least, *sigma; /* or NULL */
    int32_t *kept;                          /* [batch * classes, capacity] */
    int32_t *counts;    /* or NULL */
    float *kept_scores; /* as kept, or NULL */
    void *workspace;    /* WORDS 8-byte words for each box, and BESIDE more, per item */
    int64_t classes, n_boxes, capacity, centred, inclusive; /* whether an overlap equal to the threshold is too much */
    int64_t padded; /* the least length of `kept`, which ends with zeros */
};

/* A sort key: the score as 32 bits that decrease as it improves, above the index of the box. */
static inline uint64_t key_of(float score, int64_t box)
{
    uint32_t bits;
    score = score == 0 ? 0 : score;
    memcpy(&bits, &score, sizeof bits);
    bits = score != score ? UINT32_MAX : bits >> 31 ? bits : 0x7fffffff - bits;
    return (uint64_t)bits << 32 | (uint64_t)box;
}

static inline float score_of(uint64_t key)
{
    uint32_t bits = key >> 32;
    float score;
    bits = bits >> 31 ? bits : 0x7fffffff - bits;
    memcpy(&score, &bits, sizeof score);
    return score;
}

/* Sift key `i` of a heap down below smaller keys. */
static void sink(uint64_t *heap, int64_t count, int64_t i)
{
    uint64_t key = heap[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (heap[child] >= key)
            break;
        heap[i] = heap[child];
    }
    heap[i] = key;
}

/* The least and greatest coordinate along either axis, and the area. */
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

/* Return the intersection over union of a kept box and `own`. */
static inline float share_of(const float *restrict other, int64_t pitch, const float *own)
{
    float x0 = other[0], x1 = other[pitch], y0 = other[2 * pitch], y1 = other[3 * pitch], area = other[4 * pitch];
    float width = (x1 < own[1] ? x1 : own[1]) - (x0 > own[0] ? x0 : own[0]);
    float height = (y1 < own[3] ? y1 : own[3]) - (y0 > own[2] ? y0 : own[2]);
    float both = (width > 0 ? width : 0) * (height > 0 ? height : 0), share = both / (area + own[4] - both);
    return (area > 0) & (own[4] > 0) ? share : 0;
}

/* Whether the overlap with any of BESIDE boxes exceeds the threshold. */
static inline int overlaps(const float *restrict others, int64_t pitch, const float *own, float threshold)
{
    int any = 0;
    for (int i = 0; i < BESIDE; i++)
        any |= share_of(others + i, pitch, own) > threshold;
    return any;
}

/* The score of a box after decay by those kept since its last comparison; -inf if that suppresses it. */
static float softened(const struct suppress *a, float threshold, const float *corners, int64_t from, int64_t count,
                      const float *own, float score)
{
    float scale = -0.5f / *a->sigma;
    for (int64_t j = count - 1; j >= from; j--) {
        float share = share_of(corners + j, a->n_boxes + BESIDE, own);
        score *= share > 0 ? expf(scale * share * share) : 1;
        if ((a->inclusive && share > threshold) || (a->least && !(score > *a->least)))
            return -INFINITY;
    }
    return score;
}

/* An item is a class of an image: its boxes, best first, except those that overlap with better ones. With a sigma,
   overlap decays scores (Bodla et al., Soft-NMS, 2017): the best candidate is compared with what was kept since its
   last comparison, and returns to the heap if that lowered its score. */
CHECKED_ITEMS_OF(suppress, suppress)
{
    int64_t n = a->n_boxes, pitch = n + BESIDE, most = a->most ? smaller(*a->most, a->capacity) : a->capacity;
    float threshold = a->threshold ? *a->threshold : 0;
    if (!(threshold >= 0 && threshold <= 1))
        return 1;
    threshold = a->inclusive ? nextafterf(threshold, -1) : threshold;
    for (int64_t item = begin; item < end; item++) {
        const float *scores = a->scores + item * n, *boxes = a->boxes + item / a->classes * n * 4;
        int64_t candidates = 0, count = 0;
        uint64_t *heap = (uint64_t *)a->workspace + item * WORDS * pitch;
        float *corners = (float *)(heap + pitch);
        int32_t *seen = (int32_t *)(corners + 5 * pitch); /* number of kept boxes that a box was compared with */
        for (int64_t i = 0; most > 0 && i < n; i++) {
            seen[i] = 0, heap[candidates] = key_of(scores[i], i);
            candidates += !a->least || scores[i] > *a->least;
        }
        for (int64_t i = candidates / 2; i-- > 0;)
            sink(heap, candidates, i);
        while (candidates && count < most) {
            int64_t box = heap[0] & UINT32_MAX, beaten = 0;
            float own[5];
            uint64_t key = heap[0];
            corners_of(boxes + box * 4, a->centred, own);
            if (a->sigma && *a->sigma > 0) {
                float score = softened(a, threshold, corners, seen[box], count, own, score_of(key));
                key = key_of(score, box), beaten = score == -INFINITY, seen[box] = (int32_t)count;
            } else
                for (int64_t j = 0; !beaten && j < count; j += BESIDE)
                    beaten = overlaps(corners + j, pitch, own, threshold);
            if (!beaten && key == heap[0]) {
                for (int64_t c = 0; count % BESIDE == 0 && c < BESIDE; c++)
                    corners[4 * pitch + count + c] = 0;
                for (int64_t c = 0; c < 5; c++)
                    corners[c * pitch + count] = own[c];
                if (a->kept_scores)
                    a->kept_scores[item * a->capacity + count] = score_of(key);
                a->kept[item * a->capacity + count++] = (int32_t)box, beaten = 1;
            }
            heap[0] = beaten ? heap[--candidates] : key;
            sink(heap, candidates, 0);
        }
        if (a->counts)
            a->counts[item] = (int32_t)count;
        FILL(a->kept + count, a->padded - count, 0);
        if (a->kept_scores)
            FILL(a->kept_scores + count, a->padded - count, 0);
    }
    return 0;
}

/* The maximum of each bin of a region; 0 for empty bins. An item is a row of bins. */
struct max_roi_pool {
    const float *x, *regions; /* of a region: its image, and two corners */
    float *y;
    int64_t batch, channels, height, width, rows, columns; /* bins along either axis */
    double scale;
};

enum { MOST_BINS = 512, MOST_WIDTH = 4096 };

/* The pixels of bin `i`; return 0 if the region has no finite extent. */
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

/* Samples of boxes, (top, left, bottom, right) relative to the image size; an item is a row of samples of a box.
   Steps are between adjacent channels, rows and columns, of images and of results. */
struct crop_and_resize {
    const float *x, *boxes;
    const int32_t *images; /* of each box */
    float *y;
    int64_t batch, channels, height, width, rows, columns;
    const int64_t *x_steps, *y_steps;
    int64_t nearest, exact_ends; /* whether the last sample is exactly the end of a box, however others are rounded */
    double outside;              /* value of samples outside of the image */
};

/* The pixels on both sides of sample `i`, and the weight of the second; return 0 outside of the image. */
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
