/* Cells of recurrent layers: from gates to the next state. An item is a row of the batch. */

// Compiler options: -ffp-contract=fast
#include "math32.h"
#include "native.h"

struct lstm_cell {
    const float *gates, *cell; /* [rows, 4 * units], [rows, units] */
    float *state, *next;
    int64_t units, input, forget, new, output; /* offsets of the gates */
    double forget_bias;
};

ITEMS_OF(lstm_cell, lstm_cell)
{
    int64_t n = a->units;
    float bias = (float)a->forget_bias;
    for (int64_t row = begin; row < end; row++) {
        const float *gates = a->gates + row * 4 * n, *restrict cell = a->cell + row * n;
        const float *restrict input = gates + a->input, *restrict forget = gates + a->forget;
        const float *restrict new = gates + a->new, *restrict output = gates + a->output;
        float *restrict state = a->state + row * n, *restrict next = a->next + row * n;
        for (int64_t i = 0; i < n; i++)
            next[i] = fused32(sigmoid32(forget[i] + bias), cell[i], sigmoid32(input[i]) * tanh32(new[i]));
        for (int64_t i = 0; i < n; i++)
            state[i] = sigmoid32(output[i]) * tanh32(next[i]);
    }
}

struct gru_cell {
    const float *of_input, *of_state, *state; /* [rows, 3 * units] twice, [rows, units] */
    float *next;
    int64_t units, update, reset, new; /* offsets of the gates */
};

ITEMS_OF(gru_cell, gru_cell)
{
    int64_t n = a->units;
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->of_input + row * 3 * n, *h = a->of_state + row * 3 * n;
        const float *restrict x_update = x + a->update, *restrict h_update = h + a->update;
        const float *restrict x_reset = x + a->reset, *restrict h_reset = h + a->reset;
        const float *restrict x_new = x + a->new, *restrict h_new = h + a->new;
        const float *restrict state = a->state + row * n;
        float *restrict next = a->next + row * n;
        for (int64_t i = 0; i < n; i++) {
            float reset = sigmoid32(x_reset[i] + h_reset[i]);
            float update = sigmoid32(x_update[i] + h_update[i]);
            float new = tanh32(x_new[i] + reset * h_new[i]);
            next[i] = new + update * (state[i] - new);
        }
    }
}

struct gru_gates {
    const float *of_state, *state, *of_input; /* [rows, ..], [rows, units], [rows, ..] or NULL */
    float *update, *reset;                    /* the gate, and the reset state */
    int64_t units, state_width, input_width;  /* units, and the widths of both gates */
    int64_t h_update, h_reset, x_update, x_reset; /* offsets of the gates */
};

/* The gate of a sum of one or two parts, times `by` if given; absent parts are constant NULLs. */
INLINED void gate_row(float *restrict out, const float *restrict h, const float *restrict x,
                      const float *restrict by, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float gate = sigmoid32(x ? h[i] + x[i] : h[i]);
        out[i] = by ? gate * by[i] : gate;
    }
}

ITEMS_OF(gru_gates, gru_gates)
{
    int64_t n = a->units;
    for (int64_t row = begin; row < end; row++) {
        const float *h = a->of_state + row * a->state_width, *state = a->state + row * n;
        float *update = a->update + row * n, *reset = a->reset + row * n;
        if (a->of_input) {
            const float *x = a->of_input + row * a->input_width;
            gate_row(update, h + a->h_update, x + a->x_update, NULL, n);
            gate_row(reset, h + a->h_reset, x + a->x_reset, state, n);
        } else {
            gate_row(update, h + a->h_update, NULL, NULL, n);
            gate_row(reset, h + a->h_reset, NULL, state, n);
        }
    }
}

struct gru_state {
    const float *product, *update, *state, *of_input; /* [rows, units]; [rows, ..] or NULL */
    float *next;
    int64_t units, input_width, new; /* new: offset of the input's candidate values */
};

/* The next state from candidate values of one or two parts; an absent x is a constant NULL. */
INLINED void blend_row(float *restrict next, const float *restrict product, const float *restrict x,
                       const float *restrict update, const float *restrict state, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float new = tanh32(x ? product[i] + x[i] : product[i]);
        next[i] = new + update[i] * (state[i] - new);
    }
}

ITEMS_OF(gru_state, gru_state)
{
    int64_t n = a->units;
    for (int64_t row = begin; row < end; row++) {
        const float *product = a->product + row * n, *update = a->update + row * n;
        const float *state = a->state + row * n;
        float *next = a->next + row * n;
        if (a->of_input)
            blend_row(next, product, a->of_input + row * a->input_width + a->new, update, state, n);
        else
            blend_row(next, product, NULL, update, state, n);
    }
}

KERNELS(cells, KERNEL(lstm_cell, lstm_cell), KERNEL(gru_cell, gru_cell), KERNEL(gru_gates, gru_gates),
        KERNEL(gru_state, gru_state))
