"""Models of a few nodes, and what compiled kernels makes of them against the NumPy backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.host.native import library
from tests.support.cost_models import PreferredBackendCosts
from tests.support.expert import with_expert

OPSET = 20

there = pytest.mark.skipif(library() is None, reason="needs compiled kernels")
"""marks tests that need the library"""


def proto_of(
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = OPSET,
) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        "g",
        [info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()],
        [info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(k, name) for name, k in (constants or {}).items()],
    )
    made = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=made, ir_version=9)


def one_node(
    op: str,
    feeds: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    inputs: Sequence[str] = (),
    perm: Sequence[int] = (),
    outputs: Sequence[str] = ("y",),
    opset: int = OPSET,
    **attrs: Any,
) -> onnx.ModelProto:
    """A node whose inputs are negated first, and whose outputs are negated: so what it reads and
    makes is planned. With ``perm``, it reads a transposed view of its first input, which stays where
    it is, since it is read once more. ``inputs`` are all in their order, if some are left out."""
    names = list(inputs) or [*feeds, *(constants or {})]
    nodes = []
    seen = {}
    for i, name in enumerate(feeds):
        seen[name] = f"{name}_in"
        nodes.append(helper.make_node("Neg", [name], [seen[name]]))
        if perm and not i:
            seen[name] = f"{name}_view"
            nodes.append(helper.make_node("Transpose", [f"{name}_in"], [seen[name]], perm=perm))
    read = [seen.get(name, name) for name in names]
    made = [f"{name}_out" if name else "" for name in outputs]
    nodes.append(helper.make_node(op, read, made, name="it", **attrs))
    nodes += [helper.make_node("Neg", [f"{name}_out"], [name]) for name in outputs if name]
    if perm:
        nodes.append(helper.make_node("Neg", [seen[next(iter(feeds))]], ["view"]))
        outputs = [*outputs, "view"]
    return proto_of(nodes, feeds, [name for name in outputs if name], constants, opset)


def compile_on_native(source: Any, **options: Any) -> ps.Session:
    """Compile a model so that its nodes run on compiled kernels wherever that has a kernel for them."""
    costs = PreferredBackendCosts("native")
    defaults = {"backends": ["native", "numpy"], "cost_model": costs}
    return ps.compile(source, **with_expert({**defaults, **options}))


def ran_on(session: ps.Session, op: str) -> set[str]:
    """The backends that nodes of ``op`` run on, alone or as the first of a fused one."""
    found = set()
    for step in session.inspect.plan.walk():
        names = step.node.attrs.get("ops", step.node.op.name)
        if names.split()[0] == op:
            found.add(step.backend)
    return found


def check(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    op: str,
    *,
    executor: str = "linear",
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> ps.Session:
    """``op`` runs on compiled kernels, and all is as on NumPy."""
    session = compile_on_native(proto, executor=executor)
    same(session, proto, feeds, rtol=rtol, atol=atol)
    assert ran_on(session, op) == {"native"}
    return session


def refused(
    proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], op: str, **tolerance: float
) -> None:
    """compiled kernels does not take ``op``, and NumPy runs it."""
    session = compile_on_native(proto)
    same(session, proto, feeds, **tolerance)
    assert ran_on(session, op) == {"numpy"}


def same(
    session: ps.Session,
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    want = ps.compile(proto, backends=["numpy"]).run(feeds)
    for _ in range(2):
        got = session.run(feeds)
        for name, each in want.items():
            assert got[name].shape == each.shape
            np.testing.assert_allclose(got[name], each, rtol=rtol, atol=atol)
