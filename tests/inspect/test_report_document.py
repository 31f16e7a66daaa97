"""Documents of reports: steps, buffers, blocks, tracks."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.compiler.options import EXECUTORS
from tests.session.test_report import DIAMOND, FEEDS, compiled
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

LOOP = """g (int64 n, float[8] x) => (float[8] y) {
    y = Loop <body = b (int64 i, bool c, float[8] v) => (bool d, float[8] w) {
        d = Identity(c) p = Sin(v) q = Cos(v) w = Mul(p, q) }> (n, , x) }"""


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


@pytest.mark.costly
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
