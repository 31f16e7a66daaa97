"""Smoothing between activations and weights (Xiao et al. 2023, "SmoothQuant").

A few channels of a transformer's activations are far larger than the others, so that codes of 8
bits over the range of all leave next to nothing of these. Products that read a normalization do not
care where a factor of a channel is: it goes from the normalization's scale and bias, which it
divides, to the rows of the weights, which it multiplies::

    x * scale + bias  -> MatMul(w)         is        x * (scale / f) + bias / f  -> MatMul(f * w)

Both ranges are to be alike: with the largest elements ``a`` of a channel and ``w`` of its rows of
the weights the factor is the root of ``a / w``. Results that something else reads as well, such as
a residual sum, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.core.checkpoints import report_progress
from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Value, clone, readers_of
from penstock.quantizing.layers import QuantizableLayer, layers_of
from penstock.quantizing.samples import Samples
from penstock.session.session import Session

_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")
_LEAST = 1e-5  # of the largest elements of a channel

Factors = Mapping[str, np.ndarray]
"""the divisor of each channel of a value, by the names of values"""


def _readers(graph: Graph) -> dict[Node, list[QuantizableLayer]]:
    """The normalizations that are read only by products with constant weights, and these."""
    by_input: dict[Value, list[QuantizableLayer]] = {}
    for layer in layers_of(graph):
        if layer.x is not None and layer.learns and layer.node.op.name in ("MatMul", "Gemm"):
            by_input.setdefault(layer.x, []).append(layer)
    readers, found = readers_of(graph), {}
    for x, layers in by_input.items():
        node, count = x.producer, len(layers)
        # Attention may turn batches and positions around; channels stay last.
        while node is not None and _keeps_channels(node) and len(readers[x]) == count:
            x, count = node.inputs[0] or x, 1
            node = x.producer
        if node is None or node.op.domain or node.op.name not in _NORMALIZATIONS:
            continue
        inner = layers[0].dims[1 - layers[0].axis]
        scales = [v for v in node.inputs[1:] if v is not None]
        is_open = len(readers[x]) != count or any(node.outputs[1:])
        if is_open or any(v.const is None or v.const.shape != (inner,) for v in scales):
            continue
        found[node] = layers
    return found


def _keeps_channels(node: Node) -> bool:
    """Whether a node changes the order of all dims but the last."""
    perm = node.attrs.get("perm", ())
    return not node.op.domain and node.op.name == "Transpose" and [*perm[-1:]] == [len(perm) - 1]


def smoothing_factors(session: Session, graph: Graph, samples: Samples) -> Factors:
    """The factors of the channels of normalizations in a graph, which the session runs."""
    found = {_output(node): layers for node, layers in _readers(graph).items()}
    if not found:
        return {}
    largest: dict[str, np.ndarray] = {}
    for i, sample in enumerate(samples):
        report_progress("smooth activations", i, len(samples))
        values = session.run(sample, fetches=[value.name for value in found])
        for name, array in values.items():
            own = np.abs(np.asarray(array, FLOAT32)).reshape(-1, array.shape[-1])
            own = own.max(axis=0, initial=0.0)
            largest[name] = np.maximum(largest.get(name, own), own)
    factors = {}
    for value, layers in found.items():
        rows = np.max([np.abs(layer.weights).max(axis=layer.axis) for layer in layers], axis=0)
        own = np.sqrt(np.maximum(largest[value.name], _LEAST) / np.maximum(rows, _LEAST))
        factors[value.name] = (own / np.exp(np.log(own).mean())).astype(FLOAT32)
    return factors


def smoothed(graph: Graph, factors: Factors) -> Graph:
    """A copy of a graph that computes the same, with channels of normalizations divided."""
    graph = clone(graph)
    for node, layers in _readers(graph).items():
        own = factors.get(_output(node).name)
        if own is None:
            continue
        node.inputs[1:] = [_scaled(value, 1 / own) for value in node.inputs[1:]]
        for layer in layers:
            by_row = own[:, None] if layer.axis == 1 else own
            layer.node.inputs[1] = _scaled(layer.node.inputs[1], by_row)
    return graph


def _output(node: Node) -> Value:
    value = node.outputs[0]
    assert value is not None
    return value


def _scaled(value: Value | None, factor: np.ndarray) -> Value | None:
    if value is None or value.const is None:
        return value
    return Value(f"{value.name}/smoothed", const=(value.const * factor).astype(FLOAT32))
