"""Facts about plans: backends, reasons, executor and precision, as requested and in effect."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.build import GraphBuilder
from penstock.host.native import library
from penstock.ops.internal.fused import is_fused
from penstock.session.facts import Memory
from tests.support import onnx_text
from tests.support.onnx_text import compile_text

_WEIGHTS = ", ".join(["0.01"] * 576)
CONVOLUTION = f"""g (float[1, 8, 16, 16] x) => (float[1, 8, 16, 16] y)
    <float[8, 8, 3, 3] w = {{{_WEIGHTS}}}> {{
    [first] a = Conv<pads=[1, 1, 1, 1]>(x, w) [second] b = HardSwish(a)
    [third] c = Conv<pads=[1, 1, 1, 1]>(b, w) y = Relu(c) }}"""
X = {"x": np.ones((1, 8, 16, 16), np.float32)}

needs_native = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def fusing() -> ps.Session:
    place = {"Conv": "native"}
    return compile_text(CONVOLUTION, backends=["native", "numpy"], place=place, shapes={})


@needs_native
def test_profile_and_trace_of_fused_steps_name_their_operations_and_backend():
    session = fusing()
    assert any(is_fused(step.node) for step in session.inspect.plan.walk())
    profile, trace = ps.Profile(), ps.Trace()
    session.run(X, observers=[profile, trace])
    by_operation = {row.facts.operation: row.facts for row in profile.steps()}
    assert by_operation["Conv+HardSwish"].backend == "native"
    assert by_operation["Conv+HardSwish"].nodes == ("first", "second")
    events = [
        event["args"] for event in trace.to_dict()["traceEvents"] if event.get("cat") == "step"
    ]
    assert {(args["operation"], args["backend"]) for args in events} == {
        (facts.operation, facts.backend) for facts in by_operation.values()
    }


@needs_native
def test_source_of_fused_steps_says_what_each_reads_and_writes():
    source = fusing().source
    call = re.search(r"conv_hardswish_(\d+)\((\w+), (c\d+) -> (\w+)", source)
    assert call, source
    assert re.search(rf"conv_relu_\d+\({call[4]}, c\d+ -> ", source)  # reads the first's result
    assert "first in the model: float32[1, 8, 16, 16]" in source


def test_explain_says_backend_of_each_step_and_executor_asked_and_granted():
    session = compile_text(CONVOLUTION, backends=["numpy"], shapes={}, executor="streams")
    assert session.effective.backends == ("numpy",)
    line = session.explain().splitlines()[1]
    assert line.startswith("executor linear (asked for: streams), precision float32, up to")
    steps = [line for line in session.explain().splitlines() if " in the model" in line]
    assert steps and all(" on numpy  # " in line for line in steps)
    auto = compile_text(CONVOLUTION, backends=["numpy"], shapes={}, threads=1)
    assert auto.effective.executor == "linear"
    assert "executor linear (asked for: auto)" in auto.explain()


@needs_native
def test_reasons_name_what_was_compared():
    text = fusing().explain(reasons=True)
    assert "# place= says so" in text
    session = compile_text(CONVOLUTION, backends=["native", "numpy"], shapes={})
    session.profile(X, runs=1)
    steps = session.inspect.describe()["steps"]
    compared = [step for step in steps if len(step["candidates"]) > 1]
    assert compared
    for step in compared:
        least = min(step["candidates"], key=lambda candidate: candidate["seconds"])
        if step["reason"] == "takes least":
            assert least["backend"] == step["backend"]
    assert any(c["measured"] for step in compared for c in step["candidates"])


def test_description_is_json_with_types_operations_and_bytes():
    session = compile_text(CONVOLUTION, backends=["numpy"], shapes={}, executor="linear")
    described = json.loads(json.dumps(session.inspect.describe()))
    assert described["asked"]["executor"] == described["effective"]["executor"] == "linear"
    conv = next(step for step in described["steps"] if step["name"] == "first")
    assert conv["flops"] == 2 * 8 * 8 * 9 * 16 * 16
    assert conv["bytes"] == 4 * (8 * 256 + 576 + 8 * 256)
    assert conv["outputs"][0]["type"] == "float32[1, 8, 16, 16]"
    assert [step["number"] for step in described["steps"]] == [1, 2, 3, 4]


def test_description_nests_steps_of_loops():
    text = """g (float[8] x, int64 n) => (float[8] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[8] v) => (bool d, float[8] w)
            { d = Identity(c) a = Exp(v) w = Neg(a) }> }"""
    described = compile_text(text, backends=["numpy"], shapes={}).inspect.describe()
    loop, *inner = described["steps"]
    assert loop["operation"] == "Loop" and loop["parent"] is None
    assert {(step["parent"], step["block"]) for step in inner} == {(1, "body")}


def test_bf16_without_a_backend_for_it_warns_and_says_float32():
    reason = "computes in float32 here: no backend of numpy rounds to bfloat16"
    with pytest.warns(UserWarning, match=reason) as warned:
        session = compile_text(CONVOLUTION, backends=["numpy"], precision="bf16", shapes={})
    assert [warning.filename for warning in warned] == [onnx_text.__file__]  # the caller of compile
    assert session.effective.precision == "float32"
    assert "precision float32 (asked for: bf16)" in session.explain()


@needs_native
def test_bf16_on_a_processor_without_it_warns_and_computes_in_float32(monkeypatch):
    without = property(lambda backend: False, lambda backend, narrow: None)
    monkeypatch.setattr(NativeBackend, "narrow", without, raising=False)
    with pytest.warns(UserWarning, match="no backend of native, numpy rounds to bfloat16"):
        session = ps.compile(wide_product(), precision="bf16", backends=["native", "numpy"])
    assert session.effective.precision == "float32"
    assert set(precisions_of(session).values()) == {"float32"}


@pytest.mark.skipif(
    library() is None or not library().multiplies_bfloat16, reason="no instructions for bfloat16"
)
def test_bf16_is_told_of_the_steps_that_round():
    session = ps.compile(wide_product(), precision="bf16", shapes={})
    assert session.effective.precision == "bf16"
    precisions = precisions_of(session)
    assert precisions["MatMul"] == "bfloat16"
    assert precisions["CumSum"] == "float32"


def wide_product():
    builder = GraphBuilder()
    x = builder.input("x", np.float32, [256, 256])
    weights = builder.constant(np.ones((256, 256), np.float32))
    builder.output("y", builder.op("CumSum", builder.op("MatMul", x, weights), np.array(1)))
    return builder.model()


def precisions_of(session: ps.Session) -> dict[str, str]:
    steps = session.inspect.describe()["steps"]
    return {step["operation"]: step["precision"] for step in steps}


def test_profile_adds_up_to_its_runs_and_knows_runs_alone():
    session = compile_text(CONVOLUTION, backends=["numpy"])
    profile = session.profile(X, runs=3)
    assert profile.runs == 3 and len(profile.alone) == 3
    rows = profile.steps()
    assert {row.count for row in rows} == {3}
    total = sum(row.seconds for row in rows) + profile.outside
    assert total == pytest.approx(profile.wall, rel=0.05)
    assert sum(row.share for row in rows) == pytest.approx(1)
    conv = next(row for row in rows if row.facts.name == "first")
    assert conv.flops_per_s == pytest.approx(conv.facts.flops * 3 / conv.seconds)


def test_nodes_of_the_model_are_in_steps_or_said_to_have_none():
    text = """g (float[4] x) => (float[2, 2] y) <float[4] one = {1, 1, 1, 1}> {
        [folded] a = Exp(one) [same] b = Identity(x) [added] c = Add(a, b) [exp] d = Exp(c)
        [unused] e = Sin(d) s = Constant<value = int64[2] {2, 2}>() y = Reshape(d, s) }"""
    described = compile_text(text).inspect.describe()
    computed = [name for step in described["steps"] for name in step["nodes"]]
    assert {"added", "exp"} <= {*computed}
    assert {"folded", "same", "unused"} <= {*described["nodes_without_step"]}
    assert not {*computed} & {*described["nodes_without_step"]}


def test_facts_have_short_representations():
    session = compile_text("g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }")
    session.run({"x": np.ones((1, 2), np.float32)})
    assert repr(session.inputs) == "[Port(x: float32[N, 2])]"
    assert repr(session.outputs) == "[Port(y: float32[N, 2])]"
    assert repr(session.stats) == "Stats(plans_made=1, plans_kept=1, runs=1)"
    memory = Memory(3 * 2**20, 0, 2048, 1)
    assert (
        repr(memory) == "Memory(1 plan: weights 3.00 MiB, arenas 0 B, plans 2.00 KiB, caches 0 B)"
    )
