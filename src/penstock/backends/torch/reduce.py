"""Reductions along axes, places of extreme elements, sorting, and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.backends.torch.elementwise import writing
from penstock.backends.torch.site import FLOATS, INDICES, TorchSite
from penstock.core.types import RunValue
from penstock.ir.kernel import DeviceWork, Kernel


def _sum(x: Tensor, **options: RunValue) -> Tensor:
    # Without a dtype, torch adds up integers as int64, whatever their own type is.
    return torch.sum(x, **options, dtype=x.dtype)


def _extreme(reduce: Callable[..., Tensor], lowest: bool) -> Callable[..., Tensor]:
    """A maximum or minimum, which torch has of no empty axes: the ``lowest`` or highest number."""

    def extreme(x: Tensor, **options: RunValue) -> Tensor:
        if x.numel():
            return reduce(x, **options)
        floating = x.dtype in FLOATS
        bounds = (-math.inf, math.inf) if floating else _bounds(x.dtype)
        return _sum(x, **options).fill_(bounds[not lowest])

    return extreme


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.iinfo(dtype)
    return info.min, info.max


_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "ReduceL1": partial(torch.linalg.vector_norm, ord=1),
    "ReduceL2": partial(torch.linalg.vector_norm, ord=2),
    "ReduceLogSum": lambda x, **options: torch.sum(x, **options).log_(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": _extreme(torch.amax, lowest=True),
    "ReduceMean": torch.mean,
    "ReduceMin": _extreme(torch.amin, lowest=False),
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, **options: _sum(x * x, **options),
}
REDUCTIONS = tuple(_REDUCTIONS)
_OF_INTEGERS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceSumSquare")


def reduction_kernel(site: TorchSite) -> Kernel | None:
    """A reduction along axes that are known when the plan is compiled."""
    name, rank = site.node.op.name, site.rank(0)
    of_integers = site.dtype(0) in INDICES and name in _OF_INTEGERS
    axes = site.ints(1)
    if rank is None or (site.given(1) and axes is None):
        return None
    if site.dtype(0) not in FLOATS and not of_integers:
        return None
    if not axes:
        if site.attrs.get("noop_with_empty_axes"):
            return None
        axes = tuple(range(rank))
    reduce, keepdims = _REDUCTIONS[name], bool(site.attrs.get("keepdims", 1))
    if rank == 0:
        return None
    chosen = sorted({axis % rank for axis in axes if -rank <= axis < rank})
    if len(chosen) < len(axes):
        return None  # the error is NumPy's

    def function(x: Tensor, _: RunValue = None) -> Tensor:
        return reduce(x, dim=chosen, keepdim=keepdims)

    def into(x: Tensor, *others: RunValue) -> None:
        reduce(x, dim=chosen, keepdim=keepdims, out=others[-1])

    return Kernel(function, into, device=DeviceWork(host_inputs=(1,)))


def extreme_place(site: TorchSite) -> Kernel | None:
    """ArgMax and ArgMin: of equal elements, the first one."""
    rank, dims = site.rank(0), site.dims(0)
    if not rank or site.attrs.get("select_last_index") or site.attrs.get("skip_nan"):
        return None
    # torch refuses to look for a place among none.
    if dims is not None and 0 in dims:
        return None
    axis, keepdims = site.attrs.get("axis", 0), bool(site.attrs.get("keepdims", 1))
    find = torch.argmax if site.node.op.name == "ArgMax" else torch.argmin
    return writing(partial(find, dim=axis, keepdim=keepdims), 1)


def top_k(site: TorchSite) -> Kernel | None:
    """TopK: the largest or smallest elements in their order, of equal ones the first."""
    if not site.rank(0):
        return None
    axis, largest = site.attrs.get("axis", -1), bool(site.attrs.get("largest", 1))

    def function(x: Tensor, k: RunValue) -> tuple[Tensor, Tensor]:
        count = int(k.item())
        if not 0 <= count <= x.shape[axis]:
            raise ValueError(f"k = {count} of an axis with {x.shape[axis]} elements")
        # torch's own topk says nothing of the order of equal elements.
        values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, count).contiguous(), places.narrow(axis, 0, count)

    return Kernel(function, device=DeviceWork(host_inputs=(1,)))


def running_sum(site: TorchSite) -> Kernel | None:
    """CumSum along an axis that is known when the plan is compiled."""
    axis, rank = site.ints(1), site.rank(0)
    if axis is None or not rank or not -rank <= axis[0] < rank:
        return None  # the error is NumPy's
    along = axis[0] % rank
    exclusive, reverse = site.attrs.get("exclusive", 0), site.attrs.get("reverse", 0)

    def function(x: Tensor, _: RunValue = None) -> Tensor:
        if reverse:
            x = x.flip(along)
        # The dtype is given as for sums: ONNX's result has that of x.
        y = torch.cumsum(x, along, dtype=x.dtype)
        if exclusive:
            y = y.roll(1, along)
            y.narrow(along, 0, min(1, x.shape[along])).zero_()
        return y.flip(along) if reverse else y

    return Kernel(function, device=DeviceWork(host_inputs=(1,)))
