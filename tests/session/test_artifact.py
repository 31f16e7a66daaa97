"""Sessions that are saved and opened again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

import penstock as ps
from penstock.artifact.container import HEADER
from penstock.artifact.decode import decode_graphs
from penstock.backends.registry import available
from penstock.build import GraphBuilder
from penstock.compiler import compiler, stages
from penstock.core.types import TensorType
from tests.support.cost_models import PreferredBackendCosts
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.tf_graphs import Flow, Func, Shape, Type
from tests.support.tflite_cases import Case, cases, follow

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret", "auto")


NET = """net (float[N, 3, 8, 8] x) => (float[N, 5] y)
    {
    c = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(x, k, b) r = Relu(c)
    f = Flatten(r) m = MatMul(f, w) y = Softmax<axis=-1>(m) }"""


def net(**options: Any) -> ps.Session:
    return ps.compile(net_model(), **options)


def net_model() -> ModelProto:
    model = model_from_text(NET)
    rng = np.random.default_rng(5)
    for name, shape in {"k": (4, 3, 3, 3), "b": (4,), "w": (64, 5)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def image(rows: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 3, 8, 8)).astype(np.float32)}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, strict=True)


@contextmanager
def only_saved_plans() -> Iterator[None]:
    """Nothing may be compiled from the model's graph, and no arena may be planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.Compiler, "compile", None)
        patch.setattr(stages, "plan_arena", None)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.penstock"


@pytest.mark.filterwarnings("ignore:plans in .*those of executor")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_opened_session_gives_the_same_answers(path: Path, executor: str) -> None:
    session = net(executor=executor)
    expected = session.run(image())
    session.save(path)
    opened = ps.open(path)
    assert opened.options.executor == executor
    assert_same(opened.run(image()), expected)
    assert [str(port) for port in opened.inputs] == [str(port) for port in session.inputs]
    assert [port.name for port in opened.outputs] == ["y"]
    assert_same(opened.run(image(3)), session.run(image(3)))  # a shape that was not saved
    assert_same(opened.run(image(), ["c"]), session.run(image(), ["c"]))  # another value


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"], None])
def test_saved_plans_are_not_compiled_again(path: Path, backends: Any) -> None:
    session = net(executor="linear", backends=backends)
    expected = [session.run(image(rows)) for rows in (2, 3)]
    session.save(path)
    opened = ps.open(path)
    with only_saved_plans():
        for rows, outputs in zip((2, 3), expected, strict=True):
            assert_same(opened.run(image(rows)), outputs)
        assert opened.explain() == session.explain()
        assert opened.source == session.source


def products() -> tuple[ps.Session, dict[str, Any]]:
    """Two products on native kernels, which pack their weights in panels, and their feeds."""
    rng = np.random.default_rng(4)
    model = model_from_text(
        """g (float[1, 64] x) => (float[1, 40] y) {
        m = com.microsoft.MatMulNBits<K=64, N=128, bits=4, block_size=32>(x, codes, scales)
        y = MatMul(m, w) }""",
        domains={"com.microsoft": 1},
    )
    arrays = {
        "codes": rng.integers(0, 256, (128, 2, 16)).astype(np.uint8),
        "scales": rng.standard_normal(256).astype(np.float32),
        "w": rng.standard_normal((128, 40)).astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    costs = PreferredBackendCosts("native")
    session = ps.compile(
        model, executor="linear", expert=ps.ExpertOptions(cost_model=costs), threads=1
    )
    return session, {"x": rng.standard_normal((1, 64)).astype(np.float32)}


@contextmanager
def no_panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Native kernels may not pack weights into panels."""
    from penstock.backends.native import (
        blocks,
        code_products,
        convolution,
        quantized_convolution,
        recurrent,
    )

    def refuse(*arguments: object) -> None:
        raise TypeError("weights are brought into panels again")

    with monkeypatch.context() as patch:
        for module, name in (
            (blocks, "_panels"),
            (code_products, "integer_panels"),
            (quantized_convolution, "_fours_of_taps"),
            (convolution, "_packed"),
            (recurrent, "_blocks"),
        ):
            patch.setattr(module, name, refuse)
        yield


@pytest.mark.skipif("native" not in available(), reason="needs compiled kernels")
def test_constants_in_orders_of_native_kernels_are_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither product packs its weights into panels again."""
    session, x = products()
    expected = session.run(x), session.run(x, ["m"])
    assert {step.backend for step in session.inspect.plan.walk()} == {"native"}
    session.save(path)
    opened = ps.open(path)
    with no_panels(monkeypatch):
        assert_same(opened.run(x), expected[0])
    assert_same(opened.run(x, ["m"]), expected[1])


def codes_model(*, convolutions: bool) -> Any:
    """A product of codes and its feeds; or convolutions of the same codes for inputs of both types,
    with and without a zero point, for which kernels append different sums."""
    rng = np.random.default_rng(5)
    text = """g (uint8[4, 128] m) => (uint8[4, 256] d) <
        float scale = {0.05}, uint8 zero = {7}, int8 none = {0}, float result = {3}> {
        d = QLinearMatMul(m, scale, zero, w, scale, none, result, zero) }"""
    shapes = {"w": (128, 256)}
    feeds = {"m": rng.integers(0, 256, (4, 128)).astype(np.uint8)}
    if convolutions:
        text = """g (uint8[1, 16, 8, 8] u, int8[1, 16, 8, 8] s)
            => (uint8[1, 64, 8, 8] a, uint8[1, 64, 8, 8] b, int8[1, 64, 8, 8] c) <
            float scale = {0.05}, float result = {3},
            uint8 zero = {7}, uint8 least = {0}, int8 none = {0}> {
            a = QLinearConv<pads=[1, 1, 1, 1]>(u, scale, least, k, scale, none, result, zero)
            b = QLinearConv<pads=[1, 1, 1, 1]>(u, scale, zero, k, scale, none, result, zero)
            c = QLinearConv<pads=[1, 1, 1, 1]>(s, scale, none, k, scale, none, result, none) }"""
        shapes = {"k": (64, 16, 3, 3)}
        feeds = {
            "u": rng.integers(0, 256, (1, 16, 8, 8)).astype(np.uint8),
            "s": rng.integers(-128, 128, (1, 16, 8, 8)).astype(np.int8),
        }
    model = model_from_text(text)
    for name, shape in shapes.items():
        array = rng.integers(-128, 128, shape).astype(np.int8)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, feeds


def recurrent_model(cell: str) -> Any:
    """A layer in both directions, and its feeds."""
    rng = np.random.default_rng(6)
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]
    model = model_from_text(f"""g (float[5, 1, 24] x) => (float[5, 2, 1, 96] y) {{
        y = {cell}<hidden_size=96, direction="bidirectional">(x, w, r) }}""")
    for name, width in {"w": 24, "r": 96}.items():
        array = rng.standard_normal((2, gates * 96, width)).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, {"x": rng.standard_normal((5, 1, 24)).astype(np.float32)}


def small_convolutions_model() -> Any:
    """A convolution of codes, one in groups of one filter, and sums of codes; with their feeds."""
    rng = np.random.default_rng(7)
    model = model_from_text("""g (uint8[1, 8, 6, 6] x)
        => (uint8[1, 8, 6, 6] c, uint8[1, 8, 6, 6] d, int32[1, 4, 4, 4] s) <
        float scale = {0.05}, uint8 zero = {7}, int8 none = {0}, float result = {3}> {
        xr = DequantizeLinear(x, scale, zero)
        kr = DequantizeLinear(k, scale, none) gr = DequantizeLinear(g, scale, none)
        cr = Conv<pads=[1, 1, 1, 1]>(xr, kr) c = QuantizeLinear(cr, result, zero)
        dr = Conv<pads=[1, 1, 1, 1], group=8>(xr, gr) d = QuantizeLinear(dr, result, zero)
        s = ConvInteger(x, w, zero) }""")
    for name, shape in {"k": (8, 8, 3, 3), "g": (8, 1, 3, 3), "w": (4, 8, 3, 3)}.items():
        array = rng.integers(-128, 128, shape).astype(np.int8)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, {"x": rng.integers(0, 256, (1, 8, 6, 6)).astype(np.uint8)}


def transposed_model() -> Any:
    """A transposed convolution of two phases by two, and its feeds."""
    rng = np.random.default_rng(8)
    model = model_from_text("""g (float[1, 6, 5, 5] x) => (float[1, 5, 9, 9] y) {
        y = ConvTranspose<strides=[2, 2], pads=[1, 1, 1, 1]>(x, w) }""")
    w = rng.standard_normal((6, 5, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model, {"x": rng.standard_normal((1, 6, 5, 5)).astype(np.float32)}


def layer_model(layer: str) -> Any:
    if layer == "small convolutions":
        return small_convolutions_model()
    if layer == "transposed":
        return transposed_model()
    if layer in ("convolutions", "product"):
        return codes_model(convolutions=layer == "convolutions")
    return recurrent_model(layer)


@pytest.mark.skipif("native" not in available(), reason="needs compiled kernels")
@pytest.mark.parametrize(
    "layer", ["small convolutions", "transposed", "product", "GRU", "LSTM", "RNN"]
)
def test_codes_and_recurrent_weights_in_panels_are_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    model, feeds = layer_model(layer)
    costs = PreferredBackendCosts("native")
    session = ps.compile(
        model, executor="linear", expert=ps.ExpertOptions(cost_model=costs), threads=1
    )
    expected = session.run(feeds)
    assert {step.backend for step in session.inspect.plan.walk()} == {"native"}
    session.save(path)
    opened = ps.open(path)
    with no_panels(monkeypatch):
        assert_same(opened.run(feeds), expected)
    with ps.open(path, map_weights=False) as read:
        assert_same(read.run(feeds), expected)


def test_plans_of_all_shapes_that_are_given_are_saved(path: Path) -> None:
    net(shapes=[{"x": (1, 3, 8, 8)}, {"x": (4, 3, 8, 8)}]).save(path)
    opened = ps.open(path)
    with only_saved_plans():
        assert opened.run(image(1))["y"].shape == (1, 5)
        assert opened.run(image(4))["y"].shape == (4, 5)
        with pytest.raises(TypeError, match="not callable"):
            opened.run(image(2))


@pytest.mark.parametrize("case", list(cases("net", "control", "quant")), ids=lambda case: case.name)
def test_tflite_models_survive_saving(path: Path, case: Case) -> None:
    def reopened(source: Path) -> ps.Session:
        session = ps.compile(source)
        if all(isinstance(p.type, TensorType) and p.type.static for p in session.inputs):
            assert session.inspect.executor
        session.save(path)
        return ps.open(path)

    follow(case, reopened)


def test_frames_and_functions_survive_saving(path: Path) -> None:
    g = Flow()
    g.placeholder("x", "int32")
    g.function("F", {"n": "int32"}, {"out": "int32"}, {"out": "sum:z:0"})
    g.op("AddV2", "n", "n", name="sum")
    g.main()
    types = {"Tin": [Type("int32")], "Tout": [Type("int32")]}
    g.node("PartitionedCall", "x", name="y", f=Func("F"), **types)
    ps.compile(g.bytes(), executor="frames").save(path)
    opened = ps.open(path)
    assert opened.run({"x": np.int32(4)}, ["y"])["y"] == 8


@pytest.mark.parametrize("executor", ["frames", "interpret"])
def test_opening_says_which_plans_the_file_lacks(path: Path, executor: str) -> None:
    text = "g (float[2] x) => (float[2] y) { y = Neg(x) }"
    session = compile_text(text, executor=executor, shapes={})
    session.save(path)
    reason = f"those of executor '{executor}' are compiled when they are needed"
    with pytest.warns(UserWarning, match=reason):
        opened = ps.open(path)
    assert [reason] == list(opened.inspect.stale)
    assert opened(np.ones(2, np.float32)).tolist() == [-1, -1]
    with pytest.raises(ps.PenstockError, match=reason):
        ps.open(path, strict=True)


def test_opening_says_that_plans_for_values_that_are_no_tensors_are_missing(path: Path) -> None:
    text = (
        "g (seq(float[2]) x) => (float[2] y) { i = Constant<value_int = 0>() y = SequenceAt(x, i) }"
    )
    session = compile_text(text, executor="linear")
    x = np.ones(2, np.float32)
    session.run({"x": [x]})
    session.save(path)
    with pytest.warns(UserWarning, match="those of executor 'linear'"):
        assert ps.open(path).run({"x": [x]})["y"].tolist() == [1, 1]


def test_opening_says_that_the_plan_of_a_recursive_model_is_missing(path: Path) -> None:
    builder = GraphBuilder()

    def sum_to(n: Any) -> Any:
        return builder.cond(n > 0, lambda: n + builder.call("sum_to", n - 1), lambda: n)

    call = builder.function("sum_to", sum_to, (np.int64, []))
    builder.output("y", call(builder.input("number", np.int64, [])))
    session = ps.compile(builder.model(), backends=["numpy"])
    assert session(np.int64(4)) == 10
    session.save(path)
    with pytest.raises(ps.PenstockError, match="those of executor 'frames'"):
        ps.open(path, strict=True)


def test_variables_are_saved_with_their_first_values(path: Path) -> None:
    (case,) = [c for c in cases("op") if c.name == "unidirectional_sequence_lstm_state_kept"]
    session = ps.compile(case.path)
    session.save(path)
    follow(case, lambda _: ps.open(path))


def test_graph_of_a_model_with_variables_is_decoded_when_it_is_needed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = [c for c in cases("op") if c.name == "unidirectional_sequence_lstm_state_kept"]
    session = ps.compile(case.path)
    feeds = {port.name: np.ones(port.type.shape, np.float32) for port in session.inputs}
    session.run(feeds)
    session.save(path)
    decoded, decode = [], decode_graphs
    for module in ("artifact.decode", "frontends.artifact.importer"):
        monkeypatch.setattr(
            f"penstock.{module}.decode_graphs", lambda *args: decoded.append(1) or decode(*args)
        )
    opened = ps.open(path)
    assert decoded == []
    opened.run(feeds)
    assert len(decoded) == 1  # the plan's graph
    opened.model.graph  # noqa: B018
    assert len(decoded) == 2


@pytest.mark.parametrize("backends", [["numpy"], None])
def test_saved_plans_have_the_variables_of_the_session(path: Path, backends: Any) -> None:
    g = Flow()
    g.placeholder("x", "float32", 2)
    number = {"dtype": Type("float32")}
    g.node("VarHandleOp", name="v", shape=Shape([2]), **number)
    g.node("AssignVariableOp", "v", "x", name="reset", **number)
    g.node("AssignAddVariableOp", "v", "x", name="add", **number)
    g.node("ReadVariableOp", "v", "^add", name="sum", **number)
    g.node("ReadVariableOp", "v", name="now", **number)
    x = {"x": np.array([1, 2], np.float32)}
    session = ps.compile(g.bytes(), executor="linear", backends=backends, threads=1)
    outputs = [port.name for port in session.outputs]
    session.run(x, [], ["reset"])
    session.run(x)
    session.save(path)
    opened, other = ps.open(path), ps.open(path)
    for session in (opened, other):  # each has variables of its own
        with pytest.raises(ps.RunError, match="is read before it is initialized"):
            session.run(x)
        session.run(x, [], ["reset"])  # another subgraph, the same variable
        with only_saved_plans():
            first, second = session.run(x, outputs), session.run(x, outputs)
        assert first["sum:0"].tolist() == [2, 4]
        assert second["sum:0"].tolist() == [3, 6]
        assert session.run({}, ["now:0"])["now:0"].tolist() == [3, 6]


def test_plans_for_another_machine_or_other_options_are_compiled_anew(path: Path) -> None:
    session = net(threads=1)
    expected = session.run(image())
    session.save(path)
    with pytest.warns(UserWarning, match="are not used: threads 1, here 2"):
        opened = ps.open(path, threads=2)
    np.testing.assert_allclose(opened.run(image())["y"], expected["y"], rtol=1e-5)
    with pytest.raises(ps.PenstockError, match="threads 1, here 2"):
        ps.open(path, threads=2, strict=True)
    assert ps.open(path, strict=True).options.threads == 1


def test_opening_and_running_imports_no_front_end(path: Path) -> None:
    net(shapes={"x": (2, 3, 8, 8)}).save(path)
    code = f"""
import sys, numpy as np, penstock
y = penstock.open({str(path)!r}).run({{"x": np.ones((2, 3, 8, 8), np.float32)}})["y"]
print(y.shape, *[name for name in ("onnx", "google.protobuf") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "(2, 5)"


@pytest.mark.parametrize(("old", "new"), [(b'"numpy"', b'"other"'), (b'"native"', b'"numpy" ')])
def test_options_of_a_file_name_backends_that_there_are(path: Path, old: bytes, new: bytes) -> None:
    net(backends=["native", "numpy"]).save(path)
    file = path.read_bytes()
    path.write_bytes(with_document(file, "head", old, new))
    with pytest.raises(ps.InvalidModel, match="names backends that there are not"):
        ps.open(path)


def with_document(file: bytes, name: str, old: bytes, new: bytes) -> bytes:
    """Return the file with ``new`` instead of ``old``, equally long, and with valid checksums."""
    magic, version, _, offset, count = HEADER.unpack_from(file)
    table = json.loads(file[offset : offset + count])
    begin, length, _ = table["documents"][name]
    document = file[begin : begin + length].replace(old, new)
    table["documents"][name][2] = google_crc32c.value(document)
    end = json.dumps(table).encode()
    content = bytearray(file[:offset] + end)
    content[begin : begin + length] = document
    HEADER.pack_into(content, 0, magic, version, google_crc32c.value(end), offset, len(end))
    return bytes(content)
