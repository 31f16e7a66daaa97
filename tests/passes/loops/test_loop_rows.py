"""Rows that loops read and collect are computed outside of them."""

from __future__ import annotations

import numpy as np
from bench.nets import Net
from onnx import TensorProto

from tests.passes.loops.test_hoist_recurrences import compare, operations
from tests.support.onnx_text import model_from_text


def test_rows_that_a_loop_collects_are_computed_before_it():
    net, body = Net(2), Net(3, "b")
    x = net.input("x", [4, 3])
    body.input("i", [], TensorProto.INT64)
    body.input("go", [], TensorProto.BOOL)
    body.output("go", "on", [], TensorProto.BOOL)
    row = body.Gather(x, "i", axis=0)
    number = body.Cast("i", to=TensorProto.FLOAT)
    body.output(body.Mul(body.Exp(row), body.Add(number, body.number(0.5))), "r", [3])
    trips, go = net.const(np.array(4)), net.const(np.array(True))
    net.output(net.Loop(trips, go, body=body.graph("body")), "y", [4, 3])
    model = net.model()
    assert not {"Loop", "Gather"} & {*operations(model)}
    compare(model)


def test_rows_that_a_loop_flattens_are_computed_before_it():
    net, body = Net(2), Net(3, "b")
    x = net.input("x", [4, 2, 3])
    body.input("i", [], TensorProto.INT64)
    body.input("go", [], TensorProto.BOOL)
    body.output("go", "on", [], TensorProto.BOOL)
    body.output(body.Exp(body.Flatten(body.Gather(x, "i", axis=0), axis=0)), "r", [1, 6])
    trips, go = net.const(np.array(4)), net.const(np.array(True))
    net.output(net.Loop(trips, go, body=body.graph("body")), "y", [4, 1, 6])
    model = net.model()
    assert not {"Loop", "Gather"} & {*operations(model)}
    compare(model)


def test_bounds_of_each_row_are_numbers_in_the_loop() -> None:
    """Of Clip, which takes no rows of bounds."""
    text = """g (float[4, 3] x, float[4] low) => (float[4, 3] y) {
        y = Scan <num_scan_inputs = 2, body = body (float[3] r, float n) => (float[3] c) {
            c = Clip (r, n) }> (x, low) }"""
    compare(model_from_text(text))
