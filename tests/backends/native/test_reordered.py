"""Constants that compiled kernels hold in an order of their own, and give back from there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import penstock as ps
from penstock.ops.common import constant_cache
from penstock.ops.common.constant_cache import Reordered
from penstock.ops.registry import MICROSOFT
from tests.support.native_kernels import pytestmark  # noqa: F401
from tests.support.onnx_text import model_from_text

RNG = np.random.default_rng(0)


def codes(dtype: Any, *shape: int) -> np.ndarray:
    ends = np.iinfo(dtype)
    return RNG.integers(ends.min, ends.max, shape, dtype, endpoint=True)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def blocks(bits: int) -> tuple[str, list[Any], dict[str, Any]]:
    n, k, block = 70, 480 * 8 // bits, 32
    packed = codes(np.uint8, n, k // block, block * bits // 8)
    attrs = {"N": n, "K": k, "bits": bits, "block_size": block, "domain": MICROSOFT}
    return "MatMulNBits", [normal(1, k), packed, normal(n, k // block)], attrs


CASES = {
    "product": ("MatMul", [normal(1, 130), normal(130, 70)], {}),
    "flipped product": ("Gemm", [normal(1, 130), normal(70, 130)], {"transB": 1}),
    "signed codes": ("MatMulInteger", [codes(np.uint8, 1, 130), codes(np.int8, 130, 140)], {}),
    "codes with zero points": (
        "MatMulInteger",
        [codes(np.uint8, 1, 130), codes(np.uint8, 130, 140), np.uint8(3), codes(np.uint8, 140)],
        {},
    ),
    **{f"blocks of {bits} bits": blocks(bits) for bits in (2, 4, 8)},
}


def model_of(op: str, inputs: list[Any], attrs: dict[str, Any], rows: Any) -> onnx.ModelProto:
    """A node whose inputs but the first are constants."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **attrs)
    x = inputs[0]
    info = helper.make_tensor_value_info(
        "x0", helper.np_dtype_to_tensor_dtype(x.dtype), [rows, *x.shape[1:]]
    )
    constants = [
        numpy_helper.from_array(np.asarray(a), f"x{i + 1}") for i, a in enumerate(inputs[1:])
    ]
    graph = helper.make_graph([node], "g", [info], [onnx.ValueInfoProto(name="y")], constants)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("case", CASES)
def test_constants_are_given_back_bit_by_bit_and_shared_by_plans(case: str) -> None:
    op, inputs, attrs = CASES[case]
    proto = model_of(op, inputs, attrs, "rows")
    model = ps.load(proto)
    (value,) = {v for n in model.graph.nodes for v in n.inputs if v is not None and v.name == "x1"}
    session = ps.compile(model, backends=["native", "numpy"])
    reference = ps.compile(proto, backends=["numpy"])
    holders = set()
    for rows in (1, 2, 1, 3):
        x = np.repeat(inputs[0], rows, axis=0)
        expected = reference.run({"x0": x})["y"]
        np.testing.assert_allclose(session.run({"x0": x})["y"], expected, rtol=1e-3, atol=1e-3)
        session.trim()
        assert value.held is None
        holders.add(value._rematerialize.__self__)
    assert len(holders) == 1, "one copy for all plans"
    assert value.const.dtype == inputs[1].dtype
    assert np.array_equal(value.const, inputs[1])
    assert value.const is value.const


def test_weights_of_convolutions_are_packed_once(monkeypatch) -> None:
    made = []
    init = Reordered.__init__
    monkeypatch.setattr(
        Reordered, "__init__", lambda self, *given: made.append(given[0]) or init(self, *given)
    )
    weights = {"a": normal(32, 16, 3, 3), "b": normal(32, 1, 3, 3), "c": normal(48, 32, 1, 1)}
    model = model_from_text("""g (float[1, 16, 20, 20] x) => (y) {
        p = Conv <pads = [1, 1, 1, 1]> (x, a) r = Relu(p)
        q = Conv <group = 32> (r, b) s = Relu(q)
        y = Conv(s, c)
    }""")
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    session = ps.compile(model)
    session.run({"x": normal(1, 16, 20, 20)})
    assert len(made) == len(weights), made


def test_further_plans_do_not_ask_for_weights_of_layers(monkeypatch) -> None:
    given_back = []
    array = Reordered.array
    monkeypatch.setattr(Reordered, "array", lambda self: given_back.append(self) or array(self))
    model = model_from_text(
        "g (float[3, N, 64] x) => (y) { y, h = GRU <hidden_size = 64> (x, w, r) }"
    )
    weights = {"w": normal(1, 192, 64), "r": normal(1, 192, 64)}
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    session = ps.compile(model)
    for batch in (2, 5):
        session.run({"x": normal(3, batch, 64)})
    assert session.memory.count == 2
    assert not given_back


def block_model(n: int = 512, k: int = 1024) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """A product with weights of 4 bits in blocks, and its constants: codes, and scales."""
    constants = [codes(np.uint8, n, k // 32, 16), normal(n, k // 32)]
    attrs = {"N": n, "K": k, "bits": 4, "block_size": 32, "domain": MICROSOFT}
    return model_of("MatMulNBits", [normal(1, k), *constants], attrs, "rows"), constants


def test_scales_of_blocks_are_held_in_the_order_of_kernels_alone(monkeypatch) -> None:
    given_back = []
    array = Reordered.array
    monkeypatch.setattr(Reordered, "array", lambda self: given_back.append(self) or array(self))
    proto, constants = block_model()
    model = ps.load(proto)
    session = ps.compile(model)
    for rows in (1, 2, 3):
        session.run({"x0": np.repeat(normal(1, 1024), rows, axis=0)})
    assert not given_back, "no plan asks for scales again"
    nbytes = sum(x.nbytes for x in constants)
    assert nbytes <= session.memory.weights < nbytes * 1.01
    values = {v.name: v for node in model.graph.nodes for v in node.inputs if v is not None}
    for name, constant in zip(("x1", "x2"), constants, strict=True):
        assert values[name].held is None
        np.testing.assert_array_equal(values[name].const, constant)
    assert len(given_back) >= 2


def test_pages_of_a_mapped_file_are_not_held_beside_the_order_of_kernels(
    monkeypatch, tmp_path
) -> None:
    let_go = []
    monkeypatch.setattr(constant_cache, "let_pages_go", let_go.append)
    proto, constants = block_model()
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, size_threshold=0)
    session = ps.compile(path, map_weights=True)
    x = normal(2, 1024)
    got = session.run({"x0": x})["y"]
    reference = ps.compile(path, backends=["numpy"])
    np.testing.assert_allclose(got, reference.run({"x0": x})["y"], rtol=1e-3, atol=1e-3)
    assert sorted(array.nbytes for array in let_go) == sorted(x.nbytes for x in constants)
    nbytes = sum(x.nbytes for x in constants)
    assert nbytes <= session.memory.weights < nbytes * 1.01, "the file is not counted as a whole"
