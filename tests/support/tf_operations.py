"""Operations one by one, with TensorFlow's results (``models/tf_ops/make*.py``): each case belongs to
the module with the kernel or, where ONNX's operations do, with the rule of its operation.

A test file of such a module has its cases by::

    test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
        "ops.tensorflow.matrices"
    )
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import ANY, accepts, type_of
from penstock.frontends.tensorflow import importer  # noqa: F401 - which registers the rules
from penstock.frontends.tensorflow.conversion import RULES
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from penstock.ops.families import MODULES
from tests.support.recorded import Recorded
from tests.support.sweeps import drawn

CASES = Recorded((Path(__file__).parents[1] / "models" / "tf_ops").glob("*.npz.xz"))
PLAIN = ("linear", ("numpy",))
OTHERS = (("dataflow", ("numpy",)), ("linear", None))
_HELPERS = {"Const", "Identity", "NoOp", "Placeholder"}


@cache
def owners() -> dict[str, str]:
    """By case the module, without the package, of the operation that the case is named after, or of
    the last of its graph that is none to hold values."""
    found = {}
    for name in CASES.names:
        graph = GraphDef.FromString(CASES.graph(name))
        ops = {node.op for node in graph.node}
        first = name.split("_")[0]
        rest = [node.op for node in graph.node if node.op not in _HELPERS] or ["Const"]
        found[name] = _module(first if first in ops else rest[-1])
    return found


def _module(op: str) -> str:
    if "Segment" in op:  # rules make Segment of all reductions of segments
        return "ops.tensorflow.segments"
    module = MODULES.get(("tensorflow", op)) or RULES[op].__module__
    return module.removeprefix("penstock.")


def operation_tests(module: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The tests of the cases of a module. All run on NumPy one node after the other, samples with
    other backends, with another executor, and with the nodes in the reverse order."""
    names = [name for name, owner in owners().items() if owner == module]
    assert names, f"no case belongs to {module}"
    others = list(product(names, OTHERS))
    cases = [*((name, PLAIN) for name in names), *drawn(others, max(2, len(others) // 4))]
    ids = [f"{p[0]}-{p[1][0]}-{p[1][1]}" for p in [*product(names, [PLAIN]), *others]]

    @pytest.mark.parametrize(("name", "how"), cases, ids=ids)
    def matches(name: str, how: tuple[str, tuple[str, ...] | None]) -> None:
        executor, backends = how
        check_operation(name, executor, None if backends is None else list(backends))

    @pytest.mark.parametrize("name", drawn(names, max(2, len(names) // 4)))
    def matches_reversed(name: str) -> None:
        check_reversed(name)

    return matches, matches_reversed


def check_operation(name: str, executor: str, backends: list[str] | None) -> None:
    """That a case gives what TensorFlow gave, of the types that the session declares."""
    wanted = CASES.part(name, "out")
    session = ps.compile(CASES.graph(name), executor=executor, backends=backends)
    out = session.run(CASES.part(name, "in"), list(wanted))
    declared = {port.name: port.type for port in session.outputs}
    for key, want in wanted.items():
        got = out[key]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), key
        assert accepts(declared.get(key, ANY), type_of(got)), (key, declared[key])
        alike(got, want)


def check_reversed(name: str) -> None:
    """That a case gives the same if its nodes stand in the reverse order."""
    proto = GraphDef.FromString(CASES.graph(name))
    nodes = list(proto.node)
    del proto.node[:]
    proto.node.extend(reversed(nodes))
    session = ps.compile(proto.SerializeToString(), backends=["numpy"])
    wanted = CASES.part(name, "out")
    out = session.run(CASES.part(name, "in"), list(wanted))
    for key, want in wanted.items():
        alike(out[key], want)


def alike(got: np.ndarray, want: np.ndarray) -> None:
    if want.dtype.kind in "fc":
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    else:
        np.testing.assert_array_equal(got, want)
