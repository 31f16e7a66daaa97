"""Mixtures of experts: a router, and the feed-forward networks that it chooses among.

The experts of unquantized files become one MoE of com.microsoft, those of blocks one QMoE. GGUF
has the experts of a layer in one tensor [experts, rows, columns]; checkpoints have one tensor for
each, or one for gates and ups together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.frontends.common.builder import Operand
from penstock.frontends.weights.configuration import Experts
from penstock.frontends.weights.tensors import StoredTensor, TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value
from penstock.ops.registry import MICROSOFT

_ROLES = ("gate", "down", "up")
"""in the order of fc1, fc2 and fc3 of MoE"""


def mixture_of(b: ModelWriter, x: Value, layer: int, width: int, experts: Experts) -> Value:
    """Return the sum of the experts that the router chooses for each row [batch, rows, width]."""
    scores = b.linear(x, f"blk.{layer}.ffn_gate_inp", width, experts.total)
    scores = b.op("Reshape", scores, (-1, experts.total))
    settings: dict[str, int | str] = {
        "k": experts.used,
        "activation_type": "silu",
        "normalize_routing_weights": int(experts.normalized),
    }
    stored = _stored(b.store, layer, width, experts)
    if stored and all(tensor.is_packed for tensor in stored):
        return _packed(b, [x, scores], stored, settings)
    inputs: list[Operand] = [x, scores]
    for tensor, array in zip(_ROLES, _arrays(b.store, layer, width, experts, stored), strict=True):
        inputs += [b.real(f"blk.{layer}.ffn_{tensor}_exps", array), None]
    return b.op("MoE", *inputs, domain=MICROSOFT, **settings)


def _shapes(width: int, experts: Experts) -> list[tuple[int, int, int]]:
    inward, outward = (experts.total, experts.inner, width), (experts.total, width, experts.inner)
    return [inward, outward, inward]


def _stored(store: TensorStore, layer: int, width: int, experts: Experts) -> list[StoredTensor]:
    """Return the tensors of all experts of a layer, or [] if each expert has its own."""
    names = [f"blk.{layer}.ffn_{role}_exps.weight" for role in _ROLES]
    if names[0] not in store:
        return []
    shapes = _shapes(width, experts)
    return [store.get(name, shape) for name, shape in zip(names, shapes, strict=True)]


def _arrays(
    store: TensorStore, layer: int, width: int, experts: Experts, stored: list[StoredTensor]
) -> Iterator[np.ndarray]:
    """Return the weights of all experts, in the order of ``_ROLES``."""
    if stored:
        yield from (tensor.array() for tensor in stored)
        return
    prefix = f"blk.{layer}.mlp.experts"
    if f"{prefix}.gate_up_proj" in store:
        both = store.get(f"{prefix}.gate_up_proj", (experts.total, 2 * experts.inner, width))
        down = store.get(f"{prefix}.down_proj", (experts.total, width, experts.inner))
        halves = both.array()
        yield from (halves[:, : experts.inner], down.array(), halves[:, experts.inner :])
        return
    for role, (_, rows, columns) in zip(_ROLES, _shapes(width, experts), strict=True):
        names = [f"{prefix}.{i}.{role}_proj.weight" for i in range(experts.total)]
        tensors = [store.get(name, (rows, columns)) for name in names]
        together = np.empty((experts.total, rows, columns), tensors[0].array().dtype)
        for place, tensor in zip(together, tensors, strict=True):
            np.copyto(place, tensor.array(), casting="unsafe")
        yield together


def _packed(
    b: ModelWriter,
    inputs: list[Operand],
    stored: list[StoredTensor],
    settings: dict[str, int | str],
) -> Value:
    """Return the experts of blocks of codes, as a QMoE."""
    codes = [tensor.codes() for tensor in stored]
    group = min(layer.group for layer in codes)  # one size for all layers
    zeros: list[Operand] = []
    for i, (tensor, layer) in enumerate(zip(stored, codes, strict=True), 1):
        layer = layer.of_group(group)
        shape = tensor.shape[:2]
        parts = (layer.codes, layer.scales, layer.zeros)
        weights, scales, points = (
            None if x is None else b.named(tensor.name, x.reshape(*shape, -1)) for x in parts
        )
        inputs += [weights, scales, None]
        zeros.append(points)
        settings[f"fc{i}_expert_weight_bits"] = layer.bits
    shares = None
    if not settings["normalize_routing_weights"]:  # QMoE would normalize its own
        shares = b.op("Softmax", inputs[1], axis=-1)
    settings["block_size"] = group
    return b.op("QMoE", *inputs, *zeros, shares, domain=MICROSOFT, **settings)
