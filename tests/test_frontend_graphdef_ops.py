"""Operations one by one: what TensorFlow gave for each (``models/tf_ops/make.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.graphdef_proto.graphdef_pb2 import GraphDef
from penstock.types import ANY, accepts, type_of

CASES = np.load(Path(__file__).parent / "models" / "tf_ops" / "cases.npz")
NAMES = sorted(key.removesuffix("/graph") for key in CASES.files if key.endswith("/graph"))


def part(name: str, kind: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/{kind}/"
    return {key.removeprefix(prefix): CASES[key] for key in CASES.files if key.startswith(prefix)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("executor", "backends"), [("linear", ["numpy"]), ("dataflow", ["numpy"]), ("linear", None)]
)
def test_operation(name: str, executor: str, backends: list[str] | None) -> None:
    wanted = part(name, "out")
    graph = CASES[f"{name}/graph"].tobytes()
    session = ps.compile(graph, executor=executor, backends=backends)
    out = session.run(part(name, "in"), list(wanted))
    declared = {port.name: port.type for port in session.outputs}
    for key, want in wanted.items():
        got = out[key]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), key
        assert accepts(declared.get(key, ANY), type_of(got)), (key, declared[key])
        alike(got, want)


def alike(got: np.ndarray, want: np.ndarray) -> None:
    if want.dtype.kind in "fc":
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_may_come_in_any_order(name: str) -> None:
    proto = GraphDef.FromString(CASES[f"{name}/graph"].tobytes())
    nodes = list(proto.node)
    del proto.node[:]
    proto.node.extend(reversed(nodes))
    session = ps.compile(proto.SerializeToString(), backends=["numpy"])
    wanted = part(name, "out")
    out = session.run(part(name, "in"), list(wanted))
    for key, want in wanted.items():
        alike(out[key], want)
