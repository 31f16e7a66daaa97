/* AMX tiles: 16 rows of 64 bytes, which some processors multiply in one instruction. Files that use them compile a
   function for those processors by an attribute. */
#ifndef PENSTOCK_TILES_H
#define PENSTOCK_TILES_H

#include <stdint.h>
#include "native.h"

#if defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>

#define HAVE_TILES
enum { TILE_ROWS = 16, TILE_BYTES = 64, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

long syscall(long number, ...); /* declared by unistd.h only with GNU extensions */

/* Whether the processor has AMX tiles and the system lets this process use them. */
static inline int has_tiles(void)
{
    static int known; /* 1: yes, 2: no */
    if (!__atomic_load_n(&known, __ATOMIC_RELAXED)) {
        int usable = features & AMX && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
        __atomic_store_n(&known, usable ? 1 : 2, __ATOMIC_RELAXED);
    }
    return __atomic_load_n(&known, __ATOMIC_RELAXED) == 1;
}

/* The tile configuration, in the processor's layout. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Configure tiles 0 to 3 for sums of `upper` and `lower` rows, two of each, or four of the upper; 4 and 5 for as many
   rows of `bytes` of x; and 6 and 7 for `deep` rows of weights. */
__attribute__((target("amx-tile"))) static inline void shape_tiles(int64_t upper, int64_t lower, int64_t deep,
                                                                    int64_t bytes)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = i == 4 || i == 5 ? bytes : TILE_BYTES;
        shapes.rows[i] = i > 5 ? deep : lower && (i == 2 || i == 3 || i == 5) ? lower : upper;
    }
    __asm__ volatile("" ::"m"(shapes)); /* GCC assumes that only 8 bytes of it are read */
    _tile_loadconfig(&shapes);
}
#else
static inline int has_tiles(void)
{
    return 0;
}
#endif

#endif
