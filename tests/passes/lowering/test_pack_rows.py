"""Rows that a mask hides are left out where nothing reads them, and only there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.compiler.padding import check_batch
from penstock.core.errors import RowsStay
from tests.support.onnx_text import model_from_text

BATCH, ROWS, HEADS, SIZE = 3, 40, 2, 4
WIDTH = HEADS * SIZE
WEIGHTS = {
    "w": (WIDTH, WIDTH),
    "table": (10, WIDTH),
    "places": (1, ROWS, WIDTH),
    "near": (1, HEADS, ROWS, ROWS),
    "kernel": (WIDTH, WIDTH, 1),
    "wide": (WIDTH, WIDTH, 3),
    "half": (WIDTH, WIDTH // 2, 3),
}
CONSTANTS = f"""<int64[4] heads = {{0, 0, {HEADS}, {SIZE}}}, int64[3] flat = {{0, 0, {WIDTH}}},
    int64[2] lines = {{-1, {WIDTH}}}, int64[3] square = {{{BATCH}, {ROWS}, {WIDTH}}},
    int64[2] two = {{1, 2}}, int64[1] one = {{1}}, int64[1] last = {{2}}, int64 none = {{0}},
    int64[1] begin = {{0}}, int64[1] middle = {{4}}, float low = {{-10000}}, float unit = {{1}}, float small = {{0.001}}>"""
EMBED = "x = Gather (table, ids)"
MASK = "f = Cast <to = 1> (mask) i = Sub (unit, f) j = Mul (i, low) bias = Unsqueeze (j, two)"
BACK = "ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, flat)"
PARTS = """qw = MatMul (x, w) qh = Reshape (qw, heads) q = Transpose <perm = [0, 2, 1, 3]> (qh)
    kh = Reshape (x, heads) k = Transpose <perm = [0, 2, 3, 1]> (kh) v = Transpose <perm = [0, 2, 1, 3]> (kh)
    s0 = MatMul (q, k)"""
WEIGH = f"p = Softmax <axis = -1> (s) c = MatMul (p, v) {BACK}"
ATTEND = f"{PARTS} s = Add (s0, bias) {WEIGH}"
MEAN = "m = Unsqueeze (f, last) ym = Mul (y, m) z = ReduceSum <keepdims = 0> (ym, one)"
FIRST = "z = Gather <axis = 1> (y, none)"


def model_of(*parts: str, output: str = "z") -> bytes:
    inputs = f"int64[{BATCH}, {ROWS}] ids, int64[{BATCH}, {ROWS}] mask"
    weights = [f"float{list(dims)} {name}" for name, dims in WEIGHTS.items()]
    text = f"g ({', '.join([inputs, *weights])}) => (float {output}) {CONSTANTS} {{ {' '.join(parts)} }}"
    model, rng = model_from_text(text), np.random.default_rng(0)
    del model.graph.input[2:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, dims in WEIGHTS.items():
        values = rng.normal(size=dims).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model.SerializeToString()


def feeds_of(*lengths: int) -> dict[str, np.ndarray]:
    mask = np.arange(ROWS) < np.array(lengths or (ROWS, 3, 11))[:, None]
    ids = np.random.default_rng(1).integers(0, 10, mask.shape)
    return {"ids": ids, "mask": mask.astype(np.int64)}


def reference(model: bytes, feeds: dict[str, np.ndarray], output: int = 0) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[output]


def operations(session: ps.Session) -> Counter[str]:
    return Counter(step.node.op.name for step in session.inspect.plan.walk())


def packed(
    model: bytes, feeds: dict[str, np.ndarray] | None = None, **options: object
) -> ps.Session:
    """A session that has run a padded batch, without the rows that pad and with the right answer."""
    feeds = feeds or feeds_of()
    session = ps.compile(model, cache=False, **options)
    (got,) = session.run(feeds).values()
    want = reference(model, feeds)
    if options:  # outputs have all rows, of which those of the mask count
        got, want = got[feeds["mask"] != 0], want[feeds["mask"] != 0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 1
    return session


def reason(model: bytes) -> str:
    """Why all rows of a padded batch are computed, with the right answer."""
    session, feeds = ps.compile(model, cache=False), feeds_of()
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(model, feeds), rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 0
    (line,) = [x for x in session.explain(reasons=True).splitlines() if x.startswith("rows that")]
    assert line.startswith("rows that 'mask' hides are computed: ")
    return line


# What is left out.


def test_mean_that_a_mask_multiplies_is_computed_of_rows_that_matter():
    session = packed(model_of(EMBED, MASK, ATTEND, MEAN))
    assert operations(session)["PackedAttention"] == 1
    assert operations(session)["UnpackRows"] == 1


def test_first_row_is_read_where_it_is():
    packed(model_of(EMBED, MASK, ATTEND, FIRST))


def test_first_row_is_computed_where_the_mask_hides_it():
    feeds = feeds_of()
    feeds["mask"][:, 0] = 0
    packed(model_of(EMBED, MASK, ATTEND, FIRST), feeds)


def test_first_rows_that_are_cut_out_are_read_where_they_are():
    packed(model_of(EMBED, MASK, ATTEND, "z = Slice (y, begin, one, one)"))


def test_sample_that_the_mask_hides_entirely_is_computed_whole():
    packed(model_of(EMBED, MASK, ATTEND, FIRST), feeds_of(ROWS, 0, 5))


def test_rows_that_are_combined_with_positions_take_those_of_their_own():
    feeds = feeds_of()
    feeds["mask"] = feeds["mask"][:, ::-1].copy()  # they begin somewhere
    packed(model_of("e = Gather (table, ids) x = Add (e, places)", MASK, ATTEND, MEAN), feeds)


def test_bias_between_rows_is_cut_for_each_sample():
    packed(model_of(EMBED, MASK, PARTS, "s1 = Add (s0, near) s = Add (s1, bias)", WEIGH, MEAN))


def test_scores_that_a_mask_replaces_are_added_to():
    holds = "h = Cast <to = 9> (mask) hw = Unsqueeze (h, two)"
    where = "least = Constant <value_float = -3.0e38> () s = Where (hw, s0, least)"
    mask = f"f = Cast <to = 1> (mask) {holds}"
    packed(model_of(EMBED, mask, PARTS, where, WEIGH, MEAN))


def test_scores_with_a_lower_bound_are_masked_by_what_was_added():
    bound = "least = Constant <value_float = -3.0e38> () s1 = Add (s0, bias) s = Max (least, s1)"
    packed(model_of(EMBED, MASK, PARTS, bound, WEIGH, MEAN))


def test_bound_above_the_mask_hides_nothing():
    bound = "least = Constant <value_float = -5.0> () s1 = Add (s0, bias) s = Max (least, s1)"
    reason(model_of(EMBED, MASK, PARTS, bound, WEIGH, MEAN))


def test_rows_that_a_condition_picks_are_computed():
    index = "nine = Constant <value_int = 9> () h = Equal (ids, nine) at = NonZero (h)"
    picked = "pairs = Transpose <perm = [1, 0]> (at) z = GatherND (y, pairs)"
    packed(model_of(EMBED, MASK, ATTEND, index, picked))


def test_rows_of_all_samples_on_one_axis_are_packed():
    dense = "xl = Reshape (x0, lines) g = Gemm (xl, w) x = Reshape (g, square)"
    packed(model_of("x0 = Gather (table, ids)", dense, MASK, ATTEND, MEAN))


def test_convolution_of_single_rows_is_computed_for_rows_that_matter():
    inner = """xt = Transpose <perm = [0, 2, 1]> (x0) cv = Conv (xt, kernel)
        x = Transpose <perm = [0, 2, 1]> (cv)"""
    packed(model_of("x0 = Gather (table, ids)", inner, MASK, ATTEND, MEAN))


def test_what_is_computed_of_several_rows_before_attention_is_padded():
    before = "t = Cast <to = 1> (ids) c0 = CumSum (t, axis) a = Mul (c0, small) b = Unsqueeze (a, last) x = Add (e, b)"
    axis = "axis = Constant <value_int = 1> () e = Gather (table, ids)"
    packed(model_of(axis, before, MASK, ATTEND, MEAN))


def test_rows_that_are_read_by_index_are_computed():
    index = "k1 = ArgMax <axis = 1, keepdims = 0> (ids)"
    number = f"""base = Constant <value_ints = {[i * ROWS for i in range(BATCH)]}> ()
        number = Add (k1, base) yl = Reshape (y, lines) z = Gather (yl, number)"""
    packed(model_of(EMBED, MASK, ATTEND, index, number))


def test_outputs_with_all_rows_have_0_in_those_left_out_where_the_caller_reads_none():
    model = model_of(EMBED, MASK, ATTEND, output="y")
    session, feeds = packed(model, dead_rows="any"), feeds_of()
    (y,) = session.run(feeds).values()
    assert not y[feeds["mask"] == 0].any()


@pytest.mark.parametrize("masked", [True, False])
def test_encoders_of_different_lengths_in_one_graph_are_each_packed(masked):
    b, rng = GraphBuilder(), np.random.default_rng(0)
    table = rng.normal(size=(10, WIDTH)).astype(np.float32)
    feeds = {}
    for name, rows in (("a", ROWS), ("b", ROWS // 2)):
        ids, mask = (b.input(f"{name}_{x}", np.int64, [BATCH, rows]) for x in ("ids", "mask"))
        x = b.op("Unsqueeze", b.op("Gather", table, ids), np.array([1]))
        kept = b.op("Cast", mask, to=1)
        bias = b.op("Unsqueeze", (1 - kept) * -10000.0, np.array([1, 2]))
        scores = x @ b.op("Transpose", x, perm=[0, 1, 3, 2]) * 0.25
        scores = scores + bias if masked or name == "a" else scores
        y = b.op("Squeeze", b.op("Softmax", scores) @ x, np.array([1]))
        factor = b.op("Unsqueeze", kept, np.array([2]))
        b.output(name, b.op("ReduceSum", y * factor, np.array([1]), keepdims=0))
        lengths = np.array([rows, 3, 11])[:, None]
        feeds[f"{name}_mask"] = (np.arange(rows) < lengths).astype(np.int64)
        feeds[f"{name}_ids"] = rng.integers(0, 10, (BATCH, rows))
    session = ps.compile(b.model(), cache=False)
    want = ps.compile(b.model(), cache=False, executor="interpret").run(feeds)
    for name, got in session.run(feeds).items():
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 1 + masked
    with pytest.raises(RowsStay, match="another batch size or number of rows"):
        main = session._subgraphs.main
        check_batch(session._compiler, main, [feeds[name] for name in main.names])
