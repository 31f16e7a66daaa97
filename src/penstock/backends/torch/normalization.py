"""Normalization: by batch, instance, layer, group and across channels; softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.elementwise import writing
from penstock.backends.torch.site import TorchSite
from penstock.ir.kernel import Kernel

_FLOAT32 = 1  # of stash_type, as ONNX numbers types


def batch_normalization(site: TorchSite) -> Kernel | None:
    """BatchNormalization by given statistics."""
    if site.attrs.get("training_mode") or not site.are_floats(0, 1, 2, 3, 4):
        return None
    if any(site.output(i) is not None for i in range(1, len(site.node.outputs))):
        return None
    if (site.rank(0) or 0) < 2:
        return None
    epsilon = site.attrs.get("epsilon", 1e-5)

    def function(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.batch_norm(x, scale, bias, mean, var, False, 0.0, epsilon, False)

    return Kernel(function)


def instance_normalization(site: TorchSite) -> Kernel | None:
    """InstanceNormalization: of each channel of each image."""
    if not site.are_floats(0, 1, 2) or (site.rank(0) or 0) < 3:
        return None
    # As groups of one channel: torch refuses instances of a single element.
    return _by_groups(site, None)


def group_normalization_kernel(site: TorchSite) -> Kernel | None:
    """GroupNormalization with a scale and a bias for each channel."""
    channels = site.dims(1)
    if not site.are_floats(0, 1, 2) or site.attrs.get("stash_type", _FLOAT32) != _FLOAT32:
        return None
    groups = site.attrs["num_groups"]
    if site.node.op.since < 21 and (channels is None or channels[0] == groups):
        return None  # scales are of groups
    return _by_groups(site, groups)


def _by_groups(site: TorchSite, groups: int | None) -> Kernel:
    """The kernel for a number of groups of channels; for None, as many as there are channels."""
    epsilon = site.attrs.get("epsilon", 1e-5)

    def function(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return torch.group_norm(x, groups or x.shape[1], scale, bias, epsilon, False)

    return Kernel(function)


def _normalized_axes(site: TorchSite) -> int | None:
    """The first of the axes that are normalized, which are the last ones."""
    rank = site.rank(0)
    axis = site.attrs.get("axis", -1)
    return None if rank is None or not -rank <= axis < rank else axis % rank


def layer_normalization_kernel(site: TorchSite) -> Kernel | None:
    """LayerNormalization, with the statistics if they are outputs."""
    first, dtype, count = _normalized_axes(site), site.dtype(0), len(site.node.outputs)
    if first is None or not site.are_floats(0, 1, 2):
        return None
    if site.attrs.get("stash_type", _FLOAT32) != _FLOAT32 or dtype is torch.float64:
        return None
    epsilon, whole = site.attrs.get("epsilon", 1e-5), _same_dims(site)
    if count > 1:
        if dtype is not site.result_dtype(1) and site.output(1) is not None:
            return None

        def with_statistics(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
            shape = x.shape[first:]
            if whole:
                return torch.native_layer_norm(x, shape, scale, bias, epsilon)[:count]
            y, *others = torch.native_layer_norm(x, shape, None, None, epsilon)
            return (_scaled(y, scale, bias), *others)[:count]

        return Kernel(with_statistics)

    def function(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape[first:]
        if whole:
            return torch.layer_norm(x, shape, scale, bias, epsilon, False)
        return _scaled(torch.layer_norm(x, shape, None, None, epsilon, False), scale, bias)

    return Kernel(function)


def _scaled(y: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    y = y.mul_(scale)
    return y if bias is None else y.add_(bias)


def _same_dims(site: TorchSite) -> bool:
    """Whether scale and bias are known to have the dims that are normalized."""
    x, scale, bias = site.type(0), site.dims(1), site.dims(2)
    if x is None or x.shape is None or scale is None:
        return False
    fits = scale == x.shape[len(x.shape) - len(scale) :]
    return fits and (not site.given(2) or bias == scale)


def rms_normalization(site: TorchSite) -> Kernel | None:
    """RMSNormalization: by the root of the mean square."""
    first = _normalized_axes(site)
    if first is None or not site.are_floats(0, 1) or site.dtype(0) is torch.float64:
        return None
    if site.attrs.get("stash_type", _FLOAT32) != _FLOAT32:
        return None
    epsilon = site.attrs.get("epsilon", 1e-5)
    if _same_dims(site):
        return Kernel(lambda x, scale: torch.rms_norm(x, x.shape[first:], scale, epsilon))

    def broadcast(x: Tensor, scale: Tensor) -> Tensor:
        return torch.rms_norm(x, x.shape[first:], None, epsilon).mul_(scale)

    return Kernel(broadcast)


def local_response(site: TorchSite) -> Kernel | None:
    """LRN over an odd number of channels: of an even one, torch takes others."""
    attrs = site.attrs
    if attrs["size"] % 2 == 0 or (site.rank(0) or 0) < 3:
        return None
    # torch divides alpha by the size as ONNX does, and calls the bias k.
    normalize = partial(
        torch.nn.functional.local_response_norm,
        size=attrs["size"],
        alpha=attrs.get("alpha", 1e-4),
        beta=attrs.get("beta", 0.75),
        k=attrs.get("bias", 1.0),
    )
    return Kernel(normalize)


def softmax(site: TorchSite) -> Kernel | None:
    """Softmax and LogSoftmax along one axis, or before opset 13 along all from that on."""
    rank, axis = site.rank(0), site.attrs.get("axis", -1)
    if not rank:
        return None
    function = torch.log_softmax if site.node.op.name == "LogSoftmax" else torch.softmax
    if site.node.op.since < 13:
        axis = site.attrs.get("axis", 1)
        if not -rank <= axis < rank:
            return None
        first = axis % rank
        if first < rank - 1:

            def flattened(x: Tensor) -> Tensor:
                if not x.numel():
                    return x.clone()
                return function(x.flatten(first), first).view(x.shape)

            return Kernel(flattened)
    return writing(partial(function, dim=axis), 1)
