"""What operations do along axes of samples and rows: where these are afterwards, or why it matters
that there are several."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.registry import MICROSOFT, find, standard
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Stays,
    beside,
    packed_form,
    place_of_rows,
    repeats,
    without_samples,
)

B, S = ((SAMPLES, 3),), ((ROWS, 5),)
BS = B + S
NAMES = {"B": B, "S": S, "BS": BS, "1": ()}


def axes_of(text: str) -> tuple:
    """``"B S 8"``: samples, rows, and 8 features."""
    parts = [
        tuple(NAMES.get(p) or (("", int(p)),) for p in part.split("*")) for part in text.split()
    ]
    single = [tuple(f for x in p for f in x if f != ("", 1)) for p in parts]
    return tuple(single)


def value_of(text: str, dtype: np.dtype = FLOAT32) -> Value:
    dims = [prod(n for _, n in axis) for axis in axes_of(text)]
    return Value("x", TensorType(dtype, tuple(dims)))


def constant(*numbers: int) -> Value:
    return Value("c", const=np.array(numbers))


def form(
    name: str,
    *inputs: str | Value | None,
    plain: tuple[int, ...] = (),
    outputs: int = 1,
    **attrs: object,
):
    """How a node is computed whose inputs, but for ``plain`` ones, have rows."""
    values = [value_of(x) if isinstance(x, str) else x for x in inputs]
    op = standard(name)
    types = op.infer([v and v.type for v in values], attrs, [v and v.const for v in values])
    node = Node(op, values, [Value(f"y{i}", types[i]) for i in range(outputs)], attrs)
    axes = [
        axes_of(x) if isinstance(x, str) and i not in plain else None for i, x in enumerate(inputs)
    ]
    return packed_form(node, axes)


def result(*arguments: object, **options: object) -> tuple:
    return form(*arguments, **options).outputs[0]


@pytest.mark.parametrize(
    ("name", "inputs", "plain", "attrs", "after"),
    [
        ("Add", ["B S 8", "B S 8"], (), {}, "B S 8"),
        ("Mul", ["B S 8", "8"], (1,), {}, "B S 8"),
        ("Relu", ["B 2 S 4"], (), {}, "B 2 S 4"),
        ("MatMul", ["B S 8", "8 6"], (1,), {}, "B S 6"),
        ("MatMul", ["6 8", "B 8 S"], (0,), {}, "B 6 S"),
        ("Gemm", ["BS 8", "8 6"], (1,), {}, "BS 6"),
        ("LayerNormalization", ["B S 8", "8"], (1,), {}, "B S 8"),
        ("Softmax", ["B S 8"], (), {}, "B S 8"),
        ("Transpose", ["B S 2 4"], (), {"perm": [0, 2, 1, 3]}, "B 2 S 4"),
        ("Conv", ["B 8 S", "6 8 1"], (1,), {}, "B 6 S"),
        ("Conv", ["S 8 9", "6 8 3"], (1,), {"pads": [1, 1]}, "S 6 9"),
        ("Conv", ["BS 8 9", "6 8 3"], (1,), {"strides": [2]}, "BS 6 4"),
        ("MaxPool", ["S 8 9 9"], (), {"kernel_shape": [3, 3]}, "S 8 7 7"),
        ("GlobalAveragePool", ["S 8 9 9"], (), {}, "S 8 1 1"),
        ("MatMul", ["S 2 4 8", "S 2 8 6"], (), {}, "S 2 4 6"),
        ("MatMul", ["S 2 4 8", "2 8 6"], (1,), {}, "S 2 4 6"),
        ("MatMul", ["S 1 4 8", "2 8 6"], (1,), {}, "S 2 4 6"),
        ("CumSum", ["B S 8", Value("c", const=np.array(2))], (), {}, "B S 8"),
        ("ArgMax", ["B S 8"], (), {"axis": 2, "keepdims": 0}, "B S"),
        ("ArgMax", ["B S 8"], (), {"axis": -1}, "B S 1"),
        ("Pad", ["B S 8", constant(0, 0, 1, 0, 0, 2)], (), {}, "B S 11"),
        ("GatherElements", ["B S 8", "B S 8"], (), {"axis": 2}, "B S 8"),
        ("Tile", ["B S 8", constant(1, 1, 2)], (), {}, "B S 16"),
        ("GatherND", ["6 B S 4", Value("c", const=np.array([[2], [-1]]))], (), {}, "2 B S 4"),
    ],
)
def test_axes_are_afterwards(name, inputs, plain, attrs, after):
    assert result(name, *inputs, plain=plain, **attrs) == axes_of(after)


@pytest.mark.parametrize(
    ("before", "target", "after", "packed"),
    [
        ("B S 8", [3, 5, 2, 4], "B S 2 4", [1, -1, 2, 4]),
        ("B S 8", [-1, 8], "BS 8", [-1, 8]),
        ("BS 8", [3, 5, 8], "B S 8", [1, -1, 8]),
        ("B 2 S 4", [6, 5, 4], "B*2 S 4", [2, -1, 4]),
        ("B S 1 4", [3, 5, 4], "B S 4", [1, -1, 4]),
    ],
)
def test_reshape_names_packed_rows_by_what_is_left(before, target, after, packed):
    found = form("Reshape", before, constant(*target))
    assert found.outputs == [axes_of(after)]
    assert found.constants[0].tolist() == packed


def test_rows_that_are_joined_with_features_of_others_stay():
    with pytest.raises(Stays, match="merges a row with parts of"):
        form("Reshape", "B S 8", constant(3, 4, 10))


def test_gather_takes_rows_as_indices_or_some_features():
    ids = value_of("B S", INT64)
    op = standard("Gather")
    table = value_of("9 8")
    node = Node(op, [table, ids], [Value("y", TensorType(FLOAT32, (3, 5, 8)))], {"axis": 0})
    assert packed_form(node, [None, axes_of("B S")]).outputs == [axes_of("B S 8")]
    assert result("Gather", "B S 8", constant(1, 2), axis=2) == axes_of("B S 2")


def test_split_slice_and_concat_along_features_keep_rows():
    assert (
        form("Split", "B S 8", outputs=2, axis=-1, num_outputs=2).outputs == [axes_of("B S 4")] * 2
    )
    cut = [constant(1), constant(4), constant(2)]
    assert result("Slice", "B S 8", *cut) == axes_of("B S 3")
    assert result("Concat", "B S 8", "B S 4", axis=2) == axes_of("B S 12")


def test_expand_repeats_features_alone():
    found = form("Expand", "B S 1", constant(3, 5, 4))
    assert found.outputs == [axes_of("B S 4")]
    assert found.constants[0].tolist() == [1, 1, 4]


@pytest.mark.parametrize("keeps", [0, 1])
def test_features_may_be_reduced(keeps):
    found = result("ReduceMean", "B S 8", constant(-1), keepdims=keeps)
    assert found == axes_of("B S 1" if keeps else "B S")


@pytest.mark.parametrize(
    ("name", "inputs", "plain", "attrs"),
    [
        ("ReduceMean", ["B S 8", constant(1)], (), {}),
        ("ReduceMean", ["B S 8"], (), {}),
        ("Softmax", ["B 8 S"], (), {}),
        ("LayerNormalization", ["B S 8", "5 8"], (1,), {"axis": 1}),
        ("MatMul", ["B S 8", "B 8 S"], (), {}),
        ("Gemm", ["BS 8", "15 6"], (1,), {"transA": 1}),
        ("Concat", ["B S 8", "B S 8"], (), {"axis": 1}),
        ("Slice", ["B S 8", constant(1), constant(4), constant(1)], (), {}),
        ("Gather", ["B S 8", constant(1, 2)], (), {"axis": 1}),
        ("CumSum", ["B S 8", Value("c", const=np.array(1))], (), {}),
        ("Conv", ["B 8 S", "6 8 3"], (1,), {"pads": [1, 1]}),
        ("Conv", ["B 8 S", "6 8 1"], (1,), {"pads": [1, 1]}),
        ("Conv", ["S 8 B", "6 8 3"], (1,), {}),
        ("MaxPool", ["B 8 S"], (), {"kernel_shape": [3]}),
        ("BatchNormalization", ["S 8 9", "8", "8", "8", "8"], (1, 2, 3, 4), {"training_mode": 1}),
        ("BatchNormalization", ["B S 8", "5", "5", "5", "5"], (1, 2, 3, 4), {}),
        ("MatMul", ["S 4 8", "5 8 6"], (1,), {}),
        ("MatMul", ["S 5 4 8", "5 S 8 6"], (), {}),
        ("MatMul", ["2 S 8", "2 8 S"], (), {}),
        ("ArgMax", ["B S 8"], (), {"axis": 1}),
        ("TopK", ["B S 8", constant(2)], (), {"axis": 0}),
        ("Pad", ["B S 8", constant(0, 1, 0, 0, 0, 0)], (), {}),
        ("GatherElements", ["B S 8", "B S 8"], (), {"axis": 1}),
        ("Add", ["B S 8", "B 1 8"], (1,), {}),
        ("Add", ["B S 1", "B 1 S"], (), {}),
    ],
)  # fmt: skip
def test_what_needs_several_rows_stays(name, inputs, plain, attrs):
    with pytest.raises(Stays):
        form(name, *inputs, plain=plain, **attrs)


def test_scales_of_codes_are_for_features():
    zero = Value("z", const=np.zeros(8, np.int8))
    codes = Value("x", TensorType(np.dtype("int8"), (3, 5, 8)))
    op = standard("DequantizeLinear")

    def of_axis(axis: int, size: int):
        inputs = [codes, value_of(str(size)), zero]
        node = Node(op, inputs, [Value("y", TensorType(FLOAT32, (3, 5, 8)))], {"axis": axis})
        return packed_form(node, [axes_of("B S 8"), None, None])

    assert of_axis(2, 8).outputs == [axes_of("B S 8")]
    with pytest.raises(Stays):
        of_axis(1, 5)


def test_what_is_the_same_for_all_is_not_packed():
    rows = axes_of("B S 8")
    assert beside(value_of("8"), rows) is None
    assert beside(value_of("1 1 8"), rows) is None
    assert beside(value_of("S 8"), rows) == axes_of("S 8")
    assert beside(value_of("B S 1"), rows) == axes_of("B S 1")


def test_place_of_rows_is_found_among_samples():
    assert place_of_rows(axes_of("B 2 S 4")) == 2
    assert place_of_rows(axes_of("BS 8")) == 0


def test_sequences_of_a_recurrent_layer_stay_apart_along_their_batch():
    weights, lengths = ["1 12 8", "1 12 4"], Value("n", const=np.full(5, 6, np.int32))
    found = form("LSTM", "6 S 8", "1 16 8", "1 16 4", plain=(1, 2), outputs=3, hidden_size=4)
    assert found.outputs == [axes_of("6 1 S 4"), axes_of("1 S 4"), axes_of("1 S 4")]
    found = form("GRU", "S 6 8", *weights, plain=(1, 2), outputs=2, hidden_size=4, layout=1)
    assert found.outputs == [axes_of("S 6 1 4"), axes_of("S 1 4")]
    given = form("GRU", "6 S 8", *weights, None, lengths, "1 S 4", plain=(1, 2), hidden_size=4)
    assert given.inputs[4:] == [axes_of("S"), axes_of("1 S 4")]
    with pytest.raises(Stays):
        form("GRU", "S 6 8", *weights, plain=(1, 2), hidden_size=4)


def test_indices_of_a_pool_number_elements_of_all_samples():
    found = form("MaxPool", "S 8 9", outputs=2, kernel_shape=[3])
    assert found.outputs == [axes_of("S 8 7")]  # the others have no axes, and stay


def test_rows_of_a_table_are_read_by_places():
    op, places = standard("GatherND"), value_of("B S 1", INT64)
    node = Node(op, [value_of("9 8"), places], [Value("y", TensorType(FLOAT32, (3, 5, 8)))], {})
    assert packed_form(node, [None, axes_of("B S 1")]).outputs == [axes_of("B S 8")]


def test_rows_that_are_repeated_or_read_by_place_stay():
    with pytest.raises(Stays):
        result("Tile", "B S 8", constant(1, 2, 1))
    with pytest.raises(Stays):
        result("GatherND", "B S 8", Value("c", const=np.array([[1, 2]])))


def test_products_of_codes_keep_rows():
    codes = Value("w", const=np.zeros((6, 1, 8), np.uint8))
    scales = Value("s", const=np.ones((6, 1), np.float32))
    attrs = {"K": 16, "N": 6, "bits": 4, "block_size": 16}
    op, x = find("MatMulNBits", MICROSOFT, 1), value_of("B S 16")
    node = Node(op, [x, codes, scales], [Value("y", TensorType(FLOAT32, (3, 5, 6)))], attrs)
    assert packed_form(node, [axes_of("B S 16"), None, None]).outputs == [axes_of("B S 6")]
    with pytest.raises(Stays):
        packed_form(node, [axes_of("B 16 S"), None, None])


def test_table_of_codes_is_read_for_each_row():
    table, ids = value_of("9 8"), value_of("B S", INT64)
    op = find("GatherBlockQuantized", MICROSOFT, 1)
    y = Value("y", TensorType(FLOAT32, (3, 5, 16)))
    node = Node(op, [table, ids, value_of("9 1")], [y], {"bits": 4, "block_size": 16})
    assert packed_form(node, [None, axes_of("B S"), None]).outputs == [axes_of("B S 16")]


@pytest.mark.parametrize("x", ["B S 8", "B 2 S 4"])
@pytest.mark.parametrize("domain", ["", MICROSOFT])
def test_rows_turn_by_angles_of_their_own(x, domain):
    op = find("RotaryEmbedding", domain, 23 if not domain else 1)
    cos, ids = Value("c", const=np.ones((40, 2), np.float32)), value_of("B S", INT64)
    places = [cos, cos, ids] if not domain else [ids, cos, cos]
    inputs, axes = [value_of(x), *places], [axes_of(x), None, None, None]
    axes[3 if not domain else 1] = axes_of("B S")
    y = Value("y", inputs[0].type)
    node = Node(op, inputs, [y], {"num_heads": 2})
    assert packed_form(node, axes).outputs == [axes_of(x)]
    # Positions of the padded batch, such as constants, are gathered; one for all rows cannot be.
    at = 3 if not domain else 1
    axes[at] = None
    assert packed_form(node, axes).inputs[at] == axes_of("B S")
    node.inputs[at] = value_of("1", INT64)
    with pytest.raises(Stays, match="rotates rows by positions or angles"):
        packed_form(node, axes)


def test_rows_turn_by_angles_that_are_given_for_each():
    op, cos = find("RotaryEmbedding", "", 23), value_of("B S 2")
    node = Node(op, [value_of("B 2 S 4"), cos, cos], [value_of("B 2 S 4")], {})
    found = packed_form(node, [axes_of("B 2 S 4"), axes_of("B S 2"), axes_of("B S 2")])
    assert found.outputs == [axes_of("B 2 S 4")]
    found = packed_form(node, [axes_of("B 2 S 4"), None, None])
    assert found.inputs[1:3] == [axes_of("B S 2")] * 2
    node.inputs[1:] = [value_of("S 2")] * 2
    with pytest.raises(Stays):
        packed_form(node, [axes_of("B 2 S 4"), None, None])


def test_experts_keep_rows():
    x, router = value_of("B S 8"), value_of("BS 4")
    node = Node(find("MoE", MICROSOFT, 1), [x, router], [value_of("B S 8")], {})
    assert packed_form(node, [axes_of("B S 8"), axes_of("BS 4")]).outputs == [axes_of("B S 8")]
    with pytest.raises(Stays):
        packed_form(node, [axes_of("B S 8"), None])


def test_matrices_of_each_sample_are_told():
    found = form("MatMul", "B S 8", "B 8 6", plain=(1,))
    assert found.inputs[1] == axes_of("B 8 6")
    found = form("MatMul", "B*2 S 8", "B*2 8 6", plain=(1,))
    assert found.outputs == [axes_of("B*2 S 6")]
    assert found.inputs[1] == axes_of("B*2 8 6")
    assert without_samples(found.inputs[1]) == axes_of("2 8 6")


NODES: list[Node] = []


def made(name: str, *inputs: Value, **attrs: object) -> Value:
    """The result of a node, which is kept."""
    op = standard(name)
    (type_,) = op.infer([v.type for v in inputs], attrs, [v.const for v in inputs])
    result = Value("y", type_)
    NODES.append(Node(op, inputs, [result], attrs))
    return result


def test_what_repeats_for_each_sample_is_told():
    part = np.arange(12).reshape(2, 6)
    assert repeats(Value("c", const=np.tile(part, (3, 1))), 3)
    assert not repeats(Value("c", const=np.tile(part, (2, 1))), 3)
    assert not repeats(Value("c", const=np.arange(36).reshape(6, 6)), 3)
    x = Value("x", TensorType(FLOAT32, (2, 4)))
    tiled = made("Tile", x, constant(6, 1))
    assert repeats(tiled, 3)
    assert repeats(made("Reshape", tiled, constant(3, 4, 4)), 3)
    assert repeats(made("Transpose", made("Reshape", tiled, constant(3, 4, 4)), perm=[0, 2, 1]), 3)
    assert repeats(made("Expand", Value("x", TensorType(FLOAT32, (1, 4))), constant(3, 4)), 3)
    assert not repeats(made("Tile", x, constant(3, 1)), 2)
    assert not repeats(made("Transpose", made("Tile", x, constant(3, 3)), perm=[1, 0]), 3)
    assert not repeats(made("Expand", Value("x", TensorType(FLOAT32, (3, 1))), constant(3, 4)), 3)
    assert not repeats(made("Add", tiled, Value("z", TensorType(FLOAT32, (12, 4)))), 3)
    assert not repeats(x, 2)
    assert not repeats(None, 2)


def test_elements_of_a_table_are_picked_by_numbers_of_each_row() -> None:
    packed = form("GatherElements", "1 160 8", "1 S 8", plain=(0,), axis=1)
    assert packed.outputs == [axes_of("1 S 8")]
    with pytest.raises(Stays):
        form("GatherElements", "1 160 8", "1 8 S", plain=(0,), axis=1)
