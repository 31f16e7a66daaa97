"""Costs of nodes as a profile has them: ``penstock profile --json`` prints one, ``Profile.save``
writes one, and any machine may read it.

A step of a profile computes one or more nodes of the model, whose names it has. Its time is divided
among these as their estimated costs are; that of steps which no node stands for, such as values
brought into another layout, is added to all nodes in proportion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass
from penstock.ir.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A step: the names of its nodes, the seconds that it takes in a run, its threads."""

    nodes: tuple[str, ...]
    seconds: float
    threads: int


class ProfileCosts:
    """The steps of a profile, which ``source`` names in errors."""

    def __init__(self, steps: list[ProfiledStep], source: str) -> None:
        self.steps = steps
        self.source = source

    @staticmethod
    def read(path: str | Path) -> ProfileCosts:
        """The profile in a file. Raises ``InvalidInput`` for a file that has none, and ``OSError``
        for one that cannot be read."""
        content = Path(path).read_bytes()
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path} is no JSON: {error}") from error
        steps = document.get("steps") if isinstance(document, dict) else None
        if not isinstance(steps, list) or not steps:
            raise InvalidInput(
                f"{path} has no list 'steps'; penstock profile MODEL --json and "
                "Profile.save write one"
            )
        return ProfileCosts([_step(step, i, path) for i, step in enumerate(steps)], str(path))

    @property
    def threads(self) -> int:
        """The most threads of a step."""
        return max([step.threads for step in self.steps])

    def seconds(self, graph: Graph, estimate: Callable[[Node], float]) -> Callable[[Node], float]:
        """The seconds of the nodes of a graph in a run: those of the profile, ``estimate`` for
        nodes that it lacks. A node with graphs has what the nodes of these take in all. Raises
        ``InvalidInput`` if the profile is of another model."""
        owners = {inner.name: node for node in graph.nodes for inner in (node, *node.inner)}
        known: dict[Node, float] = {}
        beside = 0.0
        for step in self.steps:
            nodes = [owners[name] for name in step.nodes if name in owners]
            if not nodes:
                beside += step.seconds
                continue
            # Views are estimated to take nothing, and a step may be made of views alone.
            weights = [max(estimate(node), 1e-12) for node in nodes]
            for node, weight in zip(nodes, weights, strict=True):
                share = step.seconds * weight / math.fsum(weights)
                known[node] = known.get(node, 0.0) + share
        if graph.nodes and not known:
            names = ", ".join([repr(name) for name in self.steps[0].nodes[:3]])
            raise InvalidInput(
                f"{self.source} is a profile of another model: it has {names} and so on, of which "
                f"{graph.name!r} has no node"
            )
        total = math.fsum(known.values())
        scale = 1 + beside / total if total else 1.0
        return lambda node: known[node] * scale if node in known else estimate(node)


def _step(step: Any, index: int, path: str | Path) -> ProfiledStep:
    where = f"{path}: steps[{index}]"
    if not isinstance(step, Mapping):
        raise InvalidInput(f"{where} must be an object with 'nodes' and 'ms'")
    nodes, ms, threads = step.get("nodes"), step.get("ms"), step.get("threads", 1)
    if not isinstance(nodes, list) or not all(isinstance(name, str) for name in nodes):
        raise InvalidInput(f"{where}: 'nodes' must be a list of names")
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms < math.inf:
        raise InvalidInput(f"{where}: 'ms' must be a number of milliseconds, not {ms!r:.40}")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InvalidInput(f"{where}: 'threads' must be a number of threads, not {threads!r:.40}")
    return ProfiledStep(tuple(nodes), ms / 1e3, threads)
