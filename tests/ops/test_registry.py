"""Operations of users in the table of operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import TensorType
from penstock.extend import Kernel, operator, same_type
from penstock.ir.graph import Node, Value
from penstock.ops import registry
from tests.support.onnx_text import compile_text
from tests.test_extend import DOMAIN, X, register, run


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    registry._REGISTRY.pop((DOMAIN, "Twice"), None)


def test_operation_registered_twice_says_what_to_do():
    register(2)
    with pytest.raises(
        ValueError, match=r"'Twice' of the domain .* is registered already.*replace=True"
    ):
        register(3)
    np.testing.assert_array_equal(run(), 2 * X)
    register(3, replace=True)
    np.testing.assert_array_equal(run(), 3 * X)


def test_operation_of_onnx_is_replaced_only_on_request():
    before = registry.find("Celu")
    assert before is not None

    def own(node, types):
        return Kernel(lambda x: x)

    with pytest.raises(ValueError, match="'Celu' is registered already"):
        operator("Celu", since=12, infer=same_type)(own)
    assert registry.find("Celu") is before


def test_operations_of_penstock_do_not_look_for_packages(monkeypatch):
    def refuse() -> None:
        raise AssertionError("looks for packages")

    monkeypatch.setattr(registry, "load_operations", refuse)
    compile_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")([1, 2])


def test_operation_registered_after_a_model_was_refused_is_found():
    with pytest.raises(ps.Unsupported):
        run()
    register(2)
    np.testing.assert_array_equal(run(), 2 * X)


def _node(**attrs: object) -> Node:
    op = registry.standard("Neg")
    return Node(op, [Value("x")], [Value("y"), Value("z")], attrs)


def test_array_kernel_binds_attributes_and_values_prepared_once():
    prepared_of: list[Node] = []

    def prepare(node: Node) -> int:
        prepared_of.append(node)
        return len(node.outputs)

    def scaled(x, *, factor, shift=0, count):
        return x * factor + shift, count

    node = _node(factor=3)
    kernel = registry.array_kernel(scaled, {"count": prepare})(node, [None])
    for _ in range(2):
        result, count = kernel.function(np.array([1, 2]))
        assert result.tolist() == [3, 6]
        assert count == 2
    assert prepared_of == [node]
    assert scaled.__kwdefaults__ == {"shift": 0}  # the function itself stays as it is


def test_array_kernel_without_a_mandatory_attribute_raises():
    with pytest.raises(KeyError, match="factor"):
        registry.array_kernel(lambda x, *, factor: x * factor)(_node(), [None])


def test_array_operator_that_fills_writes_to_planned_memory():
    @registry.array_operator("Twice", domain=DOMAIN, fills=True)
    def twice(x, out=None):
        return np.multiply(x, 2, out)

    op = registry.find("Twice", DOMAIN)
    assert op is not None
    kernel = op.compile(_node(), [TensorType(np.dtype(np.float32), (2,))])
    out = np.empty(2, np.float32)
    assert kernel.into is not None
    kernel.into(np.array([1, 2], np.float32), out)
    assert out.tolist() == [2, 4]
