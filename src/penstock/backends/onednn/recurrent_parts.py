"""Recurrent layers that take long, in parts of some steps, between which the run may be stopped.

A part begins with the states behind the part before it. Two directions are two layers, as the one
begins where the other ends. A layer of 5 steps in parts of 2 at most::

    forward:  steps 0-1, 2-3, 4
    reverse:  steps 3-4, 1-2, 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.kernel import kernel_of
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.parts import kernel_of_parts, run_kernel
from penstock.backends.onednn.spec import PrimitiveSpec
from penstock.core.checkpoints import checkpoint
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.onnx.recurrent import Layer, parse_layer

MOST_FLOPS = 2_000_000_000
_MOST_SEQUENCES = 4
"""Operations of a part for each sequence, up to as many: it takes about a tenth of a second on one
core. A step of more sequences does not wait longer for the weights."""

_X, _W, _R, _BIAS, _STATES = 0, 1, 2, 3, (5, 6)


def recurrent_in_parts(
    library: Library, make: Callable[[OpDesc], PrimitiveSpec | None], desc: OpDesc, work: float
) -> Kernel | None:
    """The kernel of a layer of ``work`` operations, in parts if it takes long. ``make`` specifies
    its primitives; None if it does. Raises ``DnnlError``."""
    spec, layer = make(desc), parse_layer(desc.node.op.name, desc.node.attrs)
    if spec is None:
        return None
    time = 1 if layer.batch_first else 0
    dims = desc.dims(desc.inputs[_X])
    steps, most = dims[time], MOST_FLOPS * min(dims[1 - time], _MOST_SEQUENCES)
    size = max(int(steps * most / work), 1) if work else steps
    if size >= steps:
        return kernel_of(library, spec)
    directions: list[_Direction] = []
    for d in range(len(layer.reverse)):
        kernels: dict[int, Kernel] = {}
        for count in {size, steps % size or size}:
            part = _part(desc, layer, d, count)
            made = make(part)
            if made is None:
                return None
            kernels[count] = kernel_of(library, made)
        directions.append(_Direction(layer, d, steps, size, part.dims(part.inputs[-1]), kernels))
    return _joined(desc, spec, directions)


def _part(desc: OpDesc, layer: Layer, d: int, count: int) -> OpDesc:
    """Some steps of one direction ``d``, with all states before and behind them."""
    time, x = (1 if layer.batch_first else 0), desc.input(_X)
    weights = [desc.constant(i) for i in (_W, _R, _BIAS)]
    assert x is not None
    assert weights[1] is not None
    dims, hidden = x.dims, weights[1].shape[2]
    if len(layer.reverse) > 1:
        weights = [None if w is None else w[d : d + 1] for w in weights]
    attrs = {**desc.node.attrs, "direction": "reverse" if layer.reverse[d] else "forward"}
    if names := attrs.pop("activations", None):
        attrs["activations"] = names[d * len(layer.activations[d]) :]
    batch = dims[1 - time]
    state = TensorType(FLOAT32, (batch, 1, hidden) if time else (1, batch, hidden))
    y = (batch, count, 1, hidden) if time else (count, 1, batch, hidden)
    states = [state] * (2 if layer.cell == "LSTM" else 1)
    has_y = desc.tensors[desc.outputs[0]] is not None
    seen = replace(x, shape=(*dims[:time], count, *dims[time + 1 :]))
    types = [None if w is None else TensorType(w.dtype, w.shape) for w in weights]
    given = [seen, *types, *states]
    tensors = (*given, TensorType(FLOAT32, y) if has_y else None, *states)
    constants = (None, *weights, *[None] * (len(tensors) - 4))
    inputs = (_X, _W, _R, -1 if weights[2] is None else _BIAS, -1, *range(4, len(given)))
    node = Node(desc.node.op, desc.node.inputs[:4], (), attrs)
    return OpDesc(node, tensors, constants, inputs, tuple(range(len(given), len(tensors))))


@dataclass(frozen=True, slots=True, eq=False)
class _Direction:
    """One direction of a layer: its ``kernels`` by the number of steps, at most ``size``, and the
    dims of a ``state``."""

    layer: Layer
    number: int
    steps: int
    size: int
    state: tuple[int, ...]
    kernels: Mapping[int, Kernel]

    def run(
        self, x: np.ndarray, initial: Sequence[Any], y: np.ndarray | None, final: Sequence[Any]
    ) -> None:
        """Compute all steps. ``initial`` and ``final``: the states of all directions, if given or
        asked for."""
        time = 1 if self.layer.batch_first else 0
        own = (slice(None),) * time + (slice(self.number, self.number + 1),)
        states = [np.zeros(self.state, x.dtype) if s is None else s[own].copy() for s in initial]
        behind = [np.empty_like(state) for state in states]
        for begin in range(0, self.steps, self.size):
            checkpoint()
            end = min(begin + self.size, self.steps)
            count = end - begin
            if self.layer.reverse[self.number]:
                begin, end = self.steps - end, self.steps - begin
            kernel, steps = self.kernels[count], (slice(None),) * time + (slice(begin, end),)
            part = np.ascontiguousarray(x[steps])
            into = None if y is None else y[(*steps, *own[time:])]
            out = None if into is None else np.empty(into.shape, into.dtype)
            inputs = [part, None, None, None, *states]
            run_kernel(kernel, inputs, [out, *behind])
            if into is not None and out is not None:
                np.copyto(into, out)
            states, behind = behind, states
        for target, state in zip(final, states, strict=True):
            if target is not None:
                np.copyto(target[own], state)


def _joined(desc: OpDesc, spec: PrimitiveSpec, directions: Sequence[_Direction]) -> Kernel:
    """The kernel that computes all directions."""
    count, asked = len(desc.tensors) - len(desc.outputs), len(desc.outputs)
    places = _STATES if directions[0].layer.cell == "LSTM" else _STATES[:1]
    indices = [desc.index(i) for i in places]

    def into(*arrays: Any) -> None:
        outputs = arrays[count : count + asked]
        initial = [None if i < 0 else arrays[i] for i in indices]
        final = [outputs[i] if i < asked else None for i in range(1, len(places) + 1)]
        for direction in directions:
            direction.run(arrays[desc.inputs[_X]], initial, outputs[0], final)

    kernels = [kernel for direction in directions for kernel in direction.kernels.values()]
    # Of two directions, each has a part of the weights: the whole is not given back from there.
    absorbed = tuple(spec.weights) if len(directions) == 1 else ()
    return kernel_of_parts(spec, kernels, into, absorbed)
