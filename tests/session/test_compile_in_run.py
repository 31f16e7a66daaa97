"""With ``compile_in_run=False`` no run compiles a plan."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.core.errors import OptionError
from tests.session.test_padding import MEAN, feeds_of, model_of, padded
from tests.support.tflite_models import model as tflite_model
from tests.support.tflite_models import subgraph
from tests.support.timing import SOON


def model(*dims: int | str):
    b = GraphBuilder()
    x = b.input("x", np.float32, list(dims) or ["rows", 3])
    b.output("y", b.op("Relu", x * 2.0))
    return b.model()


def fed(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 3), np.float32)}


@pytest.fixture
def session() -> ps.Session:
    return ps.compile(model(), shapes={"x": (2, 3)}, compile_in_run=False, cache=False)


def test_shapes_that_were_compiled_ahead_are_run(session):
    assert session.run(fed(2))["y"].shape == (2, 3)
    assert session.stats.plans_made == 1


def test_error_names_the_shapes_and_how_to_compile_them(session):
    with pytest.raises(
        ps.InvalidInput, match=r"no plan for \(x: float32\[5, 3\]\).*shapes=\{'x': \(5, 3\)\}"
    ):
        session.run(fed(5))
    assert session.stats.plans_made == 1


def test_no_way_to_run_compiles(session):
    ways = {
        "call": lambda: session(fed(5)["x"]),
        "submit": lambda: session.submit(fed(5)).result(SOON),
        "arun": lambda: asyncio.run(session.arun(fed(5))),
        "timeout": lambda: session.run(fed(5), timeout=SOON),
        "observers": lambda: session.run(fed(5), observers=[ps.Profile()]),
        "stream": lambda: ps.Stream().run(session, fed(5)).result(SOON),
        "many shapes": lambda: [session.run(fed(n)) for n in range(5, 40)],
    }
    for way, run in ways.items():
        with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
            run()
        assert session.stats.plans_made == 1, way


def test_other_fetches_have_no_plan(session):
    inner = next(n.outputs[0].name for n in session.model.graph.nodes if n.op.name == "Mul")
    with pytest.raises(ps.InvalidInput, match="own inputs and outputs alone"):
        session.run(fed(2), [inner])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_all_executors_keep_it(executor):
    session = ps.compile(model(), executor, shapes={"x": (2, 3)}, compile_in_run=False, cache=False)
    session.run(fed(2))
    with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
        session.run(fed(5))


def test_model_of_fixed_dims_is_compiled_at_once():
    session = ps.compile(model(2, 3), compile_in_run=False, cache=False)
    assert session.stats.plans_made == 1
    assert session.run(fed(2))["y"].shape == (2, 3)


def test_open_dims_without_shapes_are_refused():
    with pytest.raises(OptionError, match="say in shapes= what to compile"):
        ps.compile(model(), compile_in_run=False, cache=False)


def test_saved_session_has_its_plans(tmp_path):
    ps.compile(model(), shapes={"x": (2, 3)}, cache=False).save(tmp_path / "m.penstock")
    session = ps.open(tmp_path / "m.penstock", compile_in_run=False)
    assert session.run(fed(2))["y"].shape == (2, 3)
    with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
        session.run(fed(5))


def test_plan_that_was_dropped_is_not_compiled_again():
    limits = ps.Limits(max_plans_bytes=1)
    shapes = [{"x": (2, 3)}, {"x": (4, 3)}]
    session = ps.compile(model(), shapes=shapes, limits=limits, compile_in_run=False, cache=False)
    session.run(fed(4))
    with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
        session.run(fed(2))


def test_batch_that_a_mask_pads_takes_the_usual_plan():
    dims = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (4, 24))
    session = ps.compile(model_of(MEAN), shapes=dims, compile_in_run=False, cache=False)
    session.run(feeds_of(session, padded(24, 3, 11, 1)))
    assert session.stats.plans_made == 1


def test_replicas_compile_before_the_first_request():
    options = {"max_batch": 4, "shapes": {"x": (1, 3)}, "warm_up": True, "cache": False}
    with ps.Replicas(model(), 1, compile_in_run=False, **options) as replicas:
        assert replicas.run(fed(1))["y"].shape == (1, 3)
        with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
            replicas.run(fed(7))


def test_replicas_of_a_session_compile_before_the_first_request():
    session = ps.compile(model(), shapes={"x": (1, 3)}, compile_in_run=False, cache=False)
    with ps.Replicas(session, 1, max_batch=4, warm_up=True) as replicas:
        assert replicas.run(fed(4))["y"].shape == (4, 3)
        with pytest.raises(ps.InvalidInput, match="compile_in_run=False"):
            replicas.run(fed(7))


def test_feeds_that_no_plan_takes_are_refused_as_such(session):
    with pytest.raises(ps.InvalidInput) as caught:
        session.run({"x": np.ones((2, 4), np.float32)})
    assert "compile_in_run" not in str(caught.value)


def test_other_shapes_than_a_tflite_file_declares_are_named():
    graph = subgraph({"x": ("float32", [1, 3])}, [("NEG", ["x"], ["y"], None)], ["y"])
    session = ps.compile(tflite_model([graph]), compile_in_run=False, cache=False)
    with pytest.raises(ps.InvalidInput, match=r"shapes=\{'x': \(2, 3\)\}"):
        session.run(fed(2))


def test_profile_keeps_the_plans():
    shapes = [{"x": (2, 3)}, {"x": (4, 3)}]
    session = ps.compile(model(), shapes=shapes, compile_in_run=False, cache=False)
    session.profile(fed(2), runs=1)
    assert session.run(fed(4))["y"].shape == (4, 3)


def test_saved_session_whose_plans_cannot_be_used_says_so_when_it_is_opened(tmp_path):
    path = tmp_path / "m.penstock"
    ps.compile(model(), shapes={"x": (2, 3)}, cache=False).save(path)
    with pytest.raises(OptionError, match=r"say in shapes= .*precision 'float32', here 'strict'"):
        ps.open(path, compile_in_run=False, precision="strict")
    ps.compile(model(2, 3), shapes={}, cache=False).save(path)
    with pytest.warns(UserWarning, match="precision"):
        session = ps.open(path, compile_in_run=False, precision="strict")
    assert session.run(fed(2))["y"].shape == (2, 3)


def test_clusters_are_refused():
    with pytest.raises(OptionError, match="goes without cluster="):
        ps.compile(model(), cluster=SimpleNamespace(devices=("worker",)), compile_in_run=False)
