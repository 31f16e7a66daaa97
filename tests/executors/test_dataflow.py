"""The dataflow executor."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.executors.conformance import ExecutorConformance, Recorder
from tests.support.onnx_text import compile_text


class TestDataflow(ExecutorConformance):
    executor = "dataflow"


N = 4000  # bytes of each value below


def most_live(text: str, **feeds: np.ndarray) -> float:
    """Return the largest number of values that were alive at once."""
    session = compile_text(text, executor="dataflow", backends=["numpy"])
    seen = Recorder()
    session.run(feeds, observers=[seen])
    return seen.most / N


X = np.ones(1000, np.float32)


def test_dataflow_frees_a_value_after_its_last_reader():
    chain = " ".join(f"v{i + 1} = {('Exp', 'Neg')[i % 2]}(v{i})" for i in range(50))
    assert most_live(f"g (float[1000] v0) => (float[1000] v50) {{ {chain} }}", v0=X) <= 2


def test_dataflow_keeps_a_value_until_all_readers_ran():
    #   x -- Exp -- a -+- Neg --- b -+- Add -- d -- Add -- y
    #                  +- Sin --- c -+           |
    #                  +-------------------------+
    text = """g (float[1000] x) => (float[1000] y) {
        a = Exp(x) b = Neg(a) c = Sin(a) d = Add(b, c) y = Add(d, a) }"""
    assert most_live(text, x=X) == 4  # a, b, c and d


def test_dataflow_loop_iterations_leak_no_memory():
    text = """g (float[1000] x, int64 n) => (float[1000] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[1000] v) => (bool d, float[1000] w)
            { d = Identity(c) s = Sin(v) t = Neg(s) w = Exp(t) }> }"""
    few, many = (most_live(text, x=X, n=np.array(n)) for n in (2, 200))
    assert many <= few + 0.1


def test_dataflow_runs_the_most_urgent_step_first():
    #   x -+- Sin ------------------------------+- Add -- y     short, and first in the file
    #      +- Exp -- Neg -- Abs -- Exp -- Neg --+
    text = """g (float[9] x) => (float[9] y) {
        [short] s = Sin(x)
        [long] a = Exp(x) b = Neg(a) c = Abs(b) d = Exp(c) e = Neg(d)
        y = Add(s, e) }"""
    order = []

    class Order(ps.Observer):
        def step_begin(self, run, step, inputs):
            order.append(step.node.name)

    compile_text(text, executor="dataflow", backends=["numpy"]).run(
        {"x": X[:9]}, observers=[Order()]
    )
    assert order.index("long") < order.index("short")


def test_dataflow_runs_graphs_of_unknown_shapes():
    #  the number of elements is known when NonZero has run
    text = """g (float[N] x) => (float[M] y) {
        i = NonZero(x) j = Squeeze(i) k = Gather(x, j) y = Exp(k) }"""
    session = compile_text(text, executor="dataflow", backends=["numpy"])
    for n in (0, 1, 5):
        x = np.array([0, 1, 0, 2, 3, 4, 5][: n + 1] * 2, np.float32)
        if np.count_nonzero(x) == 1:
            continue  # Squeeze would remove that dim, too
        np.testing.assert_array_equal(session(x), np.exp(x[x != 0]))
