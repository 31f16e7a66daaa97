"""Attention as one kernel of torch: ONNX's operation, and the chains that spell it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.site import TorchSite
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import parts
from penstock.ops.internal.zero_nan import ZERO_NAN

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


def attention_chain(site: TorchSite) -> Kernel | None:
    """A fused node that is ``softmax(q k scale + mask) v``, with or without scale and mask."""
    nodes = list(parts(site.node))
    if nodes[-2].op is ZERO_NAN:  # torch has zeros where no key is seen
        del nodes[-2]
    names = [node.op.name for node in nodes]
    if len(nodes) < 3 or [names[0], *names[-2:]] != ["MatMul", "Softmax", "MatMul"]:
        return None
    first, *middle, softmax, last = nodes
    place: dict[Value | None, int] = {
        value: i for i, value in enumerate(site.node.attrs["region"].inputs)
    }
    operands = [place.get(v, -1) for v in (*first.inputs, last.inputs[1])]
    if -1 in operands or not _are_heads(site, operands, softmax):
        return None
    scores = _scores(site, [first, *middle], place, operands)
    if scores is None:
        return None
    q_at, k_at, v_at = operands
    scale, mask = scores

    def function(*inputs: Tensor) -> Tensor:
        k, bias = inputs[k_at].transpose(-1, -2), inputs[mask] if mask >= 0 else None
        return _attend(inputs[q_at], k, inputs[v_at], bias, 0.0, False, scale=scale)

    return Kernel(function)


def _are_heads(site: TorchSite, operands: Sequence[int], softmax: Node) -> bool:
    """Whether queries, keys and values are floats of one rank, with one batch and number of heads,
    and the softmax is along the keys."""
    rank, dims = site.rank(operands[0]), [site.dims(i) for i in operands]
    if rank not in (3, 4) or not site.are_floats(*operands) or softmax.op.since < 13:
        return False
    if any(d is None or dims[0] is None or d[:-2] != dims[0][:-2] for d in dims):
        return False
    return softmax.attrs.get("axis", -1) in (-1, rank - 1)


def _scores(
    site: TorchSite,
    chain: Sequence[Node],
    place: Mapping[Value | None, int],
    operands: Sequence[int],
) -> tuple[float, int] | None:
    """The scale of scores, and the input that is added to them, -1 if there is none; None if the
    ``chain`` of a product and what follows does anything else."""
    scale, mask = 1.0, -1
    for before, node in pairwise(chain):
        if mask >= 0:
            return None
        factor = _factor(node, before)
        if factor is not None:
            scale *= factor
            continue
        others = [v for v in node.inputs if v is not before.outputs[0]]
        mask = place.get(others[0], -1) if node.op.name == "Add" and len(others) == 1 else -1
        if mask < 0 or not _is_bias(site, mask, operands):
            return None
    return scale, mask


def _is_bias(site: TorchSite, mask: int, operands: Sequence[int]) -> bool:
    """Whether a mask is to be added to scores, and has an element for each key."""
    dims, k = site.dims(mask), site.dims(operands[1])
    fits = dims is not None and k is not None and 2 <= len(dims) <= len(k) and dims[-1] == k[-1]
    return fits and site.dtype(mask) is site.dtype(operands[0])


def _factor(node: Node, chain: Node) -> float | None:
    """The number by which ``node`` multiplies the result of the chain before it."""
    if node.op.name not in ("Mul", "Div"):
        return None
    others = [i for i, value in enumerate(node.inputs) if value is not chain.outputs[0]]
    if len(others) != 1 or (node.op.name == "Div" and others != [1]):
        return None
    const = node.const(others[0])
    if const is None or const.size != 1:
        return None
    number = float(const.reshape(-1)[0])
    return number if node.op.name == "Mul" else 1 / number
