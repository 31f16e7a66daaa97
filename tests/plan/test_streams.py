"""Plans on streams: which steps share one."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.base import Backend
from penstock.build import GraphBuilder
from penstock.ir.graph import Node
from penstock.tuning.measure import Cost
from tests.support.expert import with_expert
from tests.support.far_backend import FarBackend, TanhIsFar
from tests.support.onnx_text import compile_text


class NoisyCosts:
    """Milliseconds by operation, each off by a few percent, as if they were measured."""

    def __init__(self, **milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        return Cost(1e-3 * self.milliseconds.get(node.op.name, 1.0))


def streams_of(costs: NoisyCosts, *branches: str) -> dict[str, int]:
    """The stream of each step of Exp, followed by these operations, followed by their sum."""
    b = GraphBuilder()
    first = b.op("Exp", b.input("x", np.float32, [8]), name="first")
    ends = [b.op(name, first, name=name.lower()) for name in branches]
    b.output("y", b.op("Sum", *ends, name="last"))
    options = {"executor": "streams", "backends": ["numpy"], "cost_model": costs}
    session = ps.compile(b.model(), **with_expert(options))
    session(np.zeros(8, np.float32))
    (chart,) = session.inspect.schedule(max_streams=2)
    lanes = enumerate(chart.streams)
    return {bar.origin.split()[0]: lane for lane, bars in lanes for bar in bars}


def test_schedule_has_the_streams_that_the_plan_was_made_with():
    text = "g (float[2] x) => (float[2] y) { a = Exp(x) b = Neg(a) c = Sin(a) y = Add(b, c) }"
    options = {"executor": "streams", "backends": ["numpy"], "shapes": {}}
    (alone,) = compile_text(text, **options).inspect.schedule()
    (both,) = compile_text(text, max_streams=2, **options).inspect.schedule()
    assert [len(chart.streams) for chart in (alone, both)] == [1, 2]


@pytest.mark.parametrize("sine", [0.95, 1.0, 1.05])
def test_stream_goes_on_with_its_own_operation_whatever_was_measured(sine: float) -> None:
    streams = streams_of(NoisyCosts(Sin=sine, Exp=1.02), "Sin", "Exp")
    assert streams["exp"] == streams["first"] != streams["sin"]


def test_stream_goes_on_with_the_first_edge_if_no_operation_is_its_own() -> None:
    streams = streams_of(NoisyCosts(Cos=1.04), "Sin", "Cos")
    assert streams["sin"] == streams["first"] != streams["cos"]


def test_streams_share_work_by_what_was_measured_not_by_rounded_costs() -> None:
    costs = NoisyCosts(Sin=2.1, Cos=2.4, Tan=2.8, Atan=2.6, Sum=0.001)
    streams = streams_of(costs, "Sin", "Cos", "Tan", "Atan")
    lanes = [streams[name] for name in ("sin", "cos", "tan", "atan")]
    assert sorted(lanes) == [0, 0, 1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_far_backends_have_streams_of_their_own_as_many_as_workers(workers: int) -> None:
    far = [FarBackend(name, ["Tanh"], workers=workers) for name in ("one", "two")]
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", np.float32, [4]) for i in range(8)]
    b.output("y", b.op("Sum", *[b.op("Tanh", x) for x in inputs]))
    options = {"executor": "streams", "backends": [*far, "numpy"], "cost_model": TanhIsFar()}
    session = ps.compile(b.model(), **with_expert(options))
    x = np.ones(4, np.float32)
    for _ in range(3):
        y = session.run({f"x{i}": i * x for i in range(8)})["y"]
        np.testing.assert_allclose(y, sum(np.tanh(i * x) for i in range(8)), rtol=1e-6)
    assert session.inspect.effective.executor == "streams"
    devices = session.inspect.schedule()[0].devices
    assert [devices.count(name) for name in ("one", "two")] == [workers, workers]
    # Their kernels keep the threads of the backend's own workers, not those of the host.
    for backend in far:
        assert all(backend.name in thread for thread in backend.on_threads), backend.on_threads
