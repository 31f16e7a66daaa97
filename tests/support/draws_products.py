"""Random products of matrices, of numbers and of codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ops.internal.chosen_product import CHOSEN_MATMUL
from penstock.ops.internal.fused import fused
from tests.support.draws import (
    CODES,
    FLOATS,
    HOLDER,
    WHOLE,
    Draw,
    Source,
    draws,
    followed,
    joined,
    limits_of_codes,
    short_name,
)
from tests.support.error_bounds import Rounded, smallest, unit


def operands_of_product(rng: Source, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    k, n, m = rng.size(), rng.size(), rng.size(65)
    lead = rng.dims(rng.integers(3), 4)
    lead_b = rng.broadcast(lead) if rng.chance(0.5) else ()
    a = rng.numbers((*lead, m, k), dtype, 0.15)
    b = rng.numbers((*lead_b, k, n), dtype, 0.15)
    return a, b


@draws("MatMul penstock.Fused(MatMul)")
def _matmul(rng: Source, name: str) -> Draw:
    is_fused = "(" in name
    dtype = "float32" if is_fused else rng.pick(*FLOATS, *FLOATS, *WHOLE)
    a, b = operands_of_product(rng, dtype)
    constants = [1] if is_fused or rng.chance(0.5) else []
    if is_fused:
        b = b.reshape(-1, *b.shape[-2:])[0]
    elif rng.chance(0.1):
        a = a[(0,) * (a.ndim - 1)]
    bound = bound_of_products(a.shape[-1] + 1 + is_fused) if dtype in FLOATS else None
    draw = Draw("MatMul", [a, b], {}, bound, constants)
    return with_activation(rng, draw) if is_fused else draw


@draws("Gemm penstock.Fused(Gemm)")
def _gemm(rng: Source, name: str) -> Draw:
    is_fused = "(" in name
    dtype = "float32" if is_fused else rng.pick(*FLOATS)
    a, b = (x.reshape(-1, *x.shape[-2:])[0] for x in operands_of_product(rng, dtype))
    return _gemm_of(rng, a, b, dtype, is_fused)


def _gemm_of(rng: Source, a: np.ndarray, b: np.ndarray, dtype: str, is_fused: bool) -> Draw:
    turned = [int(rng.chance(0.4)) for _ in range(2)]
    if is_fused:
        turned[0] = 0
    term = rng.pick(None, (), (b.shape[1],), (a.shape[0], 1), (a.shape[0], b.shape[1]))
    if is_fused:
        term = (b.shape[1],)
    inputs = [x.T.copy() if t else x for x, t in zip((a, b), turned, strict=True)]
    inputs += [] if term is None else [rng.numbers(term, dtype)]
    attrs = {"transA": turned[0], "transB": turned[1]}
    if rng.chance(0.3) and not is_fused:
        attrs |= {"alpha": 0.5, "beta": -2.0}
    constants = [1, 2] if is_fused else rng.pick([], [1])
    products = bound_of_products(a.shape[1] + 4)

    def bound(draw: Draw) -> Sequence[Rounded | None]:
        (result,) = products(draw)
        if "alpha" not in attrs or result is None:
            return [result]
        # It may multiply either operand first, by which a subnormal one is rounded: the other
        # operand multiplies this error.
        sums = np.abs(a.astype(float)).sum(1)[:, None], np.abs(b.astype(float)).sum(0)
        most = np.nan_to_num(np.maximum(*sums), nan=np.inf)
        return [result.inexact(smallest(result.dtype) / 2 * most)]

    draw = Draw("Gemm", inputs, attrs, bound, constants)
    return with_activation(rng, draw) if is_fused else draw


def bound_of_products(roundings: float) -> Callable[[Draw], Sequence[Rounded | None]]:
    return lambda draw: draw.linear(roundings)


def with_activation(rng: Source, draw: Draw) -> Draw:
    """With what may follow products, which changes no error but by its own rounding."""
    after = rng.pick([("Relu", 0)], [("Neg", 0)], [("Relu", 0), ("Neg", 0)])
    plain, bound = draw.node, draw.bound
    assert bound is not None

    def bounded(draw: Draw) -> Sequence[Rounded | None]:
        (result,) = bound(Draw(draw.name, draw.inputs, draw.attrs, bound, draw.constants))
        assert result is not None
        for operation, _ in after:
            result = result.maximum(0.0) if operation == "Relu" else -result
        return [result]

    draw.bound, draw.fused = bounded, lambda node: followed(node, after, plain.inputs[0])
    del draw.__dict__["node"]
    return draw


@draws("penstock.ChosenMatMul")
def _chosen(rng: Source, name: str) -> Draw:
    count, k, n, rows = rng.integers(1, 6), rng.size(129), rng.size(129), rng.size(9)
    turned, columns = rng.chance(0.5), rng.chance(0.5)
    dtype, lead = rng.pick(*FLOATS), rng.dims(2, 12)
    x = rng.numbers((*lead, *((k, 1) if columns else (rows, k))), dtype)
    matrices = rng.numbers((count, n, k) if turned else (count, k, n), dtype)
    indices = rng.integers(-count, count, (*lead, 1))
    if rng.chance(0.1):
        indices.flat[0] = rng.pick(count, -count - 1, 2**62)
    attrs = {"transposed": turned, "columns": columns}
    return Draw(CHOSEN_MATMUL, [x, matrices, indices], attrs, bound_of_products(k + 1))


@draws("MatMulInteger QLinearMatMul com.microsoft.QGemm penstock.Fused(MatMulInteger)")
def _codes_product(rng: Source, full_name: str) -> Draw:
    (x_dtype, w_dtype), k, n = (rng.pick(*CODES), rng.pick(*CODES)), rng.size(), rng.size()
    rows = rng.pick((rng.size(65),), rng.dims(2, 60))
    x, w = rng.numbers((*rows, k), x_dtype), rng.numbers((k, n), w_dtype)
    zeros = [rng.numbers((), x_dtype), rng.numbers(rng.pick((), (n,)), w_dtype)]
    if "MatMulInteger" in full_name:
        draw = Draw("MatMulInteger", [x, w, *zeros], constants=[1, 3])
        if "(" in full_name:
            scale = np.array(0.25, np.float32)
            return Draw(
                HOLDER,
                [x, w, *zeros, scale],
                constants=[1, 3, 4],
                fused=lambda node: scaled(node, "MatMulInteger"),
            )
        return draw
    scales = [np.array(0.02, np.float32), rng.uniform(0.001, 0.01, zeros[1].shape)]
    x_scale, w_scale = (np.asarray(s, np.float32) for s in scales)
    result = [np.array(0.1, np.float32), rng.numbers((), x_dtype)]
    if full_name == "QLinearMatMul":
        inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], *result]
        return Draw(full_name, inputs, constants=[1, *range(3, 8)])
    bias = rng.integers(-(10**6), 10**6, n, np.int32)
    x = x.reshape(-1, k)
    inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], bias, *result]
    constants = [1, *range(3, 9)]
    attrs = {"code_limits": limits_of_codes(rng, result[1])} if rng.chance(0.5) else {}
    return Draw("QGemm", inputs, attrs, None, constants, domain="com.microsoft", version=1)


def scaled(node: Node, operation: str, **attrs: Any) -> Node:
    """Sums of codes, which become float32 and are multiplied by a power of two, exactly."""
    *operands, scale = node.inputs
    sums = joined(operation, operands, **attrs)
    real = joined("Cast", [sums.outputs[0]], to=1)
    return fused([sums, real, joined("Mul", [real.outputs[0], scale])])


@draws("DynamicQuantizeLinear tflite.DynamicRangeCodes")
def _dynamic(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    x = rng.numbers(rng.dims(rng.integers(bool(domain), 4), least=0), "float32")
    return Draw(name, [x], outputs=3, domain=domain, version=1 if domain else 26)


@draws("com.microsoft.MatMulNBits")
def _blocks(rng: Source, name: str) -> Draw:
    bits, block = rng.pick(2, 4, 8), rng.pick(16, 32, 64)
    k, n = 16 * rng.size(17), rng.size()
    count = -(-k // block)
    rows = rng.pick((rng.size(17),), rng.dims(2, 30))
    codes = rng.integers(0, 256, (n, count, block * bits // 8), np.uint8)
    inputs = [
        *(rng.numbers((*rows, k), "float32"), codes),
        *(rng.random((n, count), np.float32) / 2**bits, None, None, None),
    ]
    if rng.chance(0.5):
        inputs[3] = rng.integers(0, 256, (n, -(-count * bits // 8)), np.uint8)
    if rng.chance(0.3):
        inputs[5] = rng.numbers((n,), "float32")
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    if by_codes := rng.chance(0.5):
        attrs["accuracy_level"] = 4

    def bound(draw: Draw) -> list[Rounded | None]:
        numbers, packed, scales, zeros, _, bias = draw.inputs
        x = draw.read(0)
        if by_codes:  # each block of a row may become int8 over its own range
            padding = [(0, 0)] * len(rows) + [(0, count * block - k)]
            blocks = np.abs(np.pad(numbers.astype(np.float64), padding)).reshape(
                *rows, count, block
            )
            x = x.inexact(np.repeat(blocks.max(-1) / 127 * 0.51, block, axis=-1)[..., :k])
        codes, half = _unpacked(packed, bits).reshape(n, count, block), 2.0 ** (bits - 1)
        # Codes, and what zero points shift them by, may be summed apart; weights are rounded once,
        # and sums as in any product.
        parts = [codes - half]
        if zeros is not None:
            shifts = half - _unpacked(zeros, bits)[:, :count, None]
            parts.append(np.broadcast_to(shifts, codes.shape))
        sums = []
        for part in parts:
            w = (part * scales[..., None].astype(np.float64)).reshape(n, -1)[:, :k]
            weights = Rounded.exact(w, draw.dtype).rounded(w, 0, 2)
            sums.append(x @ weights.map(np.transpose))
        y = sum(sums[1:], sums[0])
        return [y if bias is None else y + bias.astype(np.float64)]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    return Draw("MatMulNBits", inputs, attrs, bound, [1, 2, 3], **options)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits, the lowest of a byte first."""
    parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
    return np.asarray(parts.reshape(*packed.shape[:-1], -1))


@draws("com.microsoft.MoE", "com.microsoft.QMoE")
def _experts(rng: Source, name: str) -> Draw:
    tokens, experts, hidden, inner = rng.size(33), rng.integers(2, 6), 32, 32 * rng.integers(1, 4)
    is_quantized, activation = name.endswith(".QMoE"), rng.pick("relu", "silu", "identity", "gelu")
    inputs: list[Any] = [None] * (15 if is_quantized else 8)
    inputs[0] = rng.normal(size=(1, tokens, hidden)).astype(np.float32)
    inputs[1] = rng.normal(size=(tokens, experts)).astype(np.float32)
    layers = {2: (inner, hidden), 5 if is_quantized else 4: (hidden, inner)}
    for place, (rows, columns) in layers.items():
        if is_quantized:
            inputs[place] = rng.integers(0, 256, (experts, rows, columns // 2), np.uint8)
            inputs[place + 1] = rng.random((experts, rows), np.float32) / 64
        else:
            inputs[place] = rng.normal(size=(experts, rows, columns)).astype(np.float32) / 8
    attrs = {"k": 2, "activation_type": activation}
    attrs |= {"expert_weight_bits": 4} if is_quantized else {"normalize_routing_weights": 1}

    def weights_of(draw: Draw, place: int, expert: int) -> Rounded:
        w = draw.inputs[place][expert]
        if not is_quantized:
            return Rounded.exact(w.T.astype(np.float64), draw.dtype)
        w = _unpacked(w, 4) - 8.0
        w = w * draw.inputs[place + 1][expert][:, None].astype(np.float64)
        return Rounded.exact(w.T, draw.dtype).rounded(w.T, 0, 2)

    def bound(draw: Draw) -> list[Rounded | None]:
        x, shares = draw.read(0)[0], draw.read(1)
        order = np.argsort(-draw.inputs[1], axis=1, kind="stable")[:, :2]
        routes = shares.map(lambda v: np.take_along_axis(v, order, 1)).softmax(1)
        total = draw.read(0)[0] * 0.0
        for expert in range(experts):
            h = x
            for place in layers:
                h = h @ weights_of(draw, place, expert)
                h = _activated(h, activation) if place == 2 else h
            for choice in range(2):
                share = routes[:, choice : choice + 1]
                total = total + h * share * (order[:, choice : choice + 1] == expert)
        return [total[None]]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    constants = [i for i, array in enumerate(inputs) if i > 1 and array is not None]
    return Draw(short_name(name)[0], inputs, attrs, bound, constants, **options)


def _activated(x: Rounded, name: str) -> Rounded:
    if name == "gelu":  # its form with tanh, or with erf: both have slopes below 1.13
        return x.lipschitz(
            lambda v: v * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))), 1.13
        ).inexact(8 * unit(x.dtype) * np.abs(x.value))
    return {"relu": x.maximum(0.0), "silu": x * x.sigmoid()}.get(name, x)
