"""ONNX's operator schemas, read from a text file and checked against nodes. The onnx package would
take 7 MB of memory to look one up.

``schemas.txt`` contains all versions of all operations of the onnx release to which the package is
pinned; ``python -m tools.onnx_schemas`` writes it. The first line has the last opset of each
domain, the second lists sets of types. Each other line is an operation: its domain, its name, and
the fields of ``OnnxSchema`` from ``version`` on for each version, newest first. Sets of types are
given by number::

     Sign [[13,1,1,1,1,{},[["input","T",0,true,7]],[["output","T",0,true,7]]],[9,...]]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import ProblemList
from penstock.core.records import NamedTuple, dataclass
from penstock.ir.graph import Graph, Model, Node
from penstock.ir.op import Attrs

# The codes of attribute kinds and element types in files are fixed for ever. They are written out
# here because importing protobuf, which has them too, takes as long as opening a saved session.


class AttributeKind:
    """Codes of attribute kinds (``AttributeProto.AttributeType``)."""

    # Not an enum: defining one takes as long as twenty other classes, in every process.
    FLOAT, INT, STRING, TENSOR, GRAPH, FLOATS, INTS, STRINGS, TENSORS, GRAPHS = range(1, 11)
    SPARSE_TENSOR, SPARSE_TENSORS, TYPE_PROTO, TYPE_PROTOS = range(11, 15)


_ELEMENTS = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING"),
    *("BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2"),
)
ELEMENT_TYPES: Mapping[str, int] = {name: code for code, name in enumerate(_ELEMENTS)}
"""codes of element types by their names in upper case"""

# Dtypes whose names differ from those of element types in lower case.
_NAMES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT4E2M1": "float4_e2m1fn",
    "FLOAT6E2M3": "float6_e2m3fn",
    "FLOAT6E3M2": "float6_e3m2fn",
    "FLOAT8E8M0": "float8_e8m0fnu",
}
DTYPE_NAMES: Mapping[int, str] = {
    code: _NAMES.get(name) or name.lower().replace("float8", "float8_")
    for name, code in ELEMENT_TYPES.items()
    if code
}
"""names of dtypes by codes of element types"""


FILE = os.path.join(os.path.dirname(__file__), "schemas.txt")
OPTIONAL, VARIADIC = 1, 2
"""the ``option`` of a port that may be left out, and of one that stands for any number of values"""

# Attributes that operations of the first versions may have, and that have no meaning.
LEGACY = frozenset({"consumed_inputs"})

# Python types of attributes, and of the elements of lists, by the kind of the list.
_KINDS: Mapping[int, tuple[type, ...]] = {
    AttributeKind.INT: (int,),
    AttributeKind.FLOAT: (int, float),
    AttributeKind.STRING: (str,),
    AttributeKind.TENSOR: (np.ndarray,),
    AttributeKind.GRAPH: (Graph,),
}
_LISTS: Mapping[int, int] = {
    AttributeKind.INTS: AttributeKind.INT,
    AttributeKind.FLOATS: AttributeKind.FLOAT,
    AttributeKind.STRINGS: AttributeKind.STRING,
}

TYPE_NAMES: Mapping[int, str] = {
    kind: name for name, kind in vars(AttributeKind).items() if name.isupper()
}


class SchemaAttribute(NamedTuple):
    """``type`` is an ``AttributeKind``; ``default`` is serialized, in hexadecimal digits."""

    type: int
    required: bool
    default: str


class SchemaPort(NamedTuple):
    """An input or an output. ``types`` are the allowed ones; empty if all are allowed."""

    name: str
    type_str: str
    option: int
    is_homogeneous: bool
    types: frozenset[str]

    @property
    def variable(self) -> str:
        """The name of its type: equal names mean equal types; "" if its type is independent."""
        return "" if self.option == VARIADIC and not self.is_homogeneous else self.type_str

    def takes(self, type_: str) -> bool:
        return type_ in self.types or not self.types


@dataclass(frozen=True, eq=False)
class OnnxSchema:
    """The schema of one version of one operation."""

    name: str
    domain: str
    version: int
    min_input: int
    max_input: int
    min_output: int
    max_output: int
    attributes: Mapping[str, SchemaAttribute]
    inputs: Sequence[SchemaPort]
    outputs: Sequence[SchemaPort]

    def as_kind(self, name: str, x: Any) -> Any:
        """Return ``x`` with integers converted to floats if the attribute holds floats."""
        kind = self.attributes[name].type if name in self.attributes else 0
        if kind == AttributeKind.FLOAT and type(x) is int:
            return float(x)
        if kind == AttributeKind.FLOATS and isinstance(x, list):
            return [float(element) if type(element) is int else element for element in x]
        return x

    def kind_of(self, name: str, x: object) -> int:
        """Return the kind of an attribute's value: the schema's if the value fits, 0 for none."""
        wanted = self.attributes[name].type if name in self.attributes else 0
        if wanted and _is_of_kind(x, wanted):
            return wanted
        return next((kind for kind in (*_KINDS, *_LISTS) if _is_of_kind(x, kind)), 0)

    def node_faults(self, node: Node, names: Iterable[str]) -> Iterator[str]:
        """``faults`` for a node that is not from a file, with these attributes."""
        kinds = {name: self.kind_of(name, node.attrs[name]) for name in names}
        return self.faults(kinds, node.inputs, len(node.outputs))

    def faults(
        self, types: Mapping[str, int], inputs: Sequence[Any], outputs: int
    ) -> Iterator[str]:
        """Yield the faults of a node with these attributes (their kinds by name) and values, as
        ends of sentences that begin with the node."""
        for name, code in types.items():
            wanted = self.attributes.get(name)
            if wanted is None:
                if name not in LEGACY and not name.startswith("_"):
                    yield f"has an attribute {name!r}, which {self} does not have"
            elif wanted.type != code:
                names = f"{TYPE_NAMES.get(code, code or 'unknown')}, not {TYPE_NAMES[wanted.type]}"
                yield f"has an attribute {name!r} that is of kind {names}"
        for name, attribute in self.attributes.items():
            if attribute.required and name not in types and name not in LEGACY:
                yield f"lacks attribute {name!r}, which {self} requires"
        for role, count, least, most in (
            ("inputs", len(inputs), self.min_input, self.max_input),
            ("outputs", outputs, self.min_output, self.max_output),
        ):
            if not least <= count <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                # Schemas use the largest int32 for "any number".
                if most > 2**30:
                    allowed = f"at least {least}"
                yield f"has {count} {role}, but {self} has {allowed}"
        for i, value in enumerate(inputs[: self.max_input]):
            if value is None:
                port = self.inputs[min(i, len(self.inputs) - 1)]
                if port.option != OPTIONAL:
                    yield f"leaves out input {i} ({port.name}), which {self} requires"

    def __str__(self) -> str:
        return f"{self.domain + '.' if self.domain else ''}{self.name}-{self.version}"


# Schemas name the values of these attributes only in prose. Operations check the modes that they
# read (``shape_rules.choice``); listed here are flags, and modes that not every kernel reads.

# Integers that are 0 or 1 in every operation that has them.
_FLAGS = frozenset(
    """
    align_corners allowzero antialias broadcast ceil_mode center_point_box channels_last
    count_include_pad detect_negative detect_positive do_rotary exclude_outside exclusive fmod
    input_forget interleaved inverse is_case_sensitive is_causal is_test keepdims largest layout
    linear_before_reset multi_class new_axis noop_with_empty_axes one_class onesided output_sequence
    periodic reverse saturate select_last_index sorted spatial storage_order training_mode transA
    transB transBatchA transBatchB unidirectional upper zeros
    """.split()  # noqa: SIM905 - a list of words
)

_MODES: Mapping[tuple[str, str], tuple[int | str, ...]] = {
    ("Attention", "qk_matmul_output_mode"): (0, 1, 2, 3),
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    ("Gelu", "approximate"): ("none", "tanh"),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch", "not_larger", "not_smaller"),
    ("Resize", "nearest_mode"): ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    ("RoiAlign", "coordinate_transformation_mode"): ("half_pixel", "output_half_pixel"),
}


def value_faults(op: str, names: Iterable[str], attrs: Attrs) -> Iterator[str]:
    """Yield the faults of attribute values, as ends of sentences that begin with the node.

    ``names`` are the node's own attributes; ``attrs`` may contain defaults in addition.
    """
    for name in names:
        allowed = (0, 1) if name in _FLAGS else _MODES.get((op, name))
        value = attrs.get(name)
        if allowed is not None and isinstance(value, int | str) and value not in allowed:
            listed = ", ".join(map(repr, allowed))
            yield f"has {name} = {value!r:.40}, which must be one of {listed}"


@lru_cache(maxsize=4096)
def find_schema(name: str, domain: str, opset: int) -> OnnxSchema | None:
    """Return the schema that ``name`` has in an opset of its domain, or None."""
    schema = _read(name, domain, opset)
    if schema is None or schema.version == opset:
        return schema
    return find_schema(name, domain, schema.version)  # opsets share the record of one version


def _read(name: str, domain: str, opset: int) -> OnnxSchema | None:
    """Read the newest version of an operation that is not newer than an opset."""
    lines, sets, _ = _table()
    # Parsed line by line: a model uses some 30 of the listed operations.
    versions = json.loads(lines.get((domain, name), "[]"))
    for version, *numbers, attributes, inputs, outputs in versions:
        if version <= opset:
            ports = [
                [SchemaPort(*[*port, sets[i]]) for *port, i in side] for side in (inputs, outputs)
            ]
            attrs = {key: SchemaAttribute(*fields) for key, fields in attributes.items()}
            fields: list[Any] = [name, domain, version, *numbers, attrs, *ports]
            return OnnxSchema(*fields)
    return None


def first_schema(name: str, domain: str) -> OnnxSchema | None:
    """Return the schema of the first version of an operation, or None if ONNX has no such one."""
    lines, _, _ = _table()
    versions = json.loads(lines.get((domain, name), "[]"))
    return find_schema(name, domain, versions[-1][0]) if versions else None


def operation_names(domain: str) -> list[str]:
    """Return the names of the operations of a domain that ONNX has in any opset."""
    return [name for own, name in _table()[0] if own == domain]


def newest_opset(domain: str) -> int:
    """Return the last opset of a domain in the onnx package, or 0 for other domains."""
    return _table()[2].get(domain or "ai.onnx", 0)


@cache
def _table() -> tuple[Mapping[tuple[str, str], str], Sequence[frozenset[str]], Mapping[str, int]]:
    """Return the lines of operations by domain and name, the sets of types, and the last opsets."""
    with open(FILE, encoding="ascii") as file:
        newest, sets, *lines = file.read().splitlines()
    keys = [line.split(" ", 2) for line in lines]
    operations = {(domain, name): text for domain, name, text in keys}
    return operations, [frozenset(s) for s in json.loads(sets)], json.loads(newest)


def _is_of_kind(x: object, kind: int) -> bool:
    """Whether an attribute value of a node fits an ``AttributeKind``."""
    if kind not in _LISTS:
        return kind not in _KINDS or isinstance(x, _KINDS[kind])
    if not isinstance(x, list | tuple):
        return False
    # Tree ensembles have long lists, whose elements are of few classes.
    types, classes = _KINDS[_LISTS[kind]], {*map(type, x)}
    return classes.issubset(types) or all(issubclass(c, types) for c in classes)


def check_schemas(nodes: Iterable[Node]) -> None:
    """Raise ``InvalidModel`` for faults of nodes that no importer has checked."""
    problems = ProblemList()
    sound: set[tuple[Any, ...]] = set()  # most nodes of a model are alike
    for node in with_checkpoints(nodes):
        attrs, inputs = node.attrs, node.inputs
        key: list[Any] = [node.op, len(inputs), len(node.outputs), *attrs]
        for x in attrs.values():
            # The kind of a list is that of its elements.
            if isinstance(x, list | tuple):
                key.append(frozenset(map(type, x)))
            else:
                key.append(type(x))
        if None in inputs:
            key += [i for i, value in enumerate(inputs) if value is None]
        if (judged := tuple(key)) in sound:
            continue
        schema = find_schema(node.op.name, node.op.domain, node.op.version)
        faults: list[str] = []
        if schema is not None:
            own = [name for name in attrs if name in schema.attributes]
            faults = list(schema.node_faults(node, own))
            problems.add(*[f"{node.label} {fault}" for fault in faults])
        if not faults:
            sound.add(judged)
    problems.raise_any()


def nodes_of(model: Model) -> Iterator[Node]:
    """Yield all nodes of a model's graphs and functions."""
    for graph in (*model.graphs.values(), *model.functions.values()):
        yield from graph.walk()
