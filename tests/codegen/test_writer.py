"""Generated programs: what their lines are, and that names from a file stay names."""

from __future__ import annotations

import gc
import linecache
import re
import textwrap
import traceback
import weakref

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.codegen.steps import printable
from tests.support.onnx_text import compile_text


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, backends=["numpy"], **options)


def program(text: str, **options) -> str:
    """The source of the model's plan, without comments at the ends of lines."""
    return plain(compiled(text, shapes={}, **options).source)


def plain(source: str) -> str:
    return "\n".join(re.sub(r"(?<=\S) +# .*", "", line) for line in source.splitlines())


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


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
    ).endswith("return (v1, unshared(v1), unshared(v0), unshared(v3), unshared(c4),)")


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


LOOP = """g (float[4] x, int64 n, bool z) => (float[4] y, float[K, 4] rows) <int64 most = {3}> {
    y, rows = Loop (n, z, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w, float[4] v) {
        w = Mul(v, v) d = Less(i, most) }>
}"""


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


def test_dynamic_values_are_released_after_their_last_use():
    text = program(
        """g (float[8] x) => (int64[1, N] y, float[8] z) {
            a = NonZero(x) b = Neg(a) c = Abs(b) z = Exp(x) y = Add(c, a) }"""
    )
    order = ["v2 = negative(v1)", "v3 = absolute(v2)", "del v2", "v5 = add(v3, v1)", "del v1, v3"]
    places = [text.index(line) for line in order]
    assert places == sorted(places)


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


def test_a_look_at_the_control_after_so_much_work():
    wide = " ".join(f"v{i + 1} = MatMul(v{i}, v{i})" for i in range(8))
    text = program(f"g (float[256, 256] v0) => (float[256, 256] y) {{ {wide} y = Neg(v8) }}")
    # 2 * 256**3 operations each; a look after 50 million
    assert text.count("control.stop()") == 4


def test_work_of_unknown_size_is_looked_at_too():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(120))
    text = program(f"g (float[4] x) => (int64[1, N] y) {{ v0 = NonZero(x) {chain} y = Abs(v120) }}")
    assert text.count("control.stop()") == 2


def test_iterations_are_bounded_where_there_is_a_limit():
    text = program(LOOP, limits=ps.Limits(max_iterations=7))
    assert "if i1 >= 7: too_many(7, 'Loop_0 in the model')" in text


# What comes from a file.

EVIL = ["\n    import os\n#", "\r    import os\r#", "\x00", "\x0c", "\u2028x", "\ud800", "'''\"\\"]


@pytest.mark.parametrize("name", EVIL)
def test_names_of_a_file_are_never_code(name):
    x = ps.ir.graph.Value(
        f"x{name}", ps.core.types.SequenceType(ps.core.types.TensorType(None, (name,)))
    )
    y = ps.ir.graph.Value(f"y{name}")
    node = ps.ir.graph.Node(
        ps.ops.find("SequenceLength"), [x], [y], name=name, origin=f"{name} in m"
    )
    graph = ps.ir.graph.Graph([x], [y], [node], name)
    session = ps.compile(ps.ir.graph.Model({"g": graph}, "g"))
    assert session.run({x.name: [np.zeros(1)]})[y.name] == 1
    assert len(session.source.splitlines()) == 4
    assert session.source.isascii()


def test_dims_of_a_file_are_never_code():
    dims = ["N]\n    never = undefined\n#"]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, dims))
    graph = helper.make_graph(
        [helper.make_node("SequenceLength", ["s"], ["n"], name="a\r    never = undefined#")],
        "g",
        [helper.make_value_info("s", kind)],
        [helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [])],
    )
    session = ps.compile(helper.make_model(graph))
    assert session.run({"s": [np.zeros(2, np.float32)]})["n"] == 1


# Programs and arenas.


def test_a_second_arena_runs_the_same_program():
    session = compiled(LOOP)
    feeds = {"x": np.full(4, 0.5, np.float32), "n": np.array(3), "z": np.array(True)}
    first = session.run(feeds)
    session.trim()  # so that the next run needs a new arena
    second = session.run(feeds)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def test_errors_in_long_programs_name_their_node():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(3000))
    session = compiled(
        f"""g (float[3] v0, int64[N] i, bool c) => (float[N] y) {{
            {chain}
            y = If (c) <then_branch = t () => (float[N] p) {{ [pick] q = Gather(v3000, i) p = Neg(q) }},
                        else_branch = e () => (float[N] r) {{ r = Gather(v3000, i) }}>
        }}"""
    )
    feeds = {"v0": np.arange(3, dtype=np.float32), "i": np.array([1]), "c": np.array(True)}
    assert session.run(feeds)["y"].tolist() == [-1]
    with pytest.raises(ps.RunError, match=r"Gather \(pick in then_branch of .*int64\[1\]"):
        session.run(feeds | {"i": np.array([5])})


def test_tracebacks_show_lines_for_as_long_as_there_is_the_program():
    session = compiled("g (float[3] x, int64[N] i) => (float[N] y) { y = Gather(x, i) }")
    try:
        session(np.zeros(3, np.float32), np.array([5]))
    except ps.RunError as error:
        text = "".join(traceback.format_exception(error))
    assert "gather_0(v0, v1)" in text
    filename = session.inspect.executor._program.filename
    assert filename in linecache.cache
    del session
    gc.collect()
    assert filename not in linecache.cache


def test_arenas_go_with_their_plan_and_do_not_wait_for_the_garbage_collector():
    session = compiled("g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }")
    session(np.zeros(1000, np.float32))
    gc.collect()
    gc.disable()
    try:
        (bound,) = session.inspect.executor._arenas.free[0].values()
        gone = weakref.ref(bound.args[0])
        del bound
        assert gone() is not None
        session.trim()
        assert gone() is None
    finally:
        gc.enable()


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


def test_program_names_two_ufuncs_of_one_name_apart():
    def shout(x):
        return x

    first, second = np.frompyfunc(shout, 1, 1), np.frompyfunc(lambda x: x + "!", 1, 1)
    assert not first.__name__.isidentifier()
    nodes, values = [], [ps.ir.graph.Value("x", ps.core.types.TensorType(np.dtype(object), (2,)))]
    for i, function in enumerate((first, second)):
        op = ps.ops.Op(
            f"F{i}",
            "",
            1,
            1,
            ps.ops.common.shape_rules.same_type,
            lambda node, types, f=function: ps.ops.Kernel(f),
        )
        values.append(ps.ir.graph.Value(f"y{i}"))
        nodes.append(ps.ir.graph.Node(op, [values[-2]], [values[-1]]))
    session = ps.compile(
        ps.ir.graph.Model({"g": ps.ir.graph.Graph(values[:1], values[-1:], nodes)}, "g")
    )
    assert session(np.array(["a", "b"], object)).tolist() == ["a!", "b!"]
    assert printable("a\nb") == "a\\nb"
