"""Attention as one kernel of torch: ONNX's operation, and that of Penstock's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.site import TorchSite
from penstock.ir.kernel import Kernel

_attend: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


def attention(site: TorchSite) -> Kernel | None:
    """Attention without a past, windows, a cap of scores, or scores as an output."""
    attrs = site.attrs
    ranks = [site.rank(i) for i in range(3)]
    if not site.are_floats(0, 1, 2) or None in ranks or len(set(ranks)) != 1:
        return None
    if any(site.given(i) for i in (4, 5, 6)) or any(site.output(i) is not None for i in (1, 2, 3)):
        return None
    windows = [attrs.get(f"{side}_window_size", -1) for side in ("left", "right")]
    if attrs.get("softcap") or attrs.get("softmax_precision") or max(windows) >= 0:
        return None
    mask, causal = site.given(3), bool(attrs.get("is_causal"))
    if mask and (causal or not _mask_fits(site)):
        return None
    scale, split = attrs.get("scale"), ranks[0] == 3
    heads = [attrs.get(name) for name in ("q_num_heads", "kv_num_heads")]

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if split:
            q, k, v = _split(q, heads[0]), _split(k, heads[1]), _split(v, heads[1])
        grouped = q.shape[1] != k.shape[1]
        y = _attend(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2) if split else y

    return Kernel(function)


def _mask_fits(site: TorchSite) -> bool:
    """Whether a mask has an element for each key, and a type that torch takes."""
    mask, keys = site.dims(3), site.dims(1)
    if (
        mask is None
        or keys is None
        or len(mask) < 2
        or mask[-1] != keys[-2 if len(keys) == 4 else 1]
    ):
        return False
    return site.dtype(3) in (torch.bool, site.dtype(0))


def _split(x: Tensor, heads: Any) -> Tensor:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def recognized_attention(site: TorchSite) -> Kernel | None:
    """Penstock's own Attention of known shapes. Torch has zeros where no key is seen, in all
    cases."""
    ranks, attrs = [site.rank(i) for i in range(3)], site.attrs
    dims = [site.dims(i) for i in range(3)]
    if ranks[0] not in (3, 4) or None in dims or not site.are_floats(0, 1, 2):
        return None
    biases = [i for i in range(3, len(site.node.inputs)) if site.given(i)]
    keys_last = bool(attrs.get("keys_last"))
    grouped = dims[0][-3] != dims[1][-3]  # type: ignore[index]
    if attrs.get("softcap") or (grouped and ranks[0] == 3):
        return None
    if not all(_is_bias(site, i, dims[2][-2]) for i in biases):  # type: ignore[index]
        return None
    scale = attrs["scale"]

    def function(*inputs: Tensor) -> Tensor:
        q, k, v = inputs[:3]
        bias = sum([inputs[i] for i in biases[1:]], inputs[biases[0]]) if biases else None
        k = k.transpose(-1, -2) if keys_last else k
        return _attend(q, k, v, bias, 0.0, False, scale=scale, enable_gqa=grouped)

    return Kernel(function)


def _is_bias(site: TorchSite, bias: int, keys: int) -> bool:
    """Whether a bias has an element for each key, and the type of queries."""
    dims, q = site.dims(bias), site.rank(0)
    fits = dims is not None and q is not None and 2 <= len(dims) <= q and dims[-1] == keys
    return fits and site.dtype(bias) is site.dtype(0)
