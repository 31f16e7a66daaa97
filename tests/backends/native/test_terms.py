"""Terms of elementwise operations: what arithmetic on them makes."""

from __future__ import annotations

import pytest

from penstock.backends.native.kernel import UnsupportedError
from penstock.backends.native.terms import TERMS, Term


def test_numbers_become_constants_of_the_kind_of_the_other_operand() -> None:
    x = Term("f8")
    total = x + 2.0
    assert (total.kind, total.operation) == ("f8", "add_f8")
    read, two = total.arguments
    assert read is x
    assert (two.kind, two.constant) == ("f8", 2.0)


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Equal"])
def test_operands_of_two_kinds_have_no_term(name: str) -> None:
    with pytest.raises(UnsupportedError):
        TERMS[name]({}, Term("f4"), Term("f8"))


def test_operations_of_many_operands_are_folded_from_the_left() -> None:
    a, b, c = (Term("f4") for _ in range(3))
    total = TERMS["Sum"]({}, a, b, c)
    assert total.arguments[1] is c
    assert total.arguments[0].arguments == (a, b)
    assert TERMS["Sum"]({}, a) is a


def test_comparisons_give_truth_values_and_those_of_truth_values_are_logical() -> None:
    assert TERMS["Less"]({}, Term("i8"), Term("i8")).kind == "b1"
    equal = TERMS["Equal"]({}, Term("b1"), Term("b1"))
    assert (equal.operation, equal.arguments[0].operation) == ("not_b1", "xor_b1")
