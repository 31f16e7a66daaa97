"""Resize with nearest or linear interpolation, where oneDNN computes what ONNX defines."""

from __future__ import annotations

import numpy as np

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.onnx.resize import Table, resize_tables

# Positions this close to halfway between two elements may be rounded either way by oneDNN.
_TIE = 1e-3
_MOST = 1 << 22
_CLOSE = 1e-6


def resampling(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a Resize along spatial axes. oneDNN supports half_pixel only."""
    node, x = desc.node, desc.input(0)
    if x is None or not 3 <= len(x.dims) <= 5 or desc.post_ops:
        return None
    mode = node.attrs.get("mode", "nearest")
    if mode not in ("nearest", "linear"):
        return None
    values = node.inputs[1:]
    if any(value is not None and value.const is None for value in values):
        return None
    types = [x, *(None if value is None else value.type for value in values)]
    consts = [None, *(None if value is None else value.const for value in values)]
    tables = resize_tables(types, node.attrs, consts)
    same = _same_nearest if mode == "nearest" else _same_linear
    if not tables or not all(table.axis >= 2 and same(table) for table in tables):
        return None

    def create(context: SpecContext) -> BoundPrimitive:
        arguments = [f"resampling_{mode}", None, context.source, context.target]
        return context.primitive("resampling_forward", arguments)

    return PrimitiveSpec(desc, create, channels_last(len(x.dims)), (desc.inputs[0],))


def _positions(table: Table) -> np.ndarray:
    """The positions on an axis of the input at which oneDNN samples it for each output."""
    return (np.arange(table.out) + 0.5) * table.size / table.out - 0.5


def _same_nearest(table: Table) -> bool:
    if table.outside is not None:
        return False
    x = _positions(table)
    nearest = np.floor(x + 0.5)
    sure = np.abs(x + 0.5 - np.round(x + 0.5)) > _TIE
    return bool(sure.all()) and np.array_equal(nearest, table.indices[0])


def _same_linear(table: Table) -> bool:
    if table.outside is not None or table.size * table.out > _MOST:
        return False
    rows = np.arange(table.out)
    wanted = np.zeros((table.out, table.size))
    for indices, weights in zip(table.indices, table.weights, strict=True):
        np.add.at(wanted, (rows, indices), weights)
    x = _positions(table)
    left = np.floor(x)
    own = np.zeros_like(wanted)
    for index, weight in ((left, left + 1 - x), (left + 1, x - left)):
        np.add.at(own, (rows, np.clip(index, 0, table.size - 1).astype(np.intp)), weight)
    return bool(np.abs(own - wanted).max() < _CLOSE)
