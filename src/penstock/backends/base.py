"""What a backend offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.ir import Node
from penstock.ops.base import Kernel
from penstock.types import Type


class Backend(Protocol):
    """Where kernels run: says what it supports, compiles it, allocates and copies."""

    name: str

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        """Whether ``compile`` would succeed for this node and these input types."""
        ...

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        """The kernel of a node; raises ``ShapeError`` for types the operation never takes."""
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """``nbytes`` of memory as uint8, aligned to 64 bytes; its contents are arbitrary."""
        ...

    @property
    def workers(self) -> int:
        """How many steps may run on this backend at once, at most."""
        ...
