"""Runs of graphs with frames on the executors that can run them, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import penstock as ps
from tests.support.tf_graphs import Flow
from tests.support.timing import SOON

EXECUTORS = ("frames", "auto")


def ran(
    g: Flow, feeds: Mapping[str, Any], *fetches: str, targets: Sequence[str] = ()
) -> tuple[list[Any], Counter[str]]:
    """The fetched values, the same on all executors, and how often each node ran."""
    answers = {}
    trace = ps.Trace()
    for executor in EXECUTORS:
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        options = {"trace": trace} if executor == "frames" else {}
        outputs = session.run(feeds, fetches, targets, timeout=SOON, **options)
        answers[executor] = [outputs[name].tolist() for name in fetches]
    session = ps.compile(g.bytes(), executor="frames")
    outputs = session.run(feeds, fetches, targets, timeout=SOON)
    answers["segments"] = [outputs[name].tolist() for name in fetches]
    assert answers["auto"] == answers["segments"] == answers["frames"]
    return answers["frames"], trace.counts


def refused(
    g: Flow,
    feeds: Mapping[str, Any],
    *fetches: str,
    error: type[Exception],
    match: str,
    targets: Sequence[str] = (),
) -> None:
    """Check that all executors refuse the graph, with a message that matches."""
    for executor in EXECUTORS:
        with pytest.raises(error, match=match):
            session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
            session.run(feeds, fetches, targets, timeout=SOON)


def inputs(**dtypes: str) -> Flow:
    """A graph with placeholders of these names, scalars."""
    g = Flow()
    for name, dtype in dtypes.items():
        g.placeholder(name, dtype)
    return g


def loop_counts(loop: str, n: int, *variables: str) -> dict[str, int]:
    """How often the nodes of ``Flow.loop`` run in n iterations, with these variables beside i."""
    counts = {f"{loop}/limit": 1, f"{loop}/less": n + 1, f"{loop}/cond": n + 1}
    counts |= {f"{loop}/one": n, f"{loop}/add": n}
    for variable in ("i", *variables):
        turns = {"enter": 1, "merge": n + 1, "switch": n + 1, "body": n, "next": n, "exit": 1}
        counts |= {f"{loop}/{variable}/{node}": k for node, k in turns.items()}
    return {name: k for name, k in counts.items() if k}
