/* MaxPool, AveragePool and LpPool of channels-last images. For channels-first images, an item interleaves its inputs
   from several planes, as if they were channels, and de-interleaves its results.

   Windows are reduced at once, if that takes fewer operations (`direct`), or separably: first their rows, into one
   row of the columns that they read, then along it. */
// GCC options: -fno-loop-unroll-and-jam -fno-thread-jumps
#include "wide.h"
#include <math.h>
#include <string.h>
#include "copies.h"
#include "native.h"

enum { AXES = 3, BYTES = 32768, ROW = 6144, CHUNK = 512, PIECE = 64, MOST_TAPS = 4096, MANY = 4 };

typedef struct {
    int64_t size, count, kernel, stride, dilation, begin, pitch;
} window;

struct pooling {
    const void *x;
    void *y;
    int64_t *indices;
    const window *axes;    /* AXES of them, the first ones of size 1 if there are fewer */
    const double *counted; /* divisors of means, for the windows of each axis */
    int64_t images;        /* or planes */
    int64_t channels;      /* of a position; 1 for planes */
    int64_t lanes;         /* planes that an item interleaves, 0 for none */
    int64_t band, chunk;   /* rows and columns of the result in an item */
    int64_t group;         /* rows of the result that are reduced by rows before any is by columns */
    int64_t direct;
};

/* A part of an image: its first element, and its index along each axis; its rows and columns. */
typedef struct {
    const void *x;
    int64_t first[AXES], rows, columns, channels;
} view;

/* The number of taps of window o inside of the image, and the index of the first. */
static inline int64_t inside(const window *w, int64_t o, int64_t *place)
{
    const int64_t at = o * w->stride - w->begin, step = w->dilation, left = w->size - at;
    *place = at;
    if (at >= 0 && left > (w->kernel - 1) * step)
        return w->kernel; /* divisions take long relative to short rows */
    const int64_t first = at < 0 ? CEIL_DIV(-at, step) : 0, last = left > 0 ? CEIL_DIV(left, step) : 0;
    *place = at + first * step;
    return first < smaller(last, w->kernel) ? smaller(last, w->kernel) - first : 0;
}

/* The indices of an axis that windows `first` to `last` read, without padding: set the first, and return their
   number. */
static inline int64_t seen(const window *w, int64_t first, int64_t last, int64_t *place)
{
    const int64_t low = first * w->stride - w->begin;
    const int64_t high = last * w->stride - w->begin + (w->kernel - 1) * w->dilation + 1;
    *place = low < 0 ? 0 : low;
    return *place < smaller(high, w->size) ? smaller(high, w->size) - *place : 0;
}

/* Transpose between planes and interleaved elements; steps are in elements. */
static void turn(const void *from, void *to, int64_t size, const int64_t dims[4], const int64_t steps[4],
                 const int64_t to_steps[4])
{
    copy_plan plan = {.rank = 4, .size = size};
    for (int i = 0; i < 4; i++) {
        plan.dims[i] = dims[i];
        plan.from[i] = steps[i] * size;
        plan.to[i] = to_steps[i] * size;
    }
    copy_elements(&plan, from, to);
}

/* The remainder of `rest` by n; `rest` becomes the quotient. */
static inline int64_t digit(int64_t *rest, int64_t n)
{
    if (n == 1)
        return 0;
    const int64_t quotient = *rest / n, remainder = *rest % n;
    *rest = quotient;
    return remainder;
}

/* NaN wins against all numbers. */
#define SUM(a, b) ((a) + (b))
#define HIGHER(a, b)                                                                              \
    ({ const __typeof__(b) one = (a), two = (b), most = two > one ? two : one; two != two ? two : most; })
#define SAME(x, by) (x)
#define SQUARE(x, by) ((x) * (x))
#define ABSOLUTE(x, by) ((x) < 0 ? -(x) : (x))
#define ROOT(x, by) ((__typeof__(x))sqrt(x))
#define MEAN(x, by) ((x) / (by))

#define LANES(type) (PIECE / (int64_t)sizeof(type))
/* A loop over element j of each of `many` vectors v, which stay in registers. */
#define VECTORS(many, length)                                                                     \
    UNROLLED(v, many) IVDEP NOT_UNROLLED for (int64_t j = 0; j < (length); j++)
/* Combine x with the elements at offsets `up` and `down`. */
#define THREE(x, HOW, MAP) HOW(HOW(MAP((x)[0], 1), MAP((x)[up], 1)), MAP((x)[down], 1))
/* The remainder in pieces of n elements, if there are as many; the last piece may overlap the one before. */
#define PIECES(piece, n)                                                                          \
    for (int64_t j; i < length && length >= (n); i += (n)) {                                      \
        j = smaller(i, length - (n));                                                             \
        piece(to + j, from + j, taps, count, by, n, 1);                                           \
    }

/* to[j] = what from[j + each of the `count` taps] comes to, for `positions` stretches of `length`
   elements, `step` elements apart. */
#define COMBINE(name, type, start, MAP, HOW, FINISH)                                              \
    /* `many` vectors of `length` elements. */                                                    \
    INLINED void name##_piece(type *restrict to, const type *restrict from, const int64_t *taps,  \
                              int64_t count, type by, const int64_t length, const int many)       \
    {                                                                                             \
        type total[MANY][PIECE / sizeof(type)];                                                   \
        VECTORS(many, length) total[v][j] = start;                                                \
        int64_t k = 0;                                                                            \
        do {                                                                                      \
            const type *x = from + taps[k];                                                       \
            VECTORS(many, length) total[v][j] = HOW(total[v][j], MAP(x[v * length + j], by));     \
        } while (++k < count);                                                                    \
        VECTORS(many, length) to[v * length + j] = (type)FINISH(total[v][j], by);                 \
    }                                                                                             \
                                                                                                  \
    static __attribute__((noinline)) void name(type *to, const type *from, const int64_t *taps, int64_t count,\
                                               type by, int64_t length, int64_t positions, int64_t step)\
    {                                                                                             \
        for (; positions > 0; positions--, to += length, from += step) {                          \
            int64_t i = 0;                                                                        \
            for (; count < 1 && i < length; i++)                                                  \
                to[i] = (type)FINISH((type)start, by);                                            \
            for (; i + MANY * LANES(type) <= length; i += MANY * LANES(type))                     \
                name##_piece(to + i, from + i, taps, count, by, LANES(type), MANY);               \
            PIECES(name##_piece, LANES(type))                                                     \
            PIECES(name##_piece, LANES(type) / 2)                                                 \
            PIECES(name##_piece, LANES(type) / 4)                                                 \
            PIECES(name##_piece, 1)                                                               \
        }                                                                                         \
    }

#define POOL(name, type, start, MAP, HOW, FINISH, MEANS)                                          \
    COMBINE(name##_rows, type, start, MAP, HOW, SAME)                                             \
    COMBINE(name##_columns, type, start, SAME, HOW, FINISH)                                       \
    /* `count` windows of three rows and columns; the reduction of each column is reused by the next. */\
    INLINED void name##_slide(type *restrict to, const type *restrict from, const int64_t *taps, type by,\
                              int64_t count, int64_t channels, const int stride, const int many)  \
    {                                                                                             \
        const int64_t up = taps[1], down = taps[2];                                               \
        type first[MANY][LANES(type)], second[MANY][LANES(type)];                                 \
        VECTORS(many, LANES(type)) {                                                              \
            first[v][j] = THREE((from + v * LANES(type) + j), HOW, MAP);                          \
            second[v][j] = THREE((from + channels + v * LANES(type) + j), HOW, MAP);              \
        }                                                                                         \
        do {                                                                                      \
            VECTORS(many, LANES(type)) {                                                          \
                const type *x = from + v * LANES(type) + j + channels;                            \
                const type third = THREE((x + channels), HOW, MAP);                               \
                const type middle = stride == 1 ? second[v][j] : THREE(x, HOW, MAP);              \
                to[v * LANES(type) + j] = (type)FINISH(HOW(HOW(first[v][j], middle), third), by); \
                first[v][j] = stride == 1 ? middle : third;                                       \
                second[v][j] = third;                                                             \
            }                                                                                     \
            from += stride * channels;                                                            \
            to += channels;                                                                       \
        } while (--count > 0);                                                                    \
    }                                                                                             \
                                                                                                  \
    static __attribute__((noinline)) void name##_slides(type *to, const type *from, const int64_t *taps, type by,\
                                                        int64_t count, int64_t channels, const int64_t stride)\
    {                                                                                             \
        for (int64_t i = 0, n; i < channels; i += n) {                                            \
            n = channels - i < MANY * LANES(type) ? LANES(type) : MANY * LANES(type);             \
            i = smaller(i, channels - n);                                                         \
            if (stride == 1)                                                                      \
                n > LANES(type) ? name##_slide(to + i, from + i, taps, by, count, channels, 1, MANY)\
                                : name##_slide(to + i, from + i, taps, by, count, channels, 1, 1);\
            else                                                                                  \
                n > LANES(type) ? name##_slide(to + i, from + i, taps, by, count, channels, 2, MANY)\
                                : name##_slide(to + i, from + i, taps, by, count, channels, 2, 1);\
        }                                                                                         \
    }                                                                                             \
    /* The offset of element p of a row that is stored split by remainder modulo the step, with n \
       elements for each. */                                                                      \
    static inline int64_t name##_place(int64_t p, int64_t step, int64_t n)                        \
    {                                                                                             \
        return p % step * n + p / step;                                                           \
    }                                                                                             \
                                                                                                  \
    /* As `rows`, with results `step` apart, from element `first` on; whole vectors for a step of 2. */\
    static void name##_apart(type *to, const type *from, const int64_t *taps, int64_t count, int64_t length,\
                             int64_t first, int64_t step, int64_t n)                              \
    {                                                                                             \
        _Alignas(PIECE) type some[MANY * LANES(type)];                                            \
        type *restrict one = to + name##_place(first, step, n);                                   \
        type *restrict other = to + name##_place(first + 1, step, n);                             \
        for (int64_t i = 0, rest; (rest = smaller(length - i, MANY * LANES(type))) > 0; i += rest) {\
            if (count > 0 && rest == MANY * LANES(type))                                          \
                name##_rows_piece(some, from + i, taps, count, 1, LANES(type), MANY);             \
            else                                                                                  \
                name##_rows(some, from + i, taps, count, 1, rest, 1, 0);                          \
            if (step == 2)                                                                        \
                IVDEP NOT_UNROLLED for (int64_t j = 0; j < MANY / 2 * LANES(type); j++) {         \
                    one[i / 2 + j] = some[2 * j];                                                 \
                    other[i / 2 + j] = some[2 * j + 1];                                           \
                }                                                                                 \
            else                                                                                  \
                for (int64_t k = 0; k < step; k++) {                                              \
                    type *spread = to + name##_place(first + i + k, step, n);                     \
                    for (int64_t j = k; j < rest; j += step)                                      \
                        *spread++ = some[j];                                                      \
                }                                                                                 \
        }                                                                                         \
    }                                                                                             \
    /* `count` columns from `first` on, of `band` rows from o on, of slice d of the result; rows of y are\
       `step` elements apart. */                                                                  \
    static void name##_band(const struct pooling *a, const view *s, int64_t d, int64_t o, int64_t band,\
                            int64_t first, int64_t count, type *y, int64_t step)                  \
    {                                                                                             \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const double *of_column = a->counted + u->count + v->count, *of_row = a->counted + u->count + o;\
        const int64_t channels = s->channels, row_step = s->columns * channels, end = first + count;\
        int64_t slice, line, at = 0, origin = s->first[2], pitch = 0, taps[MOST_TAPS], all[MOST_TAPS], n = 0;\
        const int64_t slices = inside(u, d, &slice);                                              \
        const type *x = NULL;                                                                     \
        _Alignas(PIECE) type row[ROW];                                                            \
        /* Rows are combined including their padding, which affects only means. */                \
        const int padded = !a->direct && !MEANS;                                                  \
        const int64_t low = first * w->stride, width = (count - 1) * w->stride + (w->kernel - 1) * w->dilation + 1;\
        const int64_t inner = seen(w, first, end - 1, &at) * channels, reach = low - w->begin + width - w->size;\
        const int64_t before = padded && low < w->begin ? smaller(w->begin - low, width) * channels : 0;\
        const int64_t after = padded && reach > 0 ? smaller(reach, width) * channels : 0;         \
        const window whole = {low + width, w->count, w->kernel, w->stride, w->dilation, 0, 0};    \
        const int apart = !a->direct && channels == 1 && w->stride > 1;                           \
        const int64_t places = before + inner + after;                                            \
        const int64_t n_apart = (places / w->stride + 3 * LANES(type)) / LANES(type) * LANES(type);\
        pitch = a->direct ? 0 : apart ? w->stride * n_apart : places;                             \
        for (int64_t r = 0; r < band; r++) {                                                      \
            const int64_t height = inside(v, o + r, &line);                                       \
            n = 0;                                                                                \
            for (int64_t i = 0; i < slices; i++)                                                  \
                for (int64_t k = 0; k < height; k++)                                              \
                    taps[n++] = (i * u->dilation * s->rows + k * v->dilation) * row_step;         \
            x = (const type *)s->x + ((slice - s->first[0]) * s->rows + line - s->first[1]) * row_step;\
            if (!a->direct) {                                                                     \
                type *to = row + r * pitch;                                                       \
                const type *some = x + (at - origin) * channels;                                  \
                if (apart)                                                                        \
                    name##_apart(to, some, taps, n, inner, before, w->stride, n_apart);           \
                else                                                                              \
                    name##_rows(to + before, some, taps, n, 1, inner, 1, 0);                      \
                for (int64_t i = before ? 0 : inner; i < places; i = i + 1 == before ? before + inner : i + 1)\
                    to[apart ? name##_place(i, w->stride, n_apart) : i] = (type)start;            \
            }                                                                                     \
        }                                                                                         \
        const int64_t rows = a->direct ? n : 1;                                                   \
        const int slid = rows == 3 && w->kernel == 3 && w->dilation == 1 && w->stride <= 2;       \
        if (!a->direct) {                                                                         \
            taps[0] = 0;                                                                          \
            x = row;                                                                              \
            origin = padded ? low : at;                                                           \
            w = padded ? &whole : w;                                                              \
        }                                                                                         \
        for (int64_t j = first, run; j < end; j += run, y += run * channels) {                    \
            n = inside(w, j, &at);                                                                \
            const int64_t left = w->size - (w->kernel - 1) * w->dilation - at - 1;                \
            /* All windows without padding at once. */                                            \
            run = n < w->kernel ? 1 : smaller(left / w->stride + 1, end - j);                     \
            const type *from = apart ? row : x + (at - origin) * channels;                        \
            for (int64_t i = 0; i < rows; i++)                                                    \
                for (int64_t k = 0; k < n; k++)                                                   \
                    all[i * n + k] = apart ? name##_place(at - origin + k * w->dilation, w->stride, n_apart)\
                                           : taps[i] + k * w->dilation * channels;                \
            const int64_t adjacent = apart || w->stride == 1 ? run : 1;                           \
            /* Contiguous rows are computed at once, as one run. */                               \
            const int together = !MEANS && adjacent * channels == step;                           \
            for (int64_t r = 0; r < band; r += together ? band : 1) {                             \
                const type by = MEANS ? (type)(a->counted[d] * of_row[r] * of_column[j]) : 1;     \
                if (slid && n == 3 && channels >= LANES(type))                                    \
                    name##_slides(y, from, taps, by, run, channels, w->stride);                   \
                else                                                                              \
                    name##_columns(y + r * step, from + r * pitch, all, rows * n, by, adjacent * channels,\
                                   together ? band : run / adjacent, together ? pitch : w->stride * channels);\
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
    ITEMS_OF(name, pooling)                                                                       \
    {                                                                                             \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const int64_t chunks = CEIL_DIV(w->count, a->chunk);                                      \
        const int64_t bands = CEIL_DIV(v->count, a->band);                                        \
        const int64_t size = u->size * v->size * w->size, most = a->lanes ? a->lanes : 1;         \
        const int64_t every = u->count * v->count * w->count;                                     \
        _Alignas(PIECE) type near[BYTES / sizeof(type)], result[BYTES / sizeof(type)];            \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t image = item;                                                                 \
            const int64_t first = digit(&image, chunks) * a->chunk;                               \
            const int64_t o = digit(&image, bands) * a->band, d = digit(&image, u->count);        \
            const int64_t count = smaller(w->count - first, a->chunk);                            \
            const int64_t band = smaller(v->count - o, a->band), i = image * most;                \
            const int64_t lanes = a->lanes ? smaller(a->images - i, most) : a->channels;          \
            const type *x = (const type *)a->x + i * size * a->channels;                          \
            type *y = (type *)a->y +                                                              \
                      (i * every + (d * v->count + o) * w->count + first) * a->channels;          \
            view s = {x, {0}, v->size, w->size, lanes};                                           \
            if (a->lanes) {                                                                       \
                const int64_t slices = seen(u, d, d, s.first);                                    \
                s.rows = seen(v, o, o + band - 1, s.first + 1);                                   \
                s.columns = seen(w, first, first + count - 1, s.first + 2);                       \
                x += (s.first[0] * v->size + s.first[1]) * w->size + s.first[2];                  \
                const int64_t row = s.columns * lanes;                                            \
                turn(x, near, sizeof(type), (int64_t[]){lanes, slices, s.rows, s.columns},        \
                     (int64_t[]){size, v->size * w->size, w->size, 1},                            \
                     (int64_t[]){1, s.rows * row, row, lanes});                                   \
                s.x = near;                                                                       \
            }                                                                                     \
            const int64_t step = a->lanes ? count * lanes : w->count * lanes;                     \
            for (int64_t r = 0; r < band; r += a->group)                                          \
                name##_band(a, &s, d, o + r, smaller(a->group, band - r), first, count,           \
                            (a->lanes ? result : y) + r * step, step);                            \
            if (a->lanes)                                                                         \
                turn(result, y, sizeof(type), (int64_t[]){lanes, 1, band, count},                 \
                     (int64_t[]){1, 0, step, lanes}, (int64_t[]){every, 0, w->count, 1});         \
        }                                                                                         \
    }

#define INDICES(type, start)                                                                      \
    ITEMS_OF(max_pool_indices_##type, pooling)                                                    \
    {                                                                                             \
        const window *u = a->axes, *v = u + 1, *w = u + 2;                                        \
        const int64_t chunks = CEIL_DIV(w->count, CHUNK);                                         \
        type best[CHUNK];                                                                         \
        int32_t places[CHUNK];                                                                    \
        for (int64_t item = begin; item < end; item++) {                                          \
            int64_t line = item, plane;                                                           \
            const int64_t first = digit(&line, chunks) * CHUNK, rest = w->count - first;          \
            const int64_t o = (plane = line, digit(&plane, v->count));                            \
            const int64_t d = digit(&plane, u->count);                                            \
            const int64_t count = rest < CHUNK ? rest : CHUNK;                                    \
            int64_t depth, height;                                                                \
            const int64_t slices = inside(u, d, &depth), rows = inside(v, o, &height);            \
            for (int64_t j = 0; j < count; j++) {                                                 \
                best[j] = start;                                                                  \
                places[j] = -1;                                                                   \
            }                                                                                     \
            for (int64_t i = 0; i < slices; i++)                                                  \
                for (int64_t k = 0; k < rows; k++)                                                \
                    for (int64_t l = 0; l < w->kernel; l++) {                                     \
                        const int64_t p = depth + i * u->dilation, q = height + k * v->dilation;  \
                        const int64_t r = first * w->stride - w->begin + l * w->dilation;         \
                        const type *x = (const type *)a->x +                                      \
                                        ((plane * u->size + p) * v->size + q) * w->size + r;      \
                        const int64_t step = w->stride, left = w->size - r;                       \
                        const int64_t low = r < 0 ? CEIL_DIV(-r, step) : 0;                       \
                        const int64_t high = smaller(left > 0 ? CEIL_DIV(left, step) : 0, count);    \
                        const int32_t place =                                                     \
                            (int32_t)(p * u->pitch + q * v->pitch + r * w->pitch);                \
                        const int32_t further = (int32_t)(step * w->pitch);                       \
                        if (step == 1)                                                            \
                            FURTHER(1)                                                            \
                        else if (step == 2)                                                       \
                            FURTHER(2)                                                            \
                        else                                                                      \
                            FURTHER(step)                                                         \
                    }                                                                             \
            const int64_t at = line * w->count + first;                                           \
            const int64_t before = plane * u->size * v->size * w->size;                           \
            for (int64_t j = 0; j < count; j++) {                                                 \
                ((type *)a->y)[at + j] = best[j];                                                 \
                a->indices[at + j] = places[j] < 0 ? -1 : places[j] + before;                     \
            }                                                                                     \
        }                                                                                         \
    }

#define FURTHER(step)                                                                             \
    for (int64_t j = low; j < high; j++) {                                                        \
        const int beaten = ((!(x[j * step] <= best[j])) | (places[j] < 0)) & (best[j] == best[j]);\
        best[j] = beaten ? x[j * step] : best[j];                                                 \
        places[j] = beaten ? place + (int32_t)j * further : places[j];                            \
    }

#define KINDS(type)                                                                               \
    POOL(average_pool_##type, type, 0, SAME, SUM, MEAN, 1)                                        \
    POOL(l1_pool_##type, type, 0, ABSOLUTE, SUM, SAME, 0)                                         \
    POOL(l2_pool_##type, type, 0, SQUARE, SUM, ROOT, 0)                                           \
    MAXIMA(type, -INFINITY)
#define MAXIMA(type, start)                                                                       \
    POOL(max_pool_##type, type, start, SAME, HIGHER, SAME, 0)                                     \
    INDICES(type, start)

KINDS(float)
KINDS(double)
MAXIMA(int8_t, INT8_MIN)
MAXIMA(uint8_t, 0)

#define MAXIMUM_ENTRIES(type) KERNEL(max_pool_##type, pooling), KERNEL(max_pool_indices_##type, pooling)
#define ENTRIES(type)                                                                             \
    MAXIMUM_ENTRIES(type), KERNEL(average_pool_##type, pooling), KERNEL(l1_pool_##type, pooling), \
        KERNEL(l2_pool_##type, pooling)

KERNELS(pooling, ENTRIES(float), ENTRIES(double), MAXIMUM_ENTRIES(int8_t), MAXIMUM_ENTRIES(uint8_t))
