"""Carried values, conditions and scan outputs of loops."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.executors.conformance.base import ExecutorTests
from tests.support.onnx_text import model_from_text


class Loops(ExecutorTests):
    """Carried values, conditions and scan outputs of loops."""

    def test_loop_condition_that_is_also_carried_ends_the_loop(self):
        #  d is both the condition and the value that the next iteration receives as f
        session = self.compile(
            model_from_text("""g (int64 x, bool z) => (int64 y, bool last) <int64 one = {1}, int64 three = {3}, int64 n = {9}> {
                y, last = Loop (n, , x, z) <body = b (int64 i, bool c, int64 v, bool f) => (bool d, int64 w, bool d)
                    { w = Add(v, one) d = Less(w, three) }>
            }""")
        )
        for start in (True, False):
            assert session(np.array(0), np.array(start)) == (3, False)

    def test_loop_condition_is_the_carried_value_before_its_update(self):
        #  the condition is f, not the d that replaces it in the next iteration
        session = self.compile(
            model_from_text("""g (int64 x, bool z) => (int64 y, bool last) <int64 one = {1}, int64 three = {3}, int64 n = {9}> {
                y, last = Loop (n, , x, z) <body = b (int64 i, bool c, int64 v, bool f) => (bool g, int64 w, bool d)
                    { w = Add(v, one) d = Less(w, three) g = Identity(f) }>
            }""")
        )
        assert session(np.array(0), np.array(True)) == (4, False)
        assert session(np.array(0), np.array(False)) == (1, True)

    def test_scan_collects_strings_of_rank_0(self):
        session = self.compile(
            model_from_text("""g (string[n] x) => (string[n] y) {
                y = Scan <num_scan_inputs = 1, body = b (string a) => (string c) { c = StringConcat (a, a) }> (x)
            }""")
        )
        doubled = np.array(["aa", "", "bcbc"], object)
        self.assert_same(session(np.array(["a", "", "bc"], object)), doubled)

    def test_loop_carried_view_of_a_value_of_the_body_is_correct(self):
        session = self.compile(
            model_from_text("""g (float[2, 2] x, int64 n) => (float[2, 2] y) {
                y = Loop (n, , x) <body = b (int64 i, bool c, float[2, 2] v) => (bool d, float[2, 2] w)
                    { d = Identity(c) s = Add(v, v) w = Transpose(s) }>
            }""")
        )
        x = np.array([[1, 2], [3, 4]], np.float32)
        for n in range(4):
            want = x.T * 2**n if n % 2 else x * 2**n
            self.assert_same(session(x, np.array(n)), want)

    @pytest.mark.parametrize("start", [True, False])
    def test_loop_trip_count_of_two_elements_is_refused_even_if_it_is_not_read(self, start):
        session = self.compile(
            model_from_text("""g (int64[N] n, bool z, float x) => (float y) {
                y = Loop (n, z, x) <body = b (int64 i, bool c, float v) => (bool d, float w)
                    { d = Identity(c) w = Add(v, v) }>
            }""")
        )
        x, condition = np.float32(1), np.array(start)
        assert session(np.array([2]), condition, x) == (4 if start else 1)
        with pytest.raises(ps.PenstockError, match="a trip count must be one integer"):
            session(np.array([2, 3]), condition, x)

    @pytest.mark.parametrize("outputs", ["w, v", "v, v", "x, w", "w, w", "v, x", "t, w"])
    def test_loop_carried_values_that_change_places_are_correct(self, outputs):
        session = self.compile(
            model_from_text(f"""g (float[2] x, float[2] z, int64 n) => (float[2] a, float[2] b, float[K, 2] k) {{
                p = Exp(x) q = Neg(z)
                a, b, k = Loop (n, , p, q) <body = b (int64 i, bool c, float[2] v, float[2] w)
                    => (bool d, float[2] e, float[2] f, float[2] v)
                    {{ d = Identity(c) t = Add(v, w) e = Identity({outputs.split(", ")[0]})
                      f = Identity({outputs.split(", ")[1]}) }}>
            }}""")
        )
        x, z = np.array([0.5, 1], np.float32), np.array([2, 3], np.float32)
        v, w, rows = np.exp(x), -z, []
        for n in range(5):
            a, b, k = session(x, z, np.array(n))
            self.assert_same(a, v)
            self.assert_same(b, w)
            self.assert_same(k, np.array(rows, np.float32).reshape(n, 2))
            known = {"v": v, "w": w, "x": x, "t": v + w}
            rows.append(v)
            v, w = (known[name] for name in outputs.split(", "))

    def test_scan_output_of_a_loop_without_iterations_is_empty(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool z) => (float[2] y, float[K, 2] k) <int64 n = {3}> {
                y, k = Loop (n, z, x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w, float[2] v)
                    { d = Identity(c) w = Add(v, v) }>
            }""")
        )
        x = np.ones(2, np.float32)
        assert session(x, np.array(False))[1].shape == (0, 2)
        assert session(x, np.array(True))[1].tolist() == [[1, 1], [2, 2], [4, 4]]

    def test_concat_of_one_value_beyond_its_axis_is_refused_in_a_loop(self):
        with pytest.raises(ps.PenstockError, match="axis 1 is out of range for rank 1"):
            self.compile(
                model_from_text("""g (float[1] x, int64 n) => (float[1] y) {
                    y = Loop (n, , x) <body = b (int64 i, bool c, float[1] v) => (bool d, float[1] w)
                        { d = Identity(c) w = Concat<axis = 1>(x) }>
                }""")
            )(np.ones(1, np.float32), np.array(1))

    @pytest.mark.parametrize("depth", [18, 19, 30])
    def test_loops_nest_deeper_than_python_blocks(self, depth):
        def nest(left: int) -> str:
            if not left:
                return "w0 = Add(v0, v0)"
            return f"""w{left} = Loop (n, , v{left}) <body = b{left}
                (int64 i{left}, bool c{left}, float[2] v{left - 1}) => (bool d{left}, float[2] w{left - 1})
                {{ d{left} = Identity(c{left}) {nest(left - 1)} }}>"""

        text = (
            f"g (float[2] v{depth}, int64 n) => (float[2] y) {{ {nest(depth)} y = Abs(w{depth}) }}"
        )
        session = self.compile(model_from_text(text))
        assert session(np.array([1, -2], np.float32), np.array(1)).tolist() == [2, 4]
        assert session(np.array([1, -2], np.float32), np.array(0)).tolist() == [1, 2]
