"""Random nodes for tests of compiled kernels: their source of numbers, and the registry of functions
that draw them.

Such a function draws dims of 0 and 1, around multiples of vectors and prime, windows larger than what
they look at, numbers of all magnitudes, subnormal, infinite and NaN, indices out of range. A draw
without a bound is compared with NumPy bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from penstock.core.types import STRING
from penstock.ir.graph import Node
from penstock.ir.op import Op
from penstock.ops.internal.fused import fused
from tests.support.error_bounds import Rounded, gamma, unit
from tests.support.native_kernels import expected, node_of

FLOATS, WHOLE = ("float32", "float64"), ("int32", "int64")
CODES = ("uint8", "int8")
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 23, 31, 32, 33, 37, 63, 64, 65, 129, 257)


class Source(np.random.Generator):
    """A generator of random numbers that prefers what is awkward."""

    def pick(self, *options: Any) -> Any:
        return options[self.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.random() < probability)

    def size(self, most: int = 257, least: int = 1) -> int:
        return int(self.pick(*[n for n in SIZES if least <= n <= most]))

    def dims(self, rank: int, elements: int = 6000, least: int = 1) -> tuple[int, ...]:
        """As many dims; now and then one is 0."""
        dims = [1] * rank
        for axis in self.permutation(rank):
            room = elements // math.prod([max(n, 1) for n in dims])
            dims[axis] = self.size(max(min(room, 257), 1), least)
        if rank and not least and self.chance(0.9):
            dims = [max(n, 1) for n in dims]
        return tuple(dims)

    def numbers(self, dims: Sequence[int], dtype: str, wild: float = 0.0) -> np.ndarray:
        """Numbers of similar magnitudes, of different ones, or with probability ``wild`` of all that
        there are, special ones among them."""
        kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
        if kind == "b":
            return self.random(dims) < 0.5
        if kind in "iu":
            ends = np.iinfo(dtype)
            x = self.integers(ends.min, ends.max, dims, dtype, endpoint=True)
            if self.chance(0.5):
                return np.asarray(x % 7).astype(dtype)
            special = np.array([ends.min, ends.max, 0, 1, ends.max // 2], dtype)
            return np.where(self.random(dims) < 0.1, self.choice(special, dims), x)
        x = self.normal(0, self.pick(0.3, 1, 4), dims)
        if self.chance(0.4):
            x = x * 2.0 ** self.integers(-8, 8, dims)
        if self.chance(0.2):
            x = x + self.pick(-30.0, 100.0)
        if self.chance(wild):
            ends = ml_dtypes.finfo(dtype)
            x = np.where(self.random(dims) < 0.2, x * 2.0 ** self.integers(-140, 120, dims), x)
            special = [*(np.nan, np.inf, -np.inf, 0.0, -0.0, float(ends.max), float(ends.tiny))]
            special += [float(ends.smallest_subnormal), -float(ends.max), 88.7, -103.9, 0.5, 1.5, 1]
            x = np.where(self.random(dims) < 0.1, self.choice(special, dims), x)
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def broadcast(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims that broadcast to these."""
        kept = [1 if self.chance(0.3) else n for n in dims]
        return tuple(kept[self.integers(len(kept) + 1) :] if self.chance(0.3) else kept)

    def named(self, texts: Sequence[str], dims: Sequence[int]) -> np.ndarray:
        return np.asarray(np.array(texts, STRING)[self.integers(len(texts), size=dims)], STRING)


@dataclass(eq=False)
class Draw:
    """A node with its inputs. ``bound`` gives the outputs with their errors, None for those that
    are as NumPy's; ``is_formula``: NumPy's kernel has no form in float64, and the value of the bound
    is the exact result. ``specials``: infinities and NaNs are those of the exact result."""

    name: str | Op
    inputs: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    bound: Callable[[Draw], Sequence[Rounded | None]] | None = None
    constants: Sequence[int] = ()
    outputs: int = 1
    domain: str = ""
    version: int = 26
    fused: Callable[[Node], Node] | None = None
    is_formula: bool = False
    specials: bool = False

    @cached_property
    def node(self) -> Node:
        return self._node(self.inputs)

    def _node(self, inputs: Sequence[Any]) -> Node:
        options = (self.constants, self.outputs, self.domain, self.version)
        attrs = {k: int(v) if isinstance(v, np.integer) else v for k, v in self.attrs.items()}
        node = node_of(self.name, inputs, *options, **attrs)
        return node if self.fused is None else self.fused(node)

    @property
    def dtype(self) -> np.dtype:
        """That of the arithmetic."""
        floats = [x.dtype for x in self.inputs if x is not None and is_float(x)]
        is_wide = bool(floats) and floats[0].itemsize == 8
        return np.dtype("float64" if is_wide else "float32")

    def read(self, i: int) -> Rounded:
        return Rounded.exact(self.inputs[i], self.dtype)

    def wide(self, change: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> list[np.ndarray]:
        """NumPy's results in float64, of inputs that are changed."""
        inputs = [
            change(x.astype(np.float64)) if x is not None and is_float(x) else x
            for x in self.inputs
        ]
        return [np.asarray(y) for y in expected(self._node(inputs), inputs)]

    def linear(self, roundings: float) -> list[Rounded | None]:
        """The bound of sums of products, each of as many factors and terms in all."""
        # Where a factor is below 1, what it is of may overflow.
        attrs = self.attrs.items()
        sizes = {k: max(abs(v), 1.0) if isinstance(v, float) else v for k, v in attrs}
        (value, *_), (most, *_) = self.wide(), replace(self, attrs=sizes).wide(np.abs)
        own = gamma(roundings, unit(self.dtype)) * most
        return [Rounded.exact(0, self.dtype).summed(value, own, most, roundings)]


def is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16


Drawer: TypeAlias = Callable[[Source, str], Draw]
DRAWS: dict[str, Drawer] = {}


def draws(*names: str) -> Callable[[Drawer], Drawer]:
    """Register a function for operations of these full names, apart by spaces."""

    def register(function: Drawer) -> Drawer:
        DRAWS.update({name: function for text in names for name in text.split()})
        return function

    return register


def short_name(full_name: str) -> tuple[str, str]:
    domain, _, name = full_name.rpartition(".")
    return name, domain


def near(x: Rounded, number: float) -> Rounded:
    """A parameter, rounded to the type of ``x``."""
    return x.rounded(np.float64(number), 0.0)


def followed(node: Node, after: Sequence[tuple[str, int]], other: Any) -> Node:
    """A node with operations behind it as one, which read ``other`` too if they are of two."""
    nodes = [node]
    for operation, more in after:
        values = [nodes[-1].outputs[0], *[other] * more]
        nodes.append(joined(operation, values))
    return fused(nodes)


def _zero(value: Any) -> np.ndarray:
    return np.zeros((), value.type.dtype) if value.const is None else value.const


def joined(operation: str, values: Sequence[Any], **attrs: Any) -> Node:
    """A node that reads these values, and may follow those that compute them."""
    arrays = [None if v is None else np.broadcast_to(_zero(v), v.type.dims) for v in values]
    node = node_of(operation, arrays, **attrs)
    return Node(node.op, list(values), node.outputs, attrs)


HOLDER = Op("Holder", "tests", 1, 1, lambda types, attrs, consts: types[:1], lambda *_: None)


def limits_of_codes(rng: Source, zero: np.ndarray) -> list[int]:
    """Codes that bound others: from the lowest or the zero point on, up to the highest or less."""
    ends = np.iinfo(zero.dtype)
    low = rng.pick(ends.min, int(zero))
    return [low, rng.pick(ends.max, min(low + 90, ends.max))]
