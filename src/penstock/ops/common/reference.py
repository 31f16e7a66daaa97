"""Operations without a kernel here, which run by ``onnx.reference``.

Slow but exact. Nothing is known of their outputs before the run.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from penstock.core.types import RunValue, RunValues, ShapeError
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Op, Types
from penstock.ops.registry import Compile, unknown_types

_IMPURE = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
    *("RandomUniform", "RandomUniformLike"),
}
_PACKAGES = {
    "": "onnx.reference.ops",
    "ai.onnx.ml": "onnx.reference.ops.aionnxml",
    "ai.onnx.preview": "onnx.reference.ops.aionnx_preview",
    "ai.onnx.preview.training": "onnx.reference.ops.aionnx_preview_training",
}


@cache
def reference_op(name: str, domain: str, version: int) -> Op | None:
    """Return the operation of ``onnx.reference`` for a schema version, or ``None``."""
    implementation = _implementation(name, domain, version)
    if implementation is None:
        return None
    compile = _compiler(implementation, domain, version)
    return Op(name, domain, version, version, unknown_types, compile, name not in _IMPURE)


def _implementation(name: str, domain: str, version: int) -> Any:
    package = _PACKAGES.get(domain)
    if package is None:
        return None
    try:
        implementation = import_module(package).load_op(domain, name, version)
    except Exception:
        return None
    return None if implementation.__module__ == "onnx.reference.op_run" else implementation


def _compiler(implementation: Any, domain: str, version: int) -> Compile:
    def compile(node: Node, types: Types) -> Kernel:
        import onnx

        inputs = [f"i{i}" if value is not None else "" for i, value in enumerate(node.inputs)]
        outputs = [f"o{i}" if value is not None else "" for i, value in enumerate(node.outputs)]
        proto = onnx.helper.make_node(node.op.name, inputs, outputs, domain=domain)
        for key, value in node.attrs.items():
            if value is None:
                continue
            if isinstance(value, np.ndarray):
                value = onnx.numpy_helper.from_array(value)
            try:
                proto.attribute.append(onnx.helper.make_attribute(key, value))
            except (TypeError, ValueError) as error:
                raise ShapeError(f"attribute {key!r} is {value!r}: {error}") from error
        settings: dict[str, Any] = {"opsets": {domain: version}, "log": lambda *_: None}
        settings |= {"verbose": 0, "new_ops": None, "existing_functions": {}, "evaluator_cls": None}
        run = implementation(proto, settings)

        def function(*values: RunValue) -> RunValue:
            results = run.run(*values)
            results = tuple(_unshared(x, values) for x in results[: len(outputs)])
            if len(results) < len(outputs):
                raise ShapeError(f"these inputs give {len(results)} outputs, not {len(outputs)}")
            return results[0] if len(outputs) == 1 else results

        return Kernel(function)

    return compile


def _unshared(result: RunValue, inputs: RunValues) -> RunValue:
    """A copy of the result if it shares memory with an input, as references may return these."""
    if isinstance(result, np.ndarray) and any(
        isinstance(x, np.ndarray) and np.may_share_memory(result, x) for x in inputs
    ):
        return result.copy()
    return result
