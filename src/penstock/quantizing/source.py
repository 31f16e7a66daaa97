"""The graph to quantize: a copy of the model's graph, with constants folded, normalizations folded
into the weights before them, and a unique name for each node and value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.errors import Unsupported
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import replace
from penstock.core.types import BOOL, TensorType
from penstock.ir.graph import Graph, Model, Node, Value, clone
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.ops.registry import standard
from penstock.passes.context import PassContext
from penstock.passes.optimize.fold_constants import owned_bytes
from penstock.passes.output_names import name_outputs
from penstock.passes.pipeline import PASSES, run_passes

# Passes that leave a model of standard operations, as exporters would have written it.
_FOLDING = tuple(
    PASSES[name]
    for name in (
        *("dead_code", "fold_constants", "simplify", "recompose", "fold_padding", "fold_affine"),
        "widen_halves",  # they are computed in float32 anyway, and layers are looked for in that
    )
)
_ROUNDS = 4
# Limit on the bytes of constants after folding, as a multiple: halves become twice as large, and
# are stored as halves again. Fewer bytes than a few do not matter.
_MOST_GROWTH, _FEW_BYTES = 2.5, 1 << 14
_LEAST_MERGED = 1024  # elements of constants that are compared
_HALF_BYTES = ("int4", "float4_e2m1fn")  # int4 is the end of uint4 as well
_FLATTENING = 12  # the last version of Softmax and its like that flattens its input


def float_model(model: Model) -> Model:
    """Return a model with the folded graph of ``model``; weights that are already quantized stay
    so. Raises ``Unsupported`` for graphs that only the frames executor can run."""
    if model.functions:
        nodes = [
            (name, "quantize takes no functions that nodes call", name) for name in model.functions
        ]
        raise Unsupported.of(nodes)
    graph = _folded(model.graph, DEFAULT_LIMITS)
    # Filters, say, that are computed of a few numbers: they are when the file is loaded, too.
    if constant_bytes(graph) > _MOST_GROWTH * constant_bytes(model.graph) + _FEW_BYTES:
        graph = _folded(model.graph, replace(DEFAULT_LIMITS, max_folded_bytes=_FEW_BYTES))
        _spread_later(graph)
    names = [value.name for value in model.graph.outputs]
    for inner in graph.graphs():
        inner.nodes = [part for node in inner.nodes for part in _spelled_out(node)]
    for node in graph.walk():
        _modernize(node)
    _merge_equal(graph)
    name_outputs(graph, names)
    _name_uniquely(graph)
    return replace(
        model, graphs={model.entry: graph}, aliases={}, artifact=None, check_types=None, path=None
    )


def _folded(graph: Graph, limits: Limits) -> Graph:
    graph = clone(graph)
    # Codes that the model has already are not to become float32 again.
    context = PassContext(fold_quantized_weights=False, limits=limits)
    # The file that is written is for batches of any size: no shapes are given.
    run_passes(_FOLDING * _ROUNDS, graph, context, len(_FOLDING))
    return graph


def _spread_later(graph: Graph) -> None:
    """Write large constants with elements that strides repeat as Expand of these."""
    nodes: list[Node] = []
    spread: dict[Value, Value] = {}
    for node in graph.walk():
        for i, value in enumerate(node.inputs):
            array = None if value is None else value.const
            if value is None or array is None or array.nbytes <= owned_bytes(array) + _FEW_BYTES:
                continue
            if value not in spread:
                own = array[tuple(slice(None if stride else 1) for stride in array.strides)]
                shape = Value(f"{value.name}/shape", const=np.array(array.shape, np.int64))
                few = Value(f"{value.name}/few", const=own.copy())
                spread[value] = Value(value.name, value.type)
                expand = standard("Expand")
                name = f"{value.name}/Expand"
                nodes.append(Node(expand, [few, shape], [spread[value]], name=name))
            node.inputs[i] = spread[value]
    graph.nodes[:0] = nodes


def constant_bytes(graph: Graph) -> float:
    """The bytes of the constants of a graph in a file; each counts once, even if several nodes read
    it."""
    read = [value for node in graph.walk() for value in node.inputs]
    constants = {v for v in [*read, *graph.outputs] if v is not None and v.is_constant}
    return sum(_nbytes(value) for value in constants)


def _nbytes(value: Value) -> float:
    array = value.const
    if array is None:
        return 0.0
    # Two of 4 bits are in a byte.
    return array.nbytes / 2 if array.dtype.name.endswith(_HALF_BYTES) else array.nbytes


def _spelled_out(node: Node) -> list[Node]:
    """The ONNX nodes that are equivalent to an operation of Penstock."""
    if node.op is not ZERO_NAN:
        return [node]
    x, output = node.inputs[0], node.outputs[0]
    assert x is not None and output is not None
    is_nan = Value(f"{output.name}/is_nan", TensorType(BOOL, x.shape))
    zero = Value(f"{output.name}/zero", const=np.zeros((), x.dtype or np.float32))
    name = f"{node.name or output.name}/IsNaN"
    return [
        node.derived([x], [is_nan], {}, op=standard("IsNaN"), name=name),
        node.derived([is_nan, zero, x], [output], {}, op=standard("Where")),
    ]


def _merge_equal(graph: Graph) -> None:
    """Merge equal constants, such as those folded separately for each use of the same weights."""
    by_form: dict[object, list[Value]] = {}
    for node in graph.walk():
        for i, value in enumerate(node.inputs):
            array = None if value is None else value.const
            if value is None or array is None or array.size < _LEAST_MERGED:
                continue
            # Hash only a part: most constants differ in the first elements.
            form = array.dtype, array.shape, array.reshape(-1)[:16].tobytes()
            known = by_form.setdefault(form, [])
            same = [v for v in known if v is value or np.array_equal(v.const, array)]  # type: ignore[arg-type]
            node.inputs[i] = same[0] if same else value
            known += [] if same else [value]


def _modernize(node: Node) -> None:
    """Write an old operation that flattens its input first as one of an axis, where that is the
    same."""
    # Of these alone the newest version means something else.
    if node.op.domain or node.op.version != _FLATTENING or standard(node.op.name) is node.op:
        return
    value = node.inputs[0]
    type_ = None if value is None else value.type
    if isinstance(type_, TensorType) and type_.rank:
        axis = node.attrs.get("axis", 1) % type_.rank
        behind = type_.shape[axis + 1 :] if type_.shape is not None else ()
        if all(dim == 1 for dim in behind):
            node.op, node.attrs = standard(node.op.name), {"axis": axis}


def _values(graph: Graph) -> Iterator[Value]:
    for node in graph.walk():
        yield from filter(None, node.outputs)


def _name_uniquely(graph: Graph) -> None:
    """Give each node, and each value that a node produces, a name that no other has."""
    taken = {value.name for value in graph.inputs} | {value.name for value in graph.outputs}
    kept = {*graph.outputs, *graph.inputs}
    for value in _values(graph):
        if value not in kept:
            value.name = _unused(value.name or "value", taken)
    names: set[str] = set()
    for node in graph.walk():
        node.name = _unused(node.name or node.op.name, names)


def _unused(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}/{number}"
    taken.add(name)
    return name
