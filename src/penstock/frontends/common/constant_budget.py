"""The bound on the bytes of one model's constants."""

from __future__ import annotations

import math

import numpy as np

from penstock.core.limits import Limits
from penstock.core.records import dataclass, field
from penstock.frontends.common.diagnostics import TensorError


@dataclass(eq=False)
class ConstantBudget:
    """Counts the bytes of a model's constants."""

    limits: Limits
    total: int = field(default=0, init=False)

    def count(self, dims: tuple[int, ...], dtype: np.dtype) -> int:
        """The number of elements. Raises ``TensorError`` for dims that NumPy cannot have."""
        limits = self.limits
        if len(dims) > limits.max_dims:
            raise TensorError(f"it has {len(dims)} dims, more than {limits.max_dims}")
        if dims and min(dims) < 0:
            raise TensorError(f"it has a negative dim in {list(dims)}")
        count = math.prod(dims)
        # Dims of 0 count as 1: strides are products of the other dims.
        extent = count or math.prod([dim or 1 for dim in dims])
        if extent > limits.max_elements or extent * dtype.itemsize >= 2**63:
            raise TensorError(f"its dims {list(dims)} multiply to more than memory can hold")
        return count

    def spend(self, nbytes: int) -> None:
        """Count bytes of constants. Raises ``TensorError`` beyond ``Limits.max_constant_bytes``."""
        self.total += nbytes
        if excess := self.limits.beyond("max_constant_bytes", self.total):
            raise TensorError(f"with it, the constants take {self.total} bytes, more {excess}")
