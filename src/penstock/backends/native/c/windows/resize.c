/* Resize by tables of the indices and weights that each axis reads for each element of the result. An item is a row
   of the result, along the last resized axis. An element of a row is `inner` contiguous numbers, such as the channels
   of a pixel. */
#include <math.h>
#include <string.h>
#include "families.h"
#include "floats.h"

enum { MOST_ROWS = 256, SPAN = 4096 };

typedef struct {
    int64_t count, x_stride, y_stride, taps;
    int64_t first; /* offset of its indices and weights, [taps, count] */
} axis;

struct resize {
    const void *x;
    void *y;
    const axis *axes; /* the last one is that of the rows */
    const int32_t *indices;
    const void *weights;
    const int32_t *spans; /* [chunks, 2]: the elements of a row that each chunk of a result reads */
    int64_t n_axes, inner, chunk, wide; /* numbers of an element that are computed at once */
    int64_t run, run_length; /* elements of a nearest row that are contiguous in the input */
    int64_t bits;            /* fractional bits of sums of codes */
};

/* Locate an item of the axes up to `last`: return its offset in the result, and set `offsets` and `shares` to the input
   rows and weights that it is a sum of. `name`_of_row then does so for row r, of the axis behind, if there is one. */
#define PLACES(name, type)                                                                        \
    static inline int64_t name(const struct resize *a, int64_t item, int64_t last, int64_t *n_rows,\
                               int64_t *offsets, type *shares)                                    \
    {                                                                                             \
        const type *weights = a->weights;                                                         \
        int64_t place = 0, rows = 1;                                                              \
        offsets[0] = 0;                                                                           \
        shares[0] = 1;                                                                            \
        for (int64_t i = last; i >= 0; i--) {                                                     \
            const axis *along = &a->axes[i];                                                      \
            /* A division takes as long as the sums of some elements. */                          \
            const uint32_t count = (uint32_t)along->count, rest = (uint32_t)item;                 \
            const uint32_t at = rest < count ? rest : rest % count;                               \
            const int64_t old = rows;                                                             \
            item = rest < count ? 0 : rest / count;                                               \
            place += at * along->y_stride;                                                        \
            for (int64_t k = along->taps - 1; k >= 0; k--) {                                      \
                int64_t entry = along->first + k * along->count + at;                             \
                int64_t offset = a->indices[entry] * along->x_stride;                             \
                type share = weights ? weights[entry] : 1;                                        \
                for (int64_t r = 0; r < old; r++) {                                               \
                    offsets[k * old + r] = offsets[r] + offset;                                   \
                    shares[k * old + r] = shares[r] * share;                                      \
                }                                                                                 \
            }                                                                                     \
            rows = old * along->taps;                                                             \
        }                                                                                         \
        *n_rows = rows;                                                                           \
        return place;                                                                             \
    }                                                                                             \
                                                                                                  \
    INLINED int64_t name##_of_row(const struct resize *a, int64_t r, int64_t outer, const int64_t *bases,\
                                  const type *parts, int64_t *offsets, type *shares)              \
    {                                                                                             \
        const axis one = {1, 0, 0, 1, 0}, *rows = a->n_axes > 1 ? &a->axes[a->n_axes - 2] : &one; \
        for (int64_t i = 0; i < outer; i++)                                                       \
            for (int64_t k = 0; k < rows->taps; k++) {                                            \
                const int64_t entry = rows->first + k * rows->count + r;                          \
                offsets[i * rows->taps + k] = bases[i] + a->indices[entry] * rows->x_stride;      \
                shares[i * rows->taps + k] = rows == &one ? parts[i] : parts[i] * ((const type *)a->weights)[entry];\
            }                                                                                     \
        return outer * rows->taps;                                                                \
    }

PLACES(places_float, float)
PLACES(places_double, double)
PLACES(places_int32_t, int32_t)

typedef int32_t places __attribute__((vector_size(VECTOR_BYTES)));

/* The most vectors of the sums of rows from which one of a result is permuted; 0 if it reads more than two. */
static int permuted_vectors(const struct resize *a)
{
    const axis *along = &a->axes[a->n_axes - 1];
    int64_t widest = 0;
    if (LANES < 8 || a->inner > 1 || a->chunk != LANES)
        return 0;
    for (int64_t i = 0; i * LANES < along->count; i++)
        if (a->spans[2 * i + 1] - a->spans[2 * i] > widest)
            widest = a->spans[2 * i + 1] - a->spans[2 * i];
    return widest > 2 * LANES ? 0 : widest > LANES ? 2 : 1;
}

INLINED void permuted_row(const struct resize *a, const float *x, float *y, int64_t n_rows, const int64_t *offsets,
                          const float *shares, const int vectors)
{
    const axis *along = &a->axes[a->n_axes - 1];
    const int64_t count = along->count, taps = along->taps;
    const int32_t *spans = a->spans;
    for (int64_t j = 0; j < count; j += LANES, spans += 2) {
        const int64_t some = count - j, low = spans[0], span = spans[1] - low;
        vector sums[2] = {{0}}, result = {0};
        for (int64_t r = 0; r < n_rows; r++)
            UNROLLED(v, vectors) {
                const vector own = load_some(x + offsets[r] + low + v * LANES, WITHIN(span - v * LANES, 0, LANES)) * shares[r];
                sums[v] = r ? sums[v] + own : own;
            }
        for (int64_t k = 0; k < taps; k++) {
            const int64_t at = along->first + k * count + j;
            const places own = (places)load_some((const float *)a->indices + at, some) - spans[0];
            const vector taken = vectors > 1 ? OF_TWO(LANES, sums[0], sums[1], own) : PERMUTED(sums[0], own);
            const vector part = taken * load_some((const float *)a->weights + at, some);
            result = k ? result + part : part;
        }
        store_some(y + j, result, some);
    }
}

/* Weighted sums of elements of `width` numbers each, of a row that begins at `base`, for elements `from` to `to` of the
   result, whose sums are `pitch` apart. Those of two elements are computed in vectors of eight numbers; `vectors` is a
   constant. */
#define BLEND(real)                                                                               \
    typedef real real##_8 __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real)), may_alias));\
    INLINED void blend_eights_##real(const axis *along, const int32_t *left, const real *weights, const real *base,\
                                     real *sums, int64_t from, int64_t to, int64_t width, int64_t pitch, int vectors)\
    {                                                                                             \
        const int32_t *right = left + along->count;                                               \
        const real *others = weights + along->count;                                              \
        for (int64_t j = from; j < to; j++, sums += pitch) {                                      \
            const real *p = base + left[j] * width, *q = base + right[j] * width, u = weights[j], v = others[j];\
            UNROLLED(i, vectors)                                                                  \
                ((real##_8 *)sums)[i] = ((const real##_8 *)p)[i] * u + ((const real##_8 *)q)[i] * v;\
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static __attribute__((noinline)) void blend_##real(const struct resize *a, const real *base, real *restrict sums,\
                                                       int64_t from, int64_t to, int64_t width, int64_t pitch)\
    {                                                                                             \
        const axis *along = &a->axes[a->n_axes - 1];                                              \
        const int64_t count = along->count;                                                       \
        const int32_t *left = a->indices + along->first, *right = left + count;                   \
        const real *weights = (const real *)a->weights + along->first;                            \
        if (along->taps == 2 && width == 1)                                                       \
            for (int64_t j = from; j < to; j++)                                                   \
                sums[j - from] = base[left[j]] * weights[j] + base[right[j]] * weights[count + j];\
        else if (along->taps == 2 && width < 8)                                                   \
            for (int64_t j = from; j < to; j++, sums += pitch)                                    \
                for (int64_t i = 0; i < width; i++)                                               \
                    sums[i] = base[left[j] * width + i] * weights[j] + base[right[j] * width + i] * weights[count + j];\
        else if (along->taps == 2)                                                                \
            for (int64_t j = from, end; j < to; j = end, sums += pitch) {                         \
                end = width < 64 ? to : j + 1; /* wide elements one by one, in the order of memory */\
                for (int64_t i = 0, some; i < width; i += some) {                                 \
                    some = width - i < 32 ? 8 : 32;                                               \
                    i = smaller(i, width - some); /* the last eight may be computed again */      \
                    if (some == 32)                                                               \
                        blend_eights_##real(along, left, weights, base + i, sums + i, j, end, width, pitch, 4);\
                    else                                                                          \
                        blend_eights_##real(along, left, weights, base + i, sums + i, j, end, width, pitch, 1);\
                }                                                                                 \
            }                                                                                     \
        else if (width == 1)                                                                      \
            for (int64_t k = 0; k < along->taps; k++)                                             \
                for (int64_t j = from; j < to; j++) {                                             \
                    const real part = base[left[k * count + j]] * weights[k * count + j];         \
                    sums[j - from] = k ? sums[j - from] + part : part;                            \
                }                                                                                 \
        else                                                                                      \
            for (int64_t j = from; j < to; j++, sums += pitch)                                    \
                for (int64_t k = 0; k < along->taps; k++) {                                       \
                    const real *p = base + left[k * count + j] * width, weight = weights[k * count + j];\
                    for (int64_t i = 0; i < width; i++)                                           \
                        sums[i] = k ? sums[i] + p[i] * weight : p[i] * weight;                    \
                }                                                                                 \
    }

BLEND(float)
BLEND(double)

/* Sums of weighted rows: first all input rows to one, then along it. They are computed in the type `real`, and
   converted by STORED. */
#define RESIZE(name, type, real, STORED)                                                          \
    static void name##_row(const struct resize *a, const type *x, type *restrict y, int64_t n_rows,\
                           const int64_t *offsets, const real *shares)                            \
    {                                                                                             \
        const int64_t inner = a->inner, count = a->axes[a->n_axes - 1].count;                     \
        _Alignas(64) real sum[SPAN], total[SPAN];                                                 \
        for (int64_t part = 0; part < inner; part += a->wide)                                     \
            for (int64_t from = 0; from < count; from += a->chunk) {                              \
                const int64_t to = smaller(from + a->chunk, count), width = smaller(a->wide, inner - part);\
                const int32_t *span = a->spans + from / a->chunk * 2;                             \
                const int64_t low = span[0], end = span[1];                                       \
                /* Whole elements follow one another. */                                          \
                const int64_t together = width == inner ? end - low : 1, length = together * width;\
                real *own = sum;                                                                  \
                for (int64_t at = low; at < end; at += together, own += length) {                 \
                    const type *first = x + offsets[0] + at * inner + part;                       \
                    if (n_rows == 1)                                                              \
                        for (int64_t i = 0; i < length; i++)                                      \
                            own[i] = (real)first[i] * shares[0];                                  \
                    for (int64_t r = 1; r < n_rows; r++) {                                        \
                        const type *row = x + offsets[r] + at * inner + part;                     \
                        if (r == 1)                                                               \
                            for (int64_t i = 0; i < length; i++)                                  \
                                own[i] = (real)first[i] * shares[0] + (real)row[i] * shares[1];   \
                        else                                                                      \
                            for (int64_t i = 0; i < length; i++)                                  \
                                own[i] += (real)row[i] * shares[r];                               \
                    }                                                                             \
                }                                                                                 \
                type *to_y = y + from * inner + part;                                             \
                const int64_t pitch = IS_##STORED ? inner : width, lines = width == inner ? 1 : to - from;\
                blend_##real(a, sum - low * width, IS_##STORED ? (real *)to_y : total, from, to, width, pitch);\
                for (int64_t line = 0; !IS_##STORED && line < lines; line++)                      \
                    for (int64_t i = 0; i < (to - from) / lines * width; i++)                     \
                        to_y[line * inner + i] = STORED(type, total[line * width + i]);           \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(name, resize)                                                                        \
    {                                                                                             \
        int64_t offsets[MOST_ROWS], bases[MOST_ROWS], outer;                                      \
        real shares[MOST_ROWS], parts[MOST_ROWS];                                                 \
        const int permuted = IS_##STORED && sizeof(type) == 4 ? permuted_vectors(a) : 0;          \
        const axis *rows = a->n_axes > 1 ? &a->axes[a->n_axes - 2] : NULL;                        \
        const int64_t count = rows ? rows->count : 1, step = rows ? rows->y_stride : 0;           \
        for (int64_t item = begin, stop; item < end; item = stop) {                               \
            const int64_t first = item % count;                                                   \
            stop = smaller(end, item - first + count);                                            \
            type *y = (type *)a->y + places_##real(a, item / count, a->n_axes - 3, &outer, bases, parts) + first * step;\
            for (int64_t r = first; r < first + stop - item; r++, y += step) {                    \
                const int64_t n_rows = places_##real##_of_row(a, r, outer, bases, parts, offsets, shares);\
                if (permuted == 1)                                                                \
                    permuted_row(a, a->x, (float *)y, n_rows, offsets, (const float *)shares, 1); \
                else if (permuted)                                                                \
                    permuted_row(a, a->x, (float *)y, n_rows, offsets, (const float *)shares, 2); \
                else                                                                              \
                    name##_row(a, a->x, y, n_rows, offsets, shares);                              \
            }                                                                                     \
        }                                                                                         \
    }

#define ITSELF(type, sum) (sum)
enum { IS_ITSELF = 1, IS_ROUNDED = 0, IS_AWAY = 0 };

/* Codes are rounded half away from zero. */
#define AWAY(type, sum) (type)(int32_t)((sum) + ((sum) < 0 ? -0.5f : 0.5f))

/* Integers are rounded half to even, and clamped. */
#define DEFINE_ROUNDED(type, real, rint, lowest, highest)                                         \
    static inline type rounded_##type(real sum)                                                   \
    {                                                                                             \
        return (type)(int32_t)WITHIN(rint(sum), lowest, highest);                                 \
    }
DEFINE_ROUNDED(uint8_t, float, rintf, 0, UINT8_MAX)
DEFINE_ROUNDED(int8_t, float, rintf, INT8_MIN, INT8_MAX)
DEFINE_ROUNDED(uint16_t, float, rintf, 0, UINT16_MAX)
DEFINE_ROUNDED(int16_t, float, rintf, INT16_MIN, INT16_MAX)
DEFINE_ROUNDED(int32_t, double, rint, INT32_MIN, INT32_MAX)
#define ROUNDED(type, sum) rounded_##type(sum)

RESIZE(resize_float32, float, float, ITSELF)
RESIZE(resize_float64, double, double, ITSELF)
RESIZE(resize_uint8, uint8_t, float, ROUNDED)
RESIZE(resize_int8, int8_t, float, ROUNDED)
RESIZE(resize_uint16, uint16_t, float, ROUNDED)
RESIZE(resize_int16, int16_t, float, ROUNDED)
RESIZE(resize_int32, int32_t, double, ROUNDED)
RESIZE(resize_codes_uint8, uint8_t, float, AWAY)
RESIZE(resize_codes_int16, int16_t, double, AWAY)

static inline int32_t rounded_away(int32_t sum, int64_t bits)
{
    const int32_t sign = sum >> 31, size = (((sum ^ sign) - sign) + (1 << bits >> 1)) >> bits;
    return (size ^ sign) - sign;
}

/* Interpolate along a line: for each element from `from` to `to`, the weighted sum of two, `width` numbers of
   each. */
static inline void blend_elements(const struct resize *a, const int8_t *restrict x, int32_t *restrict line,
                                  int64_t from, int64_t to, int64_t width)
{
    const axis *along = &a->axes[a->n_axes - 1];
    const int32_t *left = a->indices + along->first, *right = left + along->count;
    const int32_t *weights = (const int32_t *)a->weights + along->first;
    for (int64_t j = from; j < to; j++, line += width) {
        const int8_t *p = x + left[j] * a->inner, *q = x + right[j] * a->inner;
        const int32_t u = weights[j], v = weights[along->count + j];
        int64_t i = 0;
        for (; i + 8 <= width; i += 8)
            for (int k = 0; k < 8; k++)
                line[i + k] = p[i + k] * u + q[i + k] * v;
        for (; i < width; i++)
            line[i] = p[i] * u + q[i] * v;
    }
}

/* int8 codes in integer arithmetic: weights are fixed-point, with `bits` fractional bits in all. Two lines are kept,
   as the next row of the result often reads the same ones. */
ITEMS_OF(resize_codes_int8, resize)
{
    enum { MOST = 4096 };
    int32_t lines[2][MOST], shares[MOST_ROWS];
    int64_t offsets[MOST_ROWS], n_rows;
    const int64_t count = a->axes[a->n_axes - 1].count, inner = a->inner, bits = a->bits;
    const int64_t wide = smaller(inner, MOST), step = MOST / wide;
    for (int64_t from = 0; from < count; from += step)
        for (int64_t part = 0; part < inner; part += wide) {
            const int64_t to = smaller(from + step, count), width = smaller(wide, inner - part);
            const int64_t length = (to - from) * width;
            int64_t held[2] = {INT64_MIN, INT64_MIN}; /* strides may be negative */
            for (int64_t item = begin; item < end; item++) {
                int8_t *restrict y = (int8_t *)a->y + places_int32_t(a, item, a->n_axes - 2, &n_rows, offsets, shares);
                const int32_t *rows[2] = {lines[0], lines[0]};
                for (int64_t r = 0; r < n_rows; r++) {
                    int slot = held[1] == offsets[r];
                    if (held[slot] != offsets[r]) {
                        slot = n_rows > 1 && held[0] == offsets[1 - r];
                        blend_elements(a, (const int8_t *)a->x + offsets[r] + part, lines[slot], from, to, width);
                        held[slot] = offsets[r];
                    }
                    rows[r] = lines[slot];
                }
                y += from * inner + part;
                const int32_t *first = rows[0], *second = rows[n_rows > 1];
                const int32_t share = shares[0], other = n_rows > 1 ? shares[1] : 0;
                for (int64_t i = 0; i < length; i++)
                    y[i] = (int8_t)rounded_away(first[i] * share + second[i] * other, bits);
            }
        }
}

/* Copies of elements. A row with the same input as the last one is a copy of it. */
#define NEAREST(size, type)                                                                       \
    static inline void resize_nearest_##size##_row(const struct resize *a, const type *restrict x, \
                                  type *restrict y, const int32_t *indices, int64_t count)        \
    {                                                                                             \
        const int64_t inner = a->inner, end = a->run + a->run_length;                             \
        if (inner > 1)                                                                            \
            for (int64_t j = 0; j < count; j++)                                                   \
                memcpy(y + j * inner, x + indices[j] * inner, inner * sizeof(type));              \
        else if (a->chunk)                                                                        \
            for (int64_t j = 0; j < count / 2; j++)                                               \
                y[2 * j] = y[2 * j + 1] = x[j];                                                   \
        else {                                                                                    \
            for (int64_t j = 0; j < a->run; j++)                                                  \
                y[j] = x[indices[j]];                                                             \
            if (a->run_length)                                                                    \
                memcpy(y + a->run, x + indices[a->run], a->run_length * sizeof(type));            \
            for (int64_t j = end; j < count; j++)                                                 \
                y[j] = x[indices[j]];                                                             \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(resize_nearest_##size, resize)                                                       \
    {                                                                                             \
        const axis one = {1, 0, 0, 1, 0}, *along = &a->axes[a->n_axes - 1];                       \
        const axis *rows = a->n_axes > 1 ? along - 1 : &one;                                      \
        const int64_t count = along->count, n_rows = rows->count;                                 \
        for (int64_t item = begin; item < end;) {                                                 \
            const int64_t first = item % n_rows, stop = smaller(n_rows, first + end - item);      \
            const type *x = a->x;                                                                 \
            type *y = a->y;                                                                       \
            int64_t rest = item / n_rows, last = -1;                                              \
            for (int64_t i = a->n_axes - 3; i >= 0; rest /= a->axes[i--].count) {                 \
                const int64_t at = rest % a->axes[i].count;                                       \
                x += a->indices[a->axes[i].first + at] * a->axes[i].x_stride;                     \
                y += at * a->axes[i].y_stride;                                                    \
            }                                                                                     \
            for (int64_t r = first; r < stop; r++) {                                              \
                const int64_t from = rows != &one ? a->indices[rows->first + r] : 0;              \
                type *row = y + r * rows->y_stride;                                               \
                if (from == last)                                                                 \
                    memcpy(row, row - rows->y_stride, count * a->inner * sizeof(type));           \
                else                                                                              \
                    resize_nearest_##size##_row(a, x + from * rows->x_stride, row, a->indices + along->first, \
                               count);                                                            \
                last = from;                                                                      \
            }                                                                                     \
            item += stop - first;                                                                 \
        }                                                                                         \
    }

OF_SIZES(NEAREST)

/* A constant tensor with another inserted, its elements `step` apart along each axis. An item is a row of the result:
   `width` elements, of which `length` are copied behind `before` others. */
typedef struct {
    int64_t count, before, length, step, x_stride, y_stride;
} padded_axis;

/* The index of the inserted element at a place of an axis; -1 for none. */
static inline int64_t padded_place(const padded_axis *axis, int64_t at)
{
    at -= axis->before;
    if (at >= 0 && axis->step > 1)
        at = at % axis->step ? -1 : at / axis->step;
    return at < axis->length ? at : -1;
}

struct pad {
    const void *x;
    void *y;
    const void *value;
    const padded_axis *axes; /* those of the rows */
    int64_t n_axes, before, length, width, step;
};

#define PAD(size, type)                                                                           \
    ITEMS_OF(pad_##size, pad)                                                                     \
    {                                                                                             \
        const type value = *(const type *)a->value;                                               \
        const int64_t width = a->width, step = a->step, places = a->before;                       \
        /* Negative widths crop. */                                                               \
        const int64_t skipped = places < 0 ? CEIL_DIV(-places, step) : 0;                         \
        const int64_t room = places < width ? CEIL_DIV(width - places, step) : 0;                 \
        const int64_t kept = smaller(a->length, room) - skipped, start = places + skipped * step; \
        const padded_axis one = {1, 0, 1, 1, 0, 0}, *rows = a->n_axes ? a->axes + a->n_axes - 1 : &one;\
        for (int64_t item = begin; item < end;) {                                                 \
            const type *x = a->x;                                                                 \
            type *y = a->y;                                                                       \
            const int64_t first = item % rows->count, stop = smaller(rows->count, first + end - item);\
            int64_t rest = item / rows->count, inside = 1;                                        \
            for (int64_t i = a->n_axes - 2; i >= 0; rest /= a->axes[i--].count) {                 \
                const int64_t at = rest % a->axes[i].count, from = padded_place(a->axes + i, at); \
                y += at * a->axes[i].y_stride;                                                    \
                x += from * a->axes[i].x_stride;                                                  \
                inside &= from >= 0;                                                              \
            }                                                                                     \
            for (int64_t r = first; r < stop; r++) {                                              \
                const int64_t from = padded_place(rows, r), length = inside && from >= 0 && kept > 0 ? kept : 0;\
                const int64_t copied = step > 1 ? 0 : length, before = copied ? start : width;    \
                const type *own = x + from * rows->x_stride + skipped;                            \
                type *restrict row = y + r * rows->y_stride;                                      \
                FILL(row, before, value);                                                         \
                if (copied)                                                                       \
                    memcpy(row + before, own, length * sizeof(type));                             \
                FILL(row + before + copied, width - before - copied, value);                      \
                for (int64_t j = 0; j < length - copied; j++)                                     \
                    row[start + j * step] = own[j];                                               \
            }                                                                                     \
            item += stop - first;                                                                 \
        }                                                                                         \
    }

OF_SIZES(PAD)

KERNELS(resize, KERNELS_OF_SIZES(pad, pad), KERNELS_OF_FLOATS(resize, resize),
        KERNELS_OF_SIZES(resize_nearest, resize), KERNEL(resize_uint8, resize), KERNEL(resize_int8, resize),
        KERNEL(resize_uint16, resize), KERNEL(resize_int16, resize), KERNEL(resize_int32, resize), KERNEL(resize_codes_int8, resize),
        KERNEL(resize_codes_uint8, resize), KERNEL(resize_codes_int16, resize))
