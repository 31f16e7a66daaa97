"""Mutants of TensorFlow's graphs run or are refused, and never hang."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from tests.support.sweeps import scaled
from tests.support.tf_cases import Case, cases, feeds

CASES = list(cases())
DEADLINE = 2.0


def mutated(graph: GraphDef, rng: random.Random) -> GraphDef:
    """The graph with one to three changes of nodes, edges or attributes, also in functions."""
    mutant = GraphDef()
    mutant.CopyFrom(graph)
    bodies = [function.node_def for function in mutant.library.function]
    for _ in range(rng.randint(1, 3)):
        nodes = rng.choice(bodies) if bodies and rng.random() < 0.5 else mutant.node
        if not nodes:
            break
        node = rng.choice(nodes)
        change = rng.randrange(7)
        if change == 0:
            del nodes[rng.randrange(len(nodes))]
        elif change == 1:
            copy = nodes.add()
            copy.CopyFrom(node)
            if rng.random() < 0.7:
                copy.name += "_copy"
        elif change == 2 and node.input:
            node.input[rng.randrange(len(node.input))] = named(rng.choice(nodes).name, rng)
        elif change == 3 and node.input:
            del node.input[rng.randrange(len(node.input))]
        elif change == 4:
            node.input.append(named(rng.choice(nodes).name, rng))
        elif change == 5 and node.attr:
            name = rng.choice(sorted(node.attr))
            other = rng.choice(nodes)
            if other.attr and rng.random() < 0.5:
                node.attr[name].CopyFrom(other.attr[rng.choice(sorted(other.attr))])
            else:
                del node.attr[name]
        elif change == 6:
            node.op = rng.choice(nodes).op
    return mutant


def named(name: str, rng: random.Random) -> str:
    return rng.choice([name, f"{name}:1", f"^{name}", f"{name}:0"])


def attempt(source: bytes, case: Case, executor: str) -> str:
    """Load and run. Returns "ran" or the name of the error, which must be one of Penstock's."""
    try:
        session = ps.compile(
            source, executor=executor, backends=["numpy"], limits=ps.Limits(max_iterations=10_000)
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


@pytest.mark.parametrize("mutants", scaled(8, 40))  # seeded; more with another seed
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mutants_run_or_are_refused(case: Case, mutants: int) -> None:
    graph = read_graph(Path(case.path))
    rng = random.Random(case.name)
    for _ in range(mutants):
        source = mutated(graph, rng).SerializeToString()
        attempt(source, case, rng.choice(["frames", "frames", "auto", "linear"]))
