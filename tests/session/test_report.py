"""Reports of sessions: their data, for every executor, and comparisons."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import EXECUTORS
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

#      +- Sin -- Neg -+
#  Exp-+              +- Add -- y
#      +- Cos --------+
DIAMOND = """g (float[1024] x) => (float[1024] y) {
    e = Exp(x) s = Sin(e) n = Neg(s) c = Cos(e) y = Add(n, c) }"""
LOOP = """g (int64 n, float[8] x) => (float[8] y) {
    y = Loop <body = b (int64 i, bool c, float[8] v) => (bool d, float[8] w) {
        d = Identity(c) p = Sin(v) q = Cos(v) w = Mul(p, q) }> (n, , x) }"""
FEEDS = {"x": np.linspace(0, 1, 1024, dtype=np.float32)}


def compiled(text: str = DIAMOND, **options) -> ps.Session:
    return compile_text(text, **{"backends": ["numpy"], **options})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_report_has_every_step_on_the_time_line(executor):
    report = compiled(executor=executor).inspect.report(FEEDS, runs=2)
    document = report.document
    operations = document["steps"]["operation"]
    assert {"Exp", "Sin", "Neg", "Cos", "Add"} <= set(operations)
    shown = {span[0] for span in document["timeline"]["spans"]}
    assert {operations[step] for step in shown} >= {"Exp", "Sin", "Neg", "Cos", "Add"}
    assert document["runs"] == 2
    edges = {(operations[a], operations[b]) for a, b in document["edges"]}
    assert {("Exp", "Sin"), ("Exp", "Cos"), ("Sin", "Neg"), ("Neg", "Add"), ("Cos", "Add")} <= edges
    for step, track, begin, duration, _ in document["timeline"]["spans"]:
        assert 0 <= step < len(operations)
        assert 0 <= track < len(document["timeline"]["tracks"])
        assert 0 <= begin <= begin + duration <= document["timeline"]["duration"]


def test_report_keeps_no_costs_and_profile_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    session = compiled()
    session.inspect.report(FEEDS, runs=1)
    assert not [*tmp_path.iterdir()]
    session.profile(FEEDS, runs=1)
    assert [path.name for path in tmp_path.glob("*.sqlite")] == ["costs.sqlite"]


def test_peak_of_arena_is_the_sum_of_the_buffers_that_make_it():
    arena = compiled(executor="linear").inspect.report(FEEDS, runs=1).document["arena"]
    peak = arena["peak"]
    sizes = [arena["buffers"][i][2] for i in peak["buffers"]]
    assert sum(sizes) == peak["bytes"] == max(arena["live"])
    assert arena["lower_bound"] == peak["bytes"] == 2 * 4096  # e or c, and s or n
    assert arena["size"] >= peak["bytes"]
    for _, offset, nbytes, first, last, members in arena["buffers"]:
        assert offset + nbytes <= arena["size"]
        assert 0 <= first <= last < len(arena["clock"])
        assert members


def test_steps_of_blocks_refer_to_the_step_around_them():
    feeds = {"n": np.array(5), "x": np.ones(8, np.float32)}
    document = compiled(LOOP).inspect.report(feeds, runs=3).document
    steps = document["steps"]
    loop = steps["operation"].index("Loop")
    inside = [i for i, parent in enumerate(steps["parent"]) if parent == loop]
    assert [steps["operation"][i] for i in inside] == ["Sin", "Cos", "Mul"]
    assert {steps["block"][i] for i in inside} == {"body"}
    assert [steps["count"][i] for i in inside] == [5, 5, 5]  # in each run
    executions = [span[0] for span in document["timeline"]["spans"]]
    assert [executions.count(i) for i in inside] == [5, 5, 5]


def test_fused_step_has_the_names_of_its_nodes():
    session = compile_text(DIAMOND)
    document = session.inspect.report(FEEDS, runs=1).document
    fused = [names for names in document["steps"]["nodes"] if names]
    if "native" not in session.effective.backends:
        pytest.skip("no backend here fuses these nodes")
    assert fused
    assert all(
        "+" in name
        for name, nodes in zip(
            document["steps"]["operation"], document["steps"]["nodes"], strict=True
        )
        if nodes
    )


def test_report_compares_values_with_another_session():
    model = """g (float[4,4] x) => (float[4,4] y) {
        a = Exp(x) b = MatMul(a, a) y = Sin(b) }"""
    feeds = {"x": np.full((4, 4), 0.5, np.float32)}
    other = compiled(
        model.replace("Exp(x)", "Exp(x)").replace("y = Sin(b)", "h = Identity(b) y = Cos(h)")
    )
    comparison = compiled(model).inspect.report(feeds, runs=1, against=other).document["comparison"]
    rows = {row["name"]: row for row in comparison["values"]}
    assert rows["a"]["largest"] == rows["b"]["largest"] == 0
    b = np.exp(feeds["x"]) @ np.exp(feeds["x"])
    difference = np.abs(np.sin(b) - np.cos(b))
    assert rows["y"]["largest"] == pytest.approx(difference.max(), rel=1e-5)
    assert rows["y"]["one"] == pytest.approx(np.sin(b[0, 0]), rel=1e-5)
    assert (rows["y"]["operation"], rows["y"]["other_operation"]) == ("Sin", "Cos")
    assert comparison["values"][0]["name"] == "y"  # the largest first


def test_report_of_sessions_without_a_common_value_is_refused():
    other = compiled("g (float[1024] x) => (float[1024] z) { z = Neg(x) }")
    with pytest.raises(ps.InvalidInput, match="compare sessions of one model"):
        compiled().inspect.report(FEEDS, against=other)


def test_report_refuses_wrong_arguments():
    with pytest.raises(ValueError, match="runs"):
        compiled().inspect.report(FEEDS, runs=0)
    with pytest.raises(TypeError, match="against"):
        compiled().inspect.report(FEEDS, against="numpy")
    with pytest.raises(ps.InvalidInput):
        compiled().inspect.report({})


def test_report_of_closed_session_is_refused():
    session = compiled()
    session.close()
    with pytest.raises(ps.PenstockError, match="closed"):
        session.inspect.report(FEEDS)


def test_report_is_saved_as_a_page_and_shown_in_notebooks(tmp_path):
    report = compiled().inspect.report(FEEDS, runs=1)
    path = tmp_path / "r.html"
    report.save(path)
    assert path.read_text(encoding="utf-8") == report.html
    assert report._repr_html_().startswith("<iframe ")
    assert repr(report) == "Report('g', 5 steps, 1 runs)"


def test_results_after_a_report_are_those_before():
    session = compiled()
    before = session.run(FEEDS)["y"]
    session.inspect.report(FEEDS, runs=1)
    np.testing.assert_array_equal(session.run(FEEDS)["y"], before)


@needs_torch
def test_streams_of_devices_have_tracks_of_their_own():
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    backend = TorchBackend("cpu", runtime=LateRuntime(0.0))
    session = compiled(backends=[backend], executor="streams", max_streams=8)
    document = session.inspect.report(FEEDS, runs=1).document
    line, operations = document["timeline"], document["steps"]["operation"]
    signals = session.inspect.executor.tasks.signals
    streams = len(line["tracks"]) - line["of_devices"]
    assert line["tracks"][streams:] == ["torch stream 1", "torch stream 2"]
    on = {step.node.op.name: streams + on[0] for step, on in signals.on.items()}
    tracks = {operations[span[0]]: span[1] for span in line["spans"]}
    for name in ("Sin", "Cos"):
        assert tracks[name] == on[name]
    assert tracks["Sin"] != tracks["Cos"]
