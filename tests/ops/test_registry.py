"""Operations of users in the table of operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock.extend import Kernel, operator, same_type
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
