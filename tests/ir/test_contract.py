"""Kernels and backends of users that break their contract: the first run says so."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.base import HostBackend
from penstock.core.errors import ExtensionError
from penstock.core.types import FLOAT32, STRING, SequenceType, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.kernel import Binder, Kernel, asynchronous
from penstock.ir.op import Op
from tests.support.onnx_text import compile_text

PLANNED = ["auto", "linear", "dataflow", "parallel", "streams", "frames"]
EXECUTORS = [*PLANNED, "interpret"]

X = np.array([1, 4], np.float32)


class Custom(HostBackend):
    """Has one kernel, for Sqrt: whatever it was made with."""

    name = "custom"

    def __init__(self, kernel) -> None:
        self.answer = kernel

    def kernel(self, node, types):
        return self.answer if node.op.name == "Sqrt" else None


def session_on(kernel, executor, *, text="y = Sqrt(x)") -> ps.Session:
    backends = [Custom(kernel), "numpy"]
    if executor == "frames":  # runs on its last host backend
        backends = [Everything(kernel)]
    text = f"g (float[2] x) => (float[2] y) {{ {text} }}"
    return compile_text(
        text, executor=executor, backends=backends, place={"Sqrt": backends[0].name}
    )


class Everything(Custom):
    """As ``Custom``, with NumPy's kernels for all other nodes."""

    def kernel(self, node, types):
        return super().kernel(node, types) or node.op.compile(node, types)


BROKEN = {
    "dtype": (lambda x: np.sqrt(x).astype(np.float64), r"computed a float64\[2\] as"),
    "shape": (lambda x: np.sqrt(x)[:1], r"computed a float32\[1\] as"),
    "rank": (lambda x: np.sqrt(x)[None], r"computed a float32\[1, 2\] as"),
    "scalar": (lambda x: np.float32(1), r"computed a float32\[\] as"),
    "unknown dtype": (lambda x: np.zeros(2, "M8[s]"), "computed a datetime64"),
    "list": (lambda x: [1.0, 2.0], r"computed a list as|computed a seq"),
    "float": (lambda x: 1.0, "computed a float as"),
    "nothing": (lambda x: None, "computed a optional"),
    "tuple": (lambda x: (np.sqrt(x),), "computed a tuple as"),
}


@pytest.mark.parametrize("executor", PLANNED)
@pytest.mark.parametrize("breach", BROKEN)
def test_backend_that_breaks_a_rule_is_named_with_the_node_and_the_rule(breach, executor):
    function, message = BROKEN[breach]
    session = session_on(Kernel(function), executor)
    for _ in range(2):
        with pytest.raises(ExtensionError, match=r"Sqrt \(.*" + message + ".*backend custom"):
            session.run({"x": X})


@pytest.mark.parametrize("executor", PLANNED)
def test_backend_that_breaks_a_rule_in_a_loop_is_named(executor):
    text = """n = Constant<value_int = 3>() y = Loop (n, , x) <
        body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w) {
            d = Identity(c) w = Sqrt(v) }>"""
    session = session_on(Kernel(lambda x: np.sqrt(x, dtype=np.float64)), executor, text=text)
    with pytest.raises(ExtensionError, match=r"Sqrt \(.*computed a float64\[2\] as"):
        session.run({"x": X})


@pytest.mark.parametrize("executor", PLANNED)
def test_asynchronous_kernel_that_breaks_a_rule_is_named(executor):
    kernel = asynchronous(lambda done, x: done(np.sqrt(x, dtype=np.float64)))
    with pytest.raises(ExtensionError, match=r"Sqrt \(.*computed a float64\[2\] as"):
        session_on(kernel, executor).run({"x": X})


@pytest.mark.parametrize("executor", PLANNED)
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.sqrt, "has a ufunc as its kernel; a backend returns a Kernel, or None"),
        (Kernel(None), "cannot be called"),
        (Kernel(np.sqrt, np.sqrt, inplace=(3,)), "whose inplace"),
        (Kernel(np.sqrt, np.sqrt, object()), "a object as its binder"),
        (Kernel(np.sqrt, np.sqrt, workspace=-1), "with a workspace of -1 bytes"),
    ],
)
def test_backend_whose_answer_is_no_sound_kernel_is_named(answer, message, executor):
    with pytest.raises(ExtensionError, match=rf"Sqrt \(.*{message}.*backend custom"):
        session_on(answer, executor).run({"x": X})


class Unbound(Binder):
    """A binder that gives a function without arguments."""

    implementation = "none"

    def bind(self, inputs, outputs, workspace):
        return np.sqrt


@pytest.mark.parametrize("executor", ["linear", "parallel", "streams"])
def test_binder_that_gives_no_function_with_arguments_is_named(executor):
    kernel = Kernel(np.sqrt, np.sqrt, binder=Unbound())
    with pytest.raises(ExtensionError, match=r"Sqrt \(.* bound a ufunc"):
        session_on(kernel, executor, text="h = Sqrt(x) y = Neg(h)").run({"x": X})


@pytest.mark.parametrize("executor", ["linear", "parallel", "streams"])
@pytest.mark.parametrize("memory", [bytearray(64), np.zeros(3, np.uint8), np.zeros(16, np.float64)])
def test_backend_that_allocates_other_memory_than_asked_for_is_named(memory, executor):
    class Short(Everything):
        def allocate(self, nbytes):
            return memory

    text = "g (float[2] x) => (float[2] y) { h = Sqrt(x) y = Neg(h) }"
    with pytest.raises(ExtensionError, match=r"allocate\(\d+\) of backend custom"):
        compile_text(text, executor=executor, backends=[Short(None)]).run({"x": X})


@pytest.mark.parametrize("executor", PLANNED)
def test_guard_is_gone_after_the_first_result(executor):
    callers = []

    def function(x):
        import sys

        callers.append(sys._getframe(1).f_code.co_filename)
        return np.sqrt(x)

    session = session_on(Kernel(function), executor)
    for _ in range(3):
        assert session.run({"x": X})["y"].tolist() == [1, 2]
    assert callers[0].endswith("contract.py")
    assert not any(name.endswith("contract.py") for name in callers[-2:])


def custom_model(function, output_types, op_inputs=1) -> Model:
    """A graph of one operation of a user's own."""
    op = Op("Own", "", 1, 1, lambda types, a, c: output_types, lambda node, types: Kernel(function))
    inputs = [Value(f"x{i}", TensorType(FLOAT32, (2,))) for i in range(op_inputs)]
    outputs = [Value(f"y{i}") for i in range(len(output_types))]
    node = Node(op, inputs, outputs, name="mine")
    return Model({"g": Graph(inputs, outputs, [node])}, "g")


FLOATS = TensorType(FLOAT32, (2,))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("function", "types", "message"),
    [
        (lambda x: np.zeros(2), [FLOATS], r"computed a float64\[2\] as"),
        (lambda x: (x + 1,), [FLOATS, FLOATS], "returned a tuple of 1 for 2 outputs"),
        (lambda x: x + 1, [FLOATS, FLOATS], "returned a ndarray for 2 outputs"),
        (lambda x: (x + 1, x - 1, x), [FLOATS, FLOATS], "returned a tuple of 3 for 2 outputs"),
        (lambda x: (x + 1, np.zeros(2, int)), [FLOATS, FLOATS], r"computed a int64\[2\] as \'y1\'"),
        (lambda x: x + 1, [SequenceType(FLOATS)], r"computed a float32\[2\]"),
        (lambda x: [np.zeros(2)], [SequenceType(FLOATS)], r"computed a seq\(float64"),
        (lambda x: np.array(["a", "b"]), [TensorType(STRING, (2,))], "computed a str"),
        (lambda x: 1, [TensorType(None, None)], "computed a int as"),
    ],
)
def test_operation_of_a_user_that_breaks_a_rule_is_named(function, types, message, executor):
    session = ps.compile(custom_model(function, types), executor=executor, backends=["numpy"])
    with pytest.raises(ExtensionError, match=rf"Own \(mine\) .*{message}.*backend numpy"):
        session.run({"x0": X})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_operation_of_a_user_of_constants_is_checked(executor):
    model = custom_model(lambda x: np.zeros(2), [FLOATS])
    graph = model.graph
    graph.nodes[0].inputs[0] = Value("c", const=X)
    graph.inputs.clear()
    with pytest.raises(ExtensionError, match=r"Own \(mine\).*computed a float64\[2\] as"):
        ps.compile(model, executor=executor, backends=["numpy"]).run({})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_operation_of_a_user_that_keeps_its_rules_runs(executor):
    types = [FLOATS, SequenceType(FLOATS), TensorType(STRING, ())]
    model = custom_model(lambda x: (x + 1, [x + 2], "text"), types)
    outputs = ps.compile(model, executor=executor, backends=["numpy"]).run({"x0": X})
    assert outputs["y0"].tolist() == [2, 5]
    assert outputs["y1"][0].tolist() == [3, 6]
    assert outputs["y2"].item() == "text"
