"""Schedules that are compared by runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.compiler import scheduling
from penstock.executors.base import Executor
from penstock.tuning import trial
from tests.support.onnx_text import model_from_text


@pytest.mark.parametrize("stateful", [False, True])
def test_runs_are_added_to_compare_executors_only_if_none_assigns_to_variables(
    monkeypatch: pytest.MonkeyPatch, stateful: bool
) -> None:
    session = ps.compile(model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    session.run({"x": np.ones(2, np.float32)})
    executor, compared = session._main.last[1], []

    def faster(one: Executor, other: Executor, *rest: object) -> tuple[Executor, Executor]:
        compared.append((one, other))
        return one, other

    monkeypatch.setattr(trial, "faster", faster)
    monkeypatch.setattr(scheduling, "bind", lambda *_: executor)
    node = SimpleNamespace(attrs={"store": object()} if stateful else {})
    plan = SimpleNamespace(walk=lambda: [SimpleNamespace(node=node)])
    schedule = SimpleNamespace(margin=0.9, plan=plan, profiler=SimpleNamespace(values=()))
    context = SimpleNamespace(options=SimpleNamespace(autotune=True))
    used = scheduling._bind_tried(schedule, SimpleNamespace(), executor, context)
    assert used is executor
    assert bool(compared) != stateful
