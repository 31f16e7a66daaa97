"""Mutants of TensorFlow's graphs: each runs, or is refused, and none hangs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from tests.support.tf_cases import Case, cases, feeds

CASES = list(cases())
PER_CASE = 20  # seeded; more with another seed
DEADLINE = 2.0


def mutated(graph: GraphDef, rng: random.Random) -> GraphDef:
    """The graph with one to three things changed: nodes, edges, attributes, in bodies too."""
    made = GraphDef()
    made.CopyFrom(graph)
    bodies = [function.node_def for function in made.library.function]
    for _ in range(rng.randint(1, 3)):
        nodes = rng.choice(bodies) if bodies and rng.random() < 0.5 else made.node
        if not nodes:
            break
        node = rng.choice(nodes)
        what = rng.randrange(7)
        if what == 0:
            del nodes[rng.randrange(len(nodes))]
        elif what == 1:
            copy = nodes.add()
            copy.CopyFrom(node)
            if rng.random() < 0.7:
                copy.name += "_copy"
        elif what == 2 and node.input:
            node.input[rng.randrange(len(node.input))] = named(rng.choice(nodes).name, rng)
        elif what == 3 and node.input:
            del node.input[rng.randrange(len(node.input))]
        elif what == 4:
            node.input.append(named(rng.choice(nodes).name, rng))
        elif what == 5 and node.attr:
            name = rng.choice(sorted(node.attr))
            other = rng.choice(nodes)
            if other.attr and rng.random() < 0.5:
                node.attr[name].CopyFrom(other.attr[rng.choice(sorted(other.attr))])
            else:
                del node.attr[name]
        elif what == 6:
            node.op = rng.choice(nodes).op
    return made


def named(name: str, rng: random.Random) -> str:
    return rng.choice([name, f"{name}:1", f"^{name}", f"{name}:0"])


def attempt(source: bytes, case: Case, executor: str) -> str:
    """Load and run; what came of it. All that is raised must be of ours."""
    try:
        session = ps.compile(
            source,
            executor=executor,
            backends=["numpy"],
            limits=ps.Limits(max_iterations=10_000),
        )
    except ps.PenstockError as error:
        return type(error).__name__
    for run in case.runs[:2]:
        try:
            with np.errstate(all="ignore"):
                session.run(feeds(run), run["fetches"], run["targets"], timeout=DEADLINE)
        except ps.InternalError:
            raise
        except ps.PenstockError as error:
            return type(error).__name__
    return "ran"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mutants_run_or_are_refused(case: Case) -> None:
    graph = read_graph(Path(case.path))
    rng = random.Random(case.name)
    for _ in range(PER_CASE):
        source = mutated(graph, rng).SerializeToString()
        attempt(source, case, rng.choice(["frames", "frames", "auto", "linear"]))
