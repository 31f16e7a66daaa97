"""Resize of images, where torch's interpolation is ONNX's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penstock.backends.torch.site import TorchSite
from penstock.ir.kernel import DeviceWork, Kernel

_LINEAR: Mapping[int, str] = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _mode(site: TorchSite, rank: int, coordinates: str) -> tuple[str, bool | None] | None:
    """torch's mode of interpolation, and its ``align_corners``."""
    attrs, mode = site.attrs, site.text("mode", "nearest")
    if mode == "nearest":
        rounding = site.text("nearest_mode", "round_prefer_floor")
        return ("nearest", None) if (coordinates, rounding) == ("asymmetric", "floor") else None
    aligned = {"half_pixel": False, "align_corners": True}.get(coordinates)
    if aligned is None:
        return None
    if mode == "linear":
        return _LINEAR[rank], aligned
    cubic = rank == 4 and attrs.get("cubic_coeff_a", -0.75) == -0.75
    return ("bicubic", aligned) if cubic and not attrs.get("exclude_outside", 0) else None


def resize_kernel(site: TorchSite) -> Kernel | None:
    """Resize of the spatial axes of images of known sizes."""
    attrs, rank = site.attrs, site.rank(0)
    old, new = site.dims(0), site.result_dims()
    if rank is None or rank not in _LINEAR or old is None or new is None:
        return None
    if attrs.get("antialias") or 0 in old or 0 in new or old[:2] != new[:2]:
        return None
    coordinates = site.text("coordinate_transformation_mode", "half_pixel")
    mode = _mode(site, rank, coordinates)
    if mode is None or not _are_quotients(site, old, new):
        return None
    whole = all(b % a == 0 for a, b in zip(old[2:], new[2:], strict=True))
    if mode[0] == "nearest" and not whole:
        return None  # positions are rounded otherwise
    size, (how, aligned) = list(new[2:]), mode
    interpolate = torch.nn.functional.interpolate
    return Kernel(
        lambda x, *_: interpolate(x, size, mode=how, align_corners=aligned),
        device=DeviceWork(host_inputs=(1, 2, 3)),
    )


def _are_quotients(site: TorchSite, old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether images are scaled by exactly the quotients of their sizes, as torch does."""
    if not site.given(2):
        return True
    scales = site.const(2)
    if scales is None:
        return False
    if scales.size == 0:
        return True
    axes = site.attrs.get("axes")
    chosen = range(len(old)) if axes is None else [axis % len(old) for axis in axes]
    pairs = [(np.float32(new[axis] / old[axis])) for axis in chosen]
    return bool(np.array_equal(np.asarray(pairs, np.float32), scales.astype(np.float32)))
