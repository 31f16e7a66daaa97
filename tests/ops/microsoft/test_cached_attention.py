"""GroupQueryAttention and SparseAttention, against ONNX Runtime and a plain definition."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.errors import RunError
from penstock.core.types import ShapeError
from penstock.ops.registry import standard
from tests.ops.harness import check_node, node_model, run_ort
from tests.support.sweeps import sweep

rng = np.random.default_rng(7)
BATCH, HEADS, KV, SIZE, BLOCK = 2, 4, 2, 16, 16
GQA = {"num_heads": HEADS, "kv_num_heads": KV}
PROMPT, DECODE = 5, 1


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def inputs(queries: int, room: int, lengths: list[int], total: int, **more: Any) -> list[Any]:
    """Inputs of GroupQueryAttention; ``more`` by name."""
    batch = len(lengths)
    q, k, v = (normal(batch, queries, h * SIZE) for h in (HEADS, KV, KV))
    past = [normal(batch, KV, room, SIZE) if room else None for _ in range(2)]
    names = ["cos", "sin", "positions", "bias", "sink", "k_scale", "v_scale"]
    optional = [more.get(name) for name in names]
    return [q, k, v, *past, int32(*lengths) - 1, int32(total), *optional]


def angles() -> dict[str, np.ndarray]:
    return {"cos": normal(50, SIZE // 2), "sin": normal(50, SIZE // 2)}


def check(values: list[Any], attrs: dict[str, Any], **options: Any) -> list[np.ndarray]:
    while values[-1] is None:
        values = values[:-1]
    options = {"expected": "ort", "outputs": 3, "rtol": 1e-5, "atol": 1e-5, **options}
    return check_node(
        "GroupQueryAttention",
        values,
        GQA | attrs,
        domain="com.microsoft",
        opset=1,
        constants=(6,),
        **options,
    )


# Queries, positions of the past, lengths, and the longest of them.
FORMS = {
    "prompt": (PROMPT, 0, [5, 5], 5),
    "padded prompt": (PROMPT, 0, [3, 5], 5),
    "prompt into a buffer": (PROMPT, 8, [3, 5], 5),
    "decoding": (DECODE, 8, [6, 9], 9),
    "decoding in a buffer": (DECODE, 8, [4, 7], 7),
    "first token": (DECODE, 0, [1, 1], 1),
    "more of a prompt": (PROMPT, 8, [13], 13),
    "more of a prompt in a buffer": (PROMPT, 8, [7], 7),
}


@pytest.mark.parametrize(
    "case", sweep(itertools.product(FORMS, [None, 0, 1], [False, True], [False, True]), 32)
)
def test_group_query_attention_matches_onnx_runtime(
    case: tuple[str, int | None, bool, bool],
) -> None:
    form, rotary, packed, positions = case
    queries, _, lengths, _ = FORMS[form]
    places = rng.integers(0, 9, (len(lengths), queries)) if positions else None
    more = angles() if rotary is not None else {}
    values = inputs(*FORMS[form], positions=places, **more)
    if packed:
        values[:3] = [np.concatenate(values[:3], -1), None, None]
    check(values, {"do_rotary": int(rotary is not None), "rotary_interleaved": rotary or 0})


OPTIONS = {
    "window": {"local_window_size": 3},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.3},
    "smooth": {"smooth_softmax": 1},
    "not causal": {"causal": 0},
    "window and softcap": {"local_window_size": 1, "softcap": 2.0},
}


SOME_FORMS = ["prompt", "decoding in a buffer", "more of a prompt"]


@pytest.mark.parametrize(
    "case",
    sweep(itertools.product(OPTIONS, SOME_FORMS, [False, True], [0, 1, HEADS], [0, 1, 2]), 36),
)
def test_group_query_attention_with_options_matches_onnx_runtime(
    case: tuple[str, str, bool, int, int],
) -> None:
    option, form, sink, bias, shown = case
    queries, room, lengths, total = FORMS[form]
    if shown:  # what ONNX Runtime shows beyond the end of a sample is what was in memory
        lengths = [total] * len(lengths)
    values = inputs(
        *(queries, room, lengths, total),
        sink=normal(HEADS) if sink else None,
        bias=normal(1 if bias == 1 else len(lengths), bias, queries, total) if bias else None,
    )
    check(values, {"qk_output": shown} | OPTIONS[option], outputs=4 if shown else 3)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_group_query_attention_of_16_bits_matches_wide_one(dtype: Any, form: str) -> None:
    values = inputs(*FORMS[form], **angles())
    narrow = [x.astype(dtype) if x is not None and x.dtype == np.float32 else x for x in values]
    wide = [x.astype(np.float32) if x is not None and x.dtype == dtype else x for x in narrow]
    attrs, tolerance = {"do_rotary": 1}, 1e-2 if dtype is np.float16 else 8e-2
    want: Any = "ort"
    if dtype is not np.float16:
        want = [x.astype(dtype) for x in check(wide, attrs)]
    check(narrow, attrs, expected=want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtypes", [(np.float16, np.float32), (np.float32, np.float16)])
@pytest.mark.parametrize("form", ["decoding", "decoding in a buffer", "more of a prompt"])
def test_cache_of_other_floats_than_queries_matches_onnx_runtime(dtypes: Any, form: str) -> None:
    values = inputs(*FORMS[form], **angles())
    for places, dtype in (((0, 1, 2, 7, 8), dtypes[0]), ((3, 4), dtypes[1])):
        for i in places:
            values[i] = values[i].astype(dtype)
    check(values, {"do_rotary": 1}, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "scales", [("PER_TENSOR", (1,)), ("PER_TENSOR", ()), ("PER_CHANNEL", None)]
)
@pytest.mark.parametrize("form", ["prompt", "padded prompt", "decoding", "decoding in a buffer"])
@pytest.mark.parametrize("half", [False, True])
def test_group_query_attention_with_a_quantized_cache_matches_onnx_runtime(
    bits: int, scales: tuple[str, Any], form: str, half: bool
) -> None:
    mode, shape = scales
    step = 0.02 if bits == 8 else 0.3
    shape = (1, KV, 1, SIZE) if shape is None else shape
    values = inputs(*FORMS[form])
    dtype, stored = (np.int8, SIZE) if bits == 8 else (np.uint8, SIZE // 2)
    room = FORMS[form][1]
    for i in (3, 4):
        codes = rng.integers(0, 256, (BATCH, KV, room, stored)).astype(np.uint8)
        values[i] = codes.view(dtype)
    values[12:] = [np.asarray(step + step * rng.random(shape), np.float32) for _ in range(2)]
    if half:
        values[:3] = [x.astype(np.float16) for x in values[:3]]
    attrs = {"k_quant_type": mode, "v_quant_type": mode, "kv_cache_bit_width": bits}
    tolerance = 5e-3 if half else 1e-5
    check(values, attrs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("capacity", "window"), [(4, 4), (6, 4), (7, 3)])
@pytest.mark.parametrize("queries", [1, 2, 9])
def test_group_query_attention_with_a_sliding_cache_matches_onnx_runtime(
    capacity: int, window: int, queries: int
) -> None:
    attrs = {"local_window_size": window, "sliding_window_cache": 1, "do_rotary": 1}
    for total in range(queries, 20):
        lengths = [total, max(total - 2, 1)][: 2 if queries == 1 else 1]
        bias = normal(1, HEADS, queries, total) if total % 2 else None
        values = inputs(queries, capacity, lengths, total, bias=bias, **angles())
        while values[-1] is None:
            values = values[:-1]
        model = node_model(
            "GroupQueryAttention", values, GQA | attrs, outputs=3, opset=1, domain="com.microsoft"
        )
        want = run_ort(model, values)
        step = capacity - window + 1
        for b, length in enumerate(lengths):  # the rest of the rows is left open
            kept = length - step * -(-max(length - capacity, 0) // step)
            for cache in want[1:]:
                cache[b, :, kept:] = 0
        check(values, attrs, expected=want)


def attend(
    parts: list[np.ndarray], past: list[Any], lengths: list[int], total: int, see: Any
) -> list[np.ndarray]:
    """The definition; ``see(head, query, key)`` by positions."""
    batch, queries = parts[0].shape[:2]
    q, k, v = (x.reshape(batch, queries, -1, SIZE).astype(np.float64) for x in parts)
    room = past[0].shape[2]
    caches = [np.zeros((batch, KV, max(total, room), SIZE)) for _ in range(2)]
    y = np.zeros_like(q)
    for b, length in enumerate(lengths):
        start = 0 if queries == total else length - queries
        for cache, old, new in zip(caches, past, (k, v), strict=True):
            cache[b, :, :start] = old[b, :, :start]
            cache[b, :, start : start + queries] = new[b].transpose(1, 0, 2)
        for i, head in itertools.product(range(queries), range(HEADS)):
            keys = [j for j in range(length) if j <= start + i and see(head, start + i, j)]
            keys_of, values_of = (cache[b, head // 2, keys] for cache in caches)
            weights = np.exp(keys_of @ q[b, i, head] / 4)
            y[b, i, head] = weights @ values_of / weights.sum()
    return [x.astype(np.float32) for x in (y.reshape(batch, queries, -1), *caches)]


def test_group_query_attention_of_several_samples_continues_prompts_of_each() -> None:
    values = inputs(3, 8, [5, 8], 8)
    want = attend(values[:3], values[3:5], [5, 8], 8, lambda *_: True)
    check(values, {}, expected=want, rtol=1e-4)


def test_group_query_attention_without_presents_sees_the_past() -> None:
    values = inputs(*FORMS["decoding in a buffer"])
    (y, *_) = check(values, {})
    check(values, {}, expected=[y], outputs=1)


@pytest.mark.parametrize("queries", [1, 8])
def test_group_query_attention_without_new_keys_matches_onnx_runtime(queries: int) -> None:
    values = inputs(queries, 8, [6, 4] if queries == 1 else [8, 8], 6 if queries == 1 else 8)
    values[1:3] = [x[:, :0] for x in values[1:3]]
    check(values, {})
    values[7:9] = angles().values()
    check(values, {"do_rotary": 1})


def test_group_query_attention_with_a_fed_total_runs_for_every_length() -> None:
    values = inputs(*FORMS["decoding in a buffer"])
    while values[-1] is None:
        values = values[:-1]
    model = node_model(
        "GroupQueryAttention", values, GQA, outputs=3, opset=1, domain="com.microsoft"
    )
    session = ps.compile(model)
    for total in (7, 8, 9):
        values[5:] = int32(total - 3, total - 1), int32(total)
        feeds = {f"x{i}": x for i, x in enumerate(values)}
        for got, want in zip(session.run(feeds).values(), run_ort(model, values), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(RunError, match="lengths"):
        session.run(feeds | {"x5": int32(9, 3)})


DECODER = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
decoder (float[B, S, 128] qkv, int64[B, T] mask, float[B, 2, P, 16] past_k,
         float[B, 2, P, 16] past_v, float[50, 8] cos, float[50, 8] sin)
    => (float[B, S, 64] y, float[B, 2, T, 16] k, float[B, 2, T, 16] v)
<int64[1] one = {1}, int64 second = {1}> {
    lengths = ReduceSum<keepdims = 0>(mask, one)
    before = Sub(lengths, one)
    seqlens = Cast<to = 6>(before)
    shape = Shape(mask)
    longest = Gather(shape, second)
    total = Cast<to = 6>(longest)
    y, k, v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
        (qkv, , , past_k, past_v, seqlens, total, cos, sin)
}"""


def test_group_query_attention_as_exporters_write_it_generates_as_onnx_runtime() -> None:
    model = onnx.parser.parse_model(DECODER)
    session, steps = ps.compile(model), [4, 1, 1, 1]
    past = [np.zeros((BATCH, KV, 0, SIZE), np.float32)] * 2
    for step, queries in enumerate(steps):
        total = sum(steps[: step + 1])
        mask = np.ones((BATCH, total), np.int64)
        mask[0, :1] = 0  # the first sample is shorter
        values = [normal(BATCH, queries, 128), mask, *past, *angles().values()]
        feeds = dict(zip(("qkv", "mask", "past_k", "past_v", "cos", "sin"), values, strict=True))
        results = list(session.run(feeds).values())
        for got, want in zip(results, run_named(model, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        past = results[1:]
    assert "groupqueryattention" in session.source


def run_named(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    import onnxruntime as ort

    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize(
    ("index", "value", "attrs"),
    [
        (0, normal(BATCH, 1, HEADS * SIZE + 1), {}),
        (1, None, {}),
        (1, normal(BATCH, 2, KV * SIZE), {}),
        (2, normal(BATCH, 1, KV * SIZE + 1), {}),
        (3, None, {}),
        (3, normal(BATCH, KV, 8, SIZE - 1), {}),
        (4, normal(BATCH, KV, 7, SIZE), {}),
        (4, None, {"num_heads": 3}),
        (5, int32(1, 1, 1), {}),
        (5, int32(9, 3), {}),
        (5, int32(-1, 3), {}),
        (6, int32(12), {}),
        (6, int32(0), {}),
        (7, None, {"do_rotary": 1}),
        (7, normal(20, SIZE), {}),
        (8, normal(20, 3), {}),
        (9, np.zeros((BATCH, 2), np.int64), {}),
        (10, normal(1, 1, 1, 6), {}),
        (11, normal(HEADS + 1), {}),
        (12, normal(1), {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}),
        (12, normal(1), {"k_quant_type": "PER_TENSOR"}),
        (14, normal(SIZE), {}),
        (6, int32(7), {"local_window_size": 3, "causal": 0}),
        (6, int32(7), {"sliding_window_cache": 1}),
        (6, int32(7), {"sliding_window_cache": 1, "local_window_size": 9}),
    ],
)
def test_group_query_attention_with_misfit_inputs_is_refused(
    index: int, value: Any, attrs: dict[str, Any]
) -> None:
    values = [*inputs(*FORMS["decoding in a buffer"]), None, None]
    values[7:9] = angles().values()
    values[index] = value
    with pytest.raises(ShapeError):
        check(values, attrs, expected=[None] * 3)


def test_group_query_attention_works_on_all_positions_of_the_past() -> None:
    work = standard("GroupQueryAttention", "com.microsoft").work
    assert work is not None
    past = (1, KV, 8, SIZE)
    # Each feature of a result takes part in two products for each position.
    assert work(GQA, [(1, 1, 64), None, None, past], (1, 1, 64)) == 4 * 64 * 8
    assert work(GQA, [(1, 5, 64), None, None, None], (1, 5, 64)) == 4 * 5 * 64 * 5


def bound_ort(values: list[Any], attrs: dict[str, Any]) -> list[np.ndarray]:
    """The outputs of SparseAttention, whose past ONNX Runtime wants in the place of its present."""
    import onnxruntime as ort

    model = node_model("SparseAttention", values, attrs, outputs=3, opset=1, domain="com.microsoft")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    places = {i: ort.OrtValue.ortvalue_from_numpy(x) for i, x in enumerate(values) if x is not None}
    for i, place in places.items():
        binding.bind_ortvalue_input(f"x{i}", place)
    binding.bind_output("y0")
    for output, i in (("y1", 3), ("y2", 4)):
        binding.bind_ortvalue_output(output, places[i])
    session.run_with_iobinding(binding)
    return [np.array(x.numpy()) for x in binding.get_outputs()]


VISIBLE = np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[1, 0, 0], [0, 1, 0], [1, 0, 1]]], np.bool_)
ROWS = np.array([[0, 1, 3, 5], [0, 1, 2, 4]], np.int32)
COLUMNS = np.array([[0, 0, 1, 1, 2], [0, 1, 0, 2, -1]], np.int32)


def sparse_inputs(queries: int, lengths: list[int], total: int) -> list[Any]:
    values = inputs(queries, 3 * BLOCK, lengths, total)
    return [*values[:5], ROWS, COLUMNS, int32(total), int32(*lengths)]


@pytest.mark.parametrize(
    ("queries", "lengths", "total"),
    [
        (37, [37, 37], 37),
        (37, [20, 37], 37),
        (1, [38, 38], 38),
        (1, [21, 38], 38),
        (5, [30, 41], 41),
        (48, [48, 48], 48),
    ],
)
@pytest.mark.parametrize("option", ["", "packed", "rotary", "half"])
def test_sparse_attention_matches_its_definition_and_onnx_runtime(
    queries: int, lengths: list[int], total: int, option: str
) -> None:
    values, tolerance = sparse_inputs(queries, lengths, total), 1e-4
    attrs = GQA | {"sparse_block_size": BLOCK, "do_rotary": int(option == "rotary")}

    def see(head: int, query: int, key: int) -> bool:
        return bool(VISIBLE[head % 2, query // BLOCK, key // BLOCK])

    def run(want: list[np.ndarray]) -> None:
        ends = [queries if queries == total else length for length in lengths]
        for cache, (b, end) in itertools.product(want[1:], enumerate(ends)):
            cache[b, :, end:] = 0  # the rest of the rows is left open
        check_node(
            "SparseAttention",
            values,
            attrs,
            domain="com.microsoft",
            opset=1,
            expected=want,
            outputs=3,
            constants=(7,),
            rtol=tolerance,
            atol=tolerance,
        )

    if not option:
        run(attend(values[:3], values[3:5], lengths, total, see))
    if option == "packed":
        values[:3] = [np.concatenate(values[:3], -1), None, None]
    if option == "rotary":
        values += angles().values()
    if option == "half":
        tolerance = 5e-3
        values[:5] = [x.astype(np.float16) for x in values[:5]]
    if min(lengths) == total:  # ONNX Runtime reads memory that it has not written for the others
        run(bound_ort(values, attrs))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (5, ROWS[:, :2]),
        (5, np.repeat(ROWS, 2, 0)[:3]),
        (5, ROWS + 1),
        (6, COLUMNS + 2),
        (6, COLUMNS[:1]),
        (7, int32(49)),
        (8, int32(39, 38)),
        (3, normal(BATCH, KV, 30, SIZE)),
    ],
)
def test_sparse_attention_with_misfit_inputs_is_refused(index: int, value: np.ndarray) -> None:
    values = sparse_inputs(1, [38, 38], 38)
    values[index] = value
    with pytest.raises(ShapeError):
        check_node(
            "SparseAttention",
            values,
            GQA | {"sparse_block_size": BLOCK},
            domain="com.microsoft",
            opset=1,
            expected=[None] * 3,
            outputs=3,
            constants=(7,),
        )
