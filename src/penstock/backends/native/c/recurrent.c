/* RNN, GRU and LSTM in all forms. An item is a direction for a few rows of the batch, from the first
   step to the last.

   Weights are in panels (products.h) with the gates in ONNX's order; the recurrent ones of a GRU in
   two parts, those of the update and reset gates and those of the new state.

   With weights of 8-bit codes, in the panels of integers.h, an LSTM takes X, and at each step the states
   of the whole batch, as codes over their own range. */
#include "math32.h"
#include "native.h"
#include "products.h"
#include "integers.h"

enum { RNN, GRU, LSTM };
enum { TANH, SIGMOID, RELU, AFFINE, LEAKY, THRESHOLDED, SCALED_TANH, HARD_SIGMOID, ELU, SOFTSIGN,
       SOFTPLUS };

typedef struct {
    int64_t kind;
    double alpha, beta;
} activation;

/* Weights of codes by direction: sums, zero points and scales are of columns, as in integers.c. */
typedef struct {
    const int8_t *panels; /* null: the weights are real numbers */
    const int32_t *sums, *zeros;
    const float *scales;
} code_matrix;

struct recurrent {
    const float *x, *h0, *c0;
    const int32_t *lengths;
    code_matrix w_codes, r_codes;
    const float *w, *r, *r_new; /* by direction */
    const float *bias, *new_bias, *peepholes;
    const activation *activations; /* three for each direction */
    float *y, *y_h, *y_c;
    char *workspace; /* item_bytes for each item */
    int64_t cell, directions, first_reverse, batch_first, linear, input_forget;
    int64_t steps, batch, input, hidden, gates; /* gates: columns of all gates, in whole panels */
    int64_t rows, chunk, item_bytes; /* of the batch, and steps of X at a time */
    double clip;                     /* 0: none */
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

/* The gate x of an LSTM: activated with its peephole p of the cell state c. */
static void gate(const struct recurrent *a, const activation *f, float *restrict x,
                 const float *restrict p, const float *restrict c)
{
    int64_t n = a->hidden;
    if (p)
        EACH(x[i] + p[i] * c[i]);
    clip(x, n, a->clip);
    activate(f, x, n);
}

static void lstm_row(const struct recurrent *a, int64_t d, float *restrict g, float *restrict c,
                     float *restrict h)
{
    int64_t n = a->hidden;
    const activation *f = a->activations + 3 * d;
    const float *p = a->peepholes ? a->peepholes + d * 3 * n : NULL;
    float *in = g, *out = g + n, *forget = g + 2 * n, *new = g + 3 * n;
    gate(a, f, in, p, c);
    if (a->input_forget)
        for (int64_t i = 0; i < n; i++)
            forget[i] = 1 - in[i];
    else
        gate(a, f, forget, p ? p + 2 * n : NULL, c);
    gate(a, f + 1, new, NULL, c);
    for (int64_t i = 0; i < n; i++)
        c[i] = forget[i] * c[i] + in[i] * new[i];
    gate(a, f, out, p ? p + n : NULL, c);
    for (int64_t i = 0; i < n; i++)
        h[i] = c[i];
    activate(f + 2, h, n);
    for (int64_t i = 0; i < n; i++)
        h[i] *= out[i];
}

/* The gates of a row to its next state. Of a GRU, `product` is that of the state with the weights of
   the new state. */
static void gru_row(const struct recurrent *a, int64_t d, float *restrict g,
                    float *restrict product, float *restrict h)
{
    int64_t n = a->hidden;
    const activation *f = a->activations + 3 * d;
    const float *bias = a->new_bias ? a->new_bias + d * n : NULL;
    float *update = g, *reset = g + n, *new = g + 2 * n;
    for (int64_t i = 0; i < n; i++)
        new[i] += a->linear ? reset[i] * (product[i] + (bias ? bias[i] : 0)) : product[i];
    clip(new, n, a->clip);
    activate(f + 1, new, n);
    for (int64_t i = 0; i < n; i++)
        h[i] = new[i] + update[i] * (h[i] - new[i]);
}

/* Codes of real numbers over their own range, of rows that are padded with zeros to whole tiles. */
typedef struct {
    uint8_t *codes;
    int64_t width, step; /* of a row, and bytes from one to the next */
    float scale;
    int32_t zero;
} code_rows;

static int64_t code_step(int64_t width)
{
    return (width + 63) / 64 * 64;
}

static void fill_codes(code_rows *q, const float *x, int64_t rows)
{
    q->zero = to_codes(q->codes, x, rows * q->width, &q->scale);
    for (int64_t r = rows; r-- > 0 && q->step > q->width;) {
        memmove(q->codes + r * q->step, q->codes + r * q->width, q->width);
        memset(q->codes + r * q->step + q->width, 0, q->step - q->width);
    }
}

/* Add the product of `rows` rows from `first` on, each `apart` rows behind the one before, to the
   gates, whose rows are `gates_step` apart. */
static void add_code_product(const struct recurrent *a, const code_matrix *m, int64_t d,
                             const code_rows *q, int64_t first, int64_t apart, int64_t rows,
                             float *gates, int64_t gates_step)
{
    enum { MOST = 64 };
    int64_t quads = (q->width + QUAD - 1) / QUAD, panels = a->gates / PANEL;
    const int8_t *weights = m->panels + d * (panels * quads * PANEL_BYTES + TAIL);
    int32_t c[MOST * GROUP * PANEL], sums[MOST];
    for (int64_t row = 0; row < rows; row += MOST) {
        int64_t some = rows - row < MOST ? rows - row : MOST;
        const uint8_t *x = q->codes + (first + row * apart) * q->step;
        for (int64_t r = 0; r < some; r++)
            sums[r] = sum_of(x + r * apart * q->step, q->width);
        for (int64_t p = 0; p < panels; p += GROUP) {
            int64_t group = panels - p < GROUP ? panels - p : GROUP, at = d * a->gates + p * PANEL;
            memset(c, 0, some * GROUP * PANEL * sizeof *c);
            product_for(some)(c, x, apart * q->step, weights + p * quads * PANEL_BYTES,
                              quads * PANEL_BYTES, quads, some, group);
            for (int64_t r = 0; r < some; r++) {
                const int32_t *restrict from = c + r * GROUP * PANEL;
                const int32_t *restrict column_sums = m->sums + at, *restrict zeros = m->zeros + at;
                const float *restrict scales = m->scales + at;
                float *restrict to = gates + (row + r) * gates_step + p * PANEL;
                for (int64_t j = 0; j < group * PANEL; j++) {
                    int32_t sum = from[j] - q->zero * column_sums[j] - sums[r] * zeros[j];
                    to[j] += (float)sum * (scales[j] * q->scale);
                }
            }
        }
    }
}

typedef struct {
    float *h, *c, *gates, *product, *inputs, *next_h, *next_c;
    code_rows x_codes, h_codes;
} memory;

/* One step of `rows` rows: from their gates with X alone to their next states. */
static void step(const struct recurrent *a, int64_t d, int64_t rows, float *gates, memory *m)
{
    int64_t n = a->hidden, panels = a->gates / PANEL, width = a->gates;
    if (a->cell != GRU) {
        if (a->r_codes.panels) {
            fill_codes(&m->h_codes, m->h, rows);
            add_code_product(a, &a->r_codes, d, &m->h_codes, 0, 1, rows, gates, a->gates);
        } else
            add_product(gates, width, m->h, n, a->r + d * n * width, n, rows, panels);
        for (int64_t b = 0; b < rows; b++)
            if (a->cell == LSTM)
                lstm_row(a, d, gates + b * width, m->next_c + b * n, m->next_h + b * n);
            else {
                clip(gates + b * width, n, a->clip);
                activate(a->activations + 3 * d, gates + b * width, n);
                memcpy(m->next_h + b * n, gates + b * width, n * sizeof(float));
            }
        return;
    }
    int64_t both = (2 * n + PANEL - 1) / PANEL, one = (n + PANEL - 1) / PANEL;
    memset(m->product, 0, rows * (both + one) * PANEL * sizeof(float));
    float *product = m->product, *last = product + rows * both * PANEL;
    add_product(product, both * PANEL, m->h, n, a->r + d * n * both * PANEL, n, rows, both);
    for (int64_t b = 0; b < rows; b++) {
        float *restrict g = gates + b * width, *restrict p = product + b * both * PANEL;
        for (int64_t i = 0; i < 2 * n; i++)
            g[i] += p[i];
        clip(g, 2 * n, a->clip);
        activate(a->activations + 3 * d, g, 2 * n);
        if (!a->linear)
            for (int64_t i = 0; i < n; i++)
                p[i] = g[n + i] * m->h[b * n + i];
    }
    const float *state = a->linear ? m->h : product;
    add_product(last, one * PANEL, state, a->linear ? n : both * PANEL,
                a->r_new + d * n * one * PANEL, n, rows, one);
    for (int64_t b = 0; b < rows; b++)
        gru_row(a, d, gates + b * width, last + b * one * PANEL, m->next_h + b * n);
}

/* Where the entry of step t (or of a state, with steps = 1), row b and direction d begins. */
static int64_t place(const struct recurrent *a, int64_t steps, int64_t t, int64_t d, int64_t b)
{
    int64_t row = a->batch_first ? (b * steps + t) * a->directions + d
                                 : (t * a->directions + d) * a->batch + b;
    return row * a->hidden;
}

static float *taken(char **from, int64_t count)
{
    float *start = (float *)*from;
    *from += (count * sizeof(float) + 63) / 64 * 64;
    return start;
}

/* The gates of the next steps from X and the bias, [step][row]: of all those of a row at once, or of all
   rows of a step, whichever are more. */
static void add_inputs(const struct recurrent *a, int64_t d, int64_t s, int64_t count, int64_t first,
                       int64_t rows, memory *m)
{
    int64_t width = a->gates, reverse = d ? 1 : a->first_reverse, of_row = count > rows;
    int64_t start = reverse ? a->steps - 1 - s : s, x_step = a->batch_first ? 1 : a->batch;
    int64_t x_row = a->batch_first ? a->steps : 1;
    int64_t at = start * x_step + first * x_row;
    x_step = reverse ? -x_step : x_step;
    int64_t one = of_row ? x_row : x_step, next = of_row ? x_step : x_row;
    int64_t to_one = of_row ? width : rows * width, to_next = of_row ? rows * width : width;
    for (int64_t i = 0; i < count * rows; i++)
        memcpy(m->inputs + i * width, a->bias + d * width, width * sizeof(float));
    for (int64_t i = 0; i < (of_row ? rows : count); i++) {
        int64_t together = of_row ? count : rows, row = at + i * one;
        float *to = m->inputs + i * to_one;
        if (a->w_codes.panels)
            add_code_product(a, &a->w_codes, d, &m->x_codes, row, next, together, to, to_next);
        else
            add_product(to, to_next, a->x + row * a->input, next * a->input,
                        a->w + d * a->input * width, a->input, together, width / PANEL);
    }
}

static void run_direction(const struct recurrent *a, int64_t d, int64_t first, int64_t rows, char *at)
{
    int64_t n = a->hidden, width = a->gates, reverse = d ? 1 : a->first_reverse;
    memory m;
    m.h = taken(&at, rows * n);
    m.c = taken(&at, rows * n);
    m.next_h = taken(&at, rows * n);
    m.next_c = taken(&at, rows * n);
    m.inputs = taken(&at, a->chunk * rows * width);
    m.product = taken(&at, rows * (3 * n + 2 * PANEL));
    if (a->w_codes.panels) {
        int64_t count = a->steps * a->batch;
        m.x_codes = (code_rows){(uint8_t *)at, a->input, code_step(a->input), 0, 0};
        m.h_codes = (code_rows){(uint8_t *)at + count * m.x_codes.step, n, code_step(n), 0, 0};
        fill_codes(&m.x_codes, a->x, count);
    }
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = 0; i < n; i++) {
            int64_t from = place(a, 1, 0, d, first + b) + i;
            m.h[b * n + i] = a->h0 ? a->h0[from] : 0;
            m.c[b * n + i] = a->c0 ? a->c0[from] : 0;
        }
    for (int64_t s = 0; s < a->steps; s++) {
        int64_t within = s % a->chunk, left = a->steps - s;
        if (!within)
            add_inputs(a, d, s, left < a->chunk ? left : a->chunk, first, rows, &m);
        int64_t t = reverse ? a->steps - 1 - s : s;
        memcpy(m.next_h, m.h, rows * n * sizeof(float));
        memcpy(m.next_c, m.c, rows * n * sizeof(float));
        step(a, d, rows, m.inputs + within * rows * width, &m);
        for (int64_t b = 0; b < rows; b++) {
            int live = !a->lengths || t < a->lengths[first + b];
            if (live) {
                memcpy(m.h + b * n, m.next_h + b * n, n * sizeof(float));
                memcpy(m.c + b * n, m.next_c + b * n, n * sizeof(float));
            }
            if (!a->y)
                continue;
            float *y = a->y + place(a, a->steps, t, d, first + b);
            if (live)
                memcpy(y, m.next_h + b * n, n * sizeof(float));
            else
                memset(y, 0, n * sizeof(float));
        }
    }
    for (int64_t b = 0; b < rows; b++) {
        int64_t to = place(a, 1, 0, d, first + b);
        if (a->y_h)
            memcpy(a->y_h + to, m.h + b * n, n * sizeof(float));
        if (a->y_c)
            memcpy(a->y_c + to, m.c + b * n, n * sizeof(float));
    }
}

static int recurrent(const void *arguments, int64_t begin, int64_t end)
{
    const struct recurrent *a = arguments;
    for (int64_t b = 0; a->lengths && b < a->batch; b++)
        if (a->lengths[b] < 0 || a->lengths[b] > a->steps)
            return 1;
    int64_t blocks = (a->batch + a->rows - 1) / a->rows;
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item % blocks * a->rows, rest = a->batch - first;
        run_direction(a, item / blocks, first, rest < a->rows ? rest : a->rows,
                      a->workspace + item * a->item_bytes);
    }
    return 0;
}

const kernel_entry recurrent_kernels[] = {
    KERNEL(recurrent, recurrent),
    END_OF_KERNELS,
};
