"""What becomes of the parts of a TFLite file: subgraphs, variables, weights, custom operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from penstock.frontends.tflite.flexbuffer import decode
from penstock.ops.registry import TFLITE, operator
from tests.support.tflite_cases import FOLDER
from tests.support.tflite_models import model, subgraph

X = {"x": ("float32", [2])}
ONE = np.array([1, 2], np.float32)
ADD = ("AddOptions", {})


def run(file: bytes, x: np.ndarray = ONE, **options: Any) -> np.ndarray:
    return ps.compile(file, **options)(x)


# Subgraphs.


def calling(*indices: int) -> bytes:
    """A file whose first subgraph calls another, and so on."""
    graphs = [
        subgraph(X, [("CALL", ["x"], ["y"], ("CallOptions", {"subgraph": i}))], ["y"])
        for i in indices
    ]
    return model([*graphs, subgraph(X, [("ABS", ["x"], ["y"], None)], ["y"])])


def test_subgraph_that_is_called_is_part_of_the_graph() -> None:
    np.testing.assert_array_equal(run(calling(1, 2), -ONE), ONE)


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        ((0,), "uses subgraph 0"),
        ((1, 1), "which it is itself part of"),
        ((1, 2, 1), "which it is itself part of"),
        ((9,), "uses subgraph 9, of 2"),
    ],
)
def test_subgraph_that_is_missing_or_uses_itself_is_refused(indices: tuple, reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(calling(*indices))


def test_subgraphs_that_call_the_next_one_twice_are_counted_before_they_are_expanded() -> None:
    graphs = []
    for i in range(60):
        options = ("CallOptions", {"subgraph": i + 1})
        calls = [("CALL", ["x"], ["a"], options), ("CALL", ["a"], ["y"], options)]
        graphs.append(subgraph(X, calls, ["y"]))
    graphs.append(subgraph(X, [("ABS", ["x"], ["y"], None)], ["y"]))
    with pytest.raises(ps.InvalidModel, match="nodes"):
        ps.load(model(graphs))


def test_tensor_that_is_written_twice_is_refused() -> None:
    twice = [("ABS", ["x"], ["y"], None), ("NEG", ["x"], ["y"], None)]
    with pytest.raises(ps.InvalidModel, match=r"NEG_1 in the model writes tensor 1 .*already"):
        ps.load(model([subgraph(X, twice, ["y"])]))
    with pytest.raises(ps.InvalidModel, match="writes tensor 0"):
        ps.load(model([subgraph(X, [("ABS", ["x"], ["x"], None)], ["x"])]))


def test_tensor_that_is_read_before_it_is_written_is_refused() -> None:
    with pytest.raises(
        ps.InvalidModel, match="reads tensor 1 as input 0, which nothing has written"
    ):
        ps.load(model([subgraph(X, [("ABS", ["y"], ["z"], None)], ["z"])]))
    with pytest.raises(ps.InvalidModel, match="output 0 of the model is tensor 0"):
        ps.load(model([subgraph({}, [], ["y"])]))


def test_input_that_must_not_be_left_out_is_refused() -> None:
    with pytest.raises(ps.InvalidModel, match="ADD_0 in the model leaves out input 1"):
        ps.load(model([subgraph(X, [("ADD", ["x", None], ["y"], ADD)], ["y"])]))
    with pytest.raises(ps.InvalidModel, match="has 1 inputs, but ADD takes 2"):
        ps.load(model([subgraph(X, [("ADD", ["x"], ["y"], ADD)], ["y"])]))


def test_all_faults_are_reported_at_once() -> None:
    operators = [("ADD", ["x"], ["y"], ADD), ("SUB", ["x"], ["z"], ADD)]
    with pytest.raises(ps.InvalidModel, match=r"(?s)ADD_0.*SUB_1"):
        ps.load(model([subgraph(X, operators, ["y"])]))


# Names.


def test_names_of_signatures_stand_for_those_of_tensors() -> None:
    signature = {
        "inputs": [{"name": "image", "tensor_index": 0}],
        "outputs": [{"name": "answer", "tensor_index": 1}],
        "signature_key": "serving_default",
    }
    file = model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])], signature_defs=[signature])
    session = ps.compile(file)
    assert list(session.run({"image": ONE})) == ["y"]
    np.testing.assert_array_equal(session.run({"x": ONE}, ["answer"])["answer"], -ONE)
    assert session.model.signatures == ["serving_default"]


def test_output_that_is_listed_twice_or_is_an_input_or_a_constant_has_a_name() -> None:
    graph = subgraph(X, [("NEG", ["x"], ["y"], None)], ["y", "y", "x", "c"], {"c": ONE})
    out = ps.compile(model([graph])).run({"x": ONE})
    assert list(out) == ["y", "y#1", "x", "c#1"]
    for value, want in zip(out.values(), (-ONE, -ONE, ONE, ONE), strict=True):
        np.testing.assert_array_equal(value, want)


def test_input_may_be_fed_in_other_shapes_than_the_declared_one() -> None:
    session = ps.compile(model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])]))
    for shape in ((2,), (5,), (2, 3), (2,)):
        assert session(np.ones(shape, np.float32)).shape == shape


# Variables.

HANDLE = ("VarHandleOptions", {"container": "", "shared_name": "sum"})
RESOURCE = {"type": 13}


def accumulating() -> bytes:
    """y = the sum of all x so far, and 10."""
    main = [
        ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1})),
        ("VAR_HANDLE", [], ["h"], HANDLE),
        ("READ_VARIABLE", ["h"], ["old"], None),
        ("ADD", ["old", "x"], ["new"], ADD),
        ("ASSIGN_VARIABLE", ["h", "new"], [], None),
        ("READ_VARIABLE", ["h"], ["y"], None),
    ]
    first = [("VAR_HANDLE", [], ["h"], HANDLE), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    ten = {"c": np.array([10, 10], np.float32)}
    return model([subgraph(X, main, ["y"], h=RESOURCE), subgraph({}, first, [], ten, h=RESOURCE)])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]
)
def test_variable_carries_over_from_run_to_run_in_its_session(executor: str) -> None:
    loaded = ps.load(accumulating())
    for session in (ps.compile(loaded, executor=executor), ps.compile(loaded, executor=executor)):
        for times in (1, 2, 3):
            np.testing.assert_array_equal(session(ONE), 10 + times * ONE)


def test_variable_that_is_assigned_after_the_outputs_were_computed_is_assigned() -> None:
    main = [
        ("VAR_HANDLE", [], ["h"], HANDLE),
        ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1})),
        ("READ_VARIABLE", ["h"], ["y"], None),
        ("ASSIGN_VARIABLE", ["h", "x"], [], None),
    ]
    first = [("VAR_HANDLE", [], ["h"], HANDLE), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    graphs = [subgraph(X, main, ["y"], h=RESOURCE), subgraph({}, first, [], {"c": ONE}, h=RESOURCE)]
    session = ps.compile(model(graphs))
    np.testing.assert_array_equal(session(3 * ONE), ONE)
    np.testing.assert_array_equal(session(ONE), 3 * ONE)


# Weights.


def doubled(**tensor: Any) -> dict[str, Any]:
    """Subgraphs of a file that adds a constant ``c``, whose tensor has these fields."""
    return subgraph(X, [("ADD", ["x", "c"], ["y"], ADD)], ["y"], c={"shape": [2], **tensor})


def test_buffer_outside_of_the_flatbuffer_is_read(tmp_path: Path) -> None:
    graph = doubled(buffer=1)
    size = len(model([graph], buffers=[{}, {"offset": 2**40, "size": 8}]))
    file = model([graph], buffers=[{}, {"offset": size, "size": 8}])
    assert len(file) == size
    path = tmp_path / "m.tflite"
    path.write_bytes(file + ONE.tobytes())
    for options in ({}, {"map_weights": True}):
        np.testing.assert_array_equal(run(path, **options), 2 * ONE)
    with pytest.raises(ps.InvalidModel, match="it was cut short"):
        ps.load(file)


@pytest.mark.parametrize("size", [0, 4, 9, 12])
def test_buffer_of_another_size_than_the_shape_takes_is_refused(size: int) -> None:
    file = model([doubled(buffer=1)], buffers=[{}, {"data": bytes(size)}])
    with pytest.raises(ps.InvalidModel, match=r"its shape takes 8|which nothing has written"):
        ps.load(file)


def test_constant_without_elements_whose_other_dims_no_array_can_have_is_refused() -> None:
    with pytest.raises(ps.InvalidModel, match=r"has dims \[0, 2147483647, .* no array can have"):
        ps.load(model([doubled(shape=[0, *3 * [2**31 - 1]])]))


def test_weights_are_read_once_and_each_into_an_array_of_its_own(tmp_path: Path) -> None:
    """So a session can let them go one by one, and tensors that share a buffer share the array."""
    sizes = {"a": 40_000, "b": 30_000, "c": 40_000}
    operators = [("ADD", ["x", name], [f"y{name}"], ADD) for name in sizes]
    tensors = {name: {"shape": [n], "buffer": 1 + (n < 40_000)} for name, n in sizes.items()}
    graph = subgraph({"x": ("float32", [1])}, operators, [f"y{name}" for name in sizes], **tensors)
    buffers = [{}, {"data": bytes(160_000)}, {"data": bytes(120_000)}]
    path = tmp_path / "m.tflite"
    path.write_bytes(model([graph], buffers=buffers))
    a, b, c = (node.inputs[1].const for node in ps.load(path).graph.nodes)
    assert [np.shares_memory(a, other) for other in (b, c)] == [False, True]
    assert [array.base.nbytes for array in (a, b)] == [160_000, 120_000]
    assert not a.flags.writeable
    mapped, *_ = (node.inputs[1].const for node in ps.load(path, map_weights=True).graph.nodes)
    assert mapped.base is not None and not mapped.flags.writeable


def test_float16_weights_are_computed_in_float32() -> None:
    operators = [("DEQUANTIZE", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)]
    half = {"c": np.array([0.5, 1], np.float16)}
    file = model([subgraph(X, operators, ["y"], half)])
    np.testing.assert_array_equal(run(file), [1.5, 3])


def test_sparse_weights_are_dense_in_the_graph() -> None:
    """Compressed rows of [[0, 5, 0], [0, 0, 0], [6, 0, 7]]."""
    rows = {"format": 0, "dense_size": 3}
    columns = {"format": 1, "array_segments_type": 1, "array_indices_type": 3}
    columns["array_segments"] = ("Int32Vector", {"values": [0, 1, 1, 3]})
    columns["array_indices"] = ("Uint8Vector", {"values": bytes([1, 0, 2])})
    sparsity = {"traversal_order": [0, 1], "dim_metadata": [rows, columns]}
    graph = subgraph(
        {"x": ("float32", [3, 3])},
        [("DENSIFY", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)],
        ["y"],
        c={"shape": [3, 3], "sparsity": sparsity, "buffer": 1},
    )
    data = np.array([5, 6, 7], np.float32).tobytes()
    got = run(model([graph], buffers=[{}, {"data": data}]), np.zeros((3, 3), np.float32))
    np.testing.assert_array_equal(got, [[0, 5, 0], [0, 0, 0], [6, 0, 7]])
    columns["array_indices"] = ("Uint8Vector", {"values": bytes([1, 0, 3])})
    with pytest.raises(ps.InvalidModel, match="not in its dims"):
        ps.load(model([graph], buffers=[{}, {"data": data}]))


def test_sparse_scalar_is_refused() -> None:
    sparsity = {"traversal_order": [], "dim_metadata": []}
    graph = doubled(shape=[], sparsity=sparsity, buffer=1)
    with pytest.raises(ps.InvalidModel, match="do not fit its 0 dims"):
        ps.load(model([graph], buffers=[{}, {"data": bytes(4)}]))


def test_packed_weights_are_integers_with_a_sign() -> None:
    quantization = {"scale": [0.5], "zero_point": [0]}
    graph = subgraph(
        {"x": ("float32", [3])},
        [("DEQUANTIZE", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)],
        ["y"],
        c={"shape": [3], "type": 17, "buffer": 1, "quantization": quantization},
    )
    file = model([graph], buffers=[{}, {"data": bytes([0x8F, 0x07])}])
    np.testing.assert_array_equal(run(file, np.zeros(3, np.float32)), [-0.5, -4, 3.5])


def blockwise(scales: int = 3, points: int = 4, size: int = 2, number: int = 2) -> bytes:
    """Weights [2, 4] of packed codes, whose tensor is number 1, with scales and zero points for
    each ``size`` of them in these tensors."""
    details = {"scales": scales, "zero_points": points, "block_size": size}
    blocks = {"details_type": number, "details": ("BlockwiseQuantization", details)}
    weights = {"type": 17, "shape": [2, 4], "buffer": 1, "quantization": blocks}
    numbers = {"type": 1, "shape": [4], "buffer": 2}
    graph = subgraph(
        {"x": ("float32", [1, 4])},
        [("FULLY_CONNECTED", ["x", "w"], ["y"], ("FullyConnectedOptions", {}))],
        ["y"],
        w=weights,
    )
    graph["names"] += ["scales", "points"]  # tensors that no operator reads
    graph["fields"] |= {"scales": numbers, "points": {"type": 9, "shape": [4], "buffer": 3}}
    data = (
        bytes([0x21, 0x43, 0x8F, 0x70]),
        np.array([1, 2, 3, 4], np.float16),
        np.int8([0, 1, 0, 1]),
    )
    contents = [data[0], data[1].tobytes(), data[2].tobytes()]
    return model([graph], buffers=[{}, *({"data": part} for part in contents)])


@pytest.mark.parametrize("points", [4, -1])
def test_weights_with_a_scale_for_each_block_are_real_numbers(points: int) -> None:
    """Codes [[1, 2, 3, 4], [-1, -8, 0, 7]] with scales 1 and 2, 3 and 4 of two each."""
    codes = np.array([[1, 2], [3, 4], [-1, -8], [0, 7]], np.float32)
    codes = codes - np.array([[0], [1], [0], [1]]) if points > 0 else codes
    wanted = (codes * np.array([[1], [2], [3], [4]])).reshape(2, 4).sum(axis=1)
    circle = b"CIR0".join(blockwise(points=points, number=3).split(b"TFL3"))
    for file in (blockwise(points=points), circle):
        np.testing.assert_array_equal(run(file, np.ones((1, 4), np.float32)), [wanted])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scales": 1}, "without a constant scale"),  # the tensor's own number
        ({"scales": 0}, "without a constant scale"),
        ({"scales": 99}, "refers to tensor 99"),
        ({"points": 1}, "without a constant scale"),
        ({"size": 0}, "without a constant scale"),
        ({"size": -2}, "without a constant scale"),
        ({"size": 4}, "without a constant scale"),
        ({"number": 3}, "quantized in a way that no kernel computes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(blockwise(**fields))


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"scale": [1.0, 2.0, 3.0]}, "3 scales along axis 0"),
        ({"scale": [1.0, 2.0], "zero_point": [1, 2, 3]}, "2 scales, but 3 zero points"),
        ({"scale": [-1.0]}, "negative or not finite"),
        ({"scale": [1.0], "zero_point": [2**40]}, "out of range"),
    ],
)
def test_quantization_that_does_not_fit_is_refused(quantization: Any, reason: str) -> None:
    graph = subgraph(
        {"x": ("int8", [2])},
        [("DEQUANTIZE", ["x"], ["y"], None)],
        ["y"],
        x={"quantization": quantization},
    )
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(model([graph]))


# Custom operators.

OPTIONS = {"scale": 2.5, "names": ["a", "b"], "deep": {"n": -3}, "on": True, "none": None}


def test_flexbuffer_is_decoded() -> None:
    assert decode(bytes(flexbuffers.Dumps(OPTIONS))) == OPTIONS


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_damaged_flexbuffer_is_a_value_error_or_a_value(at: int) -> None:
    data = bytearray(flexbuffers.Dumps(OPTIONS))
    for number in (0, 1, 127, 255):
        data[at] = number
        try:
            decode(bytes(data))
        except ValueError:
            continue


@pytest.mark.parametrize("name", ["TestScaled", "test.scaled", "2 x-\u00b2'\n()"])
def test_custom_operator_is_an_operation_of_its_name(name: str) -> None:
    @operator(name, domain=TFLITE)
    def scaled(node: Any, types: Any) -> ps.ops.Kernel:
        return ps.ops.Kernel(lambda x: x * np.float32(node.attrs["scale"]))

    custom = (f"CUSTOM:{name}", ["x"], ["y"], bytes(flexbuffers.Dumps({"scale": 3.0})))
    np.testing.assert_array_equal(run(model([subgraph(X, [custom], ["y"])])), 3 * ONE)
    unknown = ("CUSTOM:TestUnknown", ["x"], ["y"], b"")
    with pytest.raises(
        ps.Unsupported, match=r"TestUnknown.*register one with penstock.ops.operator"
    ):
        ps.load(model([subgraph(X, [unknown], ["y"])]))


def test_options_of_a_custom_operator_may_be_outside_of_the_flatbuffer(tmp_path: Path) -> None:
    @operator("TestOutside", domain=TFLITE)
    def outside(node: Any, types: Any) -> ps.ops.Kernel:
        return ps.ops.Kernel(lambda x: x * np.float32(node.attrs["scale"]))

    options = bytes(flexbuffers.Dumps({"scale": 3.0}))
    place = {"large_custom_options_offset": 2**40, "large_custom_options_size": len(options)}
    graph = subgraph(X, [("CUSTOM:TestOutside", ["x"], ["y"], place)], ["y"])
    place["large_custom_options_offset"] = len(model([graph]))
    file = model([graph])
    np.testing.assert_array_equal(run(file + options), 3 * ONE)
    with pytest.raises(ps.InvalidModel, match="it was cut short"):
        ps.load(file)


@pytest.mark.parametrize(("padding", "size"), [(1, (6, 8)), (2, (7, 9))])
def test_transposed_convolution_of_mediapipe_is_one_of_onnx(padding: int, size: tuple) -> None:
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 4, 2), (5, 3, 3, 2), 5)
    )
    options = np.array([padding, 2, 2], np.int32).tobytes()
    custom = ("CUSTOM:Convolution2DTransposeBias", ["x", "k", "b"], ["y"], options)
    graph = subgraph({"x": ("float32", x.shape)}, [custom], ["y"], {"k": kernel, "b": bias})
    want = np.zeros((9, 11, 5), np.float32)  # all that windows reach
    for i, j in np.ndindex(3, 4):
        want[2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.moveaxis(kernel @ x[0, i, j], 0, -1)
    got = run(model([graph]), x)
    assert got.shape == (1, *size, 5)
    np.testing.assert_allclose(got[0], want[: size[0], : size[1]] + bias, rtol=1e-5, atol=1e-5)


# Formats.


def test_tflite_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(calling(1))
    np.testing.assert_array_equal(run(path, -ONE), ONE)


# Layout.


@pytest.mark.parametrize("name", ["mini_mobilenet_v2", "mini_resnet"])
def test_no_transpose_remains_between_the_layers_of_a_network(name: str) -> None:
    """But for the image's: it comes with channels last. oneDNN's convolutions take this order."""
    path = FOLDER / "net" / f"{name}.tflite"
    session = ps.compile(path, executor="linear", backends=["onednn", "numpy"])
    session(np.zeros((1, 32, 32, 3), np.float32))
    ops = [step.node.op.name for step in session.inspect.executor.table.steps]
    assert ops.index("Transpose") == 0 and ops.count("Transpose") == 1
    assert ops.count("Reorder") <= 1
