"""Roles of a decoder's inputs, and its positions and masks, recognized by trial evaluation.

Exporters write positions and masks in dozens of ways, with ranges, comparisons, expansions and
gathers. The results depend only on the numbers of rows and of past positions, so they are evaluated
for a few such numbers, with a mask of ones::

    7 rows after 11 positions       [11, 12, 13, 14, 15, 16, 17]    the positions of the rows
                                    0 up to each row, then -inf     rows see those before them

and once after tens of thousands of positions, which shows whether there is a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from penstock.core.errors import PenstockError, RowsStay
from penstock.core.limits import Limits
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops.internal.packed import LOWEST
from penstock.passes.context import PassContext
from penstock.passes.lowering.count_tokens import count_tokens
from penstock.passes.pipeline import PASSES, STRUCTURE, optimize, run_passes

ROWS, PAST = 7, 11
"""sizes of the graph in which rows are located: no other dim is likely to equal them"""
_OTHER = 13, 5
_FEW = 3
_FAR = tuple([part << n for n in range(15, 2, -1) for part in (4, 3)])
"""numbers of positions to try: a model's tables may have fewer than the largest"""
_SOURCE, _OTHER_SOURCE, _FAR_SOURCE = 17, 23, 1000
"""numbers of positions of an encoder's output"""
_ABSENT = 5
"""a mask is 0 at every fifth position"""
_OF_ENCODERS = frozenset(("encoder", "cross"))
_OF_DECODERS = frozenset(("decoder", "past", "self"))
_OF_TOKENS = 2
_OF_CACHES = (np.float32, np.float16)
_WORD = re.compile("[a-z]+")
_FOLDED = 1 << 26  # largest folded constant, in bytes
_FEW_NODES = 8
_FOLD = PASSES["fold_constants"]


class Roles(NamedTuple):
    """Roles of a decoder's inputs, by name: ``rows`` have one row per token, ``positions`` are
    their position ids, ``masks`` are attention masks, ``caches`` are past keys or values [batch,
    groups, past, size]. Without caches, each step reads all tokens. ``fixed`` inputs are the same
    in all steps of a sequence: an encoder's outputs."""

    rows: Sequence[str]
    positions: Sequence[str]
    masks: Sequence[str]
    caches: Sequence[str]
    fixed: Sequence[str]


def roles_of(graph: Graph) -> Roles:
    """Return the roles of the inputs of a graph. Raises ``RowsStay`` if one is unknown."""
    roles: dict[str, list[str]] = {name: [] for name in Roles._fields}
    words = {v: frozenset(_WORD.findall(v.name.lower())) for v in graph.inputs}
    # A full encoder-decoder has names such as input_ids and decoder_input_ids.
    halves = any("decoder" in words[v] and len(v.shape or ()) == _OF_TOKENS for v in words)
    for value, own in words.items():
        fixed = is_of_encoder(value.name) or (halves and not own & _OF_DECODERS)
        roles["fixed" if fixed else _role_of(value)].append(value.name)
    tokens = [
        v for v in graph.inputs if v.name in roles["rows"] and v.dtype and v.dtype.kind == "i"
    ]
    if not roles["rows"] or not (roles["caches"] or tokens):
        raise RowsStay("the graph has no inputs for caches, or none with rows")
    return Roles(**roles)


def is_of_encoder(name: str) -> bool:
    """Whether the name of a decoder's input or output denotes an encoder's result."""
    return not _OF_ENCODERS.isdisjoint(_WORD.findall(name.lower()))


def present_of(name: str) -> str:
    """Return exporters' name of the output that returns the updated cache of an input."""
    return name.replace("past_key_values", "present").replace("past", "present")


def _role_of(value: Value) -> str:
    """Return the role of an input, a field name of ``Roles``."""
    shape, name, dtype = value.shape or (), value.name.lower(), value.dtype
    if "position" in name and len(shape) == 1 and dtype is not None and dtype.kind == "i":
        return "positions"
    free = [i for i, dim in enumerate(shape) if not isinstance(dim, int)]
    inner = free if shape[:1] == (1,) else free[1:] if free[:1] == [0] else []
    if dtype is not None and inner == [2] and len(shape) == 4 and dtype in _OF_CACHES:
        return "caches"
    if dtype is None or len(shape) < 2 or len(inner) != 1:
        raise RowsStay(f"input {value.name!r} has neither an axis of rows nor of past positions")
    if "mask" in name and len(shape) == 2:
        return "masks"
    if inner != [1]:
        raise RowsStay(f"input {value.name!r} has neither an axis of rows nor of past positions")
    return "positions" if "position" in name and len(shape) == 2 and dtype.kind == "i" else "rows"


def prepared(source: Graph) -> Graph:
    """Return a copy with length-independent values folded, and without padding tokens."""
    graph = clone(source)
    run_passes((*STRUCTURE, _FOLD), graph, PassContext())
    count_tokens(graph, roles_of(graph).rows)
    return graph


def with_sizes_of_heads(graph: Graph) -> Graph:
    """Return the graph, or a copy with the caches' head size set: some exporters leave that dim
    symbolic although it follows from GroupQueryAttention, or from what is appended to the cache."""
    unknown = {v: v.shape for v in graph.inputs if v.shape and len(v.shape) == 4}
    if all(isinstance(shape[3], int) for shape in unknown.values()):
        return graph
    copy = clone(graph)
    run_passes((_FOLD,), copy, PassContext())
    caches = {v for v in copy.inputs if v.shape and len(v.shape) == 4}
    for node in copy.nodes:
        for value in caches.intersection(node.inputs):
            size = _size_of_heads(node, value)
            if size is not None and value.shape:
                value.type = TensorType(value.dtype, (*value.shape[:3], size))
    return copy


def _size_of_heads(node: Node, cache: Value) -> int | None:
    """Return the last dim of a cache by a node that appends to it, if it is known."""
    if node.op.name == "GroupQueryAttention" and cache in node.inputs[3:5]:
        heads, groups = node.attrs["num_heads"], node.attrs["kv_num_heads"]
        width = (node.inputs[0].shape or (None,))[-1] if node.inputs[0] is not None else None
        share = heads if node.input(1) is not None else heads + 2 * groups
        return width // share if isinstance(width, int) else None
    if node.op.full_name != "Concat":
        return None
    sizes = [v.shape[3] for v in node.inputs if v is not None and v.shape and len(v.shape) == 4]
    return next((size for size in sizes if isinstance(size, int)), None)


def is_mask(value: Value) -> bool:
    """Whether an input is an attention mask."""
    return "mask" in value.name.lower() and len(value.shape or ()) == _OF_TOKENS


def sample_graph(graph: Graph, roles: Roles, rows: int, past: int, source: int = _SOURCE) -> Graph:
    """Return a copy of a graph for a sample of ``rows`` after ``past`` positions, with masks of
    ones, and ``source`` positions of an encoder's output."""
    copy = clone(graph)
    inputs = [*copy.inputs]
    for value in inputs:
        assert value.shape is not None
        if value.name in roles.masks:
            value.set_constant(np.ones((1, past + rows), value.dtype))
            copy.inputs.remove(value)
            continue
        fixed = value.name in roles.fixed
        middle = past if value.name in roles.caches else source if fixed else rows
        sizes = [middle if not isinstance(n, int) else n for n in value.shape]
        if len(sizes) > 1:
            sizes[0] = 1
        value.type = TensorType(value.dtype, tuple(sizes))
    return copy


class Probe(NamedTuple):
    """The values, by name, that a graph computes from the numbers of ``rows`` and ``past``
    positions alone; and flags of the encoder output's ``present`` positions, if it has a mask."""

    rows: int
    past: int
    values: Mapping[str, np.ndarray]
    present: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        """Return the positions of the rows: int64 [rows]."""
        return np.arange(self.past, self.past + self.rows)

    def offset_of(self, name: str) -> int | None:
        """Return the constant offset of a value from the rows' positions; None for other values."""
        array = self.values.get(name)
        if array is None or array.size != self.rows or array.dtype.kind not in "iuf":
            return None
        if array.shape.count(1) != array.ndim - 1:
            return None
        offsets = {float(n) for n in array.reshape(-1) - self.positions}
        offset = offsets.pop()
        return int(offset) if not offsets and offset.is_integer() else None

    def window(self, bias: np.ndarray, lowest: float = LOWEST) -> int | None:
        """Return the window size if a bias masks all positions outside it, by numbers up to
        ``lowest`` or by flags: 0 for all positions up to a row's own; None for other masks."""
        if bias.shape[-2:] != (self.rows, self.rows + self.past):
            return None
        bias = bias.reshape(-1, *bias.shape[-2:])
        seen = bias if bias.dtype == np.bool_ else bias > lowest
        if (seen != seen[0]).any():
            return None
        before, own = np.arange(self.past + self.rows), self.positions[:, None]
        window = int(seen[0][-1].sum())
        if (seen[0] != ((before <= own) & (before > own - window))).any():
            return None
        return 0 if window == len(before) else window


class Probes:
    """Probes of a graph: ``near`` ones with few positions, the first of ``ROWS`` after ``PAST``,
    and ``far`` ones in decreasing order of length. ``whole``: evaluate all nodes; else only those
    that depend on input lengths, which mostly suffice. Raises ``RowsStay`` if a graph computes rows
    after past ones one at a time only."""

    def __init__(self, graph: Graph, roles: Roles, whole: bool) -> None:
        self._graph = graph if whole else _of_lengths(graph, roles)
        self._roles = roles
        sizes = (ROWS, PAST, _SOURCE), (*_OTHER, _OTHER_SOURCE)
        try:
            self.near = [self._probe(*own) for own in sizes]
        except PenstockError as error:
            raise one_by_one(error) from error
        self._far: list[Probe] = []
        self._left = self._farther()

    @property
    def far(self) -> Iterator[Probe]:
        """Yield the far probes, cached ones first."""
        yield from self._far
        for probe in self._left:
            self._far.append(probe)
            yield probe

    def optimized(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield constants, by name, of graphs optimized for other numbers of rows and positions:
        few, and many if the model supports these."""
        far = [(_FEW, total - _FEW, _FAR_SOURCE) for total in _FAR]
        for sizes in ((*_OTHER, _OTHER_SOURCE), *far):
            with suppress(PenstockError):
                graph, _ = self._sample(*sizes)
                optimize(graph)
                read = {v for node in graph.nodes for v in node.inputs if v is not None}
                yield {v.name: v.const for v in read if v.const is not None}

    def _sample(self, rows: int, past: int, source: int) -> tuple[Graph, np.ndarray | None]:
        """Return a graph for these numbers of positions, and the encoder's mask, if any."""
        present = None
        copy = sample_graph(self._graph, self._roles, rows, past, source)
        for value in [v for v in copy.inputs if v.name in self._roles.fixed and is_mask(v)]:
            copy.inputs.remove(value)
            present = _present(value.dims[1])
            value.set_constant(present.astype(value.dtype)[None])
        for value in [v for v in copy.inputs if v.name in self._roles.positions]:
            copy.inputs.remove(value)
            positions = np.arange(past, past + rows, dtype=value.dtype)
            value.set_constant(positions if len(value.shape or ()) == 1 else positions[None])
        return copy, present

    def _farther(self) -> Iterator[Probe]:
        for total in _FAR:
            with suppress(PenstockError):  # tables may have fewer positions
                yield self._probe(_FEW, total - _FEW, _FAR_SOURCE)

    def _probe(self, rows: int, past: int, source: int) -> Probe:
        copy, present = self._sample(rows, past, source)
        values = [v for node in copy.nodes for v in node.outputs if v is not None]
        copy.outputs = [*values]  # folding replaces them by constants
        run_passes((_FOLD,), copy, PassContext(limits=Limits(max_folded_bytes=_FOLDED)))
        pairs = zip(values, copy.outputs, strict=True)
        constants = {v.name: w.const for v, w in pairs if w.const is not None}
        return Probe(rows, past, constants, present)


def one_by_one(error: PenstockError) -> RowsStay:
    """Return the reason for the error of a graph for several rows after past ones: some exporters
    write masks for a whole prompt or a single row only."""
    return RowsStay(f"the graph cannot compute several rows after past ones: {error}")


def _present(count: int) -> np.ndarray:
    """Return flags of positions, some of which are masked."""
    return np.arange(count) % _ABSENT != _ABSENT - 1


def _of_lengths(graph: Graph, roles: Roles) -> Graph:
    """Return the part of a graph that depends on lengths of inputs and of values computed by a few
    nodes from these."""
    known = (*roles.masks, *roles.positions)
    before: dict[Value, frozenset[Node]] = {
        v: frozenset()
        for v in graph.inputs
        if v.name not in known and not (v.name in roles.fixed and is_mask(v))
    }
    kept: set[Node] = set()
    for node in graph.nodes:
        own = [before[v] for v in node.inputs if v is not None and v in before]
        sources = frozenset([node]).union(*own)
        if own and node.op.name in ("Shape", "Size") and len(sources) <= _FEW_NODES:
            kept |= sources
        elif own:
            before.update({v: sources for v in node.outputs if v is not None})
        elif not node.nests:
            kept.add(node)
    return Graph(graph.inputs, [], [node for node in graph.nodes if node in kept], graph.name)
