/* TFLite's integer LSTM of 8-bit codes, bit-exact with ops/tflite/layers.py. The functions of gates are those of
   ops/common/integer_curves.py. An item is a row of the batch; some are computed together. Weights are packed in
   panels of integers.h, with uint8 codes (plus 128), which the initial sums correct for. */
// GCC options: -fno-thread-jumps
#include "integers.h"
#include "native.h"
#include "rescaling.h"

enum { MOST_ROWS = 8, PIECE = 64, PLACES = 7, ONE = 32767, ONE_2 = 8192 };

/* Weights for features, and for outputs: panels, initial sums of their columns, bytes of a row of codes (a multiple
   of 4), and quads of a tile. */
struct integer_lstm {
    const int8_t *x, *h;
    const int16_t *c;
    const int8_t *weights;
    const int32_t *start;
    int64_t size, deep;
    const int8_t *weights_of_outputs;
    const int32_t *start_of_outputs;
    int64_t size_of_outputs, deep_of_outputs;
    int8_t *y, *last;
    int16_t *cells;
    const int32_t *multipliers, *shifts; /* of gates i, f, g, o for x, and for outputs; of outputs */
    uint8_t *work;                       /* for each row: x, outputs, and sums of both */
    int64_t room, columns;               /* bytes of that; sums of one, a multiple of PANEL */
    int64_t steps, units, features, reverse, bits, clip, zero;
    int64_t x_step, x_row, y_step, y_row; /* in elements */
};

INLINED int32_t times(int32_t a, int32_t b)
{
    const int32_t x = (a * b + (1 << 14)) >> 15;
    return x < ONE ? x : ONE;
}

/* exp(x) for x <= 0 with `bits` integer bits, and 1 / ((1 + that) / 2) with two. */
INLINED int32_t quotient(int32_t x, int bits, const int32_t *places)
{
    static const int32_t powers[PLACES] = {25520, 19875, 12055, 4435, 600, 11, 0};
    const int32_t quarter = 1 << (13 - bits), part = (x & (quarter - 1)) - quarter, rest = part - x;
    const int32_t y = part * (1 << bits) + (1 << 12), square = times(y, y);
    const int32_t cube = times(square, y), fourth = times(square, square);
    const int32_t tail = shifted_right(times(shifted_right(fourth, 2) + cube, 10923) + square, 1);
    int32_t e = 28918 + times(y + tail, 28918);
    e = e < ONE ? e : ONE;
    UNROLLED(i, PLACES) e = rest & places[i] ? times(e, powers[i]) : e;
    e = bits > 5 && x < -(1 << (20 - bits)) ? 0 : e;
    e = x ? e : ONE;
    const int32_t half = (e + ONE + 1) >> 1;
    int32_t r = 23130 + times(half, -15420);
    UNROLLED(i, 3) r += bounded(times(r, ONE_2 - times(half, r)) * 4);
    return r;
}

static void set_places(int32_t *places, int bits)
{
    for (int i = 0; i < PLACES; i++)
        places[i] = i < bits + 2 ? 1 << (13 - bits + i) : 0;
}

static void integer_logistic(int32_t *x, int64_t count)
{
    int32_t places[PLACES];
    set_places(places, 3);
    for (int64_t i = 0; i < count; i++) {
        const int32_t positive = bounded(quotient(x[i] > 0 ? -x[i] : x[i], 3, places) * 2);
        x[i] = x[i] > 0 ? positive : x[i] ? ONE - positive : 1 << 14;
    }
}

static void integer_tanh(int32_t *x, int64_t count, int bits)
{
    int32_t places[PLACES];
    set_places(places, bits + 1);
    for (int64_t i = 0; i < count; i++) {
        const int32_t size = bounded((quotient(x[i] > 0 ? -x[i] : x[i], bits + 1, places) - ONE_2) * 4);
        x[i] = x[i] > 0 ? size : x[i] ? -size : 0;
    }
}

/* The next outputs and cells of some units, whose sums of gates are `units` apart. */
static void update(const struct integer_lstm *a, const int32_t *sums, const int32_t *of_outputs, int16_t *restrict c,
                   uint8_t *restrict h, int8_t *restrict y, int64_t count)
{
    int32_t gates[4][PIECE], cells[PIECE];
    const int bits = (int)a->bits;
    const int32_t limit = a->clip ? (int32_t)a->clip : 32768, *by = a->multipliers, *shifts = a->shifts;
    for (int g = 0; g < 4; g++)
        for (int64_t i = 0; i < count; i++) {
            const int32_t first = bounded(rescaled_integer(sums[g * a->units + i], by[g], shifts[g]));
            gates[g][i] = bounded(first + rescaled_integer(of_outputs[g * a->units + i], by[4 + g], shifts[4 + g]));
        }
    integer_logistic(gates[0], count);
    integer_logistic(gates[1], count);
    integer_tanh(gates[2], count, 3);
    integer_logistic(gates[3], count);
    for (int64_t i = 0; i < count; i++) {
        const int32_t added = shifted_right(gates[0][i] * gates[2][i], 15 + bits);
        const int32_t cell = bounded(shifted_right(gates[1][i] * c[i], 15) + added);
        c[i] = (int16_t)(cells[i] = WITHIN(cell, -limit, limit));
    }
    integer_tanh(cells, count, bits);
    for (int64_t i = 0; i < count; i++) {
        const int32_t code = rescaled_integer(gates[3][i] * cells[i], by[8], shifts[8]) + (int32_t)a->zero;
        y[i] = (int8_t)WITHIN(code, -128, 127);
        h[i] = (uint8_t)y[i] ^ 128;
    }
}

ITEMS_OF(integer_lstm, integer_lstm)
{
    const int64_t units = a->units, quads = a->size / QUAD, quads_of_outputs = a->size_of_outputs / QUAD;
    for (int64_t row = begin, n; row < end; row += n) {
        n = smaller(end - row, MOST_ROWS);
        uint8_t *x = a->work + row * a->room, *h = x + n * a->size;
        int32_t *sums = (int32_t *)(h + n * a->size_of_outputs), *of_outputs = sums + n * a->columns;
        multiplication of_x = {sums, a->columns, a->start, 0, x, a->size, ONE_PART, 1, quads, a->deep,
                               a->weights, a->size * PANEL, n, 4 * units, NULL, 0};
        multiplication of_h = {of_outputs, a->columns, a->start_of_outputs, 0, h, a->size_of_outputs, ONE_PART, 1,
                               quads_of_outputs, a->deep_of_outputs, a->weights_of_outputs,
                               a->size_of_outputs * PANEL, n, 4 * units, NULL, 0};
        memset(x, 0, n * (a->size + a->size_of_outputs));
        memcpy(a->cells + row * units, a->c + row * units, n * units * sizeof *a->c);
        for (int64_t r = 0; r < n; r++)
            flip(h + r * a->size_of_outputs, a->h + (row + r) * units, units);
        for (int64_t s = 0; s < a->steps; s++) {
            const int64_t step = a->reverse ? a->steps - 1 - s : s;
            for (int64_t r = 0; r < n; r++)
                flip(x + r * a->size, a->x + step * a->x_step + (row + r) * a->x_row, a->features);
            product_for(n)(&of_x);
            product_for(n)(&of_h);
            for (int64_t r = 0; r < n; r++)
                for (int64_t i = 0; i < units; i += PIECE)
                    update(a, sums + r * a->columns + i, of_outputs + r * a->columns + i,
                           a->cells + (row + r) * units + i, h + r * a->size_of_outputs + i,
                           a->y + step * a->y_step + (row + r) * a->y_row + i, smaller(PIECE, units - i));
        }
        for (int64_t r = 0; r < n; r++)
            flip(a->last + (row + r) * units, h + r * a->size_of_outputs, units);
    }
}

KERNELS(integer_lstm, KERNEL(integer_lstm, integer_lstm))
