/* The widest vectors that the processor has, for types with the attribute vector_size, and constants that depend on
   them. */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif

/* Sums along a row have as many lanes as the widest vectors, in one or several vectors, whatever the instruction set:
   their order, and so their bits, are the same. */
enum { SUM_BYTES = 64, SUM_VECTORS = SUM_BYTES / VECTOR_BYTES };

/* Select a constant by vector size: 64, 32 or 16 bytes. */
#define BY_WIDTH(widest, wide, narrow) (VECTOR_BYTES == 64 ? widest : VECTOR_BYTES == 32 ? wide : narrow)

/* Indices for SHUFFLE of two vectors of n lanes, in lane l: to take the lanes of both whose index lacks a bit, or has
   it. Also as a list for all lanes, of 4 or of 8 bytes. */
#define WITHOUT_BIT(n, l, bit) ((l) & (bit) ? (n) + (l) - (bit) : (l))
#define WITH_BIT(n, l, bit) (((l) & (bit) ? (n) + (l) : (l) + (bit)) & (2 * (n) - 1))
#define TWO(of, n, l, bit) of(n, l, bit), of(n, l + 1, bit)
#define FOUR(of, n, l, bit) TWO(of, n, l, bit), TWO(of, n, l + 2, bit)
#define EIGHT(of, n, l, bit) FOUR(of, n, l, bit), FOUR(of, n, l + 4, bit)
#if defined(__AVX512F__)
#define LANES_32(of, bit) EIGHT(of, 16, 0, bit), EIGHT(of, 16, 8, bit)
#define LANES_64(of, bit) EIGHT(of, 8, 0, bit)
#elif defined(__AVX__)
#define LANES_32(of, bit) EIGHT(of, 8, 0, bit)
#define LANES_64(of, bit) FOUR(of, 4, 0, bit)
#else
#define LANES_32(of, bit) FOUR(of, 4, 0, bit)
#define LANES_64(of, bit) TWO(of, 2, 0, bit)
#endif

/* Reduce the first `count` lanes into lane 0 by repeated halving, with SUM_OF or LARGEST_OF. */
#define HALVE(lanes, count, JOIN)                                                                 \
    _Pragma("GCC unroll 4") for (int half = (count) / 2; half; half /= 2)                         \
        for (int l = 0; l < half; l++)                                                            \
            lanes[l] = JOIN(lanes[l], lanes[l + half])
#define SUM_OF(a, b) ((a) + (b))
#define LARGEST_OF(a, b) ((b) > (a) ? (b) : (a))

#endif
