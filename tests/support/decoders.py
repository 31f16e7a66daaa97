"""Small decoders with random weights, spelled in the ways of exporters, and ONNX Runtime's answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.passes.lowering.join_steps import join_steps
from tests.support.onnx_text import model_from_text

VOCABULARY, WIDTH, HEADS, GROUPS, SIZE, LAYERS = 50, 64, 4, 2, 16, 2
_KEPT = GROUPS * SIZE
_CACHES = [f"{kind}{i}" for i in range(LAYERS) for kind in "kv"]
_DIMS = f"b, {GROUPS}, p, {SIZE}"

# A mask by comparing positions, as torch's exporters write it, with a window or without.
_COMPARED = """
    shape_i = Shape (ids) rows = Gather <axis = 0> (shape_i, one)
    shape_p = Shape (past_k0) past = Gather <axis = 0> (shape_p, two)
    total = Add (past, rows)
    own = Range (past, total, one)
    all = Range (zero, total, one)
    place = Unsqueeze (own, last)
    behind = Greater (all, place)
    {window}
    bias0 = Where (hidden, low, nothing)
    flags = Cast <to = 1> (mask) absent = Sub (unit, flags) lows = Mul (absent, low)
    bias1 = Unsqueeze (lows, middle)
    bias2 = Add (bias0, bias1)
    {numbers}"""
_NUMBERS = {  # added to scores by distance: as ALiBi has them, by keys alone as Bloom, of buckets as T5
    "slopes": """away = Sub (all, place) float_away = Cast <to = 1> (away)
        sloped = Mul (slopes, float_away) bias = Add (bias2, sloped)""",
    "keys": """counted = CumSum (mask, one) less = Sub (counted, one) at = Mul (less, mask)
        float_at = Cast <to = 1> (at) wide_at = Unsqueeze (float_at, middle)
        sloped = Mul (slopes, wide_at) bias = Add (bias2, sloped)""",
    "buckets": """away = Sub (place, all) ahead = Max (away, zero) bucket = Min (ahead, width)
        learned = Gather (numbers, bucket) by_head = Transpose <perm = [2, 0, 1]> (learned)
        bias = Add (bias2, by_head)""",
}
_ALL = "hidden = Identity (behind)"
_WINDOW = """start = Sub (place, width) before = LessOrEqual (all, start)
    hidden = Or (behind, before)"""
_SPELLED = """
    kr{i} = Transpose <perm = [0, 1, 3, 2]> (many_k{i})
    s{i} = MatMul (q{i}, kr{i}) sc{i} = Mul (s{i}, factor) {cap} sb{i} = Add (st{i}, bias)
    w{i} = Softmax <axis = -1> (sb{i}) a{i} = MatMul (w{i}, many_v{i})"""
_REPEATED = """
    present_{c} = Concat <axis = 2> (past_{c}, new_{c})
    wide_{c} = Unsqueeze (present_{c}, two) shape_{c} = Shape (wide_{c})
    times_{c} = Mul (shape_{c}, twice) more_{c} = Expand (wide_{c}, times_{c})
    many_{c} = Reshape (more_{c}, by_heads)"""
_SPLIT = """
    {c}_flat = MatMul (x{i}, w{c}) {c}_heads = Reshape ({c}_flat, {split})
    {c}_turned = Transpose <perm = [0, 2, 1, 3]> ({c}_heads)"""
_BEHIND = """
    at{i} = Transpose <perm = [0, 2, 1, 3]> (a{i}) af{i} = Reshape (at{i}, flat)
    o{i} = MatMul (af{i}, wo{i}) r{i} = Add (x{i}, o{i})
    h{i} = MatMul (r{i}, wu{i}) g{i} = Tanh (h{i}) x{next} = Add (r{i}, g{i})"""

# Positions as those count them whose texts may begin with padding, here a token of no text.
_COUNTED = """absent_i = Equal (ids, padding) present_i = Not (absent_i) flags_i = Cast <to = 6> (present_i)
    counted_i = CumSum (flags_i, one) past_i = Cast <to = 6> (past) moved_i = Add (counted_i, past_i)
    placed_i = Mul (moved_i, flags_i) wide_i = Cast <to = 7> (placed_i) place_i = Add (wide_i, one)
    y = Gather (places, place_i)"""

SPELLINGS = (
    *("spelled", "window", "softcap", "scaled", "counted", "onnx", "groups", "packed"),
    *_NUMBERS,
)


def _layer(kind: str, i: int) -> str:
    """The text of a layer."""
    if kind in ("groups", "packed"):
        return _grouped(kind, i)
    text = _SPLIT.format(c=f"q{i}", i=i, split="of_heads").replace(f"q{i}_turned", f"q{i}")
    for c in (f"k{i}", f"v{i}"):
        text += _SPLIT.format(c=c, i=i, split="of_groups").replace(f"{c}_turned", f"new_{c}")
    if kind == "onnx":
        return f"""{text}
            a{i}, present_k{i}, present_v{i} = Attention <is_causal = 1, scale = 0.25>
                (q{i}, new_k{i}, new_v{i}, , past_k{i}, past_v{i})"""
    text += "".join(_REPEATED.format(c=c) for c in (f"k{i}", f"v{i}"))
    capped = f"sl{i} = Div (sc{i}, cap) sh{i} = Tanh (sl{i}) st{i} = Mul (sh{i}, cap)"
    cap = capped if kind == "softcap" else f"st{i} = Identity (sc{i})"
    if kind == "scaled":  # with the mask
        spelled = _SPELLED.replace("sc{i} = Mul (s{i}, factor)", "sc{i} = Add (s{i}, bias)")
        spelled = spelled.replace("Add (st{i}, bias)", "Mul (st{i}, factor)")
        return text + spelled.format(i=i, cap=cap)
    return text + _SPELLED.format(i=i, cap=cap)


def _grouped(kind: str, i: int) -> str:
    heads = f"num_heads = {HEADS}, kv_num_heads = {GROUPS}, do_rotary = 1, local_window_size = 9"
    flat = " ".join(f"{c}{i} = MatMul (x{i}, w{c}{i})" for c in "qkv")
    given = f"q{i}, k{i}, v{i}"
    if kind == "packed":
        flat += f" qkv{i} = Concat <axis = 2> (q{i}, k{i}, v{i})"
        given = f"qkv{i}, , "
    return f"""{flat}
        af{i}, present_k{i}, present_v{i} = com.microsoft.GroupQueryAttention <{heads}>
            ({given}, past_k{i}, past_v{i}, lengths, longest, cos, sin)
        o{i} = MatMul (af{i}, wo{i}) r{i} = Add (x{i}, o{i})
        h{i} = MatMul (r{i}, wu{i}) g{i} = Tanh (h{i}) x{i + 1} = Add (r{i}, g{i})"""


def decoder_model(kind: str, places: int = 400) -> onnx.ModelProto:
    """A decoder in one of ``SPELLINGS``, for at most so many ``places``."""
    grouped = kind in ("groups", "packed")
    inputs = ["int64[b, s] ids", "int64[b, t] mask"]
    if kind == "onnx":
        inputs = ["int64[b, s] ids", "int64[b, s] position_ids"]
    inputs += [f"float[{_DIMS}] past_{c}" for c in _CACHES]
    outputs = [f"float[b, s, {VOCABULARY}] logits"]
    outputs += [f"float[b, {GROUPS}, t, {SIZE}] present_{c}" for c in _CACHES]
    text = "x0 = Gather (table, ids)"
    if grouped:
        text += """counted = ReduceSum <keepdims = 0> (mask, last) less = Sub (counted, one)
            lengths = Cast <to = 6> (less) shape_m = Shape (mask) t1 = Gather <axis = 0> (shape_m, one)
            longest = Cast <to = 6> (t1)"""
    elif kind == "onnx":
        text = "x = Gather (table, ids) y = Gather (places, position_ids) x0 = Add (x, y)"
    else:
        numbers = _NUMBERS.get(kind, "bias = Identity (bias2)")
        text = _COMPARED.format(window=_WINDOW if kind == "window" else _ALL, numbers=numbers)
        text += _COUNTED if kind == "counted" else "y = Gather (places, own)"
        text += " x = Gather (table, ids) x0 = Add (x, y)"
    for i in range(LAYERS):
        text += _layer(kind, i) + ("" if grouped else _BEHIND.format(i=i, next=i + 1))
    text += f" n = LayerNormalization (x{LAYERS}, gain) logits = MatMul (n, head)"
    constants = f"""<int64[1] last = {{-1}}, int64[1] middle = {{1}}, int64[1] two = {{2}},
        int64 zero = {{0}}, int64 one = {{1}}, int64 width = {{9}}, int64 padding = {{{VOCABULARY}}}, float low = {{-3.4e38}},
        float nothing = {{0}}, float unit = {{1}}, float factor = {{0.25}}, float cap = {{2.0}},
        int64[5] twice = {{1, 1, {HEADS // GROUPS}, 1, 1}}, int64[4] by_heads = {{0, {HEADS}, -1, {SIZE}}},
        int64[4] of_heads = {{0, 0, {HEADS}, {SIZE}}}, int64[4] of_groups = {{0, 0, {GROUPS}, {SIZE}}},
        int64[3] flat = {{0, 0, {WIDTH}}}>"""
    model = model_from_text(
        f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {constants} {{ {text} }}",
        opset=23,
        domains={"com.microsoft": 1},
    )
    model.graph.initializer.extend(_weights(places))
    used = {name for node in model.graph.node for name in node.input}
    kept = [x for x in model.graph.initializer if x.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


@cache
def _weights(places: int) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(3)
    shapes = {"table": (VOCABULARY, WIDTH), "places": (places, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i in range(LAYERS):
        shapes |= {f"wq{i}": (WIDTH, WIDTH), f"wo{i}": (WIDTH, WIDTH), f"wu{i}": (WIDTH, WIDTH)}
        shapes |= {f"wk{i}": (WIDTH, _KEPT), f"wv{i}": (WIDTH, _KEPT)}
    arrays = {n: rng.standard_normal(s) / np.sqrt(WIDTH) * 1.5 for n, s in shapes.items()}
    angles = np.arange(places)[:, None] * 0.7 ** np.arange(SIZE // 2)
    arrays["slopes"] = 0.5 ** np.arange(HEADS)[:, None, None]
    arrays["numbers"] = rng.standard_normal((10, HEADS))
    arrays |= {"cos": np.cos(angles), "sin": np.sin(angles), "gain": np.ones(WIDTH)}
    return [numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items()]


def reference_logits(model: onnx.ModelProto, ids: Sequence[int]) -> np.ndarray:
    """ONNX Runtime's logits [rows, vocabulary] of a whole text at once."""
    return _answers(model.SerializeToString(), tuple(ids))


@cache
def _runtime(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model)


@cache
def _answers(model: bytes, ids: tuple[int, ...]) -> np.ndarray:
    runtime = _runtime(model)
    given = {
        "ids": np.array([ids]),
        "mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None],
        **{f"past_{c}": np.zeros((1, GROUPS, 0, SIZE), np.float32) for c in _CACHES},
    }
    feeds = {x.name: given[x.name] for x in runtime.get_inputs()}
    return runtime.run(["logits"], feeds)[0][0]


# A decoder of one layer, in parts that tests change.

PLAIN = """g (float[b, s, 4] x, float[b, 1, p, 4] past{more}) => (float[b, s, 4] y,
    float[b, 1, t, 4] present) <int64[1] one = {{1}}, int64 first = {{1}}, float half = {{0.5}}> {{
    r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r)
    k = Transpose <perm = [0, 1, 3, 2]> (present) s = MatMul (r, k) {mask} w = Softmax (m)
    a = MatMul (w, {values}) z = Squeeze (a, one) {behind} }}"""
CAUSAL = """i = Shape <start = 1, end = 2> (x) n = Squeeze (i) o = Shape <start = 2, end = 3> (past)
    p = Squeeze (o) t = Add (p, n) zero = Sub (p, p) own = Range (p, t, first)
    all = Range (zero, t, first) c = Unsqueeze (own, one) hidden = Greater (all, c)
    low = Constant <value_float = -3e38> () m = Where (hidden, low, s)"""
DEFAULTS = {"more": "", "mask": CAUSAL, "values": "present", "behind": "y = Identity (z)"}


def why_steps_stay(**changes: str) -> str:
    """Why the steps of a changed decoder cannot be joined."""
    model = ps.load(model_from_text(PLAIN.format(**DEFAULTS | changes)))
    with pytest.raises(RowsStay) as error:
        join_steps(model.graph)
    return str(error.value)


def stepper_of(kind: str = "spelled", **options: object) -> ps.Stepper:
    """A stepper of a decoder in one of ``SPELLINGS``."""
    return ps.Stepper(ps.load(decoder_model(kind)), **options)


def fed(ids: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of some tokens."""
    return {"ids": ids[None]}
