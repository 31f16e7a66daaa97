"""What a primitive does to its result before it writes it: oneDNN's post-ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.backends.onednn.eltwise_algorithms import BINARY, ELTWISE, Eltwise
from penstock.backends.onednn.layouts import (
    broadcasts,
    channels_last,
    longer_steps,
    padded,
    regrouped,
    steps_of,
    usual,
)
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.primitive import (
    SRC_1,
    WEIGHTS,
    Descriptor,
    attributes,
    memory,
    post_argument,
)
from penstock.ir.graph import Node, Value
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.types import FLOAT32, TensorType

_SUM = "sum"
_PRELU = "prelu"


@dataclass(frozen=True, slots=True)
class PostOp:
    """A function of one element, or of the result and a tensor of the work, by its index."""

    eltwise: Eltwise | None = None
    binary: str = ""
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class PostOps:
    """Post-ops in their order, for a result of ``dims``. ``constants`` are those of the work, and
    behind them any that a family has computed."""

    dims: tuple[int, ...] = ()
    posts: tuple[PostOp, ...] = ()
    constants: tuple[np.ndarray | None, ...] = ()

    def __len__(self) -> int:
        return len(self.posts)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors of the work that they read and that are not known, by their indices."""
        known = self.constants
        return tuple([p.tensor for p in self.posts if p.tensor >= 0 and known[p.tensor] is None])

    def behind(
        self, first: Sequence[PostOp], dims: Sequence[int], constants: Sequence[np.ndarray | None]
    ) -> PostOps:
        """These behind ``first``, for a result of ``dims`` and ``constants``."""
        return PostOps(tuple(dims), (*first, *self.posts), tuple(constants))

    def without_bias(self, axis: int) -> tuple[np.ndarray | None, PostOps]:
        """If the first adds a constant for each index of ``axis``: that, and the rest."""
        if not self.posts or self.posts[0].binary != "add":
            return None, self
        known = self.constants[self.posts[0].tensor]
        if known is None:
            return None, self
        dims = padded(known.shape, len(self.dims))
        if any(n > 1 for i, n in enumerate(dims) if i != axis % len(dims)):
            return None, self
        bias = np.ascontiguousarray(np.broadcast_to(known.reshape(-1), self.dims[axis]))
        return bias, replace(self, posts=self.posts[1:])

    def repeats(self, tensors: Sequence[TensorType | None]) -> bool:
        """Whether an operand has elements for some axes of the result, and not for all."""
        for post in self.posts:
            if post.eltwise is None:
                known = self.constants[post.tensor]
                kind = tensors[post.tensor] if known is None else None
                dims = () if kind is None else kind.dims
                if self._repeats(dims if known is None else known.shape):
                    return True
        return False

    def _repeats(self, dims: Sequence[int]) -> bool:
        return any(n > 1 for n in dims) and padded(dims, len(self.dims)) != self.dims

    def attributes(
        self,
        library: Library,
        view: Callable[[Sequence[int]], Sequence[int]],
        tensors: Sequence[TensorType | None],
        strides: Sequence[Sequence[int] | None],
        summed: bool = False,
    ) -> PostOpArguments:
        """The attributes of a primitive whose result is of ``view(dims)``, of which the operands
        are views alike. ``strides`` are those of the work's tensors, in bytes; with ``summed`` the
        first operand lies where the result is written."""
        ffi, lib = library.ffi, library.lib
        attr = attributes(library)
        if not self.posts:
            return PostOpArguments(attr, {}, {})
        handle = ffi.new("dnnl_post_ops_t *")
        library.check(lib.dnnl_post_ops_create(handle))
        posts = ffi.gc(handle[0], lib.dnnl_post_ops_destroy)
        late: dict[int, int] = {}
        fixed: dict[int, Any] = {}
        for i, post in enumerate(self.posts):
            if post.eltwise is not None:
                name, alpha, beta = post.eltwise
                code = getattr(lib, f"dnnl_eltwise_{name}")
                library.check(lib.dnnl_post_ops_append_eltwise(posts, code, alpha, beta))
                continue
            if summed and i == 0:
                kind = lib.dnnl_data_type_undef
                library.check(lib.dnnl_post_ops_append_sum(posts, 1.0, 0, kind))
                continue
            known = self.constants[post.tensor]
            if known is not None:
                known = _laid(known, self.dims, strides[-1])
                own: tuple[int, ...] = known.shape
                lies: Sequence[int] | None = known.strides
            else:
                kind = tensors[post.tensor]
                assert kind is not None
                own, lies = kind.dims, strides[post.tensor]
            dims = padded(own, len(self.dims))
            if self._repeats(own) and not _is_usual(self.dims, strides[-1]):
                # In other layouts, oneDNN 3.2 takes the wrong elements, or some beyond the last.
                raise DnnlError(UNIMPLEMENTED)
            seen = view(dims)
            steps = regrouped(dims, longer_steps(lies or steps_of(own), len(dims)), seen)
            descriptor = Descriptor(library, seen, FLOAT32, steps)
            if post.binary == _PRELU:
                mask = sum(1 << axis for axis, n in enumerate(seen) if n > 1)
                library.check(lib.dnnl_post_ops_append_prelu(posts, mask))
                argument = post_argument(i, WEIGHTS)
            else:
                code = getattr(lib, f"dnnl_binary_{post.binary}")
                library.check(lib.dnnl_post_ops_append_binary(posts, code, descriptor.handle))
                argument = post_argument(i, SRC_1)
            if known is None:
                late[argument] = post.tensor
            else:
                fixed[argument] = memory(library, descriptor.handle, known)
        library.check(lib.dnnl_primitive_attr_set_post_ops(attr, posts))
        return PostOpArguments(attr, late, fixed)


@dataclass(frozen=True, slots=True)
class PostOpArguments:
    """Attributes with post-ops, and the arguments that these add: tensors of the work by their
    indices, and memory that is always the same."""

    attributes: Any
    tensors: dict[int, int]
    fixed: dict[int, Any]


def posts_of(
    nodes: Sequence[Node],
    place: Mapping[Value, int],
    tensors: Sequence[TensorType | None],
    constants: Sequence[np.ndarray | None],
) -> PostOps | None:
    """What the nodes behind the first do with its result; None if it is no chain of post-ops.

    ``place`` says which tensor of the work each value is that they read and do not make.
    """
    (value,) = nodes[0].outputs
    assert value is not None
    kind = value.type
    if not isinstance(kind, TensorType) or not kind.static:
        return None
    posts: list[PostOp] = []
    for node in nodes[1:]:
        assert value is not None
        made = node.outputs[0]
        assert made is not None
        if not isinstance(made.type, TensorType) or made.type.shape != kind.shape:
            return None
        one = ELTWISE.get(node.op.name)
        chain = None if one is None else one(node)
        if node.op is ZERO_NAN and nodes[0].op.name == "Softmax":
            # oneDNN's relu makes 0 of NaN, and leaves all else that a Softmax gives as it is.
            chain = (Eltwise("relu"),)
        if chain is not None and node.inputs[0 if node.inputs[0] is value else -1] is value:
            posts += [PostOp(each) for each in chain]
        else:
            found = _binary(node, value, place)
            if found is None:
                return None
            operand = tensors[found[-1].tensor]
            if operand is None or not broadcasts(operand.dims, kind.dims):
                return None
            posts += found
        value = made
    return PostOps(kind.dims, tuple(posts), tuple(constants))


def _binary(node: Node, value: Value, place: Mapping[Value, int]) -> list[PostOp] | None:
    """An operation of the result and another tensor."""
    if len(node.inputs) != 2 or None in node.inputs:
        return None
    first = node.inputs[0] is value
    other = node.inputs[1 if first else 0]
    assert other is not None
    name = BINARY.get(node.op.name)
    if node.op.name == "PRelu" and first and node.op.since >= BROADCASTING_PRELU:
        name = _PRELU
    if name is None or other not in place:
        return None
    tensor = place[other]
    if first or name in ("add", "max", "min", "mul"):
        return [PostOp(binary=name, tensor=tensor)]
    if name == "sub":
        return [PostOp(Eltwise("linear", -1.0)), PostOp(binary="add", tensor=tensor)]
    return None  # a quotient by the result would be rounded twice


BROADCASTING_PRELU = 7


def _is_usual(dims: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether a tensor lies with its dims in their own order, or with its channels last."""
    layouts = [steps_of(dims), steps_of(dims, channels_last(len(dims)))]
    return strides is None or usual(dims, strides) in layouts


def _laid(known: np.ndarray, dims: Sequence[int], strides: Sequence[int] | None) -> np.ndarray:
    """A constant with its dims in the order in memory that the result has them in."""
    if strides is None or known.ndim != len(dims):
        return np.ascontiguousarray(known)
    order = sorted(range(len(dims)), key=lambda axis: -strides[axis])
    return np.ascontiguousarray(known.transpose(order)).transpose(np.argsort(order))
