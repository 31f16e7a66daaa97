/* Cells of recurrent layers: gates to the next state. An item is a row of the batch. */
#include "math32.h"
#include "native.h"

struct lstm_cell {
    const float *gates, *cell; /* [rows, 4 * units], [rows, units] */
    float *state, *next;
    int64_t units, input, forget, new, output; /* where the gates begin */
    double forget_bias;
};

static int lstm_cell(const void *arguments, int64_t begin, int64_t end)
{
    const struct lstm_cell *a = arguments;
    int64_t n = a->units;
    float bias = (float)a->forget_bias;
    for (int64_t row = begin; row < end; row++) {
        const float *gates = a->gates + row * 4 * n, *restrict cell = a->cell + row * n;
        const float *restrict input = gates + a->input, *restrict forget = gates + a->forget;
        const float *restrict new = gates + a->new, *restrict output = gates + a->output;
        float *restrict state = a->state + row * n, *restrict next = a->next + row * n;
        for (int64_t i = 0; i < n; i++)
            next[i] = sigmoid32(forget[i] + bias) * cell[i] + sigmoid32(input[i]) * tanh32(new[i]);
        for (int64_t i = 0; i < n; i++)
            state[i] = sigmoid32(output[i]) * tanh32(next[i]);
    }
    return 0;
}

struct gru_cell {
    const float *of_input, *of_state, *state; /* [rows, 3 * units] twice, [rows, units] */
    float *next;
    int64_t units, update, reset, new; /* where the gates begin */
};

static int gru_cell(const void *arguments, int64_t begin, int64_t end)
{
    const struct gru_cell *a = arguments;
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
    return 0;
}

const kernel_entry cells_kernels[] = {
    KERNEL(lstm_cell, lstm_cell), KERNEL(gru_cell, gru_cell), END_OF_KERNELS};
