"""Outputs that are written into arrays of the caller's (``run(feeds, out={...})``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.compiler.subgraphs import Request, suggest
from penstock.core.errors import InvalidInput
from penstock.core.types import TensorType, Type, dtype_name
from penstock.executors.base import Executor
from penstock.executors.linear import LinearExecutor
from penstock.ir.layout import address

_ALIGNED = 16
"""bytes; what ``np.empty`` gives everywhere, so that kernels may count on it"""


class GivenOutputs:
    """The request of a run whose outputs go into given arrays.

    ``direct`` are the numbers of the outputs for which the program of ``executor`` is to be given
    the ``arrays``; into the others, values are copied once the run has ended (``named``): where
    the executor is not linear, or an array is strided or overlaps a feed. Raises ``InvalidInput``
    for a name that is not fetched, and for an array of another dtype or other dims than its value
    has, as far as these are known before the run.
    """

    def __init__(
        self,
        request: Request,
        out: Mapping[str, np.ndarray],
        executor: Executor,
        values: Sequence[Any],
    ) -> None:
        self._request = request
        self._out = dict(out)
        names, table = request.subgraph.outputs, executor.table
        for name, array in out.items():
            if name not in request.names:
                hint = suggest(name, request.names).replace("the model has", "the run fetches", 1)
                raise InvalidInput(f"out= has {name!r}: {hint}")
            if not array.flags.writeable:
                raise InvalidInput(f"out= has a read-only array for {name!r}; give a copy of it")
            _check(name, array, table.slots[table.outputs[names.index(name)]].type)
        numbers = [i for i, name in enumerate(names) if name in out]
        self.direct: tuple[int, ...] = ()
        if isinstance(executor, LinearExecutor) and executor.takes_outputs:
            self.direct = tuple(
                [
                    i
                    for i in numbers
                    if _is_known(table.slots[table.outputs[i]].type)
                    and self._can_be_written(out[names[i]], names[i], values)
                ]
            )
        self.arrays = [out[names[i]] for i in self.direct]

    def _can_be_written(self, array: np.ndarray, name: str, values: Sequence[Any]) -> bool:
        """Whether kernels can write into an array while they read the feeds and other outputs."""
        others = [*values, *(x for other, x in self._out.items() if other != name)]
        arrays = [x for x in others if isinstance(x, np.ndarray)]
        return (
            array.flags.c_contiguous
            and address(array) % _ALIGNED == 0
            and not any(np.may_share_memory(array, other) for other in arrays)
        )

    def named(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """The outputs of a run by name, of those given the caller's arrays."""
        by_name = self._request.named(outputs)
        for name, array in self._out.items():
            value = by_name[name]
            if value is not array:
                if not isinstance(value, np.ndarray):
                    raise InvalidInput(f"out= has {name!r}, which is no tensor")
                _check(name, array, TensorType(value.dtype, value.shape))
                np.copyto(array, value)
                by_name[name] = array
        return by_name


def _is_known(type_: Type) -> bool:
    return isinstance(type_, TensorType) and type_.dtype is not None and type_.static


def _check(name: str, array: np.ndarray, type_: Type) -> None:
    """Raise ``InvalidInput`` for an array that no value of this type fits."""
    if not isinstance(type_, TensorType):
        return
    dims = type_.shape
    fits = type_.dtype is None or array.dtype == type_.dtype
    fits &= dims is None or (
        len(dims) == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(dims, array.shape, strict=True))
    )
    if not fits:
        found = f"{dtype_name(array.dtype)}{list(array.shape)}"
        raise InvalidInput(f"out= has an array {found} for {name!r}, which is {type_}")
