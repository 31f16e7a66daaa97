"""Operations of com.microsoft, checked against ONNX Runtime in every form that a model may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import penstock as ps
from penstock.testing import assert_same
from tests.ops.harness import run_ort, value_info

OPSET = 21


def contrib_model(
    op: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    outputs: int | Sequence[bool] = 1,
    constants: Sequence[int] = (),
    typed: bool = True,
    domain: str = "com.microsoft",
    opset: int = OPSET,
) -> onnx.ModelProto:
    """A model of one node. ``typed``: whether the shapes of its inputs are declared. ``opset`` is
    that of a node of ONNX's own domain."""
    flags = [True] * outputs if isinstance(outputs, int) else list(outputs)
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" if flag else "" for i, flag in enumerate(flags)]
    node = helper.make_node(op, names, results, name="node", domain=domain, **(attrs or {}))
    infos = [
        value_info(name, x)
        for i, (name, x) in enumerate(zip(names, inputs, strict=True))
        if x is not None and i not in constants
    ]
    if not typed:
        for info in infos:
            info.type.tensor_type.ClearField("shape")
    initializers = [numpy_helper.from_array(inputs[i], names[i]) for i in constants]
    outs = [onnx.ValueInfoProto(name=name) for name in results if name]
    graph = helper.make_graph([node], "g", infos, outs, initializers)
    imports = [helper.make_opsetid("", OPSET if domain else opset)]
    imports += [helper.make_opsetid(domain, 1)] if domain else []
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def check_contrib(
    op: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    expected: Sequence[Any] | None = None,
    outputs: int | Sequence[bool] = 1,
    constants: Sequence[int] = (),
    untyped: bool = True,
    domain: str = "com.microsoft",
    opset: int = OPSET,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Check a node against ONNX Runtime, or against ``expected``: with its shapes declared or not,
    with ``constants`` among its inputs or without, compiled for shapes and interpreted."""
    forms = [{"typed": typed} for typed in ((True, False) if untyped else (True,))]
    forms += [{"constants": constants}] if constants else []
    wanted = expected
    copies = {f"x{i}": None if x is None else x.copy() for i, x in enumerate(inputs)}
    for form in forms:
        model = contrib_model(
            op,
            inputs,
            attrs,
            outputs=outputs,
            domain=domain,
            opset=opset,
            **form,  # type: ignore[arg-type]
        )
        fed = {
            f"x{i}": x
            for i, x in enumerate(inputs)
            if x is not None and i not in form.get("constants", ())  # type: ignore[operator]
        }
        if wanted is None:
            wanted = run_ort(model, inputs)
        for executor in ("linear", "interpret"):
            results = ps.compile(model, executor=executor).run(fed)
            for got, want in zip(results.values(), wanted, strict=True):
                assert_same(got, want, rtol, atol)
            for name, x in fed.items():
                np.testing.assert_array_equal(x, copies[name], "the kernel wrote to its input")
