"""Lines of steps: calls, views, copies, looks at the control."""

from __future__ import annotations

import re

from tests.codegen.test_writer import compiled, lines, program


def test_a_chain_is_calls_of_kernels_with_their_arguments():
    assert program(
        """g (float[4] x) => (float[4] y) <float[4] k = {1, 2, 3, 4}> {
            a = Mul(x, k) b = Relu(a) y = Add(b, x) }"""
    ) == lines(
        """
        def run(control, v0):
            # v0: 'x', float32[4]
            multiply(v0, c1, b2)
            relu_1(b2, b2)
            v4 = add(b2, v0)
            return (v4,)
        """
    )


def test_each_line_says_where_its_node_came_from():
    source = compiled(
        "g (float[4] x) => (float[4] y) { [first] a = Exp(x) y = Neg(a) }", shapes={}
    ).source
    assert re.search(r"exp\(v0, b1\) +# first in the model: float32\[4\]\n", source)
    assert "# Neg_1 in the model: float32[4]\n" in source


def test_views_of_planned_memory_are_names():
    assert program(
        """g (float[2, 3] x) => (float[6] y) <int64[1] s = {6}> {
            a = Exp(x) b = Reshape(a, s) y = Neg(b) }"""
    ) == lines(
        """
        def run(control, v0):
            # v0: 'x', float32[2, 3]
            exp(v0, b1)
            v4 = negative(b3)
            return (v4,)
        """
    )


def test_outputs_that_others_may_hold_are_copied():
    assert program(
        """g (float[3] x) => (float[3] p, float[3] q, float[3] r, float[1, 3] s, float[3] t)
            <float[3] t = {1, 2, 3}, int64[1] axes = {0}> {
            p = Neg(x) q = Identity(p) r = Identity(x) s = Unsqueeze(p, axes) }"""
    ).endswith("return (v1, copy(v1), unshared(v0), copy(v3), unshared(c4),)")


def test_a_look_at_the_control_after_so_much_work():
    wide = " ".join(f"v{i + 1} = MatMul(v{i}, v{i})" for i in range(8))
    text = program(f"g (float[256, 256] v0) => (float[256, 256] y) {{ {wide} y = Neg(v8) }}")
    # 2 * 256**3 operations each; a look after 50 million
    assert text.count("control.stop()") == 4


def test_work_of_unknown_size_is_looked_at_too():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(120))
    text = program(f"g (float[4] x) => (int64[1, N] y) {{ v0 = NonZero(x) {chain} y = Abs(v120) }}")
    assert text.count("control.stop()") == 2
