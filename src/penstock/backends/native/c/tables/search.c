/* Searches for token sequences: SearchStart, SearchStep and SearchEnd as ops/internal/search.py defines them. Its
   functions also compute the cases that are not implemented here: logits other than float32, inputs that do not fit,
   Whisper's timestamps, and scores of all steps. */
#include "any_shape.h"
#include "arguments.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t beams, samples, pad, eos, early, ngram, least, custom, results;
    double temperature, top_p, filter, presence; /* temperature: NaN to use an input */
} search_settings;

/* The state, as SearchStep takes it after logits, and SearchStart and SearchStep return it. */
enum { IDS, POSITIONS, MASK, SEQUENCES, SCORES, ENDED, ENDED_SCORES, DONE, OF_STATE };
enum { PROMPT = OF_STATE, MIN_LENGTH, LENGTH_PENALTY, REPETITION, VOCAB, PREFIX, TEMPERATURE, PRESENT, SEED,
       PROCESSOR, OF_STEP };
enum { SMALL = 1 << 16 }; /* bytes of a state below which NumPy's function need not ask the run's budget */

typedef struct {
    int64_t batch, beams, rows, length, most, words; /* length: of sequences so far, of `most` tokens */
    int first;
    float *scores, *ended_scores; /* scores: [row, word] */
    int32_t *ended;
    uint8_t *done;
    const int32_t *sequences;
} search;

#define DATA(x) PyArray_DATA((PyArrayObject *)(x))
#define DIM(x, axis) PyArray_DIM((PyArrayObject *)(x), axis)

/* Whether an array is contiguous and has this type and rank. */
static int is_of(PyObject *given, int type, int rank)
{
    PyArrayObject *x = (PyArrayObject *)given;
    return PyArray_Check(given) && PyArray_TYPE(x) == type && PyArray_NDIM(x) == rank && PyArray_ISCARRAY_RO(x);
}

/* Whether an int32 array has these dims, or is missing. */
static int fits(PyObject *given, int64_t rows, int64_t columns)
{
    if (given == Py_None)
        return 1;
    return rows ? is_of(given, NPY_INT, 2) && DIM(given, 0) == rows && DIM(given, 1) == columns
                : is_of(given, NPY_INT, 1) && DIM(given, 0) == columns;
}

/* Read an optional input of one number of this type; return 0 for other arrays. */
static int read_number(PyObject *given, int type, void *to)
{
    PyArrayObject *x = (PyArrayObject *)given;
    if (given == Py_None)
        return 1;
    if (!PyArray_Check(given) || !PyArray_ISCARRAY_RO(x) || PyArray_SIZE(x) != 1 || PyArray_TYPE(x) != type)
        return 0;
    memcpy(to, DATA(x), PyArray_ITEMSIZE(x));
    return 1;
}

/* Run a kernel with `items` items on the rows of this thread. */
static int compute(const char *name, const void *words, int64_t items, double item_ns, PyObject *checkpoint)
{
    Call call = {0};
    int status = 0;
    call.kernel = kernel_of(name);
    call.items = items;
    call.item_ns = item_ns;
    call.checkpoint = checkpoint;
    return call.kernel ? call_run_words(&call, words, &status) : -1;
}

/* The indices of the k greatest of x in order, or, with a sign of -1, of the least; `work` sorts all of them. */
static int rank(const float *x, int64_t length, int64_t k, int sign, int64_t *places, char *work, PyObject *checkpoint)
{
    const struct top words = {x, NULL, places, work, length, 1, k, sign, work != NULL};
    return compute("topk_float32", &words, 1, length * (work ? 10.0 : 0.5), checkpoint);
}

/* Penalize or exclude tokens that should not follow. Return 0 if a token is out of range. */
static int penalize(const search *s, const search_settings *by, int64_t least, float penalty, float degrees,
                    const int32_t *vocab, const int32_t *prefix, uint8_t *seen)
{
    const int64_t length = s->length, words = s->words, size = by->ngram;
    if (size > 0 || penalty != 1)
        for (int64_t i = 0; i < s->rows * length; i++)
            if (s->sequences[i] < 0 || s->sequences[i] >= words)
                return 0;
    for (int64_t row = 0; row < s->rows; row++) {
        float *scores = s->scores + row * words;
        const int32_t *tokens = s->sequences + row * length;
        if (penalty != 1) {
            for (int64_t i = 0; i < length; i++)
                seen[tokens[i]] = 0;
            for (int64_t i = 0; i < length; i++) {
                float *score = scores + tokens[i];
                if (!seen[tokens[i]])
                    *score = *score < 0 ? *score * penalty : *score / penalty;
                seen[tokens[i]] = 1;
            }
        }
        if (size > 0)
            for (int64_t i = 0; i + size <= length; i++)
                if (!memcmp(tokens + i, tokens + length - size + 1, (size - 1) * sizeof *tokens))
                    scores[tokens[i + size - 1]] = -FLT_MAX;
        for (int64_t i = 0; vocab && i < words; i++)
            scores[i] = vocab[i] ? scores[i] : -FLT_MAX;
        for (int64_t i = 0; prefix && s->first && i < words; i++)
            scores[i] = prefix[row / s->beams * words + i] ? scores[i] : -FLT_MAX;
        if (length < least)
            scores[by->eos] = -FLT_MAX;
        for (int64_t i = 0; degrees > 0 && degrees != 1 && i < words; i++)
            scores[i] /= degrees;
    }
    return 1;
}

/* Keep a sequence that has ended if it is among the best of its sample. */
static void add(const search *s, int64_t pad, int64_t sample, const int32_t *tokens, float score)
{
    float *scores = s->ended_scores + sample * s->beams, *worst = scores;
    for (int64_t i = 1; i < s->beams; i++)
        worst = scores[i] < *worst ? scores + i : worst;
    if (!(score > *worst))
        return;
    int32_t *to = s->ended + (sample * s->beams + (worst - scores)) * s->most;
    memcpy(to, tokens, s->length * sizeof *to);
    for (int64_t i = s->length; i < s->most; i++)
        to[i] = (int32_t)pad;
    *worst = score;
}

/* The next tokens of a sample, the beams that they extend, and their scores. Return 0 if a score is NaN. */
static int next_beams(const search *s, const search_settings *by, double penalty, int64_t sample, int64_t *best,
                      PyObject *checkpoint, int32_t *tokens, int64_t *sources, float *scores)
{
    const int64_t beams = s->beams, all = beams * s->words, count = smaller(2 * beams, all);
    const float *flat = s->scores + sample * all, by_length = (float)pow((double)s->length, penalty);
    int64_t taken = 0;
    for (int64_t i = 0; i < beams; i++)
        tokens[i] = (int32_t)by->pad, sources[i] = sample * beams + i, scores[i] = 0;
    if (s->done[sample])
        return 1;
    if (rank(flat, all, count, 1, best, NULL, checkpoint) < 0)
        return -1;
    if (flat[best[0]] != flat[best[0]])
        return 0;
    for (int64_t i = 0; i < count && taken < beams; i++) {
        const int64_t source = sample * beams + best[i] / s->words, token = best[i] % s->words;
        const float score = flat[best[i]];
        if (token != by->eos)
            tokens[taken] = (int32_t)token, sources[taken] = source, scores[taken++] = score;
        else if (i < beams)
            add(s, by->pad, sample, s->sequences + source * s->length, score / by_length);
    }
    const float *kept = s->ended_scores + sample * beams;
    float worst = kept[0];
    for (int64_t i = 1; i < beams; i++)
        worst = kept[i] < worst ? kept[i] : worst;
    s->done[sample] = worst > -INFINITY && (by->early || worst >= flat[best[0]] / by_length);
    return 1;
}

static double uniform(uint64_t seed, uint64_t count)
{
    const uint64_t modulus = INT32_MAX;
    uint64_t power = 16807, x = seed % modulus ? seed % modulus : 1;
    for (uint64_t left = 2 * count + 1; left; left >>= 1, power = power * power % modulus)
        x = left & 1 ? x * power % modulus : x;
    const uint64_t high = x * 16807 % modulus - 1;
    return (double)(x - 1 + high * (modulus - 1)) / ((double)(modulus - 1) * (double)(modulus - 1));
}

/* Draw a token from the smallest set with this probability; -1 with an error. `work` is for sorting, then for
   sums. */
static int64_t draw(float *scores, int64_t words, const search_settings *by, double at, int64_t *order, char *work,
                    PyObject *checkpoint)
{
    const float bound = by->custom ? (float)by->top_p : 1 - (float)by->top_p;
    double total = 0, *sums = (double *)work;
    float below = 0;
    if (rank(scores, words, words, by->custom ? 1 : -1, order, work, checkpoint) < 0)
        return -1;
    const float highest = scores[order[by->custom ? 0 : words - 1]];
    for (int64_t i = 0; i < words; i++)
        total += expf(scores[i] - highest);
    const int64_t end = by->custom || by->least < 0 ? words : words - by->least > 1 ? words - by->least : 1;
    for (int64_t i = 0; i < end; i++) {
        float *score = scores + order[i];
        const float part = expf(*score - highest) / (float)total;
        /* In order of decreasing probability, the token whose sum passes the bound belongs to the set. */
        if (by->custom ? i && below > bound : below + part <= bound)
            *score = (float)by->filter;
        below += part;
    }
    float top = scores[0];
    for (int64_t i = 1; i < words; i++)
        top = scores[i] > top ? scores[i] : top;
    total = 0;
    for (int64_t i = 0; i < words; i++)
        sums[i] = total += exp((double)scores[i] - top);
    int64_t token = 0; /* the last one where sums are NaN */
    while (token < words - 1 && !(sums[token] > at * total))
        token++;
    return token;
}

static PyObject *empty(int type, int rank, npy_intp first, npy_intp second, npy_intp third)
{
    npy_intp dims[] = {first, second, third};
    return PyArray_EMPTY(rank, dims, type, 0);
}

static PyObject *copy_of(PyObject *x)
{
    return PyArray_NewCopy((PyArrayObject *)x, NPY_CORDER);
}

/* A tuple that takes ownership of arrays; NULL if one is missing. */
static PyObject *tuple_of(PyObject **arrays, int count)
{
    int all = 1;
    for (int i = 0; i < count; i++)
        all = all && arrays[i];
    PyObject *tuple = all ? PyTuple_New(count) : NULL;
    for (int i = 0; i < count; i++)
        if (tuple)
            PyTuple_SetItem(tuple, i, arrays[i]);
        else
            Py_XDECREF(arrays[i]);
    return tuple;
}

static int read_settings(PyObject *const *arguments, Py_ssize_t count, search_settings *to)
{
    char *bytes;
    Py_ssize_t nbytes;
    if (count < ARRAYS || PyBytes_AsStringAndSize(arguments[SETTINGS], &bytes, &nbytes) < 0)
        return -1;
    memcpy(to, bytes, sizeof *to);
    return 0;
}

static PyObject *search_start(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS, *y[2 + OF_STATE];
    int32_t most = 0, n = 1;
    search_settings by;
    if (read_settings(arguments, count, &by) < 0)
        return NULL;
    if (count != ARRAYS + 4 || !is_of(x[0], NPY_INT, 2) || !fits(x[3], DIM(x[0], 0), DIM(x[0], 1)) ||
        !read_number(x[1], NPY_INT, &most) || !read_number(x[2], NPY_INT, &n))
        return any_shape_otherwise(arguments, count);
    const int64_t batch = DIM(x[0], 0), length = DIM(x[0], 1), rows = batch * n;
    if (!length || n < 1 || !batch || most <= length || 8.0 * batch * n * most > SMALL)
        return any_shape_otherwise(arguments, count);
    y[0] = empty(NPY_INT64, 1, 1, 0, 0);
    y[1] = empty(NPY_INT64, 1, rows, 0, 0);
    PyObject **state = y + 2;
    for (int i = IDS; i <= SEQUENCES; i++)
        state[i] = empty(NPY_INT, 2, rows, length, 0);
    state[SCORES] = empty(NPY_FLOAT, 1, rows, 0, 0);
    state[ENDED] = empty(NPY_INT, 3, batch, n, most);
    state[ENDED_SCORES] = empty(NPY_FLOAT, 2, batch, n, 0);
    state[DONE] = empty(NPY_BOOL, 1, batch, 0, 0);
    PyObject *result = tuple_of(y, 2 + OF_STATE);
    if (!result)
        return NULL;
    *(int64_t *)DATA(y[0]) = most - length - 1;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t sample = row / n, at = row * length;
        const int32_t *ids = (const int32_t *)DATA(x[0]) + sample * length;
        int32_t seen = 0, *counted = (int32_t *)DATA(state[MASK]) + at;
        memcpy((int32_t *)DATA(state[IDS]) + at, ids, length * sizeof *ids);
        memcpy((int32_t *)DATA(state[SEQUENCES]) + at, ids, length * sizeof *ids);
        for (int64_t i = 0; i < length; i++) {
            counted[i] = ids[i] != by.pad;
            ((int32_t *)DATA(state[POSITIONS]))[at + i] = counted[i] ? seen : 0;
            seen += counted[i];
        }
        if (x[3] != Py_None)
            memcpy(counted, (const int32_t *)DATA(x[3]) + sample * length, length * sizeof *ids);
        ((int64_t *)DATA(y[1]))[row] = sample;
        ((float *)DATA(state[SCORES]))[row] = row % n ? -1e9f : 0;
        ((float *)DATA(state[ENDED_SCORES]))[row] = -INFINITY;
    }
    for (int64_t i = 0; i < rows * most; i++)
        ((int32_t *)DATA(state[ENDED]))[i] = (int32_t)by.pad;
    memset(DATA(state[DONE]), 0, batch);
    return result;
}

/* Choose the next tokens; 0 for cases not implemented here, -1 with an error. */
static int choose(search *s, const search_settings *by, PyObject *const *x, PyObject *checkpoint, int32_t *tokens,
                  int64_t *sources, float *totals)
{
    int32_t least = 0, seed = 0, processor = 0;
    float penalty = 1, repetition = 1, temperature = isnan(by->temperature) ? 1 : (float)by->temperature;
    const int64_t rows = s->rows, words = s->words;
    if (!read_number(x[MIN_LENGTH], NPY_INT, &least) || !read_number(x[LENGTH_PENALTY], NPY_FLOAT, &penalty) ||
        !read_number(x[REPETITION], NPY_FLOAT, &repetition) ||
        (isnan(by->temperature) && !read_number(x[TEMPERATURE], NPY_FLOAT, &temperature)) ||
        !read_number(x[SEED], NPY_INT, &seed) || seed < 0 || !read_number(x[PROCESSOR], NPY_INT, &processor) ||
        processor == 1 || by->eos < 0 || by->eos >= words || !fits(x[VOCAB], 0, words) ||
        !fits(x[PREFIX], s->batch, words) || !fits(x[PRESENT], s->batch, words))
        return 0;
    const int64_t places = by->samples ? words : 2 * s->beams;
    int64_t *order = malloc(places * sizeof *order + 2 * words * sizeof(int64_t));
    if (!order)
        return PyErr_NoMemory(), -1;
    char *work = (char *)(order + places);
    if (by->beams) {
        const struct softmax softmax = {s->scores, s->scores, rows, words, 1, 1, 1};
        if (compute("softmax_float32", &softmax, rows, 10 + 0.35 * words, checkpoint) < 0)
            goto failed;
    }
    const int32_t *vocab = x[VOCAB] == Py_None ? NULL : DATA(x[VOCAB]);
    const int32_t *prefix = x[PREFIX] == Py_None ? NULL : DATA(x[PREFIX]);
    int done = penalize(s, by, least, repetition, temperature, vocab, prefix, (uint8_t *)work);
    if (by->beams) {
        for (int64_t row = 0; done > 0 && row < rows; row++)
            for (int64_t i = 0; i < words; i++)
                s->scores[row * words + i] += totals[row];
        for (int64_t b = 0, at = 0; done > 0 && b < s->batch; b++, at += s->beams)
            done = next_beams(s, by, penalty, b, order, checkpoint, tokens + at, sources + at, totals + at);
    }
    for (int64_t row = 0; done > 0 && !by->beams && row < rows; row++) {
        float *scores = s->scores + row * words;
        if (by->samples) {
            const int32_t *present = x[PRESENT] == Py_None ? NULL : (const int32_t *)DATA(x[PRESENT]) + row * words;
            for (int64_t i = 0; present && i < words; i++)
                scores[i] = (float)(scores[i] - present[i] * (double)(float)by->presence);
            const uint64_t count = (s->length - DIM(x[PROMPT], 1)) * rows + row;
            *order = draw(scores, words, by, uniform((uint64_t)seed, count), order, work, checkpoint);
        } else if (rank(scores, words, 1, 1, order, NULL, checkpoint) < 0)
            *order = -1;
        if (*order < 0)
            goto failed;
        s->done[row] |= *order == by->eos;
        tokens[row] = s->done[row] ? (int32_t)by->pad : (int32_t)*order;
        sources[row] = row;
    }
    free(order);
    return done;
failed:
    free(order);
    return -1;
}

static PyObject *search_step(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *const *x = arguments + ARRAYS + 1, *logits = arguments[ARRAYS], *y[3 + OF_STATE];
    search_settings by;
    search s;
    if (read_settings(arguments, count, &by) < 0)
        return NULL;
    if (count != ARRAYS + 1 + OF_STEP || !is_of(logits, NPY_FLOAT, 3) || !is_of(x[SEQUENCES], NPY_INT, 2) ||
        !is_of(x[MASK], NPY_INT, 2) || !is_of(x[POSITIONS], NPY_INT, 2) || !is_of(x[SCORES], NPY_FLOAT, 1) ||
        !is_of(x[ENDED], NPY_INT, 3) || !is_of(x[ENDED_SCORES], NPY_FLOAT, 2) || !is_of(x[DONE], NPY_BOOL, 1) ||
        !PyArray_Check(x[PROMPT]) || PyArray_NDIM((PyArrayObject *)x[PROMPT]) != 2)
        return any_shape_otherwise(arguments, count);
    s.batch = DIM(x[ENDED], 0), s.beams = DIM(x[ENDED], 1), s.most = DIM(x[ENDED], 2), s.rows = s.batch * s.beams;
    s.length = DIM(x[SEQUENCES], 1), s.words = DIM(logits, 2);
    s.first = s.length == DIM(x[PROMPT], 1);
    const int64_t all = DIM(logits, 0), last = DIM(logits, 1), rows = s.rows, length = s.length, kept = DIM(x[MASK], 1);
    const int64_t placed = DIM(x[POSITIONS], 1);
    if (!rows || !last || !s.words || (all != rows && all != s.batch) || DIM(x[SEQUENCES], 0) != rows ||
        DIM(x[MASK], 0) != rows || DIM(x[POSITIONS], 0) != rows || !placed || DIM(x[SCORES], 0) != rows ||
        DIM(x[ENDED_SCORES], 0) != s.batch || DIM(x[ENDED_SCORES], 1) != s.beams || DIM(x[DONE], 0) != s.batch ||
        length > s.most || (!by.beams && s.beams > 1) || s.words > INT32_MAX)
        return any_shape_otherwise(arguments, count);
    PyObject **state = y + 3;
    y[0] = empty(NPY_BOOL, 1, 1, 0, 0);
    y[1] = empty(NPY_INT64, 1, rows, 0, 0);
    y[2] = empty(NPY_FLOAT, 3, s.batch, s.beams, s.words);
    state[IDS] = empty(NPY_INT, 2, rows, 1, 0);
    state[POSITIONS] = empty(NPY_INT, 2, rows, 1, 0);
    state[MASK] = empty(NPY_INT, 2, rows, kept + 1, 0);
    state[SEQUENCES] = empty(NPY_INT, 2, rows, length + 1, 0);
    for (int i = SCORES; i <= DONE; i++)
        state[i] = copy_of(x[i]);
    PyObject *result = tuple_of(y, 3 + OF_STATE);
    if (!result)
        return NULL;
    s.scores = DATA(y[2]), s.ended = DATA(state[ENDED]), s.ended_scores = DATA(state[ENDED_SCORES]);
    s.done = DATA(state[DONE]), s.sequences = DATA(x[SEQUENCES]);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t from = all == rows ? row : row / s.beams; /* the first run may be of samples, not of beams */
        memcpy(s.scores + row * s.words, (const float *)DATA(logits) + ((from + 1) * last - 1) * s.words,
               s.words * sizeof(float));
    }
    int32_t *tokens = DATA(state[IDS]);
    int64_t *sources = DATA(y[1]);
    const int chosen = choose(&s, &by, x, arguments[CHECKPOINT], tokens, sources, DATA(state[SCORES]));
    if (chosen < 1) {
        Py_DECREF(result);
        return chosen < 0 ? NULL : any_shape_otherwise(arguments, count);
    }
    uint8_t *go_on = DATA(y[0]);
    *go_on = 0;
    for (int64_t b = 0; b < s.batch; b++)
        *go_on |= !s.done[b];
    for (int64_t row = 0; row < rows; row++) {
        int32_t *to = (int32_t *)DATA(state[SEQUENCES]) + row * (length + 1), *position = DATA(state[POSITIONS]);
        memcpy(to, s.sequences + sources[row] * length, length * sizeof *to);
        to[length] = tokens[row];
        position[row] = ((const int32_t *)DATA(x[POSITIONS]))[(row + 1) * placed - 1] + 1;
        for (int64_t i = position[row] *= !s.first; s.first && i < length; i++)
            position[row] += s.sequences[row * length + i] != by.pad;
        to = (int32_t *)DATA(state[MASK]) + row * (kept + 1);
        memcpy(to, (const int32_t *)DATA(x[MASK]) + row * kept, kept * sizeof *to);
        to[kept] = 1;
    }
    return result;
}

static PyObject *search_end(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    enum { TOKENS, TOTALS, KEPT, KEPT_SCORES, ALL_DONE, PENALTY, RETURNED, OF_END = 10 };
    PyObject *const *x = arguments + ARRAYS, *y[2];
    float penalty = 1;
    int32_t number = 1;
    search_settings by;
    if (read_settings(arguments, count, &by) < 0)
        return NULL;
    if (count != ARRAYS + OF_END || by.results > 1 + by.beams || !is_of(x[TOKENS], NPY_INT, 2) ||
        !is_of(x[TOTALS], NPY_FLOAT, 1) || !is_of(x[KEPT], NPY_INT, 3) || !is_of(x[KEPT_SCORES], NPY_FLOAT, 2) ||
        !is_of(x[ALL_DONE], NPY_BOOL, 1) || !read_number(x[PENALTY], NPY_FLOAT, &penalty) ||
        !read_number(x[RETURNED], NPY_INT, &number))
        return any_shape_otherwise(arguments, count);
    const int64_t batch = DIM(x[KEPT], 0), beams = DIM(x[KEPT], 1), most = DIM(x[KEPT], 2), length = DIM(x[TOKENS], 1);
    const int64_t rows = batch * beams;
    if (number < 1 || number > beams || length > most || DIM(x[TOKENS], 0) != rows || DIM(x[TOTALS], 0) != rows ||
        DIM(x[KEPT_SCORES], 0) != batch || DIM(x[KEPT_SCORES], 1) != beams || DIM(x[ALL_DONE], 0) != batch ||
        (!by.beams && beams > 1))
        return any_shape_otherwise(arguments, count);
    for (int64_t i = 0; i < rows; i++)
        if (isnan(((const float *)DATA(x[KEPT_SCORES]))[i])) /* which cannot be ordered */
            return any_shape_otherwise(arguments, count);
    PyObject *held[] = {copy_of(x[KEPT]), copy_of(x[KEPT_SCORES])}, *kept = tuple_of(held, 2);
    y[0] = by.beams ? empty(NPY_INT, 3, batch, number, most) : empty(NPY_INT, 2, batch, most, 0);
    y[1] = empty(NPY_FLOAT, 2, batch, number, 0);
    PyObject *result = tuple_of(y, 2);
    if (kept && result) {
        search s = {.batch = batch, .beams = beams, .rows = rows, .length = length, .most = most};
        s.ended = DATA(held[0]), s.ended_scores = DATA(held[1]);
        for (int64_t row = 0; row < rows; row++) {
            const float total = ((const float *)DATA(x[TOTALS]))[row] / (float)pow((double)length, penalty);
            const int32_t *tokens = (const int32_t *)DATA(x[TOKENS]) + row * length;
            if (!by.beams)
                memcpy(s.ended + row * most, tokens, length * sizeof *tokens);
            else if (!((const uint8_t *)DATA(x[ALL_DONE]))[row / beams])
                add(&s, by.pad, row / beams, tokens, total);
        }
        for (int64_t i = 0, last = 0; i < batch * number; i++) {
            const float *scores = s.ended_scores + i / number * beams;
            int64_t best = -1; /* the next one after the last: equal ones keep their order */
            for (int64_t j = 0; j < beams; j++)
                if ((i % number == 0 || scores[j] < scores[last] || (scores[j] == scores[last] && j > last)) &&
                    (best < 0 || scores[j] > scores[best]))
                    best = j;
            last = best;
            ((float *)DATA(y[1]))[i] = scores[best];
            memcpy((int32_t *)DATA(y[0]) + i * most, s.ended + (i / number * beams + best) * most, most * sizeof(int32_t));
        }
    }
    Py_XDECREF(kept);
    if (result && kept && by.results == 1) {
        PyObject *alone = Py_NewRef(y[0]);
        Py_DECREF(result);
        return alone;
    }
    if (!kept)
        Py_CLEAR(result);
    return result;
}

PyMethodDef search_functions[] = {
    {"search_start", FAST(search_start),
     "search_start(otherwise, checkpoint, settings, ids, length, beams, mask): the state before the first token."},
    {"search_step", FAST(search_step),
     "search_step(otherwise, checkpoint, settings, logits, *state, *limits): the next tokens, and the state."},
    {"search_end", FAST(search_end),
     "search_end(otherwise, checkpoint, settings, sequences, ...): the best sequences."},
    {NULL, NULL, 0, NULL},
};
