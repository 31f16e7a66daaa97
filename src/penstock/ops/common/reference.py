"""Operations without a kernel here, which run by ``onnx.reference``.

Slow but exact. Nothing is known of their outputs before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Kernel, Op, Types
from penstock.ops.registry import Compile, unknown_types
from penstock.types import ShapeError

IMPURE = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"} | {
    "RandomUniformLike"
}


@cache
def reference_op(name: str, domain: str, version: int) -> Op | None:
    """Return the operation of ``onnx.reference`` for a schema version, or ``None``."""
    implementation = _implementation(name, domain, version)
    if implementation is None:
        return None
    compile = _compiler(implementation, domain, version)
    return Op(name, domain, version, version, unknown_types, compile, name not in IMPURE)


def _implementation(name: str, domain: str, version: int) -> Any:
    if domain == "":
        from onnx.reference.ops import load_op
    elif domain == "ai.onnx.ml":
        from onnx.reference.ops.aionnxml import load_op
    elif domain == "ai.onnx.preview.training":
        from onnx.reference.ops.aionnx_preview_training import load_op
    elif domain == "ai.onnx.preview":
        from onnx.reference.ops.aionnx_preview import load_op
    else:
        return None
    try:
        implementation = load_op(domain, name, version)
    except Exception:
        return None
    return None if implementation.__module__ == "onnx.reference.op_run" else implementation


def _compiler(implementation: Any, domain: str, version: int) -> Compile:
    def compile(node: Node, types: Types) -> Kernel:
        import onnx

        attrs = {k: v for k, v in node.attrs.items() if v is not None}
        inputs = [f"i{i}" if value is not None else "" for i, value in enumerate(node.inputs)]
        outputs = [f"o{i}" if value is not None else "" for i, value in enumerate(node.outputs)]
        proto = onnx.helper.make_node(node.op.name, inputs, outputs, domain=domain)
        for key, value in attrs.items():
            if isinstance(value, np.ndarray):
                value = onnx.numpy_helper.from_array(value)
            try:
                proto.attribute.append(onnx.helper.make_attribute(key, value))
            except (TypeError, ValueError) as error:
                raise ShapeError(f"attribute {key!r} is {value!r}: {error}") from error
        run = implementation(
            proto,
            {
                "log": lambda *_: None,
                "opsets": {domain: version},
                "verbose": 0,
                "new_ops": None,
                "existing_functions": {},
                "evaluator_cls": None,
            },
        )

        def function(*values: Any) -> Any:
            try:
                results = run.run(*values)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ShapeError(str(error)) from error
            results = tuple(_unshared(x, values) for x in results[: len(outputs)])
            return results[0] if len(outputs) == 1 else results

        return Kernel(function)

    return compile


def _unshared(result: Any, inputs: Sequence[Any]) -> Any:
    """A copy of the result if it shares memory with an input, as references may return these."""
    if isinstance(result, np.ndarray) and any(
        isinstance(x, np.ndarray) and np.may_share_memory(result, x) for x in inputs
    ):
        return result.copy()
    return result
