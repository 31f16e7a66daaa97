"""Programs of Ifs, loops, scans and maps."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.codegen.test_writer import LOOP, compiled, lines, plain, program


def test_program_writes_an_if_as_an_if_statement():
    assert program(
        """g (float[4] x, bool c) => (float[4] y) {
            a = Exp(x)
            b = If (c) <then_branch = t () => (float[4] p) { q = Sin(a) p = Neg(q) },
                        else_branch = e () => (float[4] r) { r = Identity(a) }>
            y = Abs(b) }"""
    ) == lines(
        """
        def run(control, v0, v1):
            # v0: 'x', float32[4]
            # v1: 'c', bool[]
            exp(v0, b2)
            if v1:
                sin(b2, b3)
                negative(b3, b3)
                v5 = b3
            else:
                v5 = b2
            v6 = absolute(v5)
            del v5
            return (v6,)
        """
    )


def test_a_loop_is_a_loop_whose_carried_values_alternate_between_two_buffers():
    assert program(LOOP) == lines(
        """
        def run(control, v0, v1, v2):
            # v0: 'x', float32[4]
            # v1: 'n', int64[]
            # v2: 'z', bool[]
            # Loop_0 in the model
            r12 = []
            v5, v8, s5 = v0, b3, b4
            if v2:
                for i1 in range(scalar(v1)):
                    if control.stopped: control.stop()
                    v6 = array(i1, int64)
                    multiply(v5, v5, v8)
                    less(v6, c9, b10)
                    r12.append(own(v5))
                    v5, v8, s5 = v8, s5, v8
                    if not b10: break
            if v5 is v0: v5 = copied(b3, v5)
            v11 = v5
            v12 = stack(r12, 0, 0, k12)
            r12 = None
            return (unshared(v11), v12,)
        """
    )


def test_a_condition_that_is_carried_is_read_before_it_changes():
    text = program(
        """g (int64 n, bool z, bool f) => (bool y) {
            y = Loop (n, z, f) <body = b (int64 i, bool c, bool v) => (bool v, bool w) { w = Not(v) }>
        }"""
    )
    assert (
        lines("""
                    go1 = v5
                    v5, v8, s5 = v8, s5, v8
                    if not go1: break
    """).replace("\n", "\n" + " " * 12)
        in text
    ), text


def test_a_scan_writes_its_rows_where_they_belong():
    assert program(
        """g (float[3, 4] x, float[4] s) => (float[4] t, float[4, 3] rows) {
            t, rows = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1],
                body = b (float[4] a, float[4] row) => (float[4] m, float[4] a) { m = Max(a, row) }> (s, x)
        }"""
    ) == lines(
        """
        def run(control, v0, v1):
            # v0: 'x', float32[3, 4]
            # v1: 's', float32[4]
            # Scan_0 in the model
            x5 = rows_of(v0, 0, 1)
            v8 = empty(*k8)
            r8 = rows_of(v8, 1, 0)
            v4, v6, s4 = v1, b2, b3
            for i1 in range(same_length(x5)):
                if control.stopped: control.stop()
                v5 = x5[i1, ...]
                max_1(v4, v5, v6)
                r8[i1] = v4
                v4, v6, s4 = v6, s4, v6
            if v4 is v1: v4 = copied(b2, v4)
            v7 = v4
            x5 = r8 = v5 = None
            return (unshared(v7), v8,)
        """
    )


def test_a_sequence_map_walks_its_sequence():
    session = compiled(
        """g (seq(float[4]) s, float[4] k) => (seq(float[4]) y) {
            y = SequenceMap (s, k) <body = b (float[4] e, float[4] f) => (float[4] r) { r = Add(e, f) }>
        }"""
    )
    x = np.ones(4, np.float32)
    assert [y.tolist() for y in session([x, 2 * x], x)] == [[2] * 4, [3] * 4]
    assert plain(session.source) == lines(
        """
        def run(control, v0, v1):
            # v0: 's', seq(float32[4])
            # v1: 'k', float32[4]
            # SequenceMap_0 in the model
            v5 = []
            for i1 in range(len(v0)):
                if control.stopped: control.stop()
                v2 = element_of(v0, i1)
                v3 = element_of(v1, i1)
                v4 = add(v2, v3)
                v5.append(v4)
            v2 = v3 = v4 = None
            return (unshared(v5),)
        """
    )


def test_program_releases_outputs_of_a_branch_with_the_result():
    assert """
    if v1:
        v3 = absolute(v2)
        v5 = v3
        del v3
    else:
        v4 = negative(v2)
        v5 = v4
        del v4
    del v2
    v6 = sign(v5)
    del v5
""" in program(
        """g (float[8] x, bool c) => (int64[1, N] y) {
            n = NonZero(x)
            a = If (c) <then_branch = t () => (int64[1, N] p) { p = Abs(n) },
                        else_branch = e () => (int64[1, N] q) { q = Neg(n) }>
            s = Sign(a) y = Neg(s) }"""
    )


def test_rows_and_carried_values_of_a_loop_are_released_with_their_results(most_bytes):
    #  what grows to n * (n + 1) / 2 rows is alive once, and not twice, when it has been stacked
    session = compiled(
        """g (float[100000] x, int64 n) => (float[M] y, float[K, 100000] k) {
            r, k = Loop (n, , x) <body = b (int64 i, bool c, float[A] v) => (bool d, float[B] w, float[100000] q) {
                d = Identity(c) q = Neg(x) w = Concat <axis = 0> (v, q) }>
            y = Neg(r) }"""
    )
    feeds = {"x": np.zeros(100_000, np.float32), "n": np.array(10)}
    session.run(feeds)
    # rows and their stack, 10 each; the value that grew and its negative, 11 each
    assert most_bytes(lambda: session.run(feeds)) < 34 * 400_000


def test_iterations_are_bounded_where_there_is_a_limit():
    text = program(LOOP, limits=ps.Limits(max_iterations=7))
    assert "if i1 >= 7: too_many(7, 'Loop_0 in the model')" in text


def test_branches_nest_deeper_than_python_indents():
    x = ps.ir.graph.Value("x", ps.core.types.TensorType(np.dtype(np.float32), (2,)))
    c = ps.ir.graph.Value("c", ps.core.types.TensorType(np.dtype(bool), ()))

    def nest(depth: int) -> ps.ir.graph.Graph:
        y = ps.ir.graph.Value(f"y{depth}")
        if not depth:
            return ps.ir.graph.Graph([], [y], [ps.ir.graph.Node(ps.ops.find("Neg"), [x], [y])])
        attrs = {"then_branch": nest(depth - 1), "else_branch": ps.ir.graph.Graph([], [x], [])}
        return ps.ir.graph.Graph([], [y], [ps.ir.graph.Node(ps.ops.find("If"), [c], [y], attrs)])

    def run(depth: int) -> list[float]:
        graph = nest(depth)
        graph.inputs = [x, c]
        session = ps.compile(ps.ir.graph.Model({"g": graph}, "g"))
        return session(np.ones(2, np.float32), np.array(True)).tolist()

    assert run(ps.Limits().max_depth) == [-1, -1]
    assert run(120) == [-1, -1]
