"""Recurrent layers: LSTM, GRU and RNN with constant weights, as torch has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.torch.site import TorchSite, with_flag
from penstock.core.types import RunValue
from penstock.ir.kernel import Kernel
from penstock.ops.onnx.recurrent import CELLS

_ORDER: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""the gates in torch's order, by their places in ONNX's"""


def _is_plain(site: TorchSite) -> bool:
    """Whether a layer has the gates and activations of torch's, and no lengths of sequences."""
    name, attrs = site.node.op.name, site.attrs
    directions = 2 if site.text("direction") == "bidirectional" else 1
    activations = attrs.get("activations")
    if activations:
        spelled = [a.decode() if isinstance(a, bytes) else a for a in activations]
        usual = [a.lower() for a in CELLS[name].activations * directions]
        if [a.lower() for a in spelled[: len(usual)]] != usual:  # RNN's default has two names
            return False
    special = (attrs.get("clip"), attrs.get("input_forget"), attrs.get("layout"))
    if any(special) or site.given(4) or site.given(7):
        return False
    # torch's reset gate acts on the product of the state, not on the state.
    return name != "GRU" or bool(attrs.get("linear_before_reset"))


def _weights(site: TorchSite) -> list[list[Tensor]] | None:
    """The weights of each direction as torch wants them; None unless they are constants."""
    w, r, b = (site.const(i) for i in (1, 2, 3))
    if w is None or r is None or (b is None and site.given(3)):
        return None
    order = _ORDER[site.node.op.name]
    directions, rows, _ = w.shape
    hidden = rows // len(order)
    if b is None:
        # torch takes biases for all weights or for none, and so there is one form of its arguments.
        b = np.zeros((directions, 2 * rows), w.dtype)

    def ordered(array: np.ndarray) -> Tensor:
        gates = array.reshape(len(order), hidden, *array.shape[1:])
        return site.tensor(gates[list(order)].reshape(array.shape))

    return [[ordered(x) for x in (w[d], r[d], b[d, :rows], b[d, rows:])] for d in range(directions)]


def rounded_layer(site: TorchSite, layer: Callable[..., RunValue]) -> Callable[..., RunValue]:
    """``layer``, with operands of its products rounded to TensorFloat-32 on a GPU only if the
    session allows that; cuDNN rounds them by default."""
    wanted = "tf32" if site.tf32 else "ieee"
    return with_flag(site, layer, torch.backends.cudnn.rnn, "fp32_precision", wanted)


def _module(name: str, weights: list[list[Tensor]]) -> torch.nn.RNNBase:
    """The layer of these weights, which a GPU's library finds in one piece: else it would copy them
    into one for each run."""
    # Drawing the first values of parameters would move the user's generator of random numbers.
    undrawn = {"reset_parameters": lambda layer: None}
    made: Callable[..., torch.nn.RNNBase] = type(name, (getattr(torch.nn, name),), undrawn)
    first, both = weights[0][0], len(weights) == 2
    options = {"bidirectional": both, "dtype": first.dtype, "device": first.device}
    layer = made(first.shape[1], weights[0][1].shape[1], **options)
    layer = layer.eval().requires_grad_(False)
    for parameter, tensor in zip(layer.parameters(), chain(*weights), strict=True):
        parameter.copy_(tensor)
    layer.flatten_parameters()
    return layer


def recurrent(site: TorchSite) -> Kernel | None:
    """A recurrent layer in one or both directions; one backward runs on the steps in reverse."""
    dims = site.dims(0)
    if not site.are_floats(0, 1, 2, 3, 5, 6) or not _is_plain(site) or dims is None or 0 in dims:
        return None
    weights = _weights(site)
    if weights is None:
        return None
    name, backward = site.node.op.name, site.text("direction") == "reverse"
    directions, hidden = len(weights), weights[0][1].shape[1]
    run = rounded_layer(site, _module(name, weights))
    count = len(site.node.outputs)

    def function(x: Tensor, *others: RunValue) -> Any:
        _, _, _, _, h0, c0 = (*others, *[None] * 6)[:6]
        if backward:
            x = x.flip(0)
        steps, batch = x.shape[:2]
        if h0 is None:
            h0 = x.new_zeros(directions, batch, hidden)
        if name == "LSTM":
            if c0 is None:
                c0 = x.new_zeros(directions, batch, hidden)
            y, last = run(x, (h0, c0))
        else:
            y, *last = run(x, h0)
        y = y.reshape(steps, batch, directions, hidden).transpose(1, 2)
        outputs = (y.flip(0) if backward else y, *last)[:count]
        return outputs if count != 1 else outputs[0]

    return Kernel(function)
