"""Small decoders of encoder-decoders with random weights, spelled in the ways of exporters, and ONNX
Runtime's answers. Keys and values of cross attention are fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import penstock as ps
from tests.support.onnx_text import model_from_text

VOCABULARY, WIDTH, HEADS, SIZE, LAYERS, PLACES = 40, 32, 2, 16, 2, 200
_OWN = [f"past_self_{c}{i}" for i in range(LAYERS) for c in "kv"]
CROSS = [f"past_cross_{c}{i}" for i in range(LAYERS) for c in "kv"]
MASK = "encoder_mask"
_DIMS = f"b, {HEADS}, {{}}, {SIZE}"

KINDS = ("added", "chosen", "unmasked", "flat", "onnx", "microsoft")
"""a mask that is added, or chosen by, no mask, heads of all samples along one axis, and nodes of
attention"""
MASKED = ("added", "chosen", "flat", "onnx")

_START = """
    shape_i = Shape (ids) rows = Gather <axis = 0> (shape_i, one)
    shape_p = Shape (past_self_k0) past = Gather <axis = 0> (shape_p, two) total = Add (past, rows)
    begin = Unsqueeze (past, zeros) end = Unsqueeze (total, zeros)
    own = Range (past, total, one) all = Range (zero, total, one) place = Unsqueeze (own, last)
    behind = Greater (all, place) bias = Where (behind, low, nothing)
    x = Gather (table, ids) y = Slice (places, begin, end, zeros, ones) x0 = Add (x, y)
    rows1 = Unsqueeze (rows, zeros) total1 = Unsqueeze (total, zeros)
    shape_c = Shape (past_cross_k0) source1 = Slice (shape_c, twos, threes)
    flat_rows = Concat <axis = 0> (last, rows1, size1) flat_total = Concat <axis = 0> (last, total1, size1)
    flat_source = Concat <axis = 0> (last, source1, size1)
    scores_own = Concat <axis = 0> (last, heads1, rows1, total1)
    scores_cross = Concat <axis = 0> (last, heads1, rows1, source1)
    flat_own = Concat <axis = 0> (last, rows1, total1) flat_cross = Concat <axis = 0> (last, rows1, source1)
    in_heads = Concat <axis = 0> (last, heads1, rows1, size1)"""
_MASKS = """
    flags = Cast <to = 1> (encoder_mask) absent = Sub (unit, flags) lows = Mul (absent, low)
    masked = Unsqueeze (lows, middles) seen1 = Cast <to = 9> (encoder_mask)
    seen = Unsqueeze (seen1, middles) each_row = Concat <axis = 0> (ones, ones, rows1, ones)
    seen_rows = Expand (seen, each_row)"""
_SPLIT = """
    {to}_flat = MatMul ({x}, {w}) {to}_parts = Reshape ({to}_flat, of_heads)
    {to} = Transpose <perm = [0, 2, 1, 3]> ({to}_parts)"""
_SPELLED = """
    {y}_t = Transpose <perm = [0, 1, 3, 2]> ({k}) {y}_s = MatMul ({q}, {y}_t)
    {y}_c = Mul ({y}_s, factor) {bias} {y}_w = Softmax <axis = -1> ({y}_b)
    {y} = MatMul ({y}_w, {v})"""
_FLAT = """
    {y}_q = Reshape ({q}, flat_rows) {y}_k = Reshape ({k}, {flat}) {y}_v = Reshape ({v}, {flat})
    {y}_t = Transpose <perm = [0, 2, 1]> ({y}_k) {y}_3 = MatMul ({y}_q, {y}_t)
    {y}_s = Reshape ({y}_3, {four}) {y}_c = Mul ({y}_s, factor) {bias} {y}_f = Reshape ({y}_b, {three})
    {y}_w = Softmax <axis = -1> ({y}_f) {y}_p = MatMul ({y}_w, {y}_v) {y} = Reshape ({y}_p, in_heads)"""
_BEHIND = """
    {y}_turned = Transpose <perm = [0, 2, 1, 3]> ({y}) {y}_wide = Reshape ({y}_turned, wide)"""


def _attention(kind: str, i: int) -> str:
    """Both attentions of a layer."""
    own = f"a{i}_b = Add (a{i}_c, bias)"
    cross = {
        "chosen": f"c{i}_b = Where (seen, c{i}_c, low)",
        "unmasked": f"c{i}_b = Identity (c{i}_c)",
    }.get(kind, f"c{i}_b = Add (c{i}_c, masked)")
    names = {"q": f"q{i}", "k": f"present_k{i}", "v": f"present_v{i}", "y": f"a{i}"}
    fed = {"q": f"p{i}", "k": f"past_cross_k{i}", "v": f"past_cross_v{i}", "y": f"c{i}"}
    split = "".join(_SPLIT.format(x=f"x{i}", w=f"w{c}{i}", to=f"{c}{i}") for c in "qkv")
    presents = "".join(
        f" present_{c}{i} = Concat <axis = 2> (past_self_{c}{i}, {c}{i})" for c in "kv"
    )
    of_query = _SPLIT.format(x=f"r{i}", w=f"wp{i}", to=f"p{i}")
    if kind == "microsoft":
        heads = f"num_heads = {HEADS}, scale = 0.25, unidirectional = "
        plain = " ".join(f"{c}{i} = MatMul (x{i}, w{c}{i})" for c in "qkv")
        first = f"""{plain} a{i}_wide, present_k{i}, present_v{i} = com.microsoft.MultiHeadAttention
            <{heads}1> (q{i}, k{i}, v{i}, , , , past_self_k{i}, past_self_v{i})"""
        second = f"""p{i} = MatMul (r{i}, wp{i}) c{i}_wide = com.microsoft.MultiHeadAttention
            <{heads}0> (p{i}, past_cross_k{i}, past_cross_v{i})"""
        return f"{first} {_residual(i)} {second}"
    if kind == "onnx":
        first = f"""{split} a{i}, present_k{i}, present_v{i} = Attention <is_causal = 1, scale = 0.25>
            (q{i}, k{i}, v{i}, , past_self_k{i}, past_self_v{i})"""
        second = f"""{of_query} c{i} = Attention <scale = 0.25>
            (p{i}, past_cross_k{i}, past_cross_v{i}, seen_rows)"""
    elif kind == "flat":
        own_dims = {"flat": "flat_total", "four": "scores_own", "three": "flat_own"}
        dims = {"flat": "flat_source", "four": "scores_cross", "three": "flat_cross"}
        first = split + presents + _FLAT.format(bias=own, **names, **own_dims)
        second = of_query + _FLAT.format(bias=cross, **fed, **dims)
    else:
        first = split + presents + _SPELLED.format(bias=own, **names)
        second = of_query + _SPELLED.format(bias=cross, **fed)
    first += _BEHIND.format(y=f"a{i}")
    return first + _residual(i) + second + _BEHIND.format(y=f"c{i}")


def _residual(i: int) -> str:
    return f" o{i} = MatMul (a{i}_wide, wo{i}) r{i} = Add (x{i}, o{i}) "


def cross_decoder(
    kind: str, changes: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> onnx.ModelProto:
    """A decoder in one of ``KINDS``, with parts of its text replaced, and with ``more`` inputs."""
    inputs = ["int64[b, s] ids", *[f"float[{_DIMS.format('p')}] {name}" for name in _OWN]]
    inputs += [f"float[{_DIMS.format('n')}] {name}" for name in CROSS]
    inputs += [f"int64[b, n] {MASK}"] if kind in MASKED else []
    inputs += more
    outputs = [f"float[b, s, {VOCABULARY}] logits"]
    outputs += [f"float[{_DIMS.format('t')}] {n.replace('past_self', 'present')}" for n in _OWN]
    text = _START + (_MASKS if kind in MASKED else "")
    for i in range(LAYERS):
        text += f"""{_attention(kind, i)} d{i} = MatMul (c{i}_wide, wc{i}) e{i} = Add (r{i}, d{i})
            f{i} = MatMul (e{i}, wu{i}) g{i} = Tanh (f{i}) x{i + 1} = Add (e{i}, g{i})"""
    text += f" n = LayerNormalization (x{LAYERS}, gain) logits = MatMul (n, head)"
    for old, new in (changes or {}).items():
        text = text.replace(old, new)
    constants = f"""<int64[1] last = {{-1}}, int64[1] zeros = {{0}}, int64[1] ones = {{1}},
        int64[1] twos = {{2}}, int64[1] threes = {{3}}, int64[2] middles = {{1, 2}}, int64 zero = {{0}},
        int64 one = {{1}}, int64 two = {{2}}, int64[1] size1 = {{{SIZE}}}, int64[1] heads1 = {{{HEADS}}},
        float low = {{-3.4e38}}, float nothing = {{0}}, float unit = {{1}}, float factor = {{0.25}},
        int64[4] of_heads = {{0, 0, {HEADS}, {SIZE}}}, int64[3] wide = {{0, 0, {WIDTH}}}>"""
    model = model_from_text(
        f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {constants} {{ {text} }}",
        opset=23,
        domains={"com.microsoft": 1},
    )
    model.graph.initializer.extend(_weights())
    used = {name for node in model.graph.node for name in node.input}
    kept = [x for x in model.graph.initializer if x.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


@cache
def _weights() -> list[onnx.TensorProto]:
    rng = np.random.default_rng(6)
    shapes = {"table": (VOCABULARY, WIDTH), "places": (PLACES, WIDTH), "head": (WIDTH, VOCABULARY)}
    names = [f"w{c}{i}" for c in "qkvpocu" for i in range(LAYERS)]
    shapes |= dict.fromkeys(names, (WIDTH, WIDTH))
    arrays = {n: rng.standard_normal(s) / np.sqrt(WIDTH) * 1.5 for n, s in shapes.items()}
    arrays["gain"] = np.ones(WIDTH)
    return [numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items()]


def fixed_of(kind: str, positions: int, seed: int, absent: int = 0) -> dict[str, np.ndarray]:
    """What an encoder returned, of so many positions, some of which the mask leaves out."""
    rng = np.random.default_rng(seed)
    dims = 1, HEADS, positions, SIZE
    fixed = {name: rng.standard_normal(dims).astype(np.float32) for name in CROSS}
    if kind in MASKED:
        fixed[MASK] = np.ones((1, positions), np.int64)
        fixed[MASK][0, rng.permutation(positions)[:absent]] = 0
    return fixed


def cross_stepper(kind: str, **options: object) -> ps.Stepper:
    """A stepper of a decoder in one of ``KINDS``."""
    return ps.Stepper(ps.load(cross_decoder(kind)), **options)


def cross_logits(
    model: onnx.ModelProto, fixed: Mapping[str, np.ndarray], ids: Sequence[int]
) -> np.ndarray:
    """ONNX Runtime's logits [rows, vocabulary] of a whole text at once."""
    runtime = _runtime(model.SerializeToString())
    feeds = {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in _OWN}
    feeds |= {"ids": np.array([ids]), **fixed}
    return runtime.run(["logits"], feeds)[0][0]


@cache
def _runtime(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model)
