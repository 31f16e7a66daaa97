"""oneDNN: products and convolutions at the hardware's limit.

``OneDnnBackend`` takes what it has a primitive for, in float32 and with shapes that are known; a
session has NumPy beside it for the rest: ``backends=["onednn", "numpy"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.backends.base import HostBackend
from penstock.backends.onednn.convolution import convolution
from penstock.backends.onednn.kernel import DnnlKernel, Recipe, Tensors
from penstock.backends.onednn.library import Library, library
from penstock.backends.onednn.matmul import matmul
from penstock.backends.onednn.pooling import pooling
from penstock.errors import PenstockError
from penstock.ir import Node
from penstock.ops.base import Kernel
from penstock.types import FLOAT32, TensorType, Type

Family = Callable[[Library, Node, Tensors, Tensors], Recipe | None]

FAMILIES: dict[str, Family] = {
    "AveragePool": pooling,
    "Conv": convolution,
    "GlobalAveragePool": pooling,
    "MatMul": matmul,
    "MaxPool": pooling,
}
"""by operation, who makes recipes of its nodes"""


class OneDnnBackend(HostBackend):
    """Runs what oneDNN has primitives for."""

    name = "onednn"

    def __init__(self) -> None:
        found = library()
        if found is None:
            raise PenstockError(
                "there is no oneDNN: install the wheel onednn-cpu-gomp, or name a libdnnl.so.3 in "
                "PENSTOCK_DNNL"
            )
        self.library: Library = found

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        return self._kernel(node, types) is not None

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        kernel = self._kernel(node, types)
        assert kernel is not None, "compile() of what supports() refuses"
        return kernel

    def _kernel(self, node: Node, types: Sequence[Type | None]) -> DnnlKernel | None:
        family = FAMILIES.get(node.op.full_name)
        outputs = [None if value is None else value.type for value in node.outputs]
        inputs, made = _tensors(types), _tensors(outputs)
        if family is None or inputs is None or made is None:
            return None
        recipe = family(self.library, node, inputs, made)
        if recipe is None:
            return None
        return DnnlKernel.of(recipe, _channels_last(made[0]) if family is not matmul else ())

    @property
    def threads(self) -> int:
        return int(self.library.lib.omp_get_max_threads())

    def set_threads(self, threads: int) -> None:
        # With OpenMP this is a setting of each calling thread: nobody can change it for the others,
        # and one changed on a pool's thread would stay so.
        pass


def _channels_last(kind: TensorType | None) -> tuple[int, ...]:
    """What convolutions and pooling are fastest in."""
    rank = 0 if kind is None else len(kind.dims)
    return (0, *range(2, rank), 1) if rank > 2 else ()


def _tensors(types: Sequence[Type | None]) -> list[TensorType | None] | None:
    """``types``, if all of them are float32 tensors of known shapes and not empty."""
    found: list[TensorType | None] = []
    for kind in types:
        if kind is not None and not (
            isinstance(kind, TensorType)
            and kind.static
            and kind.dtype == FLOAT32
            and all(kind.dims)
        ):
            return None
        found.append(kind)
    return found
