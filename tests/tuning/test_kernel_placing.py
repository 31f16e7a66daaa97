"""Places of nodes and values, as kernels say."""

from __future__ import annotations

from penstock.backends.kernels import KernelTable
from penstock.backends.numpy import NumpyBackend
from penstock.ops.internal.transfer import NO_OTHER_PLACES
from penstock.tuning.kernel_placing import KernelPlacing
from tests.support.onnx_text import graph_from_text


def test_kernel_placing_compiles_an_unplaced_node_on_the_first_backend() -> None:
    graph = graph_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    placing = KernelPlacing([NumpyBackend()], KernelTable())
    answer = placing.compiled(graph.nodes[0])
    assert answer is not None
    assert answer[0].backend == "numpy"
    assert placing.other_places(graph.nodes[0]) is NO_OTHER_PLACES
