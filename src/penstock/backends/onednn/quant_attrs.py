"""Scales and zero points as attributes of primitives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from penstock.backends.onednn.library import Library
from penstock.backends.onednn.primitive import SRC, descriptor_of, memory
from penstock.backends.onednn.weights import Weights
from penstock.core.records import dataclass, field

# Added to an argument of a primitive (DNNL_ARG_ATTR_*).
_SCALES, ZERO_POINTS = 4096, 8192

MakeWeights = Callable[[tuple[int, ...] | None], Weights]


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Scales and zero points by argument of the primitive: one, or one for each index of the axes
    in a mask.

    Zero points are subtracted from the elements of an input, or added to those of a result.
    ``late`` maps arguments to tensors of the ``OpDesc`` that hold zero points which are no
    constants. ``signed`` are tensors of uint8 that the primitive takes as int8, each element less
    128. ``weights`` gives constant weights with certain dims.
    """

    scales: Mapping[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    zeros: Mapping[int, int] = field(default_factory=dict)
    weights: MakeWeights | None = None
    late: Mapping[int, int] = field(default_factory=dict)
    signed: Collection[int] = ()

    def arguments(self, library: Library, attributes: Any) -> dict[int, Any]:
        """Set these on ``attributes``; return the memory that calls need for them, by argument."""
        lib, arrays = library.lib, {}
        for argument, (mask, factors) in self.scales.items():
            library.check(lib.dnnl_primitive_attr_set_scales_mask(attributes, argument, mask))
            arrays[_SCALES | argument] = factors
        for argument in (*self.zeros, *[late & ~ZERO_POINTS for late in self.late]):
            library.check(lib.dnnl_primitive_attr_set_zero_points_mask(attributes, argument, 0))
        for argument, zero in self.zeros.items():
            arrays[ZERO_POINTS | argument] = np.array([zero], np.int32)
        return {i: memory(library, descriptor_of(library, x), x) for i, x in arrays.items()}


SIGNED = Scaling(zeros={SRC: 128})
"""of a copy of uint8 as int8"""
