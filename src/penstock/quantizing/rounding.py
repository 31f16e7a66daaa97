"""Codes of weights with the least error in the results of a layer.

The nearest codes minimize the error of the weights, but the error of products with the inputs ``x``
of samples matters: the sum of squared errors ``|(w - q) x|^2`` is ``(w - q) G (w - q)'`` with the
Gram matrix ``G = x' x``. With a triangular ``L L' = G``, it is a sum of squares, one for each
weight, each of which depends only on this and later weights::

    sum over i of ((w[i] - q[i]) L[i, i] + sum over j > i of (w[j] - q[j]) L[j, i]) ^ 2

So weights are rounded from the last to the first, each to compensate for the later ones
(Frantar et al. 2022, "GPTQ"; Chen et al. 2025 for this form, Babai's nearest plane algorithm).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint, report_progress
from penstock.core.types import FLOAT32
from penstock.ops.common.windows import windows
from penstock.quantizing.layers import QuantizableLayer
from penstock.quantizing.samples import Samples
from penstock.session.session import Session

_ROWS = 8192  # of the inputs of a layer
_LEAST_ROWS = 64  # of a sample
_MOST_BYTES = 2**28  # of Gram matrices at a time
# Damping of the diagonal, as a share of its mean: few samples do not tell all directions.
_DAMPING = 0.01
_TOGETHER = 64  # weights of a row between which errors are carried at once


Ends: TypeAlias = "tuple[np.ndarray, np.ndarray]"
"""the least and the largest code of each row, in arrays that broadcast against the weights"""


def learned_codes(rows: np.ndarray, scales: np.ndarray, gram: np.ndarray, ends: Ends) -> np.ndarray:
    """Codes of weights [groups, count, inner] between ``ends``, as real numbers.
    ``scales`` has a scale for each weight, ``gram`` [groups, inner, inner] is the Gram matrix of
    the inputs. For these inputs, no row has a larger error than with the nearest codes. Rows
    without negative or without positive weights stay so: a logarithm may follow filters of powers.
    """
    nearest = np.rint(rows / scales).clip(*ends)
    size = np.einsum("gii->gi", gram)
    damping = _DAMPING * size.mean(axis=1)
    if not (np.isfinite(gram).all() and damping.all()):
        return nearest
    # The most important inputs come first, so that all others make up for their errors.
    order = np.argsort(size, axis=1)
    matrix = np.take_along_axis(gram, order[:, :, None], 1)
    matrix = np.take_along_axis(matrix, order[:, None, :], 2)
    inner = np.arange(rows.shape[-1])
    matrix[:, inner, inner] += damping[:, None]
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:  # lost to rounding, with inputs of very unequal sizes
        return nearest
    wanted, steps = (np.take_along_axis(a, order[:, None, :], 2) for a in (rows, scales))
    low, high = (np.broadcast_to(end, (*rows.shape[:2], 1))[..., 0] for end in ends)
    least = np.where(rows.min(axis=-1) < 0, low, np.float32(0))
    largest = np.where(rows.max(axis=-1) > 0, high, np.float32(0))
    rounded = _rounded(wanted, steps, factor, (least, largest))
    codes = np.empty_like(rows)
    np.put_along_axis(codes, order[:, None, :], rounded, 2)
    # For the samples, i.e. without the damping, the result may be worse.
    better = _errors(rows, codes * scales, gram) < _errors(rows, nearest * scales, gram)
    return np.where(better[..., None], codes, nearest)


def _rounded(
    rows: np.ndarray, scales: np.ndarray, factor: np.ndarray, ends: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Codes between the ``ends`` of each row, from its last to its first."""
    # Rows last: each step processes one weight of all rows, which are then contiguous.
    wanted, steps = (np.ascontiguousarray(own.swapaxes(1, 2)) for own in (rows, scales))
    codes, errors = np.empty_like(wanted), np.zeros_like(wanted)
    diagonal = np.einsum("gii->gi", factor)
    for end in range(rows.shape[-1], 0, -_TOGETHER):
        checkpoint()
        begin = max(end - _TOGETHER, 0)
        carried = factor[:, end:, begin:end].swapaxes(1, 2) @ errors[:, end:]
        for i in reversed(range(begin, end)):
            near = factor[:, None, i + 1 : end, i] @ errors[:, i + 1 : end]
            more = (carried[:, i - begin] + near[:, 0]) / diagonal[:, i, None]
            codes[:, i] = np.rint((wanted[:, i] + more) / steps[:, i]).clip(*ends)
            errors[:, i] = wanted[:, i] - codes[:, i] * steps[:, i]
    return codes.swapaxes(1, 2)


def _errors(rows: np.ndarray, real: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The squared errors of each row's results; infinite where they leave the range of float32."""
    own = rows - real
    with np.errstate(over="ignore", invalid="ignore"):
        return np.einsum("gri,gri->gr", own @ gram, own)


def gram_matrices(
    session: Session, layers: Sequence[QuantizableLayer], samples: Samples
) -> Iterator[tuple[QuantizableLayer, np.ndarray]]:
    """The Gram matrices [groups, inner, inner] of the inputs of layers over samples, from some rows
    of these; a few layers' at a time are in memory. Larger ones than that are left out."""
    layers = [layer for layer in layers if _matrix_bytes(layer) <= _MOST_BYTES]
    done = 0
    while done < len(layers):
        part, held = [layers[done]], _matrix_bytes(layers[done])
        for layer in layers[done + 1 :]:
            held += _matrix_bytes(layer)
            if held > _MOST_BYTES:
                break
            part.append(layer)
        report_progress("learn roundings", done, len(layers))
        matrices = _of_part(session, part, samples)
        yield from ((layer, matrices.pop(layer.name)) for layer in part)
        done += len(part)


def _of_part(
    session: Session, layers: Sequence[QuantizableLayer], samples: Samples
) -> dict[str, np.ndarray]:
    names = [layer.x.name for layer in layers if layer.x is not None]
    most = max(_ROWS // len(samples), _LEAST_ROWS)
    sums: dict[str, np.ndarray] = {}
    for sample in samples:
        checkpoint()
        values: Mapping[str, np.ndarray] = session.run(sample, fetches=list(dict.fromkeys(names)))
        for layer, name in zip(layers, names, strict=True):
            rows = input_rows(layer, np.asarray(values[name], FLOAT32), most)
            with np.errstate(over="ignore", invalid="ignore"):
                own = rows.transpose(0, 2, 1) @ rows
            sums[layer.name] = sums[layer.name] + own if layer.name in sums else own
    return sums


def _groups(layer: QuantizableLayer) -> int:
    return int(layer.node.attrs.get("group", 1)) if layer.node.op.name == "Conv" else 1


def _matrix_bytes(layer: QuantizableLayer) -> int:
    inner = math.prod(layer.dims) // layer.dims[layer.axis]
    return 4 * _groups(layer) * inner**2


def input_rows(layer: QuantizableLayer, x: np.ndarray, most: int) -> np.ndarray:
    """Return the rows by which a layer's weights are multiplied, [groups, rows, inner]: at most
    ``most``, drawn from all."""
    rng = np.random.default_rng(0)  # the same again when a search is resumed
    if layer.node.op.name != "Conv":
        rows = x.reshape(-1, x.shape[-1])
        return rows[_drawn(rng, len(rows), most)][None]
    if layer.channels not in (1, 1 - x.ndim):
        x = np.moveaxis(x, layer.channels, 1)
    kernel = layer.dims[2:]
    axes = windows(layer.node.attrs, kernel, x.shape[2:])
    ends = [max((a.count - 1) * a.stride + a.span - a.begin - a.size, 0) for a in axes]
    pads = [(a.begin, end) for a, end in zip(axes, ends, strict=True)]
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    counts = [len(x), *(a.count for a in axes)]
    drawn = _drawn(rng, int(np.prod(counts)), most)
    image, *firsts = np.unravel_index(drawn, counts)
    # [rows, channels, kernel]: each row's window, of the one image.
    places = [
        (first * a.stride)[:, None] + np.arange(k) * a.dilation
        for first, a, k in zip(firsts, axes, kernel, strict=True)
    ]
    count = len(kernel)
    index = [
        own.reshape(len(drawn), 1, *[-1 if i == axis else 1 for i in range(count)])
        for axis, own in enumerate(places)
    ]
    channels = np.arange(x.shape[1]).reshape(1, -1, *[1] * count)
    patches = x[(image.reshape(-1, 1, *[1] * count), channels, *index)]
    by_group = patches.reshape(len(drawn), _groups(layer), -1)
    return np.ascontiguousarray(by_group.transpose(1, 0, 2))


def _drawn(rng: np.random.Generator, count: int, most: int) -> np.ndarray:
    if count <= most:
        return np.arange(count)
    return np.sort(rng.choice(count, most, replace=False))
