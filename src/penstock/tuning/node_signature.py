"""Signatures of nodes: what the cost of running one depends on."""

from __future__ import annotations

from penstock.core.records import dataclass
from penstock.core.types import STRING, RunValue, TensorType, dtype_name
from penstock.ir.graph import Node, Value

# Characters of a part of a signature; longer ones end in a digest.
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class NodeSignature:
    """The properties of a node on which its cost depends.

    Among nodes of the same ``operation`` and ``dtypes`` costs are interpolated by ``bytes``, the
    sum over all inputs and outputs; ``exact`` has the shapes too, and a digest of the attributes:
    what a model says in these is not to be read in the table of costs.
    """

    operation: str
    dtypes: str
    exact: str
    bytes: int


def tensor_bytes(value: Value | None) -> int | None:
    """Bytes of a numeric tensor of static shape; 0 for an omitted value, None for all others."""
    if value is None:
        return 0
    type_ = _static_type(value)
    return None if type_ is None else type_.nbytes


def node_signature(node: Node) -> NodeSignature | None:
    """The signature of a node; None if it has sub-graphs, or a value that is not a numeric tensor
    of static shape. Of its attributes, numbers, strings and lists of these count. Versions of an
    operation's schema are not told apart."""
    if node.graphs:
        return None
    total = 0
    dtypes, shapes = [], []
    for value in (*node.inputs, *node.outputs):
        if value is None:
            dtypes.append("_")
            shapes.append("_")
            continue
        type_ = _static_type(value)
        if type_ is None:
            return None
        assert type_.dtype is not None
        total += type_.nbytes
        dtypes.append(dtype_name(type_.dtype))
        # Constants are marked: kernels may prepare them in advance.
        shapes.append("x".join(map(str, type_.dims)) + "=" * value.is_constant)
    inputs = len(node.inputs)
    exact = f"{', '.join(shapes[:inputs])} -> {', '.join(shapes[inputs:])}"
    attrs = [f"{key}={x!r}" for key, x in sorted(node.attrs.items()) if _is_plain(x)]
    if attrs:
        exact = f"{exact}; {_digest(' '.join(attrs))}"
    form = f"{', '.join(dtypes[:inputs])} -> {', '.join(dtypes[inputs:])}"
    return NodeSignature(node.op.full_name, _shortened(form), _shortened(exact), total)


def _static_type(value: Value) -> TensorType | None:
    tensor = value.type if isinstance(value.type, TensorType) else None
    return tensor if tensor and tensor.static and tensor.dtype != STRING else None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... {_digest(text)}"


def _digest(text: str) -> str:
    from penstock.core.digests import digest

    return digest(text.encode(errors="replace"))


def _is_plain(value: RunValue) -> bool:
    values = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(x, bool | int | float | str) for x in values)
