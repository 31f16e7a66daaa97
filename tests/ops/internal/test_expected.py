"""Expected passes a value on, or says which dim is another."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.expected import EXPECTED, UnexpectedDimsError

OPEN = TensorType(FLOAT32, (None, None))


def expected(*dims):
    node = Node(EXPECTED, [Value("x", OPEN)], [Value("y", OPEN)], {"dims": dims})
    return EXPECTED.compile(node, [OPEN]).function


def test_value_of_the_expected_dims_is_passed_on():
    x = np.zeros((2, 3), np.float32)
    assert np.shares_memory(expected(2, -1)(x), x)
    assert np.shares_memory(expected(-1, -1)(x), x)


@pytest.mark.parametrize(
    ("dims", "text"), [((2, 4), "the value has dim"), ((2, 3, 1), "the value has rank")]
)
def test_value_of_other_dims_is_refused(dims, text):
    with pytest.raises(UnexpectedDimsError, match=text) as caught:
        expected(*dims)(np.zeros((2, 3), np.float32))
    assert isinstance(caught.value, ShapeError)


def test_types_take_the_expected_dims():
    attrs = {"dims": (2, -1)}
    (type_,) = EXPECTED.infer([OPEN], attrs, [None])
    assert type_ == TensorType(FLOAT32, (2, None))
    (type_,) = EXPECTED.infer([TensorType(FLOAT32)], attrs, [None])
    assert type_ == TensorType(FLOAT32, (2, None))
