"""Checks of operations for those who write some."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock import extend
from penstock.extend import Kernel, operator, same_type
from penstock.ops import registry
from penstock.testing import check_node
from tests.test_extend import DOMAIN, X, register


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    registry._REGISTRY.pop((DOMAIN, "Twice"), None)


def test_check_node_finds_what_is_wrong():
    register(2)
    check_node("Twice", [X], domain=DOMAIN, expected=[2 * X])
    with pytest.raises(AssertionError):
        check_node("Twice", [X], domain=DOMAIN, expected=[3 * X])
    with pytest.raises(LookupError, match="no operation 'Thrice'"):
        check_node("Thrice", [X], domain=DOMAIN, expected=[X])


def test_check_node_finds_kernels_that_write_inputs_or_hand_them_on():
    @operator("Twice", domain=DOMAIN, infer=same_type)
    def writes(node, types):
        return Kernel(lambda x: np.multiply(x, 2, x) + 0)

    with pytest.raises((AssertionError, ValueError)):
        check_node("Twice", [X.copy()], domain=DOMAIN, expected=[2 * X])

    @operator("Twice", domain=DOMAIN, infer=same_type, replace=True)
    def hands_on(node, types):
        return Kernel(lambda x: x)

    with pytest.raises(AssertionError, match="an output aliases an input"):
        check_node("Twice", [X.copy()], domain=DOMAIN, expected=[X])


def test_check_node_finds_wrong_types():
    def infer(types, attrs, consts):
        return (extend.TensorType(np.dtype(np.float64), (7,)),)

    @operator("Twice", domain=DOMAIN, infer=infer)
    def twice(node, types):
        return Kernel(lambda x: x * np.float32(2))

    with pytest.raises(AssertionError, match=r"float64\[7\]|TensorType"):
        check_node("Twice", [X], domain=DOMAIN, expected=[2 * X])
