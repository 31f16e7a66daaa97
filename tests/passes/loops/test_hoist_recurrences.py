"""Loops of recurrent cells become one Recurrence, and answers are those of ONNX Runtime."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
from bench.nets import Net
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

import penstock as ps
from penstock.passes.pipeline import optimize
from tests.support.sweeps import sweep

CELLS = ("lstm", "lstm of gates", "gru after", "gru before", "gru of gates", "gru of joined", "rnn")


LOOPS = ("loop", "counter", "while", "down", "scan", "sequence")


MASKS = ("none", "where", "not", "shares")


class Form:
    """A loop of ``cell``, of ``steps`` of ``batch`` rows of ``width`` features."""

    def __init__(self, cell, loop, mask, steps, batch, width, units, *, zeros=True, first=False):
        self.cell, self.loop, self.mask = cell, loop, mask
        self.steps, self.batch, self.width, self.units = steps, batch, width, units
        self.zeros, self.first = zeros, first and loop != "scan"
        self.net, self.body = Net(2), Net(3, "b")

    def gates(self, x, h, count):
        """Gates from a product of x and one of h, both with a bias."""
        net, body, n = self.net, self.body, count * self.units
        left = body.Add(body.MatMul(x, net.const(net.weight(self.width, n))), net.weight(n))
        right = body.Gemm(h, net.const(net.weight(n, self.units)), net.weight(n), transB=1)
        return left, right

    def lstm(self, x, h, c):
        body = self.body
        i, f, n, o = body.Split(body.Add(*self.gates(x, h, 4)), axis=-1, outputs=4)
        return self.lstm_end(i, body.Add(f, body.number(1)), n, o, c)

    def lstm_of_gates(self, x, h, c):
        return self.lstm_end(*[self.body.Add(*self.gates(x, h, 1)) for _ in range(4)], c)

    def lstm_end(self, i, f, n, o, c):
        body = self.body
        c = body.Add(body.Mul(body.Sigmoid(f), c), body.Mul(body.Sigmoid(i), body.Tanh(n)))
        return body.Mul(body.Sigmoid(o), body.Tanh(c)), c

    def blend(self, z, n, h):
        body = self.body
        one = body.Add(body.Neg(z), body.number(1))
        return (body.Add(body.Mul(one, n), body.Mul(z, h)),)

    def gru_after(self, x, h):
        body = self.body
        left, right = self.gates(x, h, 3)
        z, r, n = body.Split(left, axis=1, outputs=3)
        ends = [(0, self.units), (self.units, 2 * self.units), (2 * self.units, 1 << 40)]
        hz, hr, hn = [
            body.Slice(right, body.ints(0, a), body.ints(1 << 40, b), body.ints(0, 1))
            for a, b in ends
        ]
        z, r = body.Sigmoid(body.Add(z, hz)), body.Sigmoid(body.Add(r, hr))
        return self.blend(z, body.Tanh(body.Add(n, body.Mul(r, hn))), h)

    def gru_before(self, x, h):
        body, net = self.body, self.net
        left, _ = self.gates(x, h, 3)
        z, r, n = body.Split(left, axis=-1, outputs=3)
        u = net.const(net.weight(self.units, 2 * self.units))
        hr, hz = body.Split(body.MatMul(h, u), axis=-1, outputs=2)
        z, r = body.Sigmoid(body.Add(z, hz)), body.Sigmoid(body.Add(hr, r))
        v = net.const(net.weight(self.units, self.units))
        return self.blend(z, body.Tanh(body.Gemm(body.Mul(r, h), v, n)), h)

    def gru_of_gates(self, x, h):
        body = self.body
        z, r = (body.Sigmoid(body.Add(*self.gates(x, h, 1))) for _ in range(2))
        left, right = self.gates(x, body.Mul(h, r), 1)
        return self.blend(z, body.Tanh(body.Add(right, left)), h)

    def gru_of_joined(self, x, h):
        body, net, units = self.body, self.net, self.units
        w = net.const(net.weight(self.width + units, 2 * units))
        both = body.Add(body.MatMul(body.Concat(x, h, axis=1), w), net.weight(2 * units))
        r, z = body.Split(body.Sigmoid(both), axis=1, outputs=2)
        v = net.const(net.weight(self.width + units, units))
        return self.blend(z, body.Tanh(body.MatMul(body.Concat(x, body.Mul(r, h), axis=1), v)), h)

    def rnn(self, x, h):
        return (self.body.Relu(self.body.Add(*self.gates(x, h, 1))),)

    def masked(self, mask, new, old):
        body = self.body
        if self.mask == "where":
            return body.Where(mask, new, old)
        kept = body.Not(mask)
        if self.mask == "not":
            return body.Where(kept, old, new)
        shares = [body.Cast(x, to=TensorProto.FLOAT) for x in (mask, kept)]
        return body.Add(body.Mul(shares[0], new), body.Mul(old, shares[1]))

    def model(self) -> onnx.ModelProto:
        net, body = self.net, self.body
        steps, batch, units, scanned = self.steps, self.batch, self.units, self.loop == "scan"
        dims = [batch, steps, self.width] if self.first else [steps, batch, self.width]
        x = net.input("x", dims)
        m = None if self.mask == "none" else net.input("m", [steps, batch], TensorProto.BOOL)
        names = ["h", "c"] if self.cell.startswith("lstm") else ["h"]
        begin = [
            net.const(np.zeros((batch, units), np.float32))
            if self.zeros
            else net.input(f"{name}0", [batch, units])
            for name in names
        ]
        limit, go, counted = net.const(np.array(steps)), net.const(np.array(True)), []
        if not scanned:
            body.input("i", [], TensorProto.INT64)
            body.input("go", [], TensorProto.BOOL)
            index, still = "i", "go"
            if self.loop in ("counter", "while"):
                begin = [net.const(np.array(0, np.int32)), *begin]
                body.input("t", [], TensorProto.INT32)
                index, more = "t", body.Add("t", body.const(np.array(1, np.int32)))
                counted = [(more, "t_next")]
                if self.loop == "while":
                    number = body.Cast(more, to=TensorProto.FLOAT)
                    still = body.And(body.Less(number, body.number(steps)), body.Less("i", limit))
            if self.loop == "down":
                index = body.Sub(body.const(np.array(steps - 1)), "i")
            body.output(still, "on", [], TensorProto.BOOL)
            row = body.Gather(x, index, axis=1 if self.first else 0)
            mask = None if m is None else body.Gather(m, index, axis=0)
        for value, name in counted:
            body.output(value, name, [], TensorProto.INT32)
        for name in names:
            body.input(name, [batch, units])
        if scanned:
            row = body.input("row", [batch, self.width])
            mask = None if m is None else body.input("mask", [batch], TensorProto.BOOL)
        states = getattr(self, self.cell.replace(" ", "_"))(row, *names)
        if mask is not None:
            mask = body.Unsqueeze(mask, body.ints(1))
            states = [self.masked(mask, *pair) for pair in zip(states, names, strict=True)]
        for value, name in zip(states, names, strict=True):
            body.output(value, f"{name}_next", [batch, units])
        if self.loop == "sequence":
            body.inputs.append(
                onnx.helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
            )
            body.nodes.append(onnx.helper.make_node("SequenceInsert", ["s", "h_next"], ["s_next"]))
            body.outputs.append(
                onnx.helper.make_tensor_sequence_value_info("s_next", TensorProto.FLOAT, None)
            )
            begin.append(net.SequenceEmpty(dtype=TensorProto.FLOAT))
        else:
            body.output(states[0], "y_row", [batch, units])
        count = len(begin) + (self.loop != "sequence")
        if scanned:
            given = [x] if m is None else [x, m]
            results = net.Scan(
                *begin, *given, outputs=count, body=body.graph("body"), num_scan_inputs=len(given)
            )
        else:
            results = net.Loop(limit, go, *begin, outputs=count, body=body.graph("body"))
        results = results if count > 1 else [results]
        *finals, y = results
        if self.loop == "sequence":
            y = net.ConcatFromSequence(y, axis=1, new_axis=1)
        net.output(y, "y", ["a", "b", "c"])
        for i, final in enumerate(finals[len(counted) :]):
            net.output(final, f"last{i}", [batch, units])
        model = net.model()
        model.graph.value_info.clear()
        return model


def operations(model: onnx.ModelProto) -> list[str]:
    graph = ps.load(model).graph
    optimize(graph)
    return [node.op.name for node in graph.walk()]


def compare(model: onnx.ModelProto, **options) -> None:
    session, rng = ps.compile(model, **options), np.random.default_rng(5)
    feeds = {}
    for value in session.inputs:
        drawn = rng.standard_normal(value.shape)
        feeds[value.name] = drawn > -0.5 if value.dtype == bool else drawn.astype(np.float32)
    runtime = onnxruntime.InferenceSession(model.SerializeToString())
    got, wanted = session.run(feeds), runtime.run(None, feeds)
    for y, want in zip(got.values(), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("case", sweep(product(CELLS, LOOPS, MASKS), 28), ids=str)
def test_loop_of_a_cell_is_one_recurrence_and_a_product(case):
    _, loop, _ = case
    model = Form(*case, 5, 2, 3, 4).model()
    names = operations(model)
    assert names.count("Recurrence") == 1
    # Products of rows in another order than theirs are sliced, each its own.
    assert loop == "down" or names.count("MatMul") == 1
    assert not {"Loop", "Scan", "Gemm"} & {*names}
    compare(model)
    compare(model, backends=["numpy"])


@given(
    cell=st.sampled_from(CELLS),
    loop=st.sampled_from(LOOPS),
    mask=st.sampled_from(MASKS),
    sizes=st.tuples(
        *[st.integers(2, 6), st.integers(1, 9), st.integers(1, 20), st.integers(1, 40)]
    ),
    zeros=st.booleans(),
    first=st.booleans(),
)
def test_random_loops_of_cells_equal_those_of_onnx_runtime(cell, loop, mask, sizes, zeros, first):
    model = Form(cell, loop, mask, *sizes, zeros=zeros, first=first).model()
    if mask == "none" and sizes[-1] > 1:
        assert "Recurrence" in operations(model)
    compare(model)


def stacked(units: int, second_reads: str) -> onnx.ModelProto:
    """A loop of two cells, of which the second reads the first one's new state, or its old one."""
    net, body = Net(2), Net(3, "b")
    x = net.input("x", [6, 2, units])
    body.input("i", [], TensorProto.INT64)
    body.input("go", [], TensorProto.BOOL)
    body.output("go", "on", [], TensorProto.BOOL)
    row, states = body.Gather(x, "i", axis=0), []
    for name in ("h", "k"):
        body.input(name, [2, units])
        w, u = (net.const(net.weight(units, units)) for _ in range(2))
        states.append(body.Tanh(body.Add(body.MatMul(row, w), body.MatMul(name, u))))
        row = states[0] if second_reads == "new" else "h"
    for state, name in zip(states, ("h_next", "k_next"), strict=True):
        body.output(state, name, [2, units])
    head = body.Add(body.MatMul(states[1], net.const(net.weight(units, 3))), net.weight(3))
    body.output(head, "row", [2, 3])
    zeros = net.const(np.zeros((2, units), np.float32))
    trips, go = net.const(np.array(6)), net.const(np.array(True))
    h, k, y = net.Loop(trips, go, zeros, zeros, outputs=3, body=body.graph("body"))
    for value, name, dims in ((h, "h", [2, units]), (k, "k", [2, units]), (y, "y", [6, 2, 3])):
        net.output(value, f"{name}_end", dims)
    return net.model()


def test_cell_upon_another_leaves_the_loop_with_what_is_computed_of_its_states():
    model = stacked(5, "new")
    names = operations(model)
    assert names.count("Recurrence") == 2
    assert names.count("MatMul") == 3
    assert "Loop" not in names
    compare(model)


def test_cell_whose_old_state_something_else_reads_stays():
    model = stacked(5, "old")
    assert "Recurrence" not in operations(model)
    compare(model)


def edited(edit, cell="gru after", loop="loop", mask="none", **options) -> onnx.ModelProto:
    """A model of a cell whose Loop ``edit`` has changed."""
    model = Form(cell, loop, mask, 5, 2, 3, 4, **options).model()
    (node,) = [n for n in model.graph.node if n.op_type == "Loop"]
    (body,) = [a.g for a in node.attribute if a.name == "body"]
    edit(model.graph, node, body)
    return model


def weights_that_change(graph, loop, body):
    gemm = next(n for n in body.node if n.op_type == "Gemm")
    scaled = onnx.helper.make_node("Mul", [gemm.input[1], "on"], ["scaled"])
    scaled.input[1] = "number"
    cast = onnx.helper.make_node("Cast", ["i"], ["number"], to=TensorProto.FLOAT)
    gemm.input[1] = "scaled"
    body.node.insert(0, scaled)
    body.node.insert(0, cast)


def index_beyond_the_rows(graph, loop, body):
    gather = next(n for n in body.node if n.op_type == "Gather")
    body.initializer.append(onnx.numpy_helper.from_array(np.array(-1), "minus"))
    body.node.insert(0, onnx.helper.make_node("Add", ["i", "minus"], ["before"]))
    gather.input[1] = "before"


def condition_of_the_state(graph, loop, body):
    nodes = onnx.helper.make_node("ReduceMax", ["h"], ["largest"], keepdims=0)
    body.initializer.append(onnx.numpy_helper.from_array(np.array(9, np.float32), "nine"))
    body.node.insert(0, onnx.helper.make_node("Less", ["largest", "nine"], ["small"]))
    body.node.insert(0, nodes)
    (last,) = [n for n in body.node if n.output[0] == "on"]
    last.input[0] = "small"


@pytest.mark.parametrize(
    "edit", [weights_that_change, index_beyond_the_rows, condition_of_the_state]
)
def test_loop_whose_steps_are_not_known_before_it_stays(edit):
    model = edited(edit)
    names = operations(model)
    assert "Recurrence" not in names
    assert "Loop" in names
    compare(model)


def test_state_read_before_it_is_masked_stays_in_the_loop():
    def collect_unmasked(graph, loop, body):
        (where,) = [n for n in body.node if n.op_type == "Where"]
        (row,) = [n for n in body.node if n.output[0] == "y_row"]
        row.input[0] = where.input[1]

    model = edited(collect_unmasked, mask="where")
    assert "Recurrence" not in operations(model)
    compare(model)


@pytest.mark.parametrize("mask", ["where", "shares"])
def test_masked_steps_pass_on_what_is_not_finite_as_onnx_runtime_does(mask):
    model = Form("lstm", "loop", mask, 5, 2, 3, 4).model()
    x, m = np.ones((5, 2, 3), np.float32), np.ones((5, 2), bool)
    x[2, 0], m[2, 0] = np.nan, False
    (wanted, *_) = onnxruntime.InferenceSession(model.SerializeToString()).run(
        None, {"x": x, "m": m}
    )
    assert np.isnan(wanted).any() == (mask == "shares")
    for options in ({}, {"backends": ["numpy"]}):
        got = ps.compile(model, **options).run({"x": x, "m": m})["y"]
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)


def test_cell_of_noise_stays_in_the_loop():
    net, body = Net(2), Net(3, "b")
    xs, h = net.input("xs", [5, 2, 4]), net.input("h", [2, 4])
    body.input("i", [], TensorProto.INT64)
    body.input("go", [], TensorProto.BOOL)
    body.input("s", [2, 4])
    body.output("go", "on", [], TensorProto.BOOL)
    noise = body.RandomNormal(shape=[2, 4], scale=1e-30)
    summed = body.Add(body.MatMul("s", np.full((4, 4), 0.5, np.float32)), noise)
    body.output(body.Tanh(body.Add(body.Gather(xs, "i", axis=0), summed)), "t", [2, 4])
    trips, go = net.const(np.array(5)), net.const(np.array(True))
    net.output(net.Loop(trips, go, h, body=body.graph("body")), "y", [2, 4])
    model = net.model()
    assert {"Loop", "RandomNormal"} <= {*operations(model)}
    compare(model)
