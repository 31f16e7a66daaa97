"""Stages of a compilation look at whether it must end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.compiler.options import EXECUTORS
from tests.compiler.test_stopped_compile import FEEDS, NODES, CountingToken, chain
from tests.support.tf_graphs import Builder, Type

# Calls of functions, in Python or not, between two looks at the control. A call takes a tenth of a
# microsecond to a few, so that these take some milliseconds.
MOST_CALLS = 20_000


def graph_def(nodes: int = NODES) -> bytes:
    builder = Builder()
    value = builder.placeholder("x", "float32", 4)
    for i in range(nodes):
        value = builder.node(("Neg", "Exp", "Sin", "Relu")[i % 4], value, T=Type("float32"))
    return builder.bytes()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_looks_at_the_control_follow_one_another_closely(executor: str) -> None:
    session = ps.compile(chain(), executor=executor, backends=["numpy"])
    token = CountingToken()
    token.counting(session.run, FEEDS)
    assert token.looks > NODES / 100
    assert token.calls < MOST_CALLS


def test_looks_at_the_control_follow_one_another_closely_with_fusion() -> None:
    token = CountingToken()
    token.counting(ps.compile(chain(500)).run, FEEDS)
    assert token.calls < MOST_CALLS


@pytest.mark.parametrize("source", [chain, graph_def])
def test_looks_at_the_control_follow_one_another_closely_in_front_ends(
    source: Callable[..., Any],
) -> None:
    ps.compile(source(3))  # imports its modules
    model, token = source(), CountingToken()
    token.counting(ps.compile, model)
    assert token.looks > NODES / 100
    assert token.calls < MOST_CALLS
