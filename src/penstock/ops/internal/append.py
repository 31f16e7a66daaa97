"""Append: rows added behind those of a tensor, as Concat does, for caches that grow run by run.

It is not in the table of operations: the pass ``grow_caches`` creates it. Input 0 is the tensor so
far, input 1 what is added along ``axis``. NumPy's kernel copies both; one of another backend may
add the new rows behind the old ones where these lie, if nothing else was added there yet, and gives
a view that is not to be written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import Type
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.registry import array_kernel, standard


def _append(*parts: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(parts, axis)


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return standard("Concat").infer(types, attrs, consts)


APPEND = Op("Append", "penstock", 1, 1, _infer, array_kernel(_append), moves=True)
