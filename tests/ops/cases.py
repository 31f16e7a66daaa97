"""What the tests of shapes and indices share: inference by name, and nodes that must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.analysis.interpreter import evaluate
from penstock.core.types import INT64, Dim, ShapeError, TensorType, Type, constant_type
from penstock.frontends.onnx.importer import load_onnx
from penstock.ops import find
from tests.ops.harness import check_node, node_model

F32 = np.dtype(np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(*shape: int) -> np.ndarray:
    """Distinct numbers in the given shape."""
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def float_type(*dims: Dim) -> TensorType:
    return TensorType(F32, dims)


def int_type(*data: Dim) -> TensorType:
    """A 1-D int64 tensor whose contents are known in part."""
    return TensorType(INT64, (len(data),), data)


def infer(
    name: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None, **op: Any
) -> list[Type]:
    """Output types; an array among ``inputs`` is a constant."""
    consts = [x if isinstance(x, np.ndarray) else None for x in inputs]
    types = [constant_type(x) if isinstance(x, np.ndarray) else x for x in inputs]
    found = find(name, **op)
    assert found is not None
    return list(found.infer(types, attrs or {}, consts))


def shape_of(
    name: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None
) -> tuple[Dim, ...] | None:
    kind = infer(name, inputs, attrs)[0]
    assert isinstance(kind, TensorType)
    return kind.shape


def data_of(
    name: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None
) -> tuple[Dim, ...] | None:
    kind = infer(name, inputs, attrs)[0]
    assert isinstance(kind, TensorType)
    return kind.data


def check_both(
    op_type: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    constants: Sequence[int] = (1,),
    **options: Any,
) -> list[Any]:
    """``check_node`` with the given inputs known when compiling, and known only in the run."""
    check_node(op_type, inputs, attrs, constants=constants, **options)
    return check_node(op_type, inputs, attrs, **options)


def run(
    op_type: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Any, ...]:
    """The outputs of a node that no other runtime is asked about."""
    (node,) = load_onnx(node_model(op_type, inputs, attrs, **options)).graph.nodes
    return evaluate(node, list(inputs))


def fails(
    op_type: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    match: str | None = None,
    error: type[Exception] = ShapeError,
    **options: Any,
) -> None:
    """The kernel must refuse, with its inputs unknown when compiling and known: with ``error``."""
    (node,) = load_onnx(node_model(op_type, inputs, attrs, **options)).graph.nodes
    with pytest.raises(error, match=match):
        evaluate(node, list(inputs))
    with pytest.raises(error, match=match):
        node.op.compile(node, [None if x is None else TensorType() for x in inputs])(*inputs)
