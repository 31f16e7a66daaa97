"""PositionsBehind: what is added to scores of positions, so that softmax leaves some out.

Of lengths [batch] it returns [batch, 1, positions] (float32): -infinity from each length on, and 0
before. The pass ``decompose_attention_lstm`` creates it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import array_kernel


def check_lengths(lengths: np.ndarray, positions: int) -> None:
    """Raise ``ShapeError`` unless each memory has one of its ``positions`` at least."""
    if lengths.size and (lengths.min() < 1 or lengths.max() > positions):
        raise ShapeError(f"lengths of the memory must lie in 1 to {positions}, the positions in it")


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.tensor(types, 0).shape
    return [TensorType(FLOAT32, None if dims is None else (dims[0], 1, attrs["positions"]))]


def _behind(lengths: np.ndarray, *, positions: int) -> np.ndarray:
    check_lengths(lengths, positions)
    is_behind = np.arange(positions) >= lengths[:, None, None]
    return np.where(is_behind, FLOAT32.type(-np.inf), FLOAT32.type(0))


POSITIONS_BEHIND = Op("PositionsBehind", "penstock", 1, 1, _infer, array_kernel(_behind))
