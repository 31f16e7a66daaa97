"""Options of compiling and running: one record each, for all functions that take them."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import get_args

import numpy as np
import pytest

import penstock as ps
from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.compiler.options import (
    EXECUTORS,
    PRECISIONS,
    CompileOptions,
    ExecutorName,
    ExpertOptions,
    MemoryPlanner,
    Precision,
    RunOptions,
    make,
)
from penstock.core.errors import OptionError
from penstock.core.records import fields
from penstock.host.native import library
from penstock.host.threads import core_budget
from penstock.ir.describe import format_bytes
from penstock.observers.trace import Trace
from penstock.ops import find
from penstock.plan.grouping import ClusteredGrouping
from penstock.session.session import Session
from penstock.tuning.measure import Cost
from tests.support.cost_models import EqualCosts
from tests.support.onnx_text import compile_text, model_from_text


def model() -> ps.ir.graph.Model:
    x = ps.ir.graph.Value("x", ps.core.types.TensorType(np.dtype(np.float32), (2,)))
    y = ps.ir.graph.Value("y")
    graph = ps.ir.graph.Graph([x], [y], [ps.ir.graph.Node(find("Exp"), [x], [y])])
    return ps.ir.graph.Model({"g": graph}, "g")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("providers", "penstock.compat.onnxruntime has ONNX Runtime's interface"),
        ("device", r'backends=\["torch", "numpy"\] computes on a GPU'),
        ("batch_size", "shapes= compiles some before the first run"),
    ],
)
def test_option_of_other_libraries_is_refused_with_what_to_do(name, hint) -> None:
    with pytest.raises(TypeError, match=rf"compile\(\) has no option '{name}'; .*{hint}"):
        ps.compile(model(), **{name: "cuda"})
    with pytest.raises(TypeError, match="it has feeds, fetches"):
        ps.compile(model()).run({"x": [1, 2]}, **{name: "cuda"})


@pytest.mark.parametrize(
    ("precision", "hint"),
    [
        ("int8", "penstock.quantize makes one"),
        ("fp16", "a model of float16 runs as it is"),
        ("float16", "a model of float16 runs as it is"),
        ("fp32", 'write "float32"'),
        ("bfloat16", 'write "bf16"'),
    ],
)
def test_precision_of_other_libraries_is_refused_with_what_to_do(precision, hint) -> None:
    with pytest.raises(ps.core.errors.OptionError, match=f"tf32, bf16, strict; .*{hint}"):
        ps.compile(model(), precision=precision)


@pytest.mark.parametrize(
    ("function", "record"),
    [
        (ps.compile, CompileOptions),
        (Session.run, RunOptions),
        (Session.submit, RunOptions),
        (Session.run_async, RunOptions),
        (Session.arun, RunOptions),
        (ps.Stream.run, RunOptions),
    ],
)
def test_signature_lists_every_option_of_its_record(function, record) -> None:
    parameters = inspect.signature(function).parameters
    expected = inspect.signature(record).parameters
    assert list(parameters)[-len(expected) :] == list(expected)
    assert {name: parameters[name].default for name in expected} == {
        name: expected[name].default for name in expected
    }
    for name in expected:
        assert f"``{name}``: " in inspect.getdoc(function)


def test_compile_with_unknown_option_suggests_a_name() -> None:
    with pytest.raises(TypeError, match=r"compile\(\) has no option 'thread'; .*'threads'"):
        ps.compile(model(), thread=1)


@pytest.mark.parametrize("method", ["run", "submit"])
def test_run_with_unknown_option_suggests_a_name(method) -> None:
    session = ps.compile(model())
    with pytest.raises(TypeError, match=rf"{method}\(\) has no option 'timout'; .*'timeout'"):
        getattr(session, method)({"x": np.zeros(2, np.float32)}, timout=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("executor", "fast", "executor 'fast' is not one of auto, linear"),
        ("precision", "fp8", "precision 'fp8' is not one of float32, tf32, bf16, strict"),
        ("threads", 0, "threads=0: a whole number of at least 1 is needed"),
        ("max_pending", 0, "max_pending=0: a whole number from 1 to 1,000,000 is needed"),
    ],
)
def test_compile_options_with_wrong_value_raise_value_error(name, value, message) -> None:
    with pytest.raises(ValueError, match=message):
        CompileOptions(**{name: value})


def test_expert_options_with_wrong_value_raise_value_error() -> None:
    with pytest.raises(ValueError, match="memory_planner 'none' is not one of quick, best"):
        ExpertOptions(memory_planner="none")
    with pytest.raises(ValueError, match="max_streams=0"):
        ExpertOptions(max_streams=0)


def test_expert_option_as_an_option_of_compile_raises_type_error_with_its_place() -> None:
    for function in (ps.compile, ps.open):
        with pytest.raises(TypeError, match=r"expert=penstock.ExpertOptions\(max_streams=2\)"):
            function("model.onnx", max_streams=2)
    with pytest.raises(TypeError, match=r"expert=penstock.ExpertOptions\(pool=...\)"):
        ps.compile(model(), pool=object())
    with pytest.raises(TypeError):
        ExpertOptions(threads=1)


def test_expert_options_know_which_were_given() -> None:
    options = ExpertOptions(memory_planner="quick")
    assert options == ExpertOptions() and options.given == {"memory_planner"}
    assert options.changed(capture=False).given == {"memory_planner", "capture"}
    assert options.changed(capture=False) == ExpertOptions(capture=False)
    assert repr(options.changed(capture=False)) == "ExpertOptions(capture=False)"
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options and copy.given == options.given


def test_filled_leaves_expert_options_that_were_given() -> None:
    values = {"memory_planner": "wic", "fixed_threads": True, "threads": 2}
    given = make(CompileOptions, "compile", expert=ExpertOptions(memory_planner="quick"))
    filled = given.filled(values)
    assert filled.expert == ExpertOptions(fixed_threads=True) and filled.threads == 2
    assert CompileOptions().filled(values).expert.memory_planner == "wic"


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        *[(CompileOptions, f.name, object()) for f in fields(CompileOptions)],
        *[(ExpertOptions, f.name, object()) for f in fields(ExpertOptions)],
        *[(RunOptions, name, object()) for name in ("out", "returns", "observers")],
        (CompileOptions, "threads", 1.5),
        (CompileOptions, "threads", "2"),
        (CompileOptions, "threads", True),
        (CompileOptions, "max_pending", None),
        (CompileOptions, "executor", None),
    ],
)
def test_options_of_a_wrong_type_raise_type_error_with_their_name(record, name, value) -> None:
    message = re.escape(f"{name}={value!r}: ") + ".* is needed"
    with pytest.raises(TypeError, match=message):
        if name in ("timeout", "cancel"):  # of what reads and compiles
            ps.compile(model(), **{name: value})
        record(**{name: value})


def test_run_options_with_an_observer_of_another_class_raise_type_error() -> None:
    with pytest.raises(TypeError, match="a str does not observe"):
        RunOptions(observers=["trace"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": "1"}, "timeout='1': a number of seconds is needed"),
        ({"cancel": True}, "cancel=True: a penstock.CancelToken is needed"),
    ],
)
def test_stop_options_of_another_type_raise_type_error(options, message) -> None:
    session = compile_text("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    feeds = {"x": np.ones(2, np.float32)}
    for call in (session.run, session.submit):
        with pytest.raises(TypeError, match=message):
            call(feeds, **options)
    with pytest.raises(TypeError, match=message):
        compile_text("g (float[2] x) => (float[2] y) { y = Neg (x) }", **options)
    assert session.run(feeds, timeout=np.float32(60))["y"].tolist() == [-1, -1]


def test_observers_begin_with_the_trace() -> None:
    trace, other = Trace(), Trace()
    assert RunOptions(trace=trace, observers=[other]).all_observers == (trace, other)


def test_compile_options_are_pickled() -> None:
    options = CompileOptions("linear", ["numpy"], threads=1)
    assert pickle.loads(pickle.dumps(options)) == options


class NumpyIsSlow:
    def cost(self, node, backend, threads) -> Cost:
        return Cost(1.0 if backend.name == "numpy" else 1e-9)


@pytest.mark.parametrize("autotune", [False, True])
def test_cost_model_decides_where_nodes_run(autotune: bool) -> None:
    class Second(ps.backends.numpy.NumpyBackend):
        name = "second"

    backends = [ps.backends.numpy.NumpyBackend(), Second()]
    session = ps.compile(
        model(),
        backends=backends,
        expert=ps.ExpertOptions(cost_model=NumpyIsSlow()),
        autotune=autotune,
    )
    assert [step.backend for step in session.inspect.plan.walk()] == ["second"]


PRODUCTS = """g (float[8, 8] x) => (float[8, 8] y) {
    a = MatMul(x, x) b = MatMul(a, x) c = MatMul(b, x) d = MatMul(c, x) e = MatMul(x, d)
    f = Exp(x) h = MatMul(f, x) i = MatMul(h, f) j = Add(i, e) y = MatMul(j, x) }"""


@pytest.mark.parametrize("executor", ["linear", "parallel", "streams"])
def test_memory_planner_by_name_plans_the_arena(executor) -> None:
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    plans, outputs = {}, []
    for name in ("quick", "best", "wic", "first_fit", "bump"):
        session = ps.compile(
            model_from_text(PRODUCTS),
            executor=executor,
            backends=["numpy"],
            expert=ps.ExpertOptions(
                max_streams=2 if executor == "streams" else None,
                memory_planner=name,
                cost_model=EqualCosts() if executor == "parallel" else None,
            ),
        )
        outputs.append(session.run({"x": x})["y"])
        assert session.inspect.executor.name == executor or core_budget() == 1
        plans[name] = session.inspect.executor.arena_plan
        assert plans[name].planner == name
        assert f"planner {name}" in session.explain()
    explained = session.explain().splitlines()[0]  # of "bump", which compares the others
    for name in ("quick", "best", "wic", "first_fit"):
        assert f"{name} {format_bytes(plans[name].size)}" in explained
    for output in outputs:
        np.testing.assert_array_equal(output, outputs[0])
    assert plans["best"].size <= plans["wic"].size < plans["bump"].size


class NativeIsSlow:
    def cost(self, node, backend, threads) -> Cost:
        return Cost(1e-9 if backend.name == "numpy" else 1.0)


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("autotune", [False, True])
def test_cost_model_decides_against_fused_nodes(autotune: bool) -> None:
    text = """g (float[8, 8] x) => (float[8, 8] y) { p = MatMul(x, x) s = Add(p, x) y = Relu(s) }"""
    options = {"backends": ["native", "numpy"], "autotune": autotune, "executor": "linear"}
    session = compile_text(text, cost_model=NativeIsSlow(), **options)
    assert [step.node.op.name for step in session.inspect.plan.walk()] == ["MatMul", "Add", "Relu"]


def test_choices_for_type_checkers_are_those_that_are_accepted():
    assert get_args(MemoryPlanner) == MEMORY_PLANNERS
    assert get_args(ExecutorName) == EXECUTORS and get_args(Precision) == PRECISIONS


@pytest.mark.parametrize("executor", ["dataflow", "interpret"])
def test_memory_planner_is_refused_where_there_is_no_arena(executor) -> None:
    with pytest.raises(OptionError, match=f"memory_planner= .* executor='{executor}' has none"):
        ps.compile(
            model_from_text(PRODUCTS),
            executor=executor,
            expert=ps.ExpertOptions(memory_planner="wic"),
        )


@pytest.mark.parametrize("executor", ["linear", "dataflow", "frames", "streams", "interpret"])
def test_grouping_is_refused_where_nothing_is_grouped(executor) -> None:
    with pytest.raises(OptionError, match=f"grouping= .* not '{executor}'"):
        ps.compile(
            model_from_text(PRODUCTS),
            executor=executor,
            expert=ps.ExpertOptions(grouping=ClusteredGrouping),
        )
