/* Discrete Fourier transforms along an axis, of signals or of windowed frames of them. An item is a block of signals,
   which are transformed together: elements of a buffer are [point][signal].

   Stockham's algorithm: a pass of radix r turns transforms of n points into r times as many of n / r, and writes them
   in order, so that the next one reads and writes contiguous memory as well:

     y[q + s (r p + j)] = w^(j p) * sum over k of x[q + s (p + k n / r)] * e^(-2 pi i j k / r),   w = e^(-2 pi i / n)

   A real signal of even length is a complex one of half of it, whose transform holds those of its even and of its odd
   elements. Inverse transforms swap the real and the imaginary parts before and after. */
// Compiler options: -ffp-contract=fast
#include "families.h"

enum { POINTS = 2048, ROOM = POINTS + 16 }; /* times signals */

struct transforms {
    const void *x;
    void *y;
    const void *window; /* of each frame, or NULL */
    const void *circle; /* [length][2]: e^(-2 pi i k / length) */
    const int64_t *radices;
    int64_t n_radices;
    int64_t signals, together; /* all, and those of an item */
    int64_t inner;             /* elements behind the axis */
    int64_t frames, hop, pitch; /* frames of a signal, the elements between them, and those of a signal */
    int64_t length;            /* of the transform */
    int64_t given;             /* elements of a signal that are read; zeros follow */
    int64_t count;             /* of the result */
    int64_t complex, hermitian; /* the input has imaginary parts, and is half of a symmetric spectrum */
    int64_t real;               /* results are real */
    int64_t inverse, halves;    /* two real elements are one point */
};

#define TRANSFORMS(suffix, type)                                                                  \
    /* Add to each of `n` sums the product of an element and a factor, or set them. */            \
    static inline void add_##suffix(type *restrict yr, type *restrict yi, const type *restrict xr,\
                                    const type *restrict xi, const type *w, int64_t n, int first) \
    {                                                                                             \
        const type wr = w[0], wi = w[1];                                                          \
        if (first)                                                                                \
            for (int64_t q = 0; q < n; q++) {                                                     \
                yr[q] = xr[q] * wr - xi[q] * wi;                                                  \
                yi[q] = xr[q] * wi + xi[q] * wr;                                                  \
            }                                                                                     \
        else                                                                                      \
            for (int64_t q = 0; q < n; q++) {                                                     \
                yr[q] += xr[q] * wr - xi[q] * wi;                                                 \
                yi[q] += xr[q] * wi + xi[q] * wr;                                                 \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    static inline void pass_2_##suffix(const type *restrict xr, const type *restrict xi, type *restrict yr,\
                                       type *restrict yi, const type *circle, int64_t m, int64_t s, int64_t step)\
    {                                                                                             \
        for (int64_t p = 0; p < m; p++) {                                                         \
            const type *w = circle + 2 * step * p, wr = w[0], wi = w[1];                          \
            const int64_t from = p * s, apart = m * s, to = 2 * p * s;                            \
            for (int64_t q = 0; q < s; q++) {                                                     \
                const type ar = xr[from + q], ai = xi[from + q];                                  \
                const type br = xr[from + apart + q], bi = xi[from + apart + q];                  \
                const type dr = ar - br, di = ai - bi;                                            \
                yr[to + q] = ar + br, yi[to + q] = ai + bi;                                       \
                yr[to + s + q] = dr * wr - di * wi, yi[to + s + q] = dr * wi + di * wr;           \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void pass_4_##suffix(const type *restrict xr, const type *restrict xi, type *restrict yr,\
                                       type *restrict yi, const type *circle, int64_t m, int64_t s, int64_t step)\
    {                                                                                             \
        for (int64_t p = 0; p < m; p++) {                                                         \
            const type *u = circle + 2 * step * p, *v = circle + 4 * step * p, *w = circle + 6 * step * p;\
            const type ur = u[0], ui = u[1], vr = v[0], vi = v[1], wr = w[0], wi = w[1];          \
            const int64_t from = p * s, apart = m * s, to = 4 * p * s;                            \
            for (int64_t q = 0; q < s; q++) {                                                     \
                const type *r = xr + from + q, *i = xi + from + q;                                \
                const type sr = r[0] + r[2 * apart], si = i[0] + i[2 * apart];                    \
                const type dr = r[0] - r[2 * apart], di = i[0] - i[2 * apart];                    \
                const type tr = r[apart] + r[3 * apart], ti = i[apart] + i[3 * apart];            \
                const type er = r[apart] - r[3 * apart], ei = i[apart] - i[3 * apart];            \
                const type br = dr + ei, bi = di - er, cr = sr - tr, ci = si - ti, fr = dr - ei, fi = di + er;\
                yr[to + q] = sr + tr, yi[to + q] = si + ti;                                       \
                yr[to + s + q] = br * ur - bi * ui, yi[to + s + q] = br * ui + bi * ur;           \
                yr[to + 2 * s + q] = cr * vr - ci * vi, yi[to + 2 * s + q] = cr * vi + ci * vr;   \
                yr[to + 3 * s + q] = fr * wr - fi * wi, yi[to + 3 * s + q] = fr * wi + fi * wr;   \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Transform `lanes` signals; return which of the two buffers has the result. */              \
    static int passes_##suffix(const struct transforms *a, type re[2][ROOM], type im[2][ROOM], int64_t lanes)\
    {                                                                                             \
        int64_t n = a->halves ? a->length / 2 : a->length, s = lanes;                             \
        int own = 0;                                                                              \
        for (int64_t f = 0; f < a->n_radices; f++, own = !own) {                                  \
            const int64_t radix = a->radices[f], m = n / radix, step = a->length / n;             \
            const type *xr = re[own], *xi = im[own], *circle = a->circle;                         \
            type *yr = re[!own], *yi = im[!own];                                                  \
            if (radix == 4)                                                                       \
                pass_4_##suffix(xr, xi, yr, yi, circle, m, s, step);                              \
            else if (radix == 2)                                                                  \
                pass_2_##suffix(xr, xi, yr, yi, circle, m, s, step);                              \
            else                                                                                  \
                for (int64_t p = 0; p < m; p++)                                                   \
                    for (int64_t j = 0; j < radix; j++)                                           \
                        for (int64_t k = 0; k < radix; k++) {                                     \
                            const int64_t from = s * (p + k * m), to = s * (radix * p + j);       \
                            const int64_t turn = step * j * (p + k * m) % a->length;              \
                            add_##suffix(yr + to, yi + to, xr + from, xi + from, circle + 2 * turn, s, k == 0);\
                        }                                                                         \
            n = m;                                                                                \
            s *= radix;                                                                           \
        }                                                                                         \
        return own;                                                                               \
    }                                                                                             \
                                                                                                  \
    /* Element t of a half of a symmetric spectrum. */                                            \
    INLINED void mirrored_##suffix(const struct transforms *a, const type *x, int64_t t, type *re, type *im)\
    {                                                                                             \
        const int mirrored = t > a->length / 2;                                                   \
        const int64_t at = mirrored ? a->length - t : t;                                          \
        const type *own = x + at * a->inner * (a->complex + 1);                                   \
        *re = at < a->given ? own[0] : 0;                                                         \
        *im = at < a->given && a->complex && t && 2 * t != a->length ? own[1] : 0;                \
        if (mirrored)                                                                             \
            *im = -*im;                                                                           \
    }                                                                                             \
                                                                                                  \
    /* Read `n` of `lanes` signals, which are symmetric spectra, into buffers. */                 \
    static void read_spectra_##suffix(const struct transforms *a, const type *x, type *re, type *im, int64_t n,\
                                      int64_t lanes)                                              \
    {                                                                                             \
        const int64_t points = a->halves ? a->length / 2 : a->length;                             \
        for (int64_t t = 0; t < points; t++, re += lanes, im += lanes)                            \
            for (int64_t q = 0; q < n; q++) {                                                     \
                const type *own = x + q * (a->complex + 1), *w = (const type *)a->circle + 2 * t; \
                type r, i, other_r, other_i;                                                      \
                mirrored_##suffix(a, own, t, &r, &i);                                             \
                if (a->halves) {                                                                  \
                    mirrored_##suffix(a, own, points - t, &other_r, &other_i);                    \
                    const type dr = r - other_r, di = i + other_i;                                \
                    const type odd_r = dr * w[0] + di * w[1], odd_i = di * w[0] - dr * w[1];      \
                    r += other_r - odd_i;                                                         \
                    i += odd_r - other_i;                                                         \
                }                                                                                 \
                re[q] = r, im[q] = i;                                                             \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    /* Read `n` of `lanes` signals, which are `step` elements from point to point, into buffers. */\
    INLINED void read_##suffix(const struct transforms *a, const type *x, type *re, type *im, int64_t n, int64_t lanes,\
                               int64_t step)                                                      \
    {                                                                                             \
        const int64_t points = a->halves ? a->length / 2 : a->length;                             \
        const int64_t given = smaller(a->halves ? a->given / 2 : a->given, points);               \
        const type *window = a->window;                                                           \
        int64_t t = 0;                                                                            \
        if (a->complex)                                                                           \
            for (; t < given; t++)                                                                \
                for (int64_t q = 0; q < n; q++) {                                                 \
                    const type *own = x + 2 * (t * step + q), share = window ? window[t] : 1;     \
                    re[t * lanes + q] = own[0] * share, im[t * lanes + q] = own[1] * share;       \
                }                                                                                 \
        else if (a->halves)                                                                       \
            for (; t < given; t++)                                                                \
                for (int64_t q = 0; q < n; q++) {                                                 \
                    const type *own = x + 2 * t * step + q;                                       \
                    re[t * lanes + q] = own[0] * (window ? window[2 * t] : 1);                    \
                    im[t * lanes + q] = own[step] * (window ? window[2 * t + 1] : 1);             \
                }                                                                                 \
        else                                                                                      \
            for (; t < given; t++)                                                                \
                for (int64_t q = 0; q < n; q++)                                                   \
                    re[t * lanes + q] = x[t * step + q] * (window ? window[t] : 1), im[t * lanes + q] = 0;\
        for (; t < points; t++)                                                                   \
            for (int64_t q = 0; q < n; q++)                                                       \
                re[t * lanes + q] = im[t * lanes + q] = 0;                                        \
        if (a->halves && a->given % 2 && given < points)                                          \
            for (int64_t q = 0; q < n; q++)                                                       \
                re[given * lanes + q] = x[2 * given * step + q] * (window ? window[2 * given] : 1);\
    }                                                                                             \
                                                                                                  \
    /* Turn the transforms of halves of `lanes` real signals into those of the signals. */        \
    static void join_##suffix(const struct transforms *a, const type *restrict xr, const type *restrict xi,\
                              type *restrict yr, type *restrict yi, int64_t lanes)                \
    {                                                                                             \
        const int64_t points = a->length / 2;                                                     \
        for (int64_t k = 0; k <= points; k++, yr += lanes, yi += lanes) {                         \
            const int64_t at = k < points ? k * lanes : 0, other = k ? (points - k) * lanes : 0;  \
            const type *w = (const type *)a->circle + 2 * k, wr = w[0], wi = w[1];                \
            for (int64_t q = 0; q < lanes; q++) {                                                 \
                const type even_r = xr[at + q] + xr[other + q], even_i = xi[at + q] - xi[other + q];\
                const type odd_r = xi[at + q] + xi[other + q], odd_i = xr[other + q] - xr[at + q];\
                yr[q] = (even_r + odd_r * wr - odd_i * wi) / 2;                                   \
                yi[q] = (even_i + odd_r * wi + odd_i * wr) / 2;                                   \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Write `n` of `lanes` signals, which are `step` elements from point to point. */            \
    INLINED void write_##suffix(const struct transforms *a, type *y, const type *re, const type *im, int64_t n,\
                                int64_t lanes, int64_t step)                                      \
    {                                                                                             \
        const type scale = a->inverse ? (type)1 / a->length : 1;                                  \
        const int64_t joined = a->halves && !a->hermitian;                                        \
        if (a->real) {                                                                            \
            for (int64_t k = 0; k < a->count; k++)                                                \
                for (int64_t q = 0; q < n; q++) {                                                 \
                    const type *from = a->halves && k % 2 ? im : re;                              \
                    y[k * step + q] = from[(a->halves ? k / 2 : k) * lanes + q] * scale;          \
                }                                                                                 \
            return;                                                                               \
        }                                                                                         \
        const int64_t known = joined ? smaller(a->count, a->length / 2 + 1) : a->count;           \
        for (int64_t k = 0; k < known; k++)                                                       \
            for (int64_t q = 0; q < n; q++) {                                                     \
                type *to = y + 2 * (k * step + q);                                                \
                to[0] = re[k * lanes + q] * scale, to[1] = im[k * lanes + q] * scale;             \
            }                                                                                     \
        for (int64_t k = known; k < a->count; k++)                                                \
            for (int64_t q = 0; q < n; q++) {                                                     \
                const int64_t at = (a->length - k) * lanes + q;                                   \
                type *to = y + 2 * (k * step + q);                                                \
                to[0] = re[at], to[1] = -im[at];                                                  \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    ITEMS_OF(transforms_##suffix, transforms)                                                     \
    {                                                                                             \
        _Alignas(64) type re[2][ROOM], im[2][ROOM];                                               \
        const int swap = a->inverse != 0, joined = a->halves && !a->hermitian;                    \
        for (int64_t item = begin; item < end; item++) {                                          \
            const int64_t low = item * a->together, lanes = smaller(a->together, a->signals - low);\
            /* Runs of signals that are neighbours in memory. */                                  \
            for (int64_t lane = 0, n; lane < lanes; lane += n) {                                  \
                const int64_t outer = (low + lane) / a->inner, at = (low + lane) % a->inner;      \
                const int64_t from = outer / a->frames * a->pitch + outer % a->frames * a->hop + at;\
                const type *x = (const type *)a->x + from * (a->complex + 1);                     \
                type *first = (swap ? im : re)[0] + lane, *second = (swap ? re : im)[0] + lane;   \
                n = smaller(a->inner - at, lanes - lane);                                         \
                if (a->hermitian)                                                                 \
                    read_spectra_##suffix(a, x, first, second, n, lanes);                         \
                else if (a->inner == 1)                                                           \
                    read_##suffix(a, x, first, second, 1, lanes, 1);                              \
                else                                                                              \
                    read_##suffix(a, x, first, second, n, lanes, a->inner);                       \
            }                                                                                     \
            int own = passes_##suffix(a, re, im, lanes);                                          \
            if (joined) {                                                                         \
                join_##suffix(a, re[own], im[own], re[!own], im[!own], lanes);                    \
                own = !own;                                                                       \
            }                                                                                     \
            for (int64_t lane = 0, n; lane < lanes; lane += n) {                                  \
                const int64_t outer = (low + lane) / a->inner, at = (low + lane) % a->inner;      \
                const int64_t to = outer * a->count * a->inner + at;                              \
                type *y = (type *)a->y + to * (a->real ? 1 : 2);                                  \
                const type *first = (swap ? im : re)[own] + lane, *second = (swap ? re : im)[own] + lane;\
                n = smaller(a->inner - at, lanes - lane);                                         \
                if (a->inner == 1)                                                                \
                    write_##suffix(a, y, first, second, 1, lanes, 1);                             \
                else                                                                              \
                    write_##suffix(a, y, first, second, n, lanes, a->inner);                      \
            }                                                                                     \
        }                                                                                         \
    }
TRANSFORMS(float32, float)
TRANSFORMS(float64, double)

KERNELS(transforms, KERNELS_OF_FLOATS(transforms, transforms))
