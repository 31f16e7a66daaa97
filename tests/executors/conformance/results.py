"""What a run returns: the interpreter's values, in arrays of the caller's own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from tests.executors.conformance.base import INHERITED, ExecutorTests
from tests.support.onnx_text import model_from_text
from tests.support.random_graphs import graphs, seeded
from tests.support.sweeps import scaled, sweep


def of_any_type(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


class Results(ExecutorTests):
    """What a run returns: the interpreter's values, in arrays of the caller's own."""

    @pytest.mark.parametrize("examples", scaled(60, 1000))
    def test_random_graph_equals_the_interpreter(self, examples):
        @settings(max_examples=examples, suppress_health_check=INHERITED)
        @given(graph=graphs(), seed=st.integers(0, 3))
        def same(graph, seed):
            self.same_as_interpreter(graph, seed)

        same()

    @pytest.mark.parametrize("seed", sweep(range(100), 10))
    def test_larger_random_graph_equals_the_interpreter(self, seed):
        self.same_as_interpreter(seeded(seed), seed % 4)

    def test_output_that_is_an_input_is_a_copy(self):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { y = Identity (x) }")
        )
        x = np.ones(2, np.float32)
        y = session.run({"x": x})["y"]
        y[0] = 5
        assert x[0] == 1

    @pytest.mark.parametrize("wanted", [[1, 3], [2, 2, 3], [3, 4]])
    @pytest.mark.parametrize("node", ["y = Expand(x, s)", "h = Expand(x, s) y = Neg(h)"])
    def test_expand_to_a_shape_that_follows_from_data_checks_it(self, node, wanted):
        text = f"g (float[3, 4] x, int64[N] s) => (float[A, B] y) {{ {node} }}"
        session = self.compile(model_from_text(text))
        feeds = {"x": np.ones((3, 4), np.float32), "s": np.array(wanted)}
        if wanted == [3, 4]:
            assert session.run(feeds)["y"].shape == (3, 4)
            return
        with pytest.raises(ps.RunError, match="Expand"):
            session.run(feeds)

    def test_outputs_left_out_before_another_are_no_results(self):
        text = "g (float[3, 127, 2] x, float[1, 4, 2] w, float[1, 4, 4] r) => (float[] h) {{ {} }}"
        model = model_from_text(text.format("y, h = RNN<hidden_size = 4>(x, w, r)"))
        whole = self.compile(model)
        model.graph.node[0].output[0] = ""
        model.graph.output[0].ClearField("type")
        shapes = {"x": (3, 127, 2), "w": (1, 4, 2), "r": (1, 4, 4)}
        feeds = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
        self.assert_same(self.compile(model).run(feeds), whole.run(feeds))

    def test_output_that_is_a_constant_is_a_copy(self):
        session = self.compile(
            model_from_text(
                "g (float[2] x) => (float[2] y, float[2] z) <float[2] y = {1, 2}> { z = Abs(x) }"
            )
        )
        x = np.ones(2, np.float32)
        session.run({"x": x})["y"][0] = 5
        assert session.run({"x": x})["y"].tolist() == [1, 2]

    @pytest.mark.parametrize(
        "nodes",
        [
            "y = ReduceMax<keepdims = 0>(x, a)",
            "y = ReduceSum(x, a)",
            "y = ReduceMean<keepdims = 0>(x, a)",
            "h = Squeeze(x, a) y = Reshape(h, one)",
            "h = Unsqueeze(x, a) y = Reshape(h, one)",
            "h = Reshape(x, a) y = Reshape(h, one)",
            "zeros = Constant<value_ints = [0, 0]>() y = Pad(x, zeros, , a)",
        ],
    )
    def test_axis_out_of_range_of_one_element_is_refused(self, nodes):
        text = "g (float[N] x, int64[1] a) => (float[A] y) <int64[1] one = {1}> { %s }"
        session = self.compile(model_from_text(text % nodes))
        for axis in (3, -4):
            with pytest.raises(ps.RunError):
                session.run({"x": np.ones(1, np.float32), "a": np.array([axis])})

    @pytest.mark.parametrize("node", ["Concat<axis = 1>(x)", "Transpose<perm = [0, 1]>(x)"])
    def test_axis_out_of_range_of_a_rank_known_in_the_run_is_refused(self, node):
        text = f"g (float[N] x) => (float[A] y) {{ y = {node} }}"
        model = model_from_text(text)
        model.graph.input[0].type.tensor_type.ClearField("shape")
        session = self.compile(model)
        with pytest.raises((ps.InvalidInput, ps.InvalidModel, ps.RunError)):
            session.run({"x": np.ones(1, np.float32)})

    def test_outputs_of_two_runs_share_no_memory(self):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { t = Neg(x) y = Exp(t) }")
        )
        first = session.run({"x": np.zeros(2, np.float32)})["y"]
        session.run({"x": np.ones(2, np.float32)})
        assert first.tolist() == [1, 1]

    def test_value_that_is_two_outputs_gives_two_arrays(self):
        session = self.compile(
            model_from_text(
                "g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Identity(y) }"
            )
        )
        outputs = session.run({"x": np.ones(2, np.float32)})
        assert not np.shares_memory(outputs["y"], outputs["z"])

    def test_branch_that_returns_an_output_gives_two_arrays(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool c) => (float[2] a, float[2] y) {
                a = Exp(x)
                y = If (c) <then_branch = t () => (float[2] p) { p = Identity(a) },
                            else_branch = e () => (float[2] q) { q = Neg(a) }>
            }""")
        )
        outputs = session.run({"x": np.ones(2, np.float32), "c": np.array(True)})
        self.assert_same(outputs["a"], outputs["y"])
        assert not np.shares_memory(outputs["a"], outputs["y"])

    def test_views_of_one_value_returned_by_a_branch_share_no_memory(self):
        session = self.compile(
            model_from_text("""g (float[2, 3] x, bool c) => (float[2, 3] a, float[3, 2] y) {
                a, y = If (c) <then_branch = t () => (float[2, 3] p, float[3, 2] pt)
                        { p = Exp(x) pt = Transpose(p) },
                    else_branch = e () => (float[2, 3] q, float[3, 2] qt)
                        { q = Neg(x) qt = Transpose(q) }>
            }""")
        )
        outputs = session.run({"x": np.ones((2, 3), np.float32), "c": np.array(False)})
        assert not np.shares_memory(outputs["a"], outputs["y"])

    def test_arrays_of_returned_sequences_share_no_memory(self):
        session = self.compile(
            model_from_text("""g (seq(float[2]) s, float[2] x) => (seq(float[2]) y, seq(float[2]) z) {
                a = Neg(x) b = Exp(a) y = SequenceInsert(s, b) z = Identity(y)
            }""")
        )
        x = np.ones(2, np.float32)
        first = session.run({"s": [x], "x": x})
        arrays = [*first["y"], *first["z"], x]
        copies = [array.copy() for array in arrays]
        session.run({"s": [x], "x": 5 * x})
        for i, array in enumerate(arrays):
            self.assert_same(array, copies[i])
            assert not any(np.shares_memory(array, other) for other in arrays[:i])

    def test_output_that_is_an_empty_optional_is_none(self):
        branches = {
            f"{name}_branch": onnx.helper.make_graph(
                [onnx.helper.make_node("Optional", [], [name])], name, [], [of_any_type(name)]
            )
            for name in ("then", "else")
        }
        node = onnx.helper.make_node("If", ["c"], ["y"], **branches)
        c = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
        graph = onnx.helper.make_graph([node], "g", [c], [of_any_type("y")])
        opsets = [onnx.helper.make_opsetid("", 16)]
        session = self.compile(onnx.helper.make_model(graph, opset_imports=opsets))
        assert session.run({"c": np.array(True)}) == {"y": None}

    def test_output_of_rank_zero_is_an_array(self):
        session = self.compile(
            model_from_text("""g (float a, float b, string s, string t) => (float y, string z) {
                y = Add(a, b) z = StringConcat(s, t) }""")
        )
        y, z = session(1.0, 2.0, "p", "q")
        assert (y.shape, y.dtype, z.shape, z.dtype) == ((), np.float32, (), object)
        assert z.item() == "pq"

    def test_any_value_can_be_fed_and_fetched(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool c) => (float[2] y) {
                a = Exp(x) b = Neg(a)
                z = If (c) <then_branch = t () => (float[2] p) { p = Add(a, b) },
                            else_branch = e () => (float[2] q) { q = Mul(b, b) }>
                y = Abs(z)
            }""")
        )
        x, c = np.array([1, 2], np.float32), np.array(False)
        a = np.exp(x)
        outputs = session.run({"x": x, "c": c}, ["b", "x", "y", "b"])
        self.assert_same(outputs["b"], -a)
        self.assert_same(outputs["x"], x)
        self.assert_same(outputs["y"], a * a)
        assert session.run({"a": x, "b": x, "c": c}, ["z"])["z"].tolist() == [1, 4]
        assert session.run({"z": -x}, ["y"])["y"].tolist() == [1, 2]
        assert session.run({"x": x}, ["a"], targets=["b"]).keys() == {"a"}

    @pytest.mark.parametrize("n", scaled(1_200, 10_000))  # deeper than Python's stack may be
    def test_long_chain_runs(self, n):
        nodes = [onnx.helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(n)]
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(nodes, "g", [info("v0", 1, [3])], [info(f"v{n}", 1, [3])])
        session = self.compile(onnx.helper.make_model(graph))
        x = np.arange(3, dtype=np.float32)
        self.assert_same(session.run({"v0": x})[f"v{n}"], x)

    def test_fan_out_to_a_thousand_nodes_runs(self):
        make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
        nodes = [make("Exp", ["x"], ["e"])]
        nodes += [make(("Neg", "Sin", "Abs")[i % 3], ["e"], [f"w{i}"]) for i in range(1000)]
        nodes.append(make("Sum", [f"w{i}" for i in range(1000)], ["y"]))
        graph = onnx.helper.make_graph(nodes, "g", [info("x", 1, [5])], [info("y", 1, [5])])
        session = self.compile(onnx.helper.make_model(graph))
        x = np.linspace(-1, 1, 5, dtype=np.float32)
        e = np.exp(x)
        want = -334 * e + 333 * np.sin(e) + 333 * np.abs(e)
        for _ in range(3):
            np.testing.assert_allclose(session(x), want, rtol=1e-4)

    def test_error_state_of_numpy_is_unchanged_for_the_caller(self):
        session = self.compile(model_from_text("g (float[1] x) => (float[1] y) { y = Log(x) }"))
        with np.errstate(all="raise"):
            y = session.run({"x": np.zeros(1, np.float32)})["y"]
            assert np.isneginf(y[0])
            assert np.geterr()["divide"] == "raise"
