/* RNN, GRU and LSTM in all forms. An item is a direction for some rows of the batch, from the first step to the last.
   Threads can share an item: its stages are the steps, interleaved with the products of X for the next steps, and its
   pieces are blocks of units (gates.h). A GRU whose reset gate acts on the state has two stages per step.

   Buffers hold the gates one after the other in ONNX's order, each padded to whole blocks, so that all loops over
   units are over whole blocks, and results are bitwise the same however blocks are divided. The weights of such a GRU
   are in two parts: those of the update and reset gates, and those of the new state.

   With weights of 8-bit codes, in the panels of integers.h, an LSTM quantizes X, and at each step the states of the
   whole batch, over their own range: in a stage before the others, and in one stage of each step, whose first piece
   does all. Blocks then have units for whole panels. */

// Compiler options: -ffp-contract=fast
// GCC options: -O2 -ftree-vectorize -fvect-cost-model=dynamic -fno-thread-jumps
#include "gates.h"
#include "math32.h"
#include "native.h"
#include "integers.h"

enum { RNN, GRU, LSTM };
enum { TANH, SIGMOID, RELU, AFFINE, LEAKY, THRESHOLDED, SCALED_TANH, HARD_SIGMOID, ELU, SOFTSIGN,
       SOFTPLUS };

typedef struct {
    int64_t kind;
    double alpha, beta;
} activation;

/* Quantized weights by direction: sums, zero points and scales are per column, as in quantized_convolution.c. */
typedef struct {
    const int8_t *panels; /* NULL if the weights are real numbers */
    const int32_t *sums, *zeros;
    const float *scales;
} code_matrix;

struct recurrent {
    const float *x, *h0, *c0;
    const int32_t *lengths;
    const uint8_t *live; /* of steps and rows, as share; NULL: all */
    const float *share;
    code_matrix w_codes, r_codes;
    const float *w, *r, *r_new; /* by direction */
    const float *bias, *new_bias, *peepholes;
    const activation *activations; /* three for each direction */
    float *y, *y_h, *y_c;
    char *workspace; /* item_bytes for each item */
    int64_t cell, directions, first_reverse, batch_first, linear, input_forget;
    int64_t steps, batch, input, hidden, padded; /* padded: units in whole blocks */
    int64_t gates;                               /* of the cell */
    int64_t rows, chunk, item_bytes;             /* of the batch, and steps of X at a time */
    double clip, cell_clip;                      /* 0: none */
    int64_t places[4];                           /* of the gates in ready products */
};

#define EACH(expression)                                                                          \
    for (int64_t i = 0; i < n; i++)                                                               \
    x[i] = expression

static void activate(const activation *f, float *restrict x, int64_t n)
{
    float alpha = (float)f->alpha, beta = (float)f->beta;
    switch (f->kind) {
    case TANH: EACH(tanh32(x[i])); break;
    case SIGMOID: EACH(sigmoid32(x[i])); break;
    case RELU: EACH(x[i] < 0 ? 0 : x[i]); break;
    case AFFINE: EACH(x[i] * alpha + beta); break;
    case LEAKY: EACH(x[i] < 0 ? alpha * x[i] : x[i]); break;
    case THRESHOLDED: EACH(x[i] < alpha ? 0 : x[i]); break;
    case SCALED_TANH: EACH(alpha * tanh32(beta * x[i])); break;
    case HARD_SIGMOID: EACH(fminf(fmaxf(alpha * x[i] + beta, 0), 1)); break;
    case ELU: EACH(x[i] < 0 ? alpha * expm132(x[i]) : x[i]); break;
    case SOFTSIGN: EACH(x[i] / (1 + fabsf(x[i]))); break;
    case SOFTPLUS: EACH((x[i] > 0 ? x[i] : 0) + log1p32(exp32(-fabsf(x[i])))); break;
    }
}

static void clip(float *restrict x, int64_t n, double bound)
{
    float high = (float)bound;
    if (bound != 0)
        EACH(x[i] < -high ? -high : x[i] > high ? high : x[i]);
}

/* `n` units of a gate x: clipped and activated, for an LSTM with the peepholes p of the cell state c. */
static void gate(const struct recurrent *a, const activation *f, float *restrict x,
                 const float *restrict p, const float *restrict c, int64_t n)
{
    if (p)
        EACH(x[i] + p[i] * c[i]);
    clip(x, n, a->clip);
    activate(f, x, n);
}

/* `n` units of a row, at `from` in each gate of g: the next cell state in place, and the next state. */
static void lstm_units(const struct recurrent *a, int64_t d, float *g, float *restrict c,
                       float *restrict h, int64_t from, int64_t n)
{
    int64_t next = a->padded;
    const activation *f = a->activations + 3 * d;
    const float *p = a->peepholes ? a->peepholes + d * 3 * next + from : NULL;
    float *restrict in = g + from, *restrict out = in + next, *restrict forget = out + next,
                    *restrict new = forget + next;
    c += from;
    h += from;
    gate(a, f, in, p, c, n);
    if (a->input_forget)
        for (int64_t i = 0; i < n; i++)
            forget[i] = 1 - in[i];
    else
        gate(a, f, forget, p ? p + 2 * next : NULL, c, n);
    gate(a, f + 1, new, NULL, c, n);
    for (int64_t i = 0; i < n; i++)
        c[i] = forget[i] * c[i] + in[i] * new[i];
    clip(c, n, a->cell_clip);
    gate(a, f, out, p ? p + next : NULL, c, n);
    memcpy(h, c, n * sizeof *h);
    activate(f + 2, h, n);
    for (int64_t i = 0; i < n; i++)
        h[i] *= out[i];
}

/* `n` units of a GRU's next state, from activated gates and candidate values before their activation. */
static void gru_units(const struct recurrent *a, int64_t d, const float *restrict update,
                      float *restrict new, const float *restrict h, float *restrict next, int64_t n)
{
    gate(a, a->activations + 3 * d + 1, new, NULL, NULL, n);
    for (int64_t i = 0; i < n; i++)
        next[i] = new[i] + update[i] * (h[i] - new[i]);
}

typedef struct {
    float scale;
    int32_t zero;
} code_range;

/* Rows quantized over their own range, padded with zeros to whole tiles. */
typedef struct {
    uint8_t *codes;
    int64_t width, step; /* of a row, and bytes between rows */
    code_range *range;
} code_rows;

enum { PANEL_UNITS = PANEL / UNITS, RANGE_BYTES = 64 }; /* blocks of a panel */

static int64_t code_step(int64_t width)
{
    return (width + 63) / 64 * 64;
}

static void fill_codes(code_rows *q, const float *x, int64_t rows)
{
    q->range->zero = to_codes(q->codes, x, rows * q->width, &q->range->scale);
    for (int64_t r = rows; r-- > 0 && q->step > q->width;) {
        memmove(q->codes + r * q->step, q->codes + r * q->width, q->width);
        memset(q->codes + r * q->step + q->width, 0, q->step - q->width);
    }
}

/* Add the product of `rows` rows from `first` on, `apart` rows apart, to all gates of the blocks `low` up to `high`;
   rows of gates are `gates_step` apart. */
static void add_code_product(const struct recurrent *a, const code_matrix *m, int64_t d, const code_rows *q,
                             int64_t first, int64_t apart, int64_t rows, float *gates, int64_t gates_step,
                             int64_t low, int64_t high)
{
    enum { MOST = 64 };
    int64_t columns = a->gates * a->padded, panels = columns / PANEL, some_panels = (high - low) / PANEL_UNITS;
    int64_t quads = CEIL_DIV(q->width, QUAD);
    const int8_t *weights = m->panels + d * (panels * quads * PANEL_BYTES + TAIL);
    int32_t c[MOST * GROUP * PANEL], sums[MOST];
    for (int64_t row = 0; row < rows; row += MOST) {
        int64_t some = rows - row < MOST ? rows - row : MOST;
        const uint8_t *x = q->codes + (first + row * apart) * q->step;
        for (int64_t r = 0; r < some; r++)
            sums[r] = sum_of(x + r * apart * q->step, ONE_PART, 1, q->width);
        for (int64_t i = 0, group; i < a->gates * some_panels; i += group) {
            int64_t p = i / some_panels * (a->padded / PANEL) + low / PANEL_UNITS + i % some_panels;
            int64_t at = d * columns + p * PANEL;
            group = smaller(GROUP, some_panels - i % some_panels);
            memset(c, 0, some * GROUP * PANEL * sizeof *c);
            product_for(some)(&(multiplication){
                c, GROUP * PANEL, c, GROUP * PANEL, x, apart * q->step, ONE_PART, 1, quads, TILE,
                weights + p * quads * PANEL_BYTES, quads * PANEL_BYTES, some, group * PANEL, NULL, 0});
            for (int64_t r = 0; r < some; r++) {
                const int32_t *restrict from = c + r * GROUP * PANEL;
                const int32_t *restrict column_sums = m->sums + at, *restrict zeros = m->zeros + at;
                const float *restrict scales = m->scales + at;
                float *restrict to = gates + (row + r) * gates_step + p * PANEL;
                for (int64_t j = 0; j < group * PANEL; j++) {
                    int32_t sum = from[j] - q->range->zero * column_sums[j] - sums[r] * zeros[j];
                    to[j] += (float)sum * (scales[j] * q->range->scale);
                }
            }
        }
    }
}

typedef struct {
    int64_t d, first, rows, reverse; /* direction, and rows of the batch */
    int64_t end;                     /* of the longest of its sequences */
    float *h[2], *c;                 /* h: states before and after a step, alternating */
    float *inputs, *product;
    code_rows x_codes, h_codes;
} item;

static float *taken(char **from, int64_t count)
{
    float *start = (float *)*from;
    *from += (count * sizeof(float) + 63) / 64 * 64;
    return start;
}

static item item_of(const struct recurrent *a, int64_t number)
{
    int64_t blocks = CEIL_DIV(a->batch, a->rows);
    item m = {.d = number / blocks, .first = number % blocks * a->rows};
    int64_t rest = a->batch - m.first, width = a->gates * a->padded;
    char *at = a->workspace + number * a->item_bytes;
    m.rows = rest < a->rows ? rest : a->rows;
    m.reverse = m.d ? 1 : a->first_reverse;
    m.end = a->lengths ? 0 : a->steps;
    for (int64_t b = 0; a->lengths && b < m.rows; b++)
        if (m.end < a->lengths[m.first + b])
            m.end = a->lengths[m.first + b];
    m.end = smaller(m.end, a->steps); /* another thread may have changed lengths after they were checked */
    m.h[0] = taken(&at, a->rows * a->padded);
    m.h[1] = taken(&at, a->rows * a->padded);
    m.c = taken(&at, a->rows * a->padded);
    m.inputs = taken(&at, a->chunk * a->rows * width);
    m.product = taken(&at, a->rows * width);
    if (a->w_codes.panels) {
        code_range *ranges = (code_range *)at;
        at += RANGE_BYTES;
        m.x_codes = (code_rows){(uint8_t *)at, a->input, code_step(a->input), ranges};
        at += a->steps * a->batch * m.x_codes.step;
        m.h_codes = (code_rows){(uint8_t *)at, a->hidden, code_step(a->hidden), ranges + 1};
    }
    return m;
}

/* The offset of the entry of step t (or of a state, with steps = 1), row b and direction d. */
static int64_t place(const struct recurrent *a, int64_t steps, int64_t t, int64_t d, int64_t b)
{
    int64_t row = a->batch_first ? (b * steps + t) * a->directions + d
                                 : (t * a->directions + d) * a->batch + b;
    return row * a->hidden;
}

/* Units from `from` up to `to`, without padding. */
static int64_t real_units(const struct recurrent *a, int64_t from, int64_t to)
{
    return (to < a->hidden ? to : a->hidden) - from;
}

/* The states before the first step, padded with zeros. */
static void set_states(const struct recurrent *a, const item *m, int64_t from, int64_t to)
{
    int64_t real = real_units(a, from, to);
    for (int64_t b = 0; b < m->rows; b++) {
        int64_t given = place(a, 1, 0, m->d, m->first + b) + from;
        const float *sources[] = {a->h0, a->c0};
        float *targets[] = {m->h[0], m->c};
        for (int i = 0; i < 2; i++) {
            float *target = targets[i] + b * a->padded + from;
            memset(target, 0, (to - from) * sizeof(float));
            if (sources[i])
                memcpy(target, sources[i] + given, real * sizeof(float));
        }
    }
}

/* The gates of step s from ready products and the bias, for the units of some blocks. */
static void add_products(const struct recurrent *a, const item *m, int64_t s, float *gates, int64_t first,
                         int64_t last)
{
    int64_t from = first * UNITS, n = (last - first) * UNITS, real = real_units(a, from, from + n);
    for (int64_t b = 0; b < m->rows; b++)
        for (int64_t g = 0; g < a->gates; g++) {
            int64_t row = (s * a->batch + m->first + b) * a->gates + a->places[g];
            const float *restrict x = a->x + row * a->hidden + from;
            const float *restrict bias = a->bias + g * a->padded + from;
            float *restrict to = gates + (b * a->gates + g) * a->padded + from;
            for (int64_t i = 0; i < real; i++)
                to[i] = bias[i] + x[i];
            for (int64_t i = real; i < n; i++)
                to[i] = bias[i];
        }
}

/* The gates of `count` steps from X and the bias, [step][row]: for all steps of a row at once, or for all rows of a
   step, whichever are more. */
static void add_inputs(const struct recurrent *a, const item *m, int64_t s, int64_t count, int64_t first,
                       int64_t last)
{
    enum { TOGETHER = 4 };
    int64_t width = a->gates * a->padded, rows = m->rows, of_row = count > rows;
    int64_t start = m->reverse ? a->steps - 1 - s : s, x_step = a->batch_first ? 1 : a->batch;
    int64_t x_row = a->batch_first ? a->steps : 1;
    int64_t at = start * x_step + m->first * x_row;
    x_step = m->reverse ? -x_step : x_step;
    int64_t one = of_row ? x_row : x_step, next = of_row ? x_step : x_row;
    int64_t to_one = of_row ? width : rows * width, to_next = of_row ? rows * width : width;
    int64_t together = of_row ? count : rows;
    if (rows == a->batch && !a->batch_first && !m->reverse) { /* the steps are contiguous */
        of_row = 1, one = 0, next = 1, to_one = 0, to_next = width;
        together = count * rows, rows = 1;
    }
    if (!a->w && !a->w_codes.panels) {
        for (int64_t i = 0; i < count; i++)
            add_products(a, m, s + i, m->inputs + i * m->rows * width, first, last);
        return;
    }
    for (int64_t i = 0; i < count * m->rows; i++)
        for (int64_t g = 0; g < a->gates; g++) {
            int64_t unit = g * a->padded + first * UNITS;
            memcpy(m->inputs + i * width + unit, a->bias + m->d * width + unit,
                   (last - first) * UNITS * sizeof(float));
        }
    for (int64_t block = first; block < last; block += a->w_codes.panels ? last : TOGETHER)
        for (int64_t i = 0; i < (of_row ? rows : count); i++) {
            int64_t row = at + i * one, end = last - block < TOGETHER ? last : block + TOGETHER;
            float *to = m->inputs + i * to_one;
            if (a->w_codes.panels)
                add_code_product(a, &a->w_codes, m->d, &m->x_codes, row, next, together, to, to_next, first, last);
            else
                add_gates(to, to_next, a->padded, a->x + row * a->input, next * a->input,
                          a->w + m->d * a->input * width, a->input, together, a->gates, block, end, 0);
        }
}

/* Complete the gates of an LSTM or RNN, which have the part of X only, by the part of the states. */
static void add_states(const struct recurrent *a, item *m, const float *h, float *gates, int64_t first,
                       int64_t last, int down)
{
    int64_t width = a->gates * a->padded;
    if (!a->r_codes.panels) {
        add_gates(gates, width, a->padded, h, a->padded, a->r + m->d * a->hidden * width, a->hidden,
                  m->rows, a->gates, first, last, down);
        return;
    }
    add_code_product(a, &a->r_codes, m->d, &m->h_codes, 0, 1, m->rows, gates, width, first, last);
}

/* The states before a step, quantized. */
static void fill_state_codes(const struct recurrent *a, item *m, const float *h)
{
    for (int64_t b = 0; b < m->rows; b++)
        memcpy(m->product + b * a->hidden, h + b * a->padded, a->hidden * sizeof(float));
    fill_codes(&m->h_codes, m->product, m->rows);
}

/* The gates of a GRU; if its reset gate acts on the product, also the candidate values before their activation, and
   else the states after the reset gate. */
static void gru_gates(const struct recurrent *a, const item *m, const float *h, float *inputs,
                      int64_t first, int64_t last, int down)
{
    int64_t next = a->padded, width = 3 * next, from = first * UNITS, n = (last - first) * UNITS;
    const activation *f = a->activations + 3 * m->d;
    float *gates = a->linear ? m->product : inputs;
    for (int64_t b = 0; a->linear && b < m->rows; b++) {
        float *to = gates + b * width + from;
        for (int64_t g = 0; g < 2; g++)
            memcpy(to + g * next, inputs + b * width + g * next + from, n * sizeof(float));
        if (a->new_bias)
            memcpy(to + 2 * next, a->new_bias + m->d * next + from, n * sizeof(float));
        else
            memset(to + 2 * next, 0, n * sizeof(float));
    }
    int64_t together = a->linear ? 3 : 2;
    add_gates(gates, width, next, h, next, a->r + m->d * a->hidden * together * next, a->hidden, m->rows,
              together, first, last, down);
    for (int64_t b = 0; b < m->rows; b++) {
        float *restrict update = gates + b * width + from, *restrict reset = update + next;
        gate(a, f, update, NULL, NULL, n);
        gate(a, f, reset, NULL, NULL, n);
        const float *restrict state = h + b * next + from, *restrict x = inputs + b * width + 2 * next + from;
        float *restrict new = update + 2 * next, *restrict left = m->product + b * next + from;
        if (a->linear)
            for (int64_t i = 0; i < n; i++)
                new[i] = x[i] + reset[i] * new[i];
        else
            for (int64_t i = 0; i < n; i++)
                left[i] = reset[i] * state[i];
    }
}

static void blend(float *restrict new, const float *restrict old, float share, int64_t n)
{
    float rest = 1 - share;
    for (int64_t i = 0; i < n; i++)
        new[i] = share * new[i] + rest * old[i];
}

/* Step s of blocks of units: from `inputs`, the gates with the part of X only, to the next states. */
static void finish_step(const struct recurrent *a, item *m, float *inputs, int64_t s, int64_t first,
                        int64_t last, int down)
{
    int64_t next = a->padded, width = a->gates * next, from = first * UNITS, n = (last - first) * UNITS;
    int64_t t = m->reverse ? a->steps - 1 - s : s, real = real_units(a, from, from + n);
    float *before = m->h[s % 2], *after = m->h[1 - s % 2];
    if (t >= m->end)
        ; /* all states stay */
    else if (a->cell != GRU)
        add_states(a, m, before, inputs, first, last, down);
    else if (a->linear)
        gru_gates(a, m, before, inputs, first, last, down);
    else
        add_gates(inputs + 2 * next, width, next, m->product, next, a->r_new + m->d * a->hidden * next,
                  a->hidden, m->rows, 1, first, last, down);
    for (int64_t b = 0; b < m->rows; b++) {
        int64_t at = t * a->batch + m->first + b;
        int live = a->lengths ? t < a->lengths[m->first + b] : !a->live || a->live[at];
        float *gates = (a->cell == GRU && a->linear ? m->product : inputs) + b * width;
        const float *h = before + b * next + from;
        float *to = after + b * next + from, *c = m->c + b * next, *old = m->product + b * next + from;
        if (a->share && a->cell == LSTM)
            memcpy(old, c + from, n * sizeof(float));
        if (!live)
            memcpy(to, h, n * sizeof(float));
        else if (a->cell == LSTM)
            lstm_units(a, m->d, gates, c, to - from, from, n);
        else if (a->cell == GRU)
            gru_units(a, m->d, gates + from, gates + 2 * next + from, h, to, n);
        else {
            memcpy(to, gates + from, n * sizeof(float));
            gate(a, a->activations + 3 * m->d, to, NULL, NULL, n);
        }
        if (a->share) {
            blend(to, h, a->share[at], n);
            if (a->cell == LSTM)
                blend(c + from, old, a->share[at], n);
        }
        if (a->y) {
            float *y = a->y + place(a, a->steps, t, m->d, m->first + b) + from;
            if (live || a->live)
                memcpy(y, to, real * sizeof(float));
            else
                memset(y, 0, real * sizeof(float));
        }
        int64_t end = place(a, 1, 0, m->d, m->first + b) + from;
        if (s + 1 == a->steps && a->y_h)
            memcpy(a->y_h + end, to, real * sizeof(float));
        if (s + 1 == a->steps && a->y_c)
            memcpy(a->y_c + end, c + from, real * sizeof(float));
    }
}

/* Stages of a step; for those of an item, see recurrent.py. */
static int64_t stages_of_step(const struct recurrent *a)
{
    return a->w_codes.panels || (a->cell == GRU && !a->linear) ? 2 : 1;
}

/* A stage of an item, for blocks of units. */
static void run_stage(const struct recurrent *a, item *m, int64_t stage, int64_t first, int64_t last, int down)
{
    int64_t each = stages_of_step(a), of_chunk = 1 + a->chunk * each;
    if (a->w_codes.panels && !stage--) {
        if (!first)
            fill_codes(&m->x_codes, a->x, a->steps * a->batch);
        return;
    }
    int64_t s = stage / of_chunk * a->chunk, within = stage % of_chunk - 1;
    if (within < 0) {
        if (!s)
            set_states(a, m, first * UNITS, last * UNITS);
        /* Sequences end before the last steps, which come first in reverse. */
        int64_t end = m->reverse ? a->steps : m->end, count = end - s < a->chunk ? end - s : a->chunk;
        if (count > 0 && (!m->reverse || s + count > a->steps - m->end))
            add_inputs(a, m, s, count, first, last);
        return;
    }
    float *inputs = m->inputs + within / each * m->rows * a->gates * a->padded;
    s += within / each;
    if (within % each == each - 1)
        finish_step(a, m, inputs, s, first, last, down);
    else if ((m->reverse ? a->steps - 1 - s : s) >= m->end)
        return;
    else if (!a->w_codes.panels)
        gru_gates(a, m, m->h[s % 2], inputs, first, last, down);
    else if (!first)
        fill_state_codes(a, m, m->h[s % 2]);
}

static int64_t stages_of_item(const struct recurrent *a)
{
    return (a->w_codes.panels ? 1 : 0) + CEIL_DIV(a->steps, a->chunk) + a->steps * stages_of_step(a);
}

static int has_lengths(const struct recurrent *a)
{
    for (int64_t b = 0; a->lengths && b < a->batch; b++)
        if (a->lengths[b] < 0 || a->lengths[b] > a->steps)
            return 0;
    return 1;
}

CHECKED_ITEMS_OF(recurrent, recurrent)
{
    int64_t stages = stages_of_item(a), blocks = a->padded / UNITS;
    if (!has_lengths(a))
        return 1;
    for (int64_t number = begin; number < end; number++) {
        item m = item_of(a, number);
        for (int64_t stage = 0; stage < stages; stage++)
            run_stage(a, &m, stage, 0, blocks, stage % 2);
    }
    return 0;
}

static int recurrent_stage(const void *arguments, int64_t stage, int64_t first, int64_t last)
{
    const struct recurrent *a = arguments;
    int64_t stages = stages_of_item(a);
    if (!stage && !has_lengths(a))
        return 1;
    item m = item_of(a, stage / stages);
    int64_t units = a->w_codes.panels ? PANEL_UNITS : 1; /* blocks of a piece */
    run_stage(a, &m, stage % stages, first * units, last * units, stage % 2);
    return 0;
}

KERNELS(recurrent, STAGED_KERNEL(recurrent, recurrent, recurrent, recurrent_stage))
