"""Random reductions, normalizations and other operations on rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.support.draws import CODES, FLOATS, WHOLE, Draw, Source, draws, short_name
from tests.support.draws_products import with_activation
from tests.support.error_bounds import Rounded, gamma, unit


@draws("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd")
@draws("ReduceSum ReduceSumSquare ArgMax ArgMin tflite.ReduceMax tflite.ReduceMin")
@draws("tflite.ArgMax tflite.ArgMin")
def _reduction(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    of = (domain, 1) if domain else ("", 26)
    extreme = name in ("ReduceMax", "ReduceMin", "ArgMax", "ArgMin")
    whole = WHOLE if extreme or name in ("ReduceMean", "ReduceProd", "ReduceSum") else ()
    dtype = rng.pick(*FLOATS, *FLOATS, *whole, *(CODES if extreme else ()))
    if name.startswith("Arg"):
        dtype = rng.pick(dtype, dtype, dtype, "int16")
    elif domain:
        dtype = "int16"
    dims = rng.dims(rng.integers(1, 5), least=0)
    if rng.chance(0.3):
        dims = (rng.size(5), rng.pick(511, 512, 513, 1030), rng.size(5))
    x = rng.numbers(dims, dtype, 0.4 if extreme else 0)
    if name in ("ReduceLogSum", "ReduceProd"):
        x = np.abs(x) if dtype in FLOATS else x
    if name == "ReduceProd" and dtype in FLOATS:
        x = 1 + rng.uniform(-0.05, 0.05, dims).astype(dtype)
    attrs: dict[str, Any] = {"keepdims": int(rng.chance(0.5))}
    if name.startswith("Arg"):
        attrs |= {"axis": int(rng.integers(-len(dims), len(dims)))}
        attrs |= {"select_last_index": int(rng.chance(0.5))}
        return Draw(name, [x], attrs, None, [], 1, *of)
    count = rng.integers(0, len(dims) + 1)
    start = rng.integers(0, len(dims) - count + 1)
    axes = tuple(range(start, start + count)) or tuple(range(len(dims)))
    inputs = [x, *([np.array(axes)] if count else [])]

    def bound(draw: Draw) -> list[Rounded | None]:
        x, options = draw.read(0), (axes, bool(attrs["keepdims"]))
        if name == "ReduceProd":
            (value,) = draw.wide()
            return [Rounded.exact(value, x.dtype).rounded(value, 0, math.prod(dims) + 1)]
        if name == "ReduceLogSumExp":
            highest = x.value.max(axes, keepdims=True)
            flat = highest if attrs["keepdims"] else highest.reshape(x.value.max(axes).shape)
            return [(x - highest).exp().sum(*options).log() + flat]
        total = x * x if name in ("ReduceL2", "ReduceSumSquare") else x
        total = abs(x) if name == "ReduceL1" else total
        total = total.mean(*options) if name == "ReduceMean" else total.sum(*options)
        if name == "ReduceLogSum":
            total = total.log()
        return [total.sqrt() if name == "ReduceL2" else total]

    exact = extreme or (dtype not in FLOATS)
    return Draw(name, inputs, attrs, None if exact else bound, rng.pick([], [1][:count]), 1, *of)


@draws("Softmax LogSoftmax Hardmax")
def _softmax(rng: Source, name: str) -> Draw:
    dims, dtype = rng.dims(rng.integers(1, 5)), rng.pick(*FLOATS)
    axis = int(rng.integers(-len(dims), len(dims)))
    x = rng.numbers(dims, dtype, 0.3)

    def bound(draw: Draw) -> list[Rounded | None]:
        x = draw.read(0)
        if name == "Softmax":
            return [x.softmax(axis)]
        return [(x - x.max(axis)) - x.powers(axis).sum(axis, keepdims=True).log()]

    return Draw(name, [x], {"axis": axis}, None if name == "Hardmax" else bound)


@draws("Det com.microsoft.Inverse")
def _matrices(rng: Source, full_name: str) -> Draw:
    """Of matrices in whose columns the diagonal dominates, but for their order of rows."""
    (name, domain), side, dtype = short_name(full_name), rng.size(33), rng.pick(*FLOATS)
    x = rng.numbers((rng.size(70), side, side), dtype)
    x += x.dtype.type(2 * np.abs(x).sum(-2).max(initial=1)) * np.eye(side, dtype=dtype)
    x = x[:, rng.permutation(side)]

    def bound(draw: Draw) -> list[Rounded | None]:
        # N. Higham, Accuracy and Stability of Numerical Algorithms: of dominant matrices |L||U| is at most 2n
        # |A| (9.5), of which elimination makes an error of gamma(n); that of Gauss and Jordan has the
        # condition for a factor, several times (14.4). NumPy's own in float64 are as large again.
        (value,), u = draw.wide(), unit(draw.dtype)
        wide = x.astype(np.float64)
        inverses = np.abs(np.linalg.inv(wide)).sum(-1).max(-1)
        condition = inverses * np.abs(wide).sum(-1).max(-1)
        if name == "Det":
            change = np.expm1(4 * side**2 * gamma(side, u) * condition) + gamma(side, u)
            return [Rounded(value, np.abs(value) * change, draw.dtype)]
        error = (32 * gamma(side, u) * condition * inverses)[:, None, None]
        return [Rounded(value, np.broadcast_to(error, value.shape), draw.dtype)]

    return Draw(name, [x], {}, bound, domain=domain, version=1 if domain else 26)


@draws("CumSum CumProd")
def _cumulative(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4), least=0)
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE), 0.3)
    attrs = {"exclusive": int(rng.chance(0.5)), "reverse": int(rng.chance(0.5))}
    return Draw(name, [x, np.array(rng.integers(len(dims)))], attrs, None, [1])


@draws("InstanceNormalization GroupNormalization LayerNormalization RMSNormalization")
@draws("SimplifiedLayerNormalization")
def _normalization(rng: Source, name: str) -> Draw:
    dtype, groups = rng.pick(*FLOATS), rng.pick(1, 2, 4)
    by_group, epsilon = name in ("InstanceNormalization", "GroupNormalization"), 1e-3
    dims = (rng.size(3), groups * rng.size(9), *rng.dims(rng.integers(1, 4), 300))
    axis = 2 if by_group else int(rng.integers(1, len(dims)))
    x = rng.numbers(dims, dtype)
    sizes = (dims[1],) if by_group else dims[axis:]
    parameters = [rng.numbers(sizes, dtype) for _ in range(2)]
    inputs = [x, *(parameters if by_group or name[0] == "L" else parameters[:1])]
    attrs: dict[str, Any] = {"epsilon": epsilon}
    if name == "GroupNormalization":
        attrs["num_groups"] = groups
    elif not by_group:
        attrs["axis"] = axis

    def bound(draw: Draw) -> list[Rounded | None]:
        x, scale, bias = draw.read(0), draw.read(1), 0.0
        axes, back = tuple(range(axis, len(dims))), lambda v: v
        if by_group:
            parts = groups if name[0] == "G" else dims[1]
            grouped = (dims[0], parts, dims[1] // parts, *dims[2:])
            x, axes = x.map(lambda v: v.reshape(grouped)), tuple(range(2, len(grouped)))
            per_channel = (parts, dims[1] // parts, *[1] * (len(dims) - 2))
            back = lambda v: v.reshape(per_channel)  # noqa: E731
        centred = x - x.mean(axes, True) if name[0] not in "RS" else x
        deviation = ((centred * centred).mean(axes, True) + epsilon).sqrt()
        y = centred / deviation * scale.map(back)
        if len(draw.inputs) > 2:
            bias = draw.read(2).map(back)
            y = y + bias
        return [y.map(lambda v: np.broadcast_to(v, x.value.shape).reshape(dims))]

    return Draw(name, inputs, attrs, bound)


@draws("BatchNormalization penstock.Fused(BatchNormalization)")
def _batch(rng: Source, full_name: str) -> Draw:
    dtype = "float32" if "(" in full_name else rng.pick(*FLOATS)
    dims = (rng.size(3), rng.size(65), *rng.dims(rng.integers(0, 4), 200))
    inputs = [rng.numbers(dims, dtype), *[rng.numbers(dims[1:2], dtype) for _ in range(3)]]
    inputs.append(np.abs(rng.numbers(dims[1:2], dtype)))
    attrs = {"epsilon": 1e-3}

    def bound(draw: Draw) -> list[Rounded | None]:
        shape = (-1, *[1] * (len(dims) - 2))
        x, scale, bias, mean, variance = (draw.read(i) for i in range(5))
        scale, bias, mean, variance = (
            v.map(lambda a: a.reshape(shape)) for v in (scale, bias, mean, variance)
        )
        factor = scale / (variance + attrs["epsilon"]).sqrt()
        return [x * factor + (bias - mean * factor)]

    draw = Draw("BatchNormalization", inputs, attrs, bound, rng.pick([], [1, 2, 3, 4]), version=15)
    return with_activation(rng, draw) if "(" in full_name else draw


@draws("LRN")
def _lrn(rng: Source, name: str) -> Draw:
    size, beta, bias = rng.pick(1, 2, 3, 5, 8), rng.pick(0.75, 0.5, 1.3), rng.pick(1.0, 2.0)
    x = rng.numbers((rng.size(3), rng.size(65), *rng.dims(rng.integers(1, 3), 100)), "float32")
    attrs = {"size": size, "alpha": 0.25, "beta": beta, "bias": bias}

    def bound(draw: Draw) -> list[Rounded | None]:
        x = draw.read(0)
        before, after = (size - 1) // 2, size // 2
        around = [(0, 0), (before, after), *[(0, 0)] * (x.value.ndim - 2)]
        padded = (x * x).map(lambda v: np.pad(v, around))
        total = padded[:, : x.value.shape[1]]
        for k in range(1, size):
            total = total + padded[:, k : k + x.value.shape[1]]
        sums = total * (0.25 / size) + bias
        return [x / (sums.log() * np.float64(np.float32(beta))).exp()]

    return Draw(name, [x], attrs, bound)


@draws("DFT STFT")
def _transform(rng: Source, name: str) -> Draw:
    dtype, parts = rng.pick(*FLOATS), int(rng.integers(1, 3))
    if name == "STFT":
        size, batch = rng.size(129), rng.size(5)
        length, step = int(rng.integers(1, size + 1)), rng.size(9)
        x = rng.numbers((batch, size, parts), dtype)
        window = rng.numbers((length,), dtype) if rng.chance(0.6) else None
        given = None if window is not None and rng.chance(0.5) else np.array(length)
        inputs, attrs = [x, np.array(step), window, given], {"onesided": int(rng.chance(0.5))}
        constants, axes, scale = [1, 3], (1, 2), 1.0 if window is None else np.abs(window).max()
    else:
        dims = rng.dims(rng.integers(1, 4), 2000, least=0)
        axis = int(rng.integers(len(dims)))
        attrs = {"inverse": int(rng.chance(0.5)), "onesided": int(rng.chance(0.5))}
        length = dims[axis] if rng.chance(0.5) and dims[axis] else rng.size(257)
        x = rng.numbers((*dims, parts), dtype)
        inputs = [x, np.array(length), np.array(axis - len(dims) - 1 if rng.chance(0.5) else axis)]
        # Of a symmetric spectrum, a half is read.
        scale = (1 + attrs["onesided"]) / length if attrs["inverse"] else 1.0
        constants, axes = [1, 2], (axis, -1)

    def bound(draw: Draw) -> list[Rounded | None]:
        (value,) = draw.wide()
        most = scale * np.abs(x.astype(np.float64)).sum(axes, keepdims=True)
        most = most[..., None] if name == "STFT" else most
        # Each pass adds as many products as its radix has.
        roundings = 40.0 + 8 * length.bit_length() + 4 * sum(_prime_factors(length))
        own = gamma(roundings, unit(draw.dtype)) * most
        return [Rounded.exact(0, draw.dtype).summed(value, own, most, roundings)]

    return Draw(name, inputs, attrs, bound, constants)


def _prime_factors(n: int) -> list[int]:
    factor = next((k for k in range(2, n + 1) if n % k == 0), 0)
    return [factor, *_prime_factors(n // factor)] if factor else []
