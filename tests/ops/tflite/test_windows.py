"""Windows of subgraphs, gathers and scatters of slices, beside LiteRT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.frontends.tflite.test_rules_stablehlo import OPS, PAIR, declared, i64
from tests.support.litert import Op, by_litert, f, i32, scalar
from tests.support.tflite_models import model, subgraph


def test_gather_takes_indices_without_a_dim_of_their_own() -> None:
    """LiteRT reads beyond its memory there."""
    op = OPS[-5]
    x, _ = op.inputs
    indices = i32(2, 0, 3)
    got = ps.compile(declared(Op(op.name, (x, [indices]), op.options), 2))(x)
    np.testing.assert_array_equal(got, x[indices])


def region(name: str) -> dict[str, Any]:
    """A subgraph of two scalars; without a name, it gives the second one."""
    return subgraph(PAIR, [(name, ["a", "b"], ["c"], None)] if name else [], ["c" if name else "b"])


@pytest.mark.parametrize("name", ["", "STABLEHLO_ADD", "STABLEHLO_MULTIPLY", "STABLEHLO_MAXIMUM"])
def test_scatter_gives_what_litert_gives(name: str) -> None:
    options = {
        "update_window_dims": [2, 3],
        "inserted_window_dims": [0],
        "scatter_dims_to_operand_dims": [1, 0],
        "index_vector_dim": 2,
        "update_computation_subgraph_index": 1,
    }
    feeds = {
        "x": np.arange(24, dtype=np.float32).reshape(3, 4, 2),
        "i": i64([[0, 2], [1, 0], [2, 1]], [[0, 1], [1, 1], [0, 9]]),
        "u": np.rint(8 * f(2, 3, 2, 2)) / np.float32(8),  # sums are exact in any order
    }
    ports = {key: (value.dtype.name, value.shape) for key, value in feeds.items()}
    operators = [("STABLEHLO_SCATTER", [*ports], ["y"], ("StablehloScatterOptions", options))]
    main = subgraph(ports, operators, ["y"], y={"shape": [3, 4, 2]})
    file = model([main, region(name)])
    (want,) = by_litert(file, feeds)
    np.testing.assert_allclose(ps.compile(file).run(feeds)["y"], want, rtol=1e-6)


@pytest.mark.parametrize("name", ["STABLEHLO_ADD", "STABLEHLO_MINIMUM", "STABLEHLO_MAXIMUM"])
def test_windows_of_a_subgraph_give_what_litert_gives(name: str) -> None:
    options = {
        "window_dimensions": [3, 2],
        "window_strides": [1, 2],
        "base_dilations": [2, 1],
        "window_dilations": [1, 2],
        "padding": [1, 2, 0, 1],
        "body_subgraph_index": 1,
    }
    x = np.rint(8 * f(4, 5)) / np.float32(8)  # whose sums are exact in any order
    operators = [
        ("STABLEHLO_REDUCE_WINDOW", ["x", "i"], ["y"], ("StablehloReduceWindowOptions", options))
    ]
    main = subgraph({"x": ("float32", x.shape)}, operators, ["y"], {"i": scalar(0.25, np.float32)})
    file = model([main, region(name)])
    (want,) = by_litert(file, {"x": x})
    np.testing.assert_array_equal(ps.compile(file)(x), want)
