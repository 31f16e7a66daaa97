"""Nodes against their schemas: arity, attributes, types."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from tests.frontends.tensorflow.test_importer import refused, sum_of_two
from tests.support.tf_graphs import Builder, Type


def test_missing_inputs_are_refused() -> None:
    g = Builder()
    g.node("Neg", "missing", name="a", T=Type("float32"))
    g.node("Neg", "a:1", name="b", T=Type("float32"))
    g.node("Neg", "a", "^nowhere", name="c", T=Type("float32"))
    with pytest.raises(InvalidModel) as caught:
        ps.load(g.bytes())
    message = str(caught.value)
    assert "a in the model (Neg) reads 'missing', which is no node" in message
    assert "b in the model (Neg) reads 'a:1', but 'a' has 1 outputs" in message
    assert "c in the model (Neg) waits for 'nowhere'" in message


def test_duplicate_and_empty_names_are_refused() -> None:
    g = sum_of_two()
    g.placeholder("a", "float32")
    refused(g, "has a node 'a' .* twice")
    g = sum_of_two()
    g.proto.node.add(op="NoOp")
    refused(g, "without a name")


def test_wrong_arity_is_refused() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("AddV2", "x", name="sum", T=Type("float32"))
    refused(g, r"sum in the model \(AddV2\) has 1 inputs, but AddV2 takes 2")
    g = Builder()
    g.node("Pack", name="p", N=10**12, T=Type("float32"))
    refused(g, "attribute 'N'")
    g = Builder()
    g.node("Merge", name="m", N=0, T=Type("float32"))
    refused(g, "Merge has 0 inputs")


def test_input_of_another_dtype_is_refused() -> None:
    g = Builder()
    x, y = g.placeholder("x", "float32"), g.const(np.float64(1))
    g.node("AddV2", x, y, name="sum", T=Type("float32"))
    refused(g, r"sum in the model \(AddV2\): its input 1 must be float32, but is float64")


def test_dtype_that_the_operation_does_not_take_is_refused() -> None:
    g = Builder()
    x = g.placeholder("x", "object")
    g.node("FloorDiv", x, x, name="quotient", T=Type("object"))
    refused(g, "its attribute 'T' is 'string', not one of bfloat16, ")


def test_attribute_without_a_value_has_its_default() -> None:
    g = Builder()
    x = g.placeholder("x", "float32", 1, 2, 2, 1)
    one, zero = g.const(np.ones(1, np.float32)), g.const(np.zeros(1, np.float32))
    types = {"T": Type("float32"), "U": Type("float32"), "is_training": False}
    g.node("FusedBatchNormV3", x, one, zero, zero, one, name="y", **types)
    g.proto.node[-1].attr["epsilon"].SetInParent()
    (y,) = ps.compile(g.bytes()).run({"x": np.ones((1, 2, 2, 1), np.float32)}, ["y:0"]).values()
    np.testing.assert_allclose(y, 1 / np.sqrt(np.full((1, 2, 2, 1), 1.0001)), rtol=1e-6)


def test_missing_dtype_is_refused() -> None:
    g = Builder()
    g.node("Neg", g.placeholder("x", "float32"), name="n")
    refused(g, r"n in the model \(Neg\): it has no attribute T")
