/* Convolutions of 8-bit codes to clamped codes; those over all channels also to int32 sums or real numbers, and with
   any zero point of the weights. Matrix products are convolutions of an image of one row; computed right-hand
   matrices are packed first. The zero points a of x and b of the weights are subtracted from the sums:

       sum (x - a) (w - b) = sum x w - a (sum w - K b) - b sum x

   Images may have any strides. Input rows are copied and padded with the zero point, so that the input of a position
   consists of parts, one for each row of the kernel, at the same offsets for all positions. Rows a stride apart
   become adjacent: positions are then evenly spaced even across the ends of rows, with a few in between that are
   computed and discarded (not by `tiles_of_codes`). Channels-last images without padding are read in place. An item
   is a block of rows and columns of the result and some of the filters; products are those of integers.h. Groups have
   their own weights and filters, and channels of an image or, in batches of products, images.

   Depthwise convolutions copy rows likewise; with strides, columns a stride apart become adjacent. Then the channels
   of adjacent positions are contiguous, and are computed CHUNK at a time, whatever their number: weights, factors and
   offsets repeat with a `period`, a multiple of CHUNK. Four taps of a kernel row are brought together for each
   channel by interleaving bytes of vectors, which permutes the channels of a CHUNK, and with them all that repeats:
   by vector (0 to 3), 16-byte lane and index. */
#include "images.h"
#include "integers.h"
#include "native.h"

enum { SUMS = 32 * GROUP * PANEL, CHUNK = 64, COPIED = 65536, MOST_TAPS = 256, LINES = 4 };
enum { POSITIONS = 256, READ_AGAIN = 16384, MOST_OF_CODES = 3072, FEW_FILTERS = 48 };

/* Tiles of codes: sums, rows and vectors of filters; a single row may have four vectors. */
#if defined(__AVX512BW__)
enum { TILE_SUMS = 24, MOST_ROWS = 12, MOST_VECTORS = 4 };
#else
enum { TILE_SUMS = 8, MOST_ROWS = 8, MOST_VECTORS = 2 };
#endif

/* Requantization of sums: rint(sum * factor + offset), at most `high`, plus zero, at least `low`; as for uint8, with
   ^ change for int8. If `fixed`, factors and offsets give the result as fixed-point multiples of 1 / ONE, rounded
   once; offsets include half a ONE and SLACK, unless results below zero are possible (low is not zero), where they
   take the sign of the sum. Within SLACK of a tie, float32 errors may matter: the exact multipliers and right shifts
   (ops/common/fixed_point.py) are `fixed` elements behind factors and offsets. If `fixed` is negative, only these are
   used. */
enum { ONE = 1 << 15, SLACK = 2 };
typedef struct {
    double high;
    int64_t zero, low, change, fixed;
} bounds;

/* Offsets of a group: its channels, and those of its filters, in channels; its weights. */
typedef struct {
    int64_t x, y, weights;
} group;

struct quantized_convolution {
    const uint8_t *x;
    const int8_t *weights; /* panels; rows of the matrix are in order of parts */
    const uint8_t *x_zero; /* of each image, or of all; NULL to use `zero` */
    const int32_t *sums, *terms, *zeros; /* per filter: sums of weights, addends, zero points; or NULL */
    const float *factors, *offsets;      /* NULL to store sums; offsets may be NULL for real numbers */
    void *y;
    const axis *planes, *rows, *columns;
    const bounds *bounds; /* NULL unless sums become codes */
    double low, high;     /* of real numbers */
    const group *groups;
    int64_t count;                     /* of groups */
    int64_t weights_step, filter_step; /* between groups of weights: in bytes, and in elements of sums */
    int64_t factor_step, factors_step; /* between factors of filters: 1 or 0; and of weight groups */
    int64_t image_zeros, image_factors; /* between zero points and factors of images */
    int64_t images, channels, filters; /* filters of a group */
    int64_t quads, deep;               /* of a part; of a tile */
    int64_t block, chunk, reach, some; /* of an item: rows, columns, more that are read; panels */
    int64_t change, zero;              /* codes are uint8 after ^ change */
    const steps *x_steps, *y_steps;
};

struct code_depthwise {
    const uint8_t *x;
    const int8_t *weights; /* [row][four columns][period][4]; all columns twice where weights are sums of two */
    const int32_t *terms;
    const float *factors, *offsets;
    uint8_t *y;
    const axis *rows, *columns;
    const bounds *bounds;
    int64_t images, filters, multiplier, period, columns_read, block, chunk, reach, change, zero;
    const steps *x_steps, *y_steps;
};

/* Sums rescaled in integer arithmetic. */
static inline words rescaled(words x, words multipliers, words shifts)
{
    const words right = shifts & (shifts > 0);
    words high;
    x <<= -shifts & (shifts < 0);
#if defined(__SSE4_1__)
    const bytes half = (bytes){0} + (1 << 30), low = (bytes){0} + UINT32_MAX; /* 64 bits each */
    const bytes even = V(srli_epi64)(V(mul_epi32)((bytes)x, (bytes)multipliers) + half, 31);
    const bytes odd = V(mul_epi32)(V(srli_epi64)((bytes)x, 32), V(srli_epi64)((bytes)multipliers, 32)) + half;
    high = (words)((even & low) | (V(slli_epi64)(odd, 1) & ~low));
#elif defined(__aarch64__)
    high = (words)vqrdmulhq_s32((int32x4_t)x, (int32x4_t)multipliers);
#else
    for (int i = 0; i < LANES_OF_SUMS; i++)
        high[i] = (int32_t)(((int64_t)x[i] * multipliers[i] + (1 << 30)) >> 31);
#endif
    return (high + (((words){0} + 1) << right >> 1) + ((high >> 31) & (right > 0))) >> right;
}

/* Factors and offsets of vectors of sums, which are `step` apart, and repeat after `own` of them. */
typedef struct {
    const float *factors, *offsets;
    int step, own;
} scales;

/* Rescale vectors of sums in integer arithmetic, in place. */
static __attribute__((noinline)) void rescale_vectors(bytes *sums, const scales *u, const bounds *b, int count)
{
    const int64_t behind = b->fixed < 0 ? -b->fixed : b->fixed;
    for (int v = 0; v < count; v++) {
        words parts[2];
        memcpy(parts, u->factors + behind + v % u->own * u->step, BYTES);
        memcpy(parts + 1, u->offsets + behind + v % u->own * u->step, BYTES);
        sums[v] = (bytes)rescaled((words)sums[v], parts[0], parts[1]);
    }
}

#if defined(__AVX512BW__)
#define IS_ANY_BELOW(x, limit) _mm512_cmplt_epi32_mask((bytes)(x), (bytes)((words){0} + (limit)))
#elif defined(__SSE4_1__)
#define IS_ANY_BELOW(x, limit) V(movemask_epi8)((bytes)((x) < (limit)))
#endif

/* The codes of four vectors of sums, or of the first `count`: in the order of the sums, or as these vectors interleave.
   `near` has the same factors and offsets as u, without the exact multipliers behind them: copies of it stay in
   registers. */
INLINED bytes codes_of_vectors(const bytes *sums, const scales near, const scales *u, const bounds *b, int count,
                               int ordered)
{
    const int step = near.step, own = near.own;
#if defined(__SSE4_1__)
    bytes whole[4] = {{0}};
    words least = (words){0} + ONE;
    UNROLLED(v, count) {
        __typeof__(V(setzero_ps)()) number = V(cvtepi32_ps)(sums[v]), offset = V(loadu_ps)(near.offsets + v % own * step);
        if (b->fixed && b->low != b->zero)
            offset = V(set1_ps)(ONE / 2 + SLACK) + V(or_ps)(offset, V(and_ps)(number, V(set1_ps)(-0.0f)));
        const __typeof__(number) factor = V(loadu_ps)(near.factors + v % own * step);
#if defined(__FMA__)
        if (b->fixed) /* an estimate, whose rounding is free */
            number = V(fmadd_ps)(number, factor, offset);
        else
#endif
            number = V(mul_ps)(number, factor) + offset;
        whole[v] = V(cvtps_epi32)(b->fixed ? number : V(min_ps)(number, V(set1_ps)((float)b->high)));
        if (b->fixed) { /* for numbers that are too large, all bits but the sign are 0 */
            least = (words)V(min_epu32)((bytes)least, whole[v] & (bytes)((words){0} + ONE - 1));
            whole[v] = V(srai_epi32)(whole[v], 15);
        }
    }
    if (b->fixed && (b->fixed < 0 || IS_ANY_BELOW(least, 2 * SLACK))) {
        bytes copies[4]; /* so that sums and results need not be in memory otherwise */
        UNROLLED(v, count)
            copies[v] = sums[v];
        rescale_vectors(copies, u, b, count);
        UNROLLED(v, count)
            whole[v] = copies[v];
    }
    bytes codes = packed_codes(whole, b->zero, ordered);
    codes = V(min_epu8)(codes, V(set1_epi8)((char)((int64_t)b->high + b->zero)));
    return V(max_epu8)(codes, V(set1_epi8)((char)b->low)) ^ V(set1_epi8)((char)b->change);
#else
    bytes codes;
    _Alignas(BYTES) int32_t numbers[BYTES];
    memcpy(numbers, sums, sizeof numbers);
    if (b->fixed)
        rescale_vectors((bytes *)numbers, u, b, count);
    for (int i = 0; i < BYTES; i++) {
        const int at = i / 4 % own * step + i % 4;
        float number = b->fixed ? (float)numbers[i] : (float)numbers[i] * near.factors[at] + near.offsets[at];
        number = number < b->high ? number : (float)b->high;
        numbers[i] = (int32_t)rintf(number > -512 ? number : -512) + (int32_t)b->zero;
    }
    for (int i = 0; i < BYTES; i++)
        codes[i] = (uint8_t)(numbers[i] > b->low ? numbers[i] : b->low) ^ (uint8_t)b->change;
    return codes;
#endif
}

/* Copy codes ^ change, `size` at a time; the remainder is an overlapping copy where vectors can be filled. */
INLINED void copy_by(uint8_t *restrict to, const uint8_t *restrict from, int64_t count, uint8_t change, int size)
{
    for (int64_t i = 0; i < count; i += size) {
        i = smaller(i, count - size);
        for (int j = 0; j < size; j++)
            to[i + j] = from[i + j] ^ change;
    }
}

static inline void copy_changed(uint8_t *restrict to, const uint8_t *restrict from, int64_t count, uint8_t change)
{
    count >= 64   ? copy_by(to, from, count, change, 64)
    : count >= 16 ? copy_by(to, from, count, change, 16)
                  : copy_by(to, from, count, change, count >= 8 ? 8 : 1);
}

/* Rows of images, whose columns `phases` apart are made adjacent, and whose channels are each repeated `multiplier`
   times. */
typedef struct {
    const steps *steps;
    int64_t size, channels, multiplier, phases;
    uint8_t change, zero; /* codes ^ change are copied, and padded with zero */
} source;

/* Copy the input of a row, NULL for padding: columns from `first` on, `length` of each phase. */
static void copy_row(const source *s, const uint8_t *line, int64_t first, int64_t length, uint8_t *restrict to)
{
    const int64_t channels = s->channels * s->multiplier, step = s->steps->channel;
    const int simple = step == 1 && s->multiplier == 1;
    const int flat = simple && s->phases == 1 && s->steps->column == channels;
    for (int64_t phase = 0; phase < s->phases; phase++)
        for (int64_t i = 0, n; i < length; i += n, to += n * channels) {
            const int64_t column = first + phase + i * s->phases;
            n = 1;
            if (!line || column < 0 || column >= s->size) {
                n = s->phases > 1 ? 1 : !line || column >= s->size ? length - i : smaller(-column, length - i);
                memset(to, s->zero, n * channels);
            } else if (simple) {
                n = flat ? smaller(length - i, s->size - column) : 1;
                copy_changed(to, line + column * s->steps->column, n * channels, s->change);
            } else
                for (int64_t e = 0; e < channels; e++)
                    to[e] = line[column * s->steps->column + e / s->multiplier * step] ^ s->change;
        }
}

/* The positions that an item computes, `apart` of them per row, and their input; `far`: the bytes between rows. Then
   the addresses of the input of some positions, and of the results of some filters: NULL for positions between
   rows. */
typedef struct {
    group group;
    int64_t image, plane, row, rows, column, columns;
    const uint8_t *x;
    int64_t step, apart, far, places[MOST_TAPS], parts, bytes;
    const uint8_t *seen[POSITIONS];
    uint8_t *y[POSITIONS];
    const float *factors, *offsets; /* of the first of the filters */
    const int32_t *zeros;           /* of these, or NULL; else the sum of the input of each position is: */
    int32_t totals[POSITIONS];
    uint8_t change; /* codes ^ change are multiplied */
} view;

/* Remove the last digit of a number in this base and return it. For small images most bases are 1, and divisions take
   as long as some products. */
static inline int64_t digit_of(int64_t *number, int64_t base)
{
    if (base == 1)
        return 0;
    const int64_t rest = *number / base, digit = *number - rest * base;
    *number = rest;
    return digit;
}

static inline int64_t parts_of(int64_t count, int64_t each)
{
    return count <= each ? 1 : CEIL_DIV(count, each);
}

/* Set the offsets of parts in rows of `wide` bytes, with `far` bytes between planes; rows that are `phases` apart are
   adjacent, with `tall` bytes between phases. */
static void set_places(const struct quantized_convolution *a, view *s, int64_t far, int64_t wide,
                       int64_t phases, int64_t tall)
{
    const axis *u = a->rows, *v = a->columns;
    const int64_t taps = v->dilation > 1 ? v->kernel : 1;
    s->parts = 0;
    s->bytes = v->kernel / taps * a->channels;
    for (int64_t kz = 0; kz < a->planes->kernel; kz++)
        for (int64_t ky = 0; ky < u->kernel; ky++) {
            int64_t row = ky * u->dilation;
            const int64_t phase = digit_of(&row, phases), place = kz * far + phase * tall + row * wide;
            for (int64_t kx = 0; kx < taps; kx++)
                s->places[s->parts++] = place + kx * v->dilation * a->channels;
        }
}

static int is_within(const axis *a)
{
    return !a->begin && (a->count - 1) * a->stride + (a->kernel - 1) * a->dilation < a->size;
}

/* The address of the group's first channel of the image, in the plane that tap 0 reads. */
static const uint8_t *plane_of(const struct quantized_convolution *a, const view *s)
{
    const int64_t plane = s->plane * a->planes->stride - a->planes->begin;
    return a->x + s->group.x * a->x_steps->channel + s->image * a->x_steps->image + plane * a->x_steps->slice;
}

/* Whether products are computed by `tiles_of_codes`, whose sums stay in registers. */
static int are_codes(const struct quantized_convolution *a)
{
    const int64_t taps = a->planes->kernel * a->rows->kernel * a->columns->kernel;
    int is_faster;
    if (BYTES == 64) /* sums of AMX are written to memory and read again, which takes longer than few products */
        is_faster = features & AVX512_VNNI &&
                    (product_for(TILE) == WIDEST() || taps * a->channels * a->filters <= MOST_OF_CODES);
    else /* the product widens rows once for all filters, but adjacent ones of an image separately */
        is_faster = BYTES == 32 && !(features & AVX_VNNI) &&
                    (taps > 1 || a->filters <= FEW_FILTERS || a->rows->count * a->columns->count == 1);
    return is_faster && a->bounds && a->y_steps->channel == 1;
}

/* Whether int8 codes are multiplied as they are. AMX multiplies them so, but they have no sums to take off. */
static int are_signed(const struct quantized_convolution *a)
{
    const int64_t positions = a->rows->count * a->columns->count;
    return a->change && !a->zeros && product_for(positions) != WIDEST() && !are_codes(a);
}

/* Read the image in place, if no padding is read. Return whether that is so. */
static int look_at_image(const struct quantized_convolution *a, view *s)
{
    const axis *u = a->rows, *v = a->columns;
    const steps *x = a->x_steps;
    if (s->change || x->channel != 1 || (x->column != a->channels && v->kernel > 1) ||
        !is_within(a->planes) || !is_within(u) || !is_within(v))
        return 0;
    s->step = v->stride * x->column;
    s->far = u->stride * x->row;
    const int equally = s->rows > 1 && !are_codes(a); /* positions must be evenly spaced across rows */
    s->apart = equally ? s->far / s->step : s->columns;
    if (s->apart >= 2 * s->columns || s->apart < s->columns || (equally && s->far % s->step))
        return 0;
    set_places(a, s, a->planes->dilation * x->slice, x->row, 1, 0);
    s->x = plane_of(a, s) + s->row * s->far + s->column * s->step;
    return s->bytes == a->quads * QUAD;
}

static void look_at_copy(const struct quantized_convolution *a, view *s, uint8_t zero, uint8_t *copy)
{
    const axis *u = a->rows, *v = a->columns;
    /* Of columns a stride apart that only one tap reads, no others are copied. */
    const int64_t apart = v->kernel == 1 && !v->begin ? v->stride : 1, stride = v->stride / apart;
    steps of_x = *a->x_steps;
    of_x.column *= apart;
    const source source = {&of_x, CEIL_DIV(v->size, apart), a->channels, 1, 1, s->change, zero};
    const int64_t tall = s->rows + (u->kernel - 1) * u->dilation / u->stride;
    const int64_t length = (s->columns + a->reach) * stride, wide = length * a->channels;
    const int64_t whole = tall * u->stride * wide, seen = (s->rows - 1) * u->stride + (u->kernel - 1) * u->dilation;
    for (int64_t plane = 0; plane < a->planes->kernel; plane++)
        for (int64_t y = 0; y <= seen; y++) {
            const int64_t kz = plane * a->planes->dilation, r = s->row * u->stride - u->begin + y;
            const int64_t z = s->plane * a->planes->stride - a->planes->begin + kz;
            const int outside = r < 0 || r >= u->size || z < 0 || z >= a->planes->size;
            const uint8_t *line = outside ? NULL : plane_of(a, s) + kz * a->x_steps->slice + r * a->x_steps->row;
            int64_t row = y;
            const int64_t phase = digit_of(&row, u->stride);
            if (u->dilation > 1 || phase < u->kernel)
                copy_row(&source, line, s->column * stride - v->begin, length,
                         copy + plane * whole + (phase * tall + row) * wide);
        }
    set_places(a, s, whole, wide, u->stride, tall * wide);
    s->x = copy;
    s->step = stride * a->channels;
    s->far = (s->columns + a->reach) * s->step;
    s->apart = s->columns + (are_codes(a) ? 0 : a->reach);
}

static inline void put_codes(uint8_t *restrict y, int64_t step, bytes codes, int64_t count)
{
    if (step == 1 && count == BYTES)
        memcpy(y, &codes, BYTES);
    else if (step == 1)
#if defined(__AVX512BW__)
        V(mask_storeu_epi8)(y, ~0ull >> (BYTES - count), codes);
#else
        copy_changed(y, (const uint8_t *)&codes, count, 0);
#endif
    else
        for (int64_t i = 0; i < count; i++)
            y[i * step] = ((const uint8_t *)&codes)[i];
}

/* Find the sum of the input of each of `count` positions. */
static void find_totals(view *s, int64_t count)
{
    for (int64_t p = 0; p < count; p++)
        s->totals[p] = sum_of(s->seen[p], s->places, s->parts, s->bytes);
}

/* Subtract the zero points of weights from the sums. */
static void take_off(const view *s, const multiplication *m)
{
    for (int64_t p = 0; p < m->rows; p++)
        for (int64_t f = 0; f < m->columns; f++)
            m->c[p * m->c_step + f] -= s->totals[p] * s->zeros[f];
}

/* Convert the sums of a position to real numbers, in place; `step` is a constant. */
INLINED void scale_sums(const struct quantized_convolution *a, int32_t *restrict sums,
                        const float *restrict factors, const float *restrict offsets, int64_t count, int step)
{
    const float low = (float)a->low, high = (float)a->high;
    for (int64_t f = 0; f < count; f++) {
        float number = (float)sums[f] * factors[f * step];
        number = offsets ? number + offsets[f] : number;
        number = number < low ? low : number; /* NaN is preserved */
        number = number > high ? high : number;
        memcpy(sums + f, &number, sizeof number);
    }
}

/* Set the addresses of `count` positions, from `first` on, and the terms of the filters from `filter` on. */
static void set_positions(const struct quantized_convolution *a, view *s, int64_t first, int64_t count,
                          int64_t filter)
{
    const steps *to = a->y_steps;
    const int64_t scaled = s->group.weights * a->factors_step + filter, size = a->bounds ? 1 : sizeof(float);
    uint8_t *y = (uint8_t *)a->y + (s->image * to->image + s->plane * to->slice + s->row * to->row +
                                    s->column * to->column + (s->group.y + filter) * to->channel) * size;
    s->offsets = a->offsets ? a->offsets + scaled : NULL;
    s->factors = a->factors ? a->factors + scaled * a->factor_step + s->image * a->image_factors : NULL;
    s->zeros = a->zeros ? a->zeros + s->group.weights * a->filter_step + filter : NULL;
    for (int64_t i = 0, row = first / s->apart, column = first % s->apart; i < count; row++, column = 0) {
        const int64_t n = smaller(count - i, s->apart - column), step = s->step, width = to->column * size;
        const uint8_t *x = s->x + row * s->far;
        uint8_t *line = y + row * to->row * size;
        for (int64_t end = column + n, columns = s->columns; column < end; column++, i++) {
            s->seen[i] = x + column * step;
            s->y[i] = column < columns ? line + column * width : NULL;
        }
    }
}

/* Convert the sums m to codes of some filters from f on, in `vectors` vectors, and write these. */
INLINED void put_all_codes(const struct quantized_convolution *a, const view *s, const multiplication *m, int64_t f,
                           int vectors)
{
    enum { EACH = 4 * LANES_OF_SUMS };
    const int64_t step = a->y_steps->channel, count = smaller(m->columns - f, BYTES);
    const bounds own = *a->bounds; /* local copies, which cannot alias the results */
    float factors[EACH], offsets[EACH];
    memcpy(factors, s->factors + f, vectors * BYTES);
    memcpy(offsets, s->offsets + f, vectors * BYTES);
    const scales near = {factors, offsets, LANES_OF_SUMS, 4}, all = {s->factors + f, s->offsets + f, LANES_OF_SUMS, 4};
    for (int64_t p = 0; p < m->rows; p++)
        if (s->y[p]) {
            const bytes *four = (const bytes *)(m->c + p * m->c_step + f);
            put_codes(s->y[p] + f * step, step, codes_of_vectors(four, near, &all, &own, vectors, 1), count);
        }
}

/* Convert the sums m and write the results. */
static void finish(const struct quantized_convolution *a, const view *s, const multiplication *m)
{
    const int64_t step = a->y_steps->channel, filters = m->columns;
    for (int64_t f = 0; a->bounds && f < filters; f += BYTES)
        filters - f > BYTES / 2 ? put_all_codes(a, s, m, f, 4) : put_all_codes(a, s, m, f, 2);
    for (int64_t p = 0; !a->bounds && p < m->rows; p++) {
        int32_t *sums = m->c + p * m->c_step, *y = (int32_t *)s->y[p];
        if (!y)
            continue;
        if (s->factors)
            a->factor_step ? scale_sums(a, sums, s->factors, s->offsets, filters, 1)
                           : scale_sums(a, sums, s->factors, s->offsets, filters, 0);
        if (step == 1 && sums != y)
            memcpy(y, sums, filters * sizeof *sums);
        for (int64_t f = 0; step != 1 && f < filters; f++)
            y[f * step] = sums[f];
    }
}

#if defined(__AVX2__)
/* Convert the sums of a tile of some positions, from `row` on, and of `vectors` vectors of filters, from `first` on, to
   codes, and write these; `vectors` is a constant. */
INLINED void put_tile(const view *s, const multiplication *m, const bounds *b, const bytes *sums, int64_t row,
                      int64_t first, int rows, int vectors)
{
    const int64_t count = smaller(m->columns - first, vectors * LANES_OF_SUMS);
    const bounds own = *b;
    const scales u = {s->factors + first, s->offsets + first, LANES_OF_SUMS, vectors};
    /* Codes of as many positions as fill four vectors. */
    const int each = vectors < 3 ? 4 / vectors : 1;
    uint8_t *const *y = s->y + row;
    NOT_UNROLLED for (; rows > 0; rows -= each, y += each, sums += each * vectors)
    {
        const bytes codes = codes_of_vectors(sums, u, &u, &own, each * vectors, 1);
        _Alignas(BYTES) uint8_t parts[BYTES];
        memcpy(parts, &codes, BYTES);
#if defined(__AVX512BW__)
        if (each == 1)
            V(mask_storeu_epi8)(y[0] + first, ~0ull >> (BYTES - count), codes);
        for (int j = 0; each == 2 && j < smaller(rows, 2); j++)
            _mm256_mask_storeu_epi8(y[j] + first, ~0u >> (32 - count), *(const __m256i *)(parts + 32 * j));
        for (int j = 0; each == 4 && j < smaller(rows, 4); j++)
            _mm_mask_storeu_epi8(y[j] + first, 0xffffu >> (16 - count), *(const __m128i *)(parts + 16 * j));
#else
        const int wide = vectors * LANES_OF_SUMS;
        for (int j = 0; j < smaller(rows, each); j++)
            if (count == wide)
                memcpy(y[j] + first, parts + j * wide, wide);
            else
                copy_changed(y[j] + first, parts + j * wide, count, 0);
#endif
    }
}

#define PUT_TILE(vectors)                                                                         \
    static __attribute__((noinline)) void put_tile_##vectors(                                     \
        const view *s, const multiplication *m, const bounds *b, const bytes *sums, int64_t row,  \
        int64_t first, int rows)                                                                  \
    {                                                                                             \
        put_tile(s, m, b, sums, row, first, rows, vectors);                                       \
    }
PUT_TILE(1) PUT_TILE(2) PUT_TILE(3) PUT_TILE(4)
static __typeof__(put_tile_1) *const put_tiles[] = {put_tile_1, put_tile_2, put_tile_3, put_tile_4};

/* The codes of a tile: of some positions, from `row` on, and of some vectors of filters, from `vector` on, which is
   even. Accumulators stay in registers, as in panels.c. */
INLINED void tile_of_codes(const view *s, const multiplication *m, const bounds *b, int64_t row, int64_t vector,
                           int rows, int vectors)
{
    enum { IN_PANEL = PANEL / LANES_OF_SUMS };
    const int64_t first = vector * LANES_OF_SUMS;
    const int8_t *w = m->w + vector / IN_PANEL * m->w_step + vector % IN_PANEL * BYTES;
    const uint8_t *const *x = s->seen + row;
    bytes sums[TILE_SUMS], kept[TILE_SUMS + 3];
    UNROLLED(i, rows * vectors)
        memcpy(sums + i, m->start + first + i % vectors * LANES_OF_SUMS, BYTES);
    if (s->zeros)
        UNROLLED(i, rows * vectors)
        {
            words zeros;
            memcpy(&zeros, s->zeros + first + i % vectors * LANES_OF_SUMS, BYTES);
            sums[i] = (bytes)((words)sums[i] - zeros * s->totals[row + i / vectors]);
        }
    for (int64_t part = 0; part < m->parts; part++)
        for (int64_t k = m->places[part], end = k + m->quads * QUAD; k < end; k += QUAD, w += PANEL_BYTES) {
            bytes columns[4], four;
            UNROLLED(j, vectors)
                memcpy(columns + j, w + j / IN_PANEL * m->w_step + j % IN_PANEL * BYTES, BYTES);
            UNROLLED(i, rows)
            {
#if defined(__AVX512BW__)
                __asm__("vpbroadcastd (%1,%2), %0" : "=v"(four) : "r"(x[i]), "r"(k), "m"(*(const char(*)[1 << 16])x[i]));
                UNROLLED(j, vectors)
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[i * vectors + j]) : "v"(four), "v"(columns[j]));
#else
                int32_t quad;
                memcpy(&quad, x[i] + k, QUAD);
                four = (bytes)((words){0} + quad);
                UNROLLED(j, vectors)
                    sums[i * vectors + j] = (bytes)plain_dot((words)sums[i * vectors + j], four, columns[j]);
#endif
            }
        }
    /* What follows is a function for all numbers of rows, which reads sums from memory, four vectors at a time. */
    UNROLLED(i, rows * vectors + 3)
        memcpy(kept + i, &sums[i < rows * vectors ? i : i % vectors], BYTES);
    put_tiles[vectors - 1](s, m, b, kept, row, first, rows);
}
#endif

/* As the product and `finish`, in tiles of about equally many rows. */
static void tiles_of_codes(const view *s, const multiplication *m, const bounds *b)
{
#if defined(__AVX2__)
    const int64_t all = CEIL_DIV(m->columns, LANES_OF_SUMS), wide = m->rows == 1 ? 4 : MOST_VECTORS;
    for (int64_t vector = 0, vectors; vector < all; vector += vectors) {
        /* Two and three instead of four and one; tiles begin at panels unless these have two vectors. */
        vectors = BYTES == 64 && all - vector == 5 ? 2 : smaller(all - vector, wide);
        const int64_t most = smaller(TILE_SUMS / vectors, MOST_ROWS);
        for (int64_t row = 0, rows, left = CEIL_DIV(m->rows, most); left > 0; row += rows, left--) {
            rows = CEIL_DIV(m->rows - row, left);
#define OF(rows, vectors)                                                                         \
    case rows * 8 + vectors:                                                                      \
        if (rows * vectors <= TILE_SUMS && rows <= MOST_ROWS && vectors <= (rows > 1 ? MOST_VECTORS : 4)) \
            tile_of_codes(s, m, b, row, vector, rows, vectors);                                   \
        break;
#define OF_ROWS(rows) OF(rows, 1) OF(rows, 2) OF(rows, 3) OF(rows, 4)
            switch (rows * 8 + vectors) {
                OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4) OF_ROWS(5) OF_ROWS(6)
                OF_ROWS(7) OF_ROWS(8) OF_ROWS(9) OF_ROWS(10) OF_ROWS(11) OF_ROWS(12)
            }
        }
    }
#endif
}

ITEMS_OF(quantized_convolution, quantized_convolution)
{
    const axis *u = a->rows, *v = a->columns;
    const steps *to = a->y_steps;
    const int64_t blocks = parts_of(u->count, a->block), chunks = parts_of(v->count, a->chunk);
    const int64_t panels = CEIL_DIV(a->filters, PANEL);
    _Alignas(64) uint8_t copy[COPIED + CHUNK]; /* tile and vector loads that cross cache lines are half as fast */
    const int is_signed = are_signed(a);
    view s; /* not set, as it is large */
    s.change = is_signed ? 0 : (uint8_t)a->change;
    _Alignas(64) int32_t c[SUMS + CHUNK];
    _Alignas(64) int32_t start[GROUP * PANEL];
    const int64_t inputs = blocks * chunks * a->planes->count * a->images * a->count; /* of items */
    int64_t shape = 0, known = -1; /* the input that s shows */
    for (int64_t item = begin; item < end; item++) {
        int64_t rest = item;
        s.column = digit_of(&rest, chunks) * a->chunk;
        s.row = digit_of(&rest, blocks) * a->block;
        s.plane = digit_of(&rest, a->planes->count);
        s.image = digit_of(&rest, a->images);
        s.group = a->groups[digit_of(&rest, a->count)];
        const uint8_t zero = (a->x_zero ? a->x_zero[s.image * a->image_zeros] : (uint8_t)a->zero) ^ s.change;
        const int32_t less = is_signed ? (int8_t)zero : zero;
        const int64_t low = rest * a->some, begun = s.group.weights * a->filter_step;
        s.columns = smaller(a->chunk, v->count - s.column);
        s.rows = smaller(a->block, u->count - s.row);
        const int64_t input = item - rest * inputs;
        if (input != known && !look_at_image(a, &s))
            look_at_copy(a, &s, zero, copy);
        known = input;
        const int64_t positions = (s.rows - 1) * s.apart + s.columns;
        for (int64_t panel = low, some; panel < smaller(low + a->some, panels); panel += some) {
            some = smaller(GROUP, smaller(low + a->some, panels) - panel);
            const int64_t step = s.parts * a->quads * PANEL_BYTES;
            const int64_t filter = panel * PANEL, columns = smaller(some * PANEL, a->filters - filter);
            multiplication m = {c, CEIL_DIV(columns, TILE) * TILE, start, 0, NULL, s.step, s.places, s.parts,
                                a->quads, a->deep, a->weights + s.group.weights * a->weights_step + panel * step,
                                step, 0, columns, &shape, is_signed};
            for (int64_t f = 0; f < some * PANEL; f++)
                start[f] = (a->terms ? a->terms[begun + filter + f] : 0) - less * a->sums[begun + filter + f];
            /* The input of positions is read once for each tile of filters, from the nearest cache. */
            const int64_t near = MOST_ROWS + READ_AGAIN / (s.parts * s.bytes);
            const int64_t most = smaller(POSITIONS, are_codes(a) ? near : SUMS / m.c_step);
            /* Sums and real numbers are computed in place if nothing else lies between them. */
            const int in_place = !a->bounds && s.rows == 1 && to->channel == 1 && columns % TILE == 0;
            m.c_step = in_place ? to->column : m.c_step;
            for (int64_t p = 0; p < positions; p += most) {
                m.rows = smaller(most, positions - p);
                set_positions(a, &s, p, m.rows, filter);
                m.x = s.seen[0], m.c = in_place ? (int32_t *)s.y[0] : c;
                if (s.zeros)
                    find_totals(&s, m.rows);
                if (are_codes(a)) {
                    tiles_of_codes(&s, &m, a->bounds);
                    continue;
                }
                product_for(is_signed ? TILE : m.rows)(&m);
                if (s.zeros)
                    take_off(&s, &m);
                finish(a, &s, &m);
            }
        }
    }
    end_tiles(shape);
}

/* Products of two computed matrices, in two stages: panels of the second are packed, then used as weights. */
struct code_matrices {
    struct quantized_convolution product; /* without weights, sums and zeros */
    int8_t *work;                         /* panels of all matrices, their sums and zeros */
    const uint8_t *b, *b_zero;            /* NULL to use `zero` */
    int64_t matrices, inner, b_matrix, b_inner, b_column; /* steps in elements */
    int64_t change, zero;
    int64_t items; /* of the product */
};

static int32_t zero_of(const struct code_matrices *a)
{
    const uint8_t code = a->b_zero ? *a->b_zero : (uint8_t)a->zero;
    return a->change ? code - 128 : (int8_t)code;
}

static struct quantized_convolution packed_product(const struct code_matrices *a)
{
    struct quantized_convolution product = a->product;
    const int32_t *sums = (const int32_t *)(a->work + a->matrices * product.weights_step);
    product.weights = a->work;
    product.sums = sums;
    product.zeros = zero_of(a) ? sums + a->matrices * product.filter_step : NULL;
    return product;
}

/* Pack a panel of 32 columns of b, of which `count` are valid. */
static void pack_panel(const struct code_matrices *a, const uint8_t *b, int64_t count, int8_t *restrict to,
                       int32_t *restrict sums)
{
    const int64_t size = a->product.quads * QUAD;
    const uint8_t change = (uint8_t)a->change;
    memset(sums, 0, PANEL * sizeof *sums);
    for (int64_t k = 0; k < size; k += QUAD, to += PANEL_BYTES) {
        uint8_t four[QUAD][PANEL] = {{0}};
        for (int64_t i = 0; i < smaller(QUAD, a->inner - k); i++)
            for (int64_t j = 0; j < count; j++)
                four[i][j] = b[(k + i) * a->b_inner + j * a->b_column] ^ change;
        for (int64_t j = 0; j < PANEL; j++) {
            const uint32_t quad = four[0][j] | four[1][j] << 8 | four[2][j] << 16 | (uint32_t)four[3][j] << 24;
            memcpy(to + j * QUAD, &quad, QUAD);
            sums[j] += (int8_t)four[0][j] + (int8_t)four[1][j] + (int8_t)four[2][j] + (int8_t)four[3][j];
        }
    }
}

static int code_matrices_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    const struct code_matrices *a = arguments;
    const struct quantized_convolution product = packed_product(a);
    if (stage)
        return quantized_convolution(&product, first, last);
    const int64_t panels = CEIL_DIV(product.filters, PANEL), every = a->matrices * panels;
    const int32_t zero = zero_of(a);
    for (int64_t i = first * every / a->items; i < last * every / a->items; i++) {
        const int64_t matrix = i / panels, column = i % panels * PANEL;
        int32_t *sums = (int32_t *)product.sums + matrix * product.filter_step + column;
        pack_panel(a, a->b + matrix * a->b_matrix + column * a->b_column, smaller(PANEL, product.filters - column),
                   a->work + matrix * product.weights_step + column * product.quads * QUAD, sums);
        for (int64_t j = 0; j < PANEL; j++) {
            sums[j] -= (int32_t)a->inner * zero;
            sums[a->matrices * product.filter_step + j] = zero;
        }
    }
    return 0;
}

/* The input offset of each tap of a kernel row from that of the first tap; taps that pad a group of four repeat the
   last. `above`: the bytes of a row of the copy. */
typedef struct {
    int64_t above, quads, taps[MOST_TAPS];
} sight;

/* The kernel row that reads row t of the copy for row `row` of the result; -1 for none. */
INLINED int64_t kernel_row(const axis *u, int64_t row, int64_t t)
{
    const int64_t at = t - row * u->stride;
    if (at < 0 || at > (u->kernel - 1) * u->dilation)
        return -1;
    return u->dilation == 1 ? at : at % u->dilation ? -1 : at / u->dilation;
}

/* Four taps of adjacent channels, with those of a channel together. */
INLINED void four_taps(bytes *s, const uint8_t *x, const int64_t *taps)
{
    UNROLLED(j, 4)
        memcpy(s + j, x + taps[j], BYTES);
    const bytes low = V(unpacklo_epi8)(s[0], s[1]), high = V(unpackhi_epi8)(s[0], s[1]);
    const bytes low2 = V(unpacklo_epi8)(s[2], s[3]), high2 = V(unpackhi_epi8)(s[2], s[3]);
    s[0] = V(unpacklo_epi16)(low, low2), s[1] = V(unpackhi_epi16)(low, low2);
    s[2] = V(unpacklo_epi16)(high, high2), s[3] = V(unpackhi_epi16)(high, high2);
}

/* The codes of four vectors of sums, whose factors begin at `at`. */
INLINED void put_depthwise(const struct code_depthwise *a, const words *sums, int64_t at, uint8_t *codes)
{
    const scales u = {a->factors + at, a->offsets + at, CHUNK / 4, 4};
    const bytes packed = codes_of_vectors((const bytes *)sums, u, &u, a->bounds, 4, 0);
    memcpy(codes, &packed, BYTES);
}

/* The codes of a CHUNK of channels, whose weights begin at `at`, for `rows` rows, which are CHUNK apart. x: the copy
   of their input. */
#define DEPTHWISE(name, attribute)                                                                \
    attribute INLINED void name##_channels(const struct code_depthwise *a, const sight *seen,     \
                                           const uint8_t *x, int64_t at, uint8_t *codes,          \
                                           const int rows)                                        \
    {                                                                                             \
        const axis *u = a->rows;                                                                  \
        const int64_t tall = (rows - 1) * u->stride + (u->kernel - 1) * u->dilation + 1;          \
        for (int i = 0; i < CHUNK; i += BYTES) {                                                  \
            words sums[LINES * 4];                                                          \
            UNROLLED(j, rows * 4)                                                                 \
                memcpy(sums + j, a->terms + at + j % 4 * (CHUNK / 4) + i / 4, BYTES);             \
            for (int64_t t = 0; t < tall; t++)                                                    \
                for (int64_t q = 0; q < seen->quads; q++) {                                       \
                    bytes s[4];                                                                   \
                    four_taps(s, x + t * seen->above + i, seen->taps + 4 * q);                    \
                    UNROLLED(r, rows)                                                             \
                    {                                                                             \
                        const int64_t ky = kernel_row(u, r, t);                                   \
                        if (ky < 0)                                                               \
                            continue;                                                             \
                        const int8_t *w = a->weights + i +                                        \
                                          ((ky * seen->quads + q) * a->period + at) * QUAD;       \
                        UNROLLED(j, 4)                                                            \
                        {                                                                         \
                            bytes four;                                                           \
                            memcpy(&four, w + j * CHUNK, BYTES);                                  \
                            sums[4 * r + j] = name##_dot(sums[4 * r + j], s[j], four);            \
                        }                                                                         \
                    }                                                                             \
                }                                                                                 \
            UNROLLED(r, rows)                                                                     \
                put_depthwise(a, sums + 4 * r, at + i / 4, codes + r * CHUNK + i);                \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    attribute static void name##_depthwise(const struct code_depthwise *a, const sight *seen,     \
                                           const uint8_t *x, int64_t at, uint8_t *codes,          \
                                           int64_t rows)                                          \
    {                                                                                             \
        rows == LINES ? name##_channels(a, seen, x, at, codes, LINES)                             \
                      : name##_channels(a, seen, x, at, codes, 1);                                \
    }

#if !defined(__SSE4_1__)
DEPTHWISE(plain, )
#else
/* Without dot products of bytes, x86-64 multiplies int16 and adds up pairs. Taps are brought together and widened once
   for all rows of the result that read them, for as many kernel rows as fit, and weights once for all rows. */
enum { MOST_WIDE = 64 };
INLINED void wide_channels(const struct code_depthwise *a, const sight *seen, const uint8_t *x, int64_t at,
                           uint8_t *codes, const int rows)
{
    const axis *u = a->rows;
    const int64_t quads = seen->quads, fit = MOST_WIDE / quads - (rows - 1) * u->stride;
    const int64_t some = u->dilation == 1 ? fit : 1, step = u->stride * quads, w_step = a->period * QUAD;
    words wide[MOST_WIDE][4][2], sums[LINES][4];
    for (int i = 0; i < CHUNK; i += BYTES) {
        UNROLLED(j, rows * 4)
            memcpy(&sums[j / 4][j % 4], a->terms + at + j % 4 * (CHUNK / 4) + i / 4, BYTES);
        for (int64_t ky = 0; ky < u->kernel; ky += some) {
            const int64_t n = smaller(some, u->kernel - ky), tall = (rows - 1) * u->stride + n;
            const int8_t *of_row = a->weights + i + (ky * quads * a->period + at) * QUAD;
            for (int64_t t = 0; t < tall; t++)
                for (int64_t q = 0; q < quads; q++) {
                    bytes s[4];
                    four_taps(s, x + (ky * u->dilation + t) * seen->above + i, seen->taps + 4 * q);
                    UNROLLED(j, 4) {
                        wide[t * quads + q][j][0] = (words)(s[j] & V(set1_epi16)(255));
                        wide[t * quads + q][j][1] = (words)V(srli_epi16)(s[j], 8);
                    }
                }
            UNROLLED(j, 4) {
                const int8_t *w = of_row + j * CHUNK;
                for (int64_t e = 0; e < n * quads; e++, w += w_step) {
                    words even, odd;
                    widen_words(&even, &odd, w);
                    UNROLLED(r, rows)
                        sums[r][j] += (words)V(madd_epi16)((bytes)wide[r * step + e][j][0], (bytes)even) +
                                      (words)V(madd_epi16)((bytes)wide[r * step + e][j][1], (bytes)odd);
                }
            }
        }
        UNROLLED(r, rows)
            put_depthwise(a, sums[r], at + i / 4, codes + r * CHUNK + i);
    }
}

static void plain_depthwise(const struct code_depthwise *a, const sight *seen, const uint8_t *x, int64_t at,
                            uint8_t *codes, int64_t rows)
{
    if (rows == LINES && ((LINES - 1) * a->rows->stride + 1) * seen->quads <= MOST_WIDE) {
        wide_channels(a, seen, x, at, codes, LINES);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        wide_channels(a, seen, x + r * a->rows->stride * seen->above, at, codes + r * CHUNK, 1);
}
#endif
#if defined(VNNI)
DEPTHWISE(vnni, VNNI)
#endif
#if defined(DOTS)
DEPTHWISE(dots, DOTS)
#endif

/* Write `count` codes of positions of a row of the result, from element i of these on. */
static inline void put_channels(const struct code_depthwise *a, uint8_t *y, const uint8_t *codes, int64_t i,
                                int64_t count)
{
    if (a->y_steps->channel == 1 && a->y_steps->column == a->filters)
        copy_changed(y + i, codes, count, 0);
    else
        for (int64_t e = i; e < i + count; e++)
            y[e / a->filters * a->y_steps->column + e % a->filters * a->y_steps->channel] = codes[e - i];
}

ITEMS_OF(code_depthwise, code_depthwise)
{
    const axis *u = a->rows, *v = a->columns;
    const int64_t chunks = parts_of(v->count, a->chunk), blocks = parts_of(u->count, a->block), filters = a->filters;
    uint8_t copy[COPIED + CHUNK], codes[LINES * CHUNK];
    sight seen; /* taps past the last are not read */
    seen.quads = CEIL_DIV(a->columns_read, QUAD);
    const uint8_t change = (uint8_t)a->change;
    const source source = {a->x_steps, v->size, filters / a->multiplier, a->multiplier, v->stride,
                           change, (uint8_t)a->zero ^ change};
    memset(copy + COPIED, 0, CHUNK);
    for (int64_t item = begin; item < end; item++) {
        int64_t image = item;
        const int64_t column = digit_of(&image, chunks) * a->chunk, first = digit_of(&image, blocks) * a->block;
        const int64_t columns = smaller(a->chunk, v->count - column);
        const int64_t rows = smaller(a->block, u->count - first), length = columns * filters;
        const int64_t above = first * u->stride - u->begin;
        const int64_t tall = (rows - 1) * u->stride + (u->kernel - 1) * u->dilation + 1;
        seen.above = v->stride * (columns + a->reach) * filters;
        for (int64_t k = 0, kx = 0; k < seen.quads * QUAD; k++) {
            int64_t tap = kx * v->dilation;
            const int64_t phase = digit_of(&tap, v->stride);
            seen.taps[k] = (phase * (columns + a->reach) + tap) * filters;
            if (k + 1 < a->columns_read)
                kx = kx + 1 < v->kernel ? kx + 1 : 0;
        }
        for (int64_t r = above; r < above + tall; r++) {
            const uint8_t *x = a->x + image * a->x_steps->image + r * a->x_steps->row;
            copy_row(&source, r < 0 || r >= u->size ? NULL : x, column * v->stride - v->begin,
                     columns + a->reach, copy + (r - above) * seen.above);
        }
        for (int64_t r = 0, n; r < rows; r += n) {
            n = rows - r < LINES ? 1 : LINES;
            uint8_t *y = a->y + image * a->y_steps->image + (first + r) * a->y_steps->row +
                         column * a->y_steps->column;
            for (int64_t i = 0, at = 0; i < length; i += CHUNK, at += CHUNK) {
                at = at < a->period ? at : 0;
                WIDEST(_depthwise)(a, &seen, copy + r * u->stride * seen.above + i, at, codes, n);
                for (int64_t line = 0; line < n; line++)
                    put_channels(a, y + line * a->y_steps->row, codes + line * CHUNK, i,
                                 smaller(CHUNK, length - i));
            }
        }
    }
}

/* Quantization of real numbers over their own range, 0 included; items are images. */
struct dynamically_quantized {
    const float *x;
    uint8_t *y;
    float *scale;
    uint8_t *zero;
    int64_t count;
};

ITEMS_OF(dynamically_quantized, dynamically_quantized)
{
    for (int64_t i = begin; i < end; i++)
        a->zero[i] = (uint8_t)to_codes(a->y + i * a->count, a->x + i * a->count, a->count, a->scale + i);
}

KERNELS(quantized_convolution, KERNEL(quantized_convolution, quantized_convolution),
        STAGED_KERNEL(code_matrices, code_matrices, NULL, code_matrices_stage),
        KERNEL(code_depthwise, code_depthwise), KERNEL(dynamically_quantized, dynamically_quantized))
