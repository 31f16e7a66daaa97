"""Kernels made by formulas of traced dims equal those compiled for the dims: the same arguments of the
same calls."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from penstock.backends.dynamic_shapes import KernelCache, _typed, _types
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import ShapeError, TensorType
from penstock.ir.layout import channels_last
from tests.support.differential import drawn
from tests.support.draws import Source
from tests.support.kernel_draws import DRAWS
from tests.support.native_kernels import LIBRARIES, pytestmark  # noqa: F401

# Operations of whose kernels a formula is expected for most draws of open dims.
TRACED = (
    *(
        "Conv",
        "penstock.Fused(Conv)",
        "penstock.Fused(MatMul)",
        "Gemm",
        "LayerNormalization",
        "MatMul",
        "Softmax",
    ),
    *("Add", "Gelu", "penstock.Fused", "MaxPool", "ReduceSum", "penstock.Attention"),
)


def arguments(backend, node, types, inputs):
    """Those of the call that is compiled for these types; None if there is no kernel. Raises
    ``ShapeError``."""
    typed = _typed(node, types, {})
    kernel = backend.static_kernel(typed, _types(typed.inputs))
    if kernel is None or kernel.binder is None:
        return None
    parts = kernel.binder.function_parts(inputs, None)
    return None if parts is None else parts[1]


def same(a, b):
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and (a is b or a == b or not isinstance(a, str | int))


def arrays_of(rng, types):
    """Arrays of these types, some with channels last."""
    last = rng.chance(0.5)
    arrays = []
    for t in types:
        order = channels_last(len(t.dims)) if t is not None and last else ()
        if t is None:
            arrays.append(None)
        elif order:
            memory = np.zeros([t.dims[axis] for axis in order], t.dtype)
            arrays.append(memory.transpose(np.argsort(order)))
        else:
            arrays.append(np.zeros(t.dims, t.dtype))
    return arrays


def compared(operation, seed, seen):
    """Compare what a formula for a draw's dims gives with what is compiled, for these dims and
    others; count in ``seen``."""
    node = drawn(operation, seed).node
    rng = Source(np.random.PCG64(seed))
    types = _types(node.inputs)
    if not all(t is None or (isinstance(t, TensorType) and t.static) for t in types):
        return
    is_open = [
        v is not None and not v.is_constant and len(t.dims) > 0 and t.dtype != object
        for v, t in zip(node.inputs, types, strict=True)
    ]
    if not any(is_open):
        return
    shapes = [
        tuple([None] * len(t.dims)) if own else None for own, t in zip(is_open, types, strict=True)
    ]
    opened = [
        t if shape is None else TensorType(t.dtype, shape)
        for shape, t in zip(shapes, types, strict=True)
    ]
    backend = NativeBackend(LIBRARIES[-1])
    inputs = arrays_of(rng, types)
    wanted = arguments(backend, node, types, inputs)
    cache = KernelCache(backend, node, opened, (), True)
    cache._trace(inputs)
    seen["compiled"] += wanted is not None
    if not cache._formulas:
        return
    assert wanted is not None
    seen["traced"] += 1
    (own,) = cache._formulas
    given = own.formula([inputs[i].shape[axis] for i, axis in own.places])
    assert same(given, wanted)
    dims = sorted({n for t, o in zip(types, is_open, strict=True) if o for n in t.dims})
    for _ in range(6):
        changed = {n: n for n in dims}
        for n in dims:
            if rng.chance(0.6):
                changed[n] = int(rng.pick(n + 1, max(n - 1, 0), 2 * n, rng.size(64), 1, n + 16))
        others = [
            TensorType(t.dtype, tuple([changed[n] for n in t.dims])) if o else t
            for t, o in zip(types, is_open, strict=True)
        ]
        if any(t is not None and t.elements > 1 << 22 for t in others):
            continue
        arrays = []
        for t, x in zip(others, inputs, strict=True):
            order = np.argsort([-s for s in x.strides], kind="stable") if x is not None else ()
            if t is None:
                arrays.append(None)
            else:
                memory = np.zeros([t.dims[axis] for axis in order], t.dtype)
                arrays.append(memory.transpose(np.argsort(order)))
        result = own.formula([arrays[i].shape[axis] for i, axis in own.places])
        wanted = None
        with suppress(ShapeError), np.errstate(all="ignore"):
            wanted = arguments(backend, node, others, arrays)
        if result is not None:
            if cache._layouts(arrays) != own.layouts:
                continue
            seen["served"] += 1
            assert wanted is not None, (others, "no kernel")
            assert same(result, wanted), (others, result, wanted)


@pytest.mark.parametrize("operation", DRAWS)
def test_formula_equals_the_compiled_kernel_or_does_not_hold(operation):
    seen = Counter()
    for seed in range(6):
        compared(operation, seed, seen)


@pytest.mark.parametrize("operation", TRACED)
def test_kernels_of_common_operations_are_traced(operation):
    seen = Counter()
    for seed in range(20):
        compared(operation, seed, seen)
    assert seen["traced"] >= 0.7 * seen["compiled"] > 0
    assert seen["served"]
