"""Elements picked and replaced by index: gathers and scatters.

Indices may be negative, which torch's own functions do not take; those out of range are an error,
on a GPU one that comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.site import FLOATS, INDICES, TorchSite
from penstock.ir.kernel import DeviceWork, Kernel

_REDUCED: Mapping[str, str] = {"mul": "prod", "max": "amax", "min": "amin", "add": "sum"}


def _wrapped(site: TorchSite, index: int) -> Callable[[Tensor, int], Tensor]:
    """The function that makes indices of an input int64, and counts negative ones from the end."""
    const = site.const(index)
    # Known at compile time, so that no run looks for negative ones.
    if const is not None and const.min(initial=0) >= 0:
        return lambda indices, size: indices.long()
    return lambda indices, size: torch.where(indices < 0, indices + size, indices).long()


def gather(site: TorchSite) -> Kernel | None:
    """Gather: slices along an axis."""
    rank = site.rank(0)
    if site.dtype(1) not in INDICES or not rank:
        return None
    axis = site.attrs.get("axis", 0)
    if not -rank <= axis < rank:
        return None  # the error is NumPy's
    axis, wrap, const = axis % rank, _wrapped(site, 1), site.const(1)
    # One slice at a place that is known is a view, which copies nothing.
    if const is not None and const.ndim == 0:
        place = int(const)
        return Kernel(
            lambda x, _: x.select(axis, place), view=True, device=DeviceWork(host_inputs=(1,))
        )

    def function(x: Tensor, indices: Tensor) -> Tensor:
        places = wrap(indices, x.shape[axis])
        if places.dim() == 1:
            return torch.index_select(x, axis, places)
        # index_select takes indices of one dim alone.
        picked = torch.index_select(x, axis, places.reshape(-1))
        return picked.reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))

    return Kernel(function)


def gather_elements(site: TorchSite) -> Kernel | None:
    """GatherElements."""
    rank = site.rank(0)
    if site.dtype(1) not in INDICES or not rank:
        return None
    axis, wrap = site.attrs.get("axis", 0) % rank, _wrapped(site, 1)
    return Kernel(lambda x, indices: torch.gather(x, axis, wrap(indices, x.shape[axis])))


def gather_nd(site: TorchSite) -> Kernel | None:
    """GatherND without dims of batches."""
    if site.dtype(1) not in INDICES or site.attrs.get("batch_dims", 0):
        return None
    return Kernel(lambda x, indices: x[indices.long().unbind(-1)])


def scatter_elements(site: TorchSite) -> Kernel | None:
    """ScatterElements: elements replaced by others, or reduced with them."""
    rank, how = site.rank(0), site.text("reduction", "none")
    if site.dtype(1) not in INDICES or not rank or site.dtype(0) is not site.dtype(2):
        return None
    if how != "none" and site.dtype(0) not in FLOATS:
        return None
    axis, wrap = site.attrs.get("axis", 0) % rank, _wrapped(site, 1)
    if how == "none":

        def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
            return torch.scatter(x, axis, wrap(indices, x.shape[axis]), updates)
    else:
        reduce = _REDUCED[how]

        def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
            places = wrap(indices, x.shape[axis])
            return torch.scatter_reduce(x, axis, places, updates, reduce)

    return Kernel(function)


def scatter_nd(site: TorchSite) -> Kernel | None:
    """ScatterND: slices replaced by others, or added to them."""
    how = site.text("reduction", "none")
    if site.dtype(1) not in INDICES or how not in ("none", "add"):
        return None
    adds = how == "add"

    def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        y = x.clone()
        places: Any = indices.long().unbind(-1)
        # A tuple of no indices names all of x.
        return y.index_put_(places, updates, adds) if places else y.copy_(updates)

    return Kernel(function)
