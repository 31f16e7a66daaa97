"""Kernels of the torch backend on what flows through the official ONNX node cases: each case belongs
to the module of torch's kernels that has one for its first node of any.

A test file of such a module has its cases by ``test_... = official_tests("products")``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.analysis.interpreter import evaluate
from penstock.backends.registry import missing
from penstock.frontends.onnx.importer import load_onnx
from tests.ops.harness import node_model
from tests.ops.test_official import compute_case, graphs, variants
from tests.support.sweeps import drawn
from tests.support.torch_kernels import check_torch_kernel, needs_torch

_rng = np.random.default_rng(11)


@cache
def owners() -> dict[str, str]:
    """By case, the name of the module of its kernel; "" where torch has none. Empty without torch."""
    if missing("torch") is not None:
        return {}
    from penstock.backends.torch.backend import FAMILIES

    found = {}
    for name, (graph, _) in graphs().items():
        families = [FAMILIES[n.op.full_name] for n in graph.nodes if n.op.full_name in FAMILIES]
        found[name] = families[0][0].__module__.rpartition(".")[2] if families else ""
    return found


def official_tests(module: str) -> Callable[..., None]:
    """The test of a sample of the cases of a module, of a fourth of them and eight at least."""
    names = [name for name, owner in owners().items() if owner == module]
    assert names or not owners(), f"no case belongs to {module}"

    @needs_torch
    @pytest.mark.parametrize("name", drawn(names, max(8, len(names) // 4)))
    def agrees(name: str) -> None:
        check_official_case(name)

    return agrees


def check_official_case(name: str) -> None:
    """That torch's kernels of a case, in each of their forms, agree with NumPy's."""

    def compute(node, given):
        with np.errstate(all="ignore"):
            results = evaluate(node, given)
        for variant in variants(node, given) if node.op.pure else ():
            for known in (True, False):
                check_torch_kernel(variant, given, results, known=known)
        return results

    compute_case(name, compute)


def floats(*dims: int) -> np.ndarray:
    return _rng.standard_normal(dims).astype(np.float32)


def check(op: str, inputs: Any, constants=(), outputs=1, opset=None, **attrs: Any) -> None:
    """torch has a kernel for this node, and it does what NumPy's does."""
    version = {} if opset is None else {"opset": opset}
    (node,) = load_onnx(node_model(op, inputs, attrs, outputs=outputs, **version)).graph.nodes
    for i in constants:
        value = node.inputs[i]
        assert value is not None
        value.const = inputs[i]
    by_name = {f"x{i}": x for i, x in enumerate(inputs)}
    values = [None if v is None else by_name.get(v.name, v.const) for v in node.inputs]
    assert check_torch_kernel(node, values, evaluate(node, values))
