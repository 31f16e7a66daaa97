"""Reductions over axes apart become reductions over one axis after the other."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Model, Value
from penstock.passes.context import PassContext
from penstock.passes.optimize.split_reductions import SplitReductions
from penstock.passes.pipeline import optimize, run_passes
from penstock.textual.parser import parse_graph

REDUCTIONS = {
    "L1": lambda x, axes: np.abs(x).sum(axes),
    "L2": lambda x, axes: np.sqrt(np.square(x).sum(axes)),
    "LogSum": lambda x, axes: np.log(np.sum(x, axes)),
    "LogSumExp": lambda x, axes: np.log(np.exp(x).sum(axes)),
    "Max": np.max,
    "Mean": np.mean,
    "Min": np.min,
    "Prod": np.prod,
    "Sum": np.sum,
    "SumSquare": lambda x, axes: np.square(x).sum(axes),
}
PARTS = {"LogSum": ["Sum", "LogSum"], "SumSquare": ["SumSquare", "Sum"]}
"""the operations that reduce the innermost axes, and the outermost"""


def graph_of(name: str, dims: str, axes: str, keepdims: int = 0) -> str:
    count = len(axes.split(","))
    return f"""
    graph main(x: float32[{dims}]) -> (y) {{
      axes: int64[{count}] = const [{axes}]
      y = Reduce{name}{{keepdims={keepdims}}}(x, axes)
    }}
    """


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_of_integers_is_rounded_once(name):
    text = graph_of(name, "3, 4, 5", "0, 2").replace("float32", "int32")
    x = np.random.default_rng(0).integers(-2, 9, (3, 4, 5)).astype(np.int32)
    found = [
        ps.compile(Model({"main": parse_graph(text)}, "main"), executor=executor).run({"x": x})["y"]
        for executor in ("interpret", "linear")
    ]
    np.testing.assert_array_equal(*found, strict=True)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("axes", "parts"), [("0, 2", 2), ("0, 2, 4", 3), ("-1, 0", 2), ("3, 4", 1)]
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_over_axes_apart_is_split_and_equals_numpy(name, axes, parts, keepdims):
    graph = parse_graph(graph_of(name, "2, 3, 4, 2, 5", axes, keepdims))
    optimize(graph)
    first, last = PARTS.get(name, [name, name])
    names = [f"Reduce{first}", *["ReduceSum" if first != last else f"Reduce{name}"] * (parts - 2)]
    names = [*names, f"Reduce{last}"] if parts > 1 else [f"Reduce{name}"]
    assert [node.op.name for node in graph.nodes] == names
    x = np.random.default_rng(3).uniform(-1, 2, (2, 3, 4, 2, 5)).astype(np.float32)
    x = np.abs(x) if name == "LogSum" else x
    taken = tuple(int(axis) for axis in axes.split(","))
    wanted = REDUCTIONS[name](x, taken)
    (y,) = ps.compile(Model({"main": graph}, "main")).run({"x": x}).values()
    assert y.shape == (np.sum(x, taken, keepdims=True).shape if keepdims else wanted.shape)
    np.testing.assert_allclose(y.reshape(wanted.shape), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dims", "axes"),
    [
        ("Sum", "2, 3, 4", "1, 2"),
        ("Sum", "2, 1, 4", "0, 2"),
        ("Sum", "2, N, 4", "0, 2"),
        ("Sum", "2, 0, 4", "0, 2"),
    ],
)
def test_reductions_that_need_no_split_stay_as_they_are(name, dims, axes):
    graph = parse_graph(graph_of(name, dims, axes))
    assert not run_passes([SplitReductions()], graph, PassContext())


@pytest.mark.parametrize("axes", [[0, 3], [2, -1]])
def test_reduction_over_axes_that_there_are_not_is_left_to_the_run(axes):
    graph = parse_graph(graph_of("Sum", "2, 3, 4", "0, 2"))
    (node,) = graph.nodes
    # As in a loop whose values have other ranks in a run.
    node.inputs[1] = Value("axes", const=np.array(axes))
    assert not SplitReductions().run(graph, PassContext())
