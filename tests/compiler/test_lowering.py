"""The context of passes, as the options of a session make it, and what placing measures."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.lowering import BackendPlacing, pass_context
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext
from penstock.ir.kernel import Kernel
from penstock.passes.context import FramePolicy
from penstock.tuning.trial import BUDGET
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text, graph_from_text


def context_of(executor: str) -> CompileContext:
    return CompileContext(CompileOptions(executor=executor), (NumpyBackend(),))


def test_pass_context_raises_all_frames_by_default() -> None:
    assert type(pass_context(context_of("auto")).frames) is FramePolicy


def test_backend_placing_without_a_choice_keeps_the_placement() -> None:
    placing = BackendPlacing(context_of("linear"))
    graph = graph_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    assert placing.chosen(graph) is placing.placement
    assert not placing.plans_layouts
    assert not placing.stacks("numpy")


class CountingBackend(NumpyBackend):
    """Counts the runs of kernels, which have two threads or one."""

    name = "counting"
    threads = 2

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    def kernel(self, node, types):
        kernel = super().kernel(node, types)

        def run(*inputs):
            self.ran[node.op.name] += 1
            return kernel.function(*inputs)

        return Kernel(run)


class FarThreads(FarBackend):
    """A backend of another memory, whose costs with one thread are not those with all."""

    threads = 2


DIAMOND = "g (float[4] x) => (float[4] y) { a = Exp(x) b = Neg(a) c = Sin(a) y = Add(b, c) }"
X = {"x": np.ones(4, np.float32)}


@pytest.fixture
def empty_costs(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def first_runs(executor: str, far: FarBackend, **options) -> tuple[Counter[str], ps.Session]:
    """How often each operation ran until the first answer, on both backends together."""
    near = CountingBackend()
    session = compile_text(DIAMOND, executor=executor, backends=[near, far], **options)
    session.run(X)
    return near.ran + far.ran, session


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "auto", "frames"]
)
def test_placing_in_several_memories_measures_three_runs_a_backend(executor, empty_costs) -> None:
    ran, session = first_runs(executor, FarThreads())
    # On each of two backends, and then the run itself.
    assert set(ran) == {"Exp", "Neg", "Sin", "Add"}
    assert 1 + 2 * 2 <= max(ran.values()) <= 1 + 2 * BUDGET
    before = sum(ran.values())
    assert (
        sum(first_runs(executor, FarThreads())[0].values()) < before
    )  # nothing is left to measure
    session.close()


@pytest.mark.parametrize("executor", ["dataflow", "parallel"])
def test_placing_measures_long_runs_once(executor, empty_costs, monkeypatch) -> None:
    monkeypatch.setattr("penstock.tuning.trial.MOST_SECONDS", 0.0)
    ran, _ = first_runs(executor, FarThreads())
    # On each of two backends, as tasks where the bound on time allows it, and then the run itself.
    assert 1 + 2 <= max(ran.values()) <= 1 + 3


def test_autotune_measures_in_more_runs_in_several_memories(empty_costs) -> None:
    ran, _ = first_runs("parallel", FarThreads(), autotune=True)
    assert min(ran.values()) > 1 + 2 * BUDGET


def test_measuring_on_a_backend_that_takes_too_long_is_left(empty_costs, monkeypatch) -> None:
    def too_long(executor, values, runs, left=None):
        raise ps.DeadlineExceeded("it takes as long as it likes")

    monkeypatch.setattr("penstock.tuning.trial.profile_briefly", too_long)
    ran, session = first_runs("parallel", FarThreads())
    np.testing.assert_allclose(session.run(X)["y"], np.sin(np.e) - np.e, rtol=1e-6)
    assert max(ran.values()) == 1
