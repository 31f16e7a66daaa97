"""Chains of shape arithmetic, as exporters write them, under symbolic dims."""

import pytest

from penstock.analysis.type_inference import infer_types
from penstock.core.types import TensorType
from tests.support.onnx_text import graph_from_text


def inferred(body: str) -> TensorType:
    """The type of y."""
    graph = graph_from_text(f"g (float[N, 3, ?, 8] x) => (float y) {body}")
    infer_types(graph)
    kind = graph.outputs[0].type
    assert isinstance(kind, TensorType)
    return kind


CHAINS = {
    "flatten all but the batch": (
        """{
        s = Shape(x)
        zero = Constant<value_int = 0>()
        n = Gather<axis = 0>(s, zero)
        first = Constant<value_ints = [0]>()
        n1 = Unsqueeze(n, first)
        rest = Constant<value_ints = [-1]>()
        target = Concat<axis = 0>(n1, rest)
        y = Reshape(x, target)
        }""",
        ("N", None),
    ),
    "split the last dim into heads": (
        """{
        s = Shape<start = 0, end = 2>(x)
        heads = Constant<value_ints = [-1, 2, 4]>()
        target = Concat<axis = 0>(s, heads)
        y = Reshape(x, target)
        }""",
        ("N", 3, None, 2, 4),
    ),
    "a mask of the batch's size": (
        """{
        s = Shape(x)
        from = Constant<value_ints = [0]>()
        to = Constant<value_ints = [2]>()
        dims = Slice(s, from, to)
        y = ConstantOfShape(dims)
        }""",
        ("N", 3),
    ),
    "positions along an axis": (
        """{
        s = Shape(x)
        i = Constant<value_int = 0>()
        n = Gather(s, i)
        one = Constant<value_int = 1>()
        positions = Range(i, n, one)
        floats = Cast<to = 1>(positions)
        axis = Constant<value_ints = [1]>()
        column = Unsqueeze(floats, axis)
        ones = Constant<value_ints = [1, 5]>()
        y = Expand(column, ones)
        }""",
        ("N", 5),
    ),
    "tiled by a dim": (
        """{
        s = Shape(x)
        n, three, rest = Split<axis = 0>(s, sizes)
        sizes = Constant<value_ints = [1, 1, 2]>()
        ones = ConstantOfShape<value = int64[1] {1}>(two)
        two = Constant<value_ints = [1]>()
        repeats = Concat<axis = 0>(n, ones, three)
        dims = Constant<value_ints = [1, 7, 2]>()
        small = ConstantOfShape(dims)
        y = Tile(small, repeats)
        }""",
        ("N", 7, 6),
    ),
    "reversed and squeezed": (
        """{
        s = Shape(x)
        from = Constant<value_ints = [-1]>()
        to = Constant<value_ints = [-9223372036854775807]>()
        axes = Constant<value_ints = [0]>()
        back = Slice(s, from, to, axes, from)
        flat = Constant<value_ints = [-1]>()
        again = Reshape(back, flat)
        cast = Cast<to = 6>(again)
        wide = Cast<to = 7>(cast)
        picked = Constant<value_ints = [0, 2]>()
        dims = Gather(wide, picked)
        y = ConstantOfShape(dims)
        }""",
        (8, 3),
    ),
    "padded by one": (
        """{
        s = Shape<start = 1, end = 2>(x)
        around = Constant<value_ints = [1, 0]>()
        two = Constant<value_int = 2>()
        dims = Pad(s, around, two)
        y = ConstantOfShape(dims)
        }""",
        (2, 3),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_of_shape_operations_infers_its_shape(name: str) -> None:
    body, wanted = CHAINS[name]
    assert inferred(body).shape == wanted
