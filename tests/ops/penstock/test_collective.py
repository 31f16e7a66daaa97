"""AllReduce and Broadcast on the host, as models have them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from tests.support.onnx_text import compile_text

DOMAINS = {"penstock": 1}
A = np.array([[1, -2, 3]], np.float32)
B = np.array([[4, 5, -6]], np.float32)
C = np.array([[0, 7, 9]], np.float32)


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [
        ("sum", A + B + C),
        ("mean", (A + B + C) / np.float32(3)),
        ("max", np.maximum(np.maximum(A, B), C)),
        ("min", np.minimum(np.minimum(A, B), C)),
    ],
)
def test_all_reduce_gives_each_output_the_reduction_of_all_inputs(reduction, wanted):
    session = compile_text(
        "g (float[1, 3] a, float[1, 3] b, float[1, 3] c) => (float[1, 3] x, float[1, 3] y, "
        f'float[1, 3] z) {{ x, y, z = penstock.AllReduce <reduction = "{reduction}"> (a, b, c) }}',
        domains=DOMAINS,
    )
    results = session.run({"a": A, "b": B, "c": C})
    for value in results.values():
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert len({value.ctypes.data for value in results.values()}) == 3


def test_all_reduce_sums_by_default_and_infers_the_type_of_its_outputs():
    b = GraphBuilder()
    x = b.input("x", np.int32, ["n", 2])
    y, z = b.op("AllReduce", x, x, domain="penstock", outputs=2)
    assert (y.dtype, y.shape) == (z.dtype, z.shape) == (np.int32, ("n", 2))
    b.output("y", y)
    b.output("z", z)
    results = ps.compile(b.model()).run({"x": np.ones((3, 2), np.int32)})
    assert all(np.array_equal(value, np.full((3, 2), 2)) for value in results.values())


def test_broadcast_copies_its_input_to_each_output():
    session = compile_text(
        "g (float[1, 3] a) => (float[1, 3] x, float[1, 3] y) "
        "{ x, y = penstock.Broadcast <copies = 2> (a) }",
        domains=DOMAINS,
    )
    results = session.run({"a": A})
    assert all(np.array_equal(value, A) for value in results.values())
    assert results["x"].ctypes.data != results["y"].ctypes.data


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("x, y = penstock.AllReduce(a, b)", "inputs of one shape are needed"),
        ("x = penstock.AllReduce(a, a)", "2 outputs are needed, and there are 1"),
        ('x, y = penstock.AllReduce<reduction = "xor">(a, a)', "'xor' is not one of sum, mean"),
        ("x, y = penstock.Broadcast(a)", "copies= is the number of outputs"),
        ("x, y = penstock.Broadcast<copies = 3>(a)", "3 outputs are needed, and there are 2"),
    ],
)
def test_collective_with_wrong_inputs_or_attributes_names_the_fault(node, message):
    text = f"g (float[1, 3] a, float[2, 3] b) => (float[1, 3] x) {{ {node} }}"
    with pytest.raises(ps.InvalidModel, match=message):
        compile_text(text, domains=DOMAINS).run({"a": A, "b": np.zeros((2, 3), np.float32)})


def test_all_reduce_of_shapes_that_differ_in_a_run_is_refused():
    text = """g (float[n, 3] a, float[m, 3] b) => (float[n, 3] x) {
        x, y = penstock.AllReduce(a, b) }"""
    session = compile_text(text, domains=DOMAINS)
    with pytest.raises(ps.PenstockError, match="one shape"):
        session.run({"a": A, "b": np.zeros((2, 3), np.float32)})
