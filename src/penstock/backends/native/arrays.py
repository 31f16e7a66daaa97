"""Elements copied in any order and layout, whatever the shapes: Concat and Tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.native.library import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.types import ShapeError, TensorType, Type

ArrayFamily = Callable[[NativeLibrary, Node, Sequence[Type | None]], Kernel | None]
"""chooses a kernel that takes arrays of any shapes"""

_SIZES = (1, 2, 4, 8, 16)  # bytes of an element


def _are_copied(types: Sequence[Type | None]) -> bool:
    """Whether elements are of a kind that compiled code copies, and of one."""
    dtypes = {t.dtype if isinstance(t, TensorType) else None for t in types}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype is not None and dtype.kind in "biufcV" and dtype.itemsize in _SIZES


def _concat(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    if not _are_copied(types):
        return None
    axis, concatenated = node.attrs.get("axis", 1), library.functions.concatenated

    def into(*arrays: Any) -> None:
        concatenated(axis, arrays[-1], *arrays[:-1])

    return Kernel(partial(concatenated, axis, None), into)


def _tile(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    tiled = library.functions.tiled

    def run(x: np.ndarray, repeats: np.ndarray) -> Any:
        times = repeats.tolist()
        if times and min(times) < 0:
            raise ShapeError(f"repeats {times} must not be negative")
        return tiled(x, *times)

    return Kernel(run) if node.op.since >= 6 and _are_copied(types[:1]) else None


ARRAY_FAMILIES: Mapping[str, ArrayFamily] = {"Concat": _concat, "Tile": _tile}
