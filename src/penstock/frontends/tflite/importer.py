"""Convert TFLite and Circle files to graphs.

The first subgraph, or that of a signature, is the entry. A subgraph that an operator uses becomes a
nested graph or, if it is called, part of the surrounding graph, each time that it is used. A
tensor becomes a value of its name, an operator the nodes that its rule emits (``rules``). Operators
are listed in the order in which they run, so that each reads what earlier ones have written.

Shapes in the file, except those of the inputs, are inferred by the converter; they are used only
where operations reject others. Names of the signatures' inputs and outputs are aliases of the
entry's.

The file is not trusted. All violations of the format, or else all operators without a kernel, are
reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel, shortened
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import cached_property, dataclass
from penstock.frontends.common.builder import UniqueNames
from penstock.frontends.common.diagnostics import NO_KERNEL, Diagnostics, NodeError, TensorError
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.frontends.common.model_files import open_path
from penstock.frontends.tflite import rules, rules_arrays  # noqa: F401 - they register rules
from penstock.frontends.tflite.conversion import RULES, OperatorConversion, RuleEntry, SubgraphScope
from penstock.frontends.tflite.file import OpenFile, opened_model
from penstock.frontends.tflite.flatbuffer import FlatTable, schema
from penstock.frontends.tflite.tensors import (
    DeclaredTensor,
    Quantization,
    TensorContents,
    blocks_of,
    dtype_of,
    input_type,
    quantization_of,
)
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops.registry import standard

if TYPE_CHECKING:
    from penstock.ops.tensorflow.state import Store


def load_tflite(
    source: str | os.PathLike[str] | bytes,
    limits: Limits = DEFAULT_LIMITS,
    map_weights: bool = False,
    signature: str | None = None,
) -> Model:
    """Read a ``.tflite`` or ``.circle`` file, or its bytes: the subgraph of ``signature`` if the
    file has it, or else the first. Raises ``InvalidModel`` for violations of the format or
    of ``limits``, ``Unsupported`` for operators without a kernel."""
    path = None if isinstance(source, bytes) else os.fspath(source)
    opened = source if isinstance(source, bytes) else partial(open_path, os.fspath(source))
    name = "the model" if path is None else os.path.basename(path)
    with importing(opened, name, limits, map_weights) as importer:
        return importer.model(path, signature)


@dataclass
class FileTotals:
    """The totals of files that are read as one model."""

    nodes: int = 0
    size: int = 0
    constant_bytes: int = 0


@contextmanager
def importing(
    source: OpenFile | bytes,
    name: str,
    limits: Limits,
    map_weights: bool,
    before: FileTotals | None = None,
    wanted: str | None = None,
) -> Iterator[SubgraphImporter]:
    """Return the importer of a file, which can be used while the context is open. ``before`` has
    the totals of other files, which also count for the limits; this file's are added at the end.
    ``wanted``: the format that the file must have."""
    before = before or FileTotals()
    with opened_model(source, name, map_weights, wanted) as (model, weights):
        reader = TensorContents(limits, model.buffers, weights)
        reader.total = before.constant_bytes
        size = before.size + weights.size
        diagnostics = Diagnostics(name, limits, lambda: size, before.nodes)
        yield SubgraphImporter(model, reader, diagnostics)
        before.nodes, before.size = diagnostics.nodes, size
        before.constant_bytes = reader.total


class SubgraphImporter:
    """Imports one file. ``store`` holds its variables; ``entry`` is the model's subgraph once it
    is imported."""

    entry: SubgraphScope

    def __init__(self, model: FlatTable, reader: TensorContents, diagnostics: Diagnostics) -> None:
        self.table = model
        self.reader = reader
        self.diagnostics = diagnostics
        self.where = diagnostics.where
        self.types = InferredTypes()
        self.names = UniqueNames(list, numbered="{}#{}")
        self.initial: dict[str, np.ndarray] = {}
        self.handles: dict[Value, int] = {}
        self.tables: dict[int, tuple[Value, Value]] = {}
        self._constants: dict[tuple[int, int], Value] = {}
        self._declared: dict[tuple[int, int], DeclaredTensor] = {}

    @cached_property
    def store(self) -> Store:
        from penstock.ops.tensorflow.state import Store

        store = Store()
        store.initial = self.initial
        return store

    def model(self, path: str | None = None, signature: str | None = None) -> Model:
        """Return the model whose entry is the subgraph of a signature, with its names, or else the
        first."""
        if not self.table.subgraphs:
            raise InvalidModel(f"{self.where} has no subgraphs; export it again")
        keys = [entry.signature_key for entry in self.table.signature_defs]
        entry = None if signature not in keys else self.table.signature_defs[keys.index(signature)]
        name, index = ("main", 0) if entry is None else (signature or "", entry.subgraph_index)
        if index >= len(self.table.subgraphs):
            self.fault(f"signature {name!r} of {self.where} is subgraph {index}, which is missing")
        scope = SubgraphScope(index, self.table.subgraphs[index], self.where, "", ())
        self.entry = scope
        names = {} if entry is None else {x.tensor_index: x.name for x in entry.inputs}
        inputs = []
        for index in scope.table.inputs:
            tensor = self.declared(scope, index).table
            given = names.get(index) or tensor.name or f"input_{index}"
            value = Value(self.names.unique(given), input_type(tensor))
            if scope.values.setdefault(index, value) is value:
                inputs.append(value)
            else:
                self.fault(f"{self.where} lists input {tensor.name!r} twice")
        wanted, aliases = [(index, "") for index in scope.table.outputs], {}
        if entry is not None:
            wanted = [(x.tensor_index, self.names.unique(x.name)) for x in entry.outputs]
            # An output with the name of an input is known by that name when it is fetched.
            shared = {x.name for x in entry.outputs} & {value.name for value in inputs}
            pairs = zip(entry.outputs, wanted, strict=True)
            aliases = {x.name: own for x, (_, own) in pairs if x.name in shared}
        self.run(scope)
        outputs = self.results(scope, wanted)
        self.diagnostics.raise_collected()
        graph = Graph(inputs, outputs, scope.nodes, name)
        return Model(
            {name: graph},
            name,
            metadata=self.metadata(graph, [*scope.table.inputs, *(index for index, _ in wanted)]),
            path=path,
            aliases=self.aliases(graph) if entry is None else aliases,
            signatures=keys,
            structure=self.structure(),
            resizable=True,
        )

    def metadata(self, graph: Graph, indices: Sequence[int]) -> dict[str, str]:
        """Return the description of the file, and as JSON the scales and zero points of quantized
        inputs and outputs, whose real numbers programs convert to codes and back."""
        metadata = {"description": self.table.description} if self.table.description else {}
        for value, index in zip([*graph.inputs, *graph.outputs], indices, strict=True):
            quantization = self.declared(self.entry, index).quantization
            if quantization is not None and len(quantization.scales) == 1:
                (scale,), (point,) = quantization.scale, quantization.zero_points
                text = f'{{"scale": {scale}, "zero_point": {point}}}'
                metadata[f"quantization of {value.name}"] = text
        return metadata

    def ports(self, graph: Graph) -> dict[Value, DeclaredTensor]:
        """Return the tensors of the entry's inputs and outputs by their values."""
        scope = SubgraphScope(0, self.table.subgraphs[0], self.where, "", ())
        indices = [*scope.table.inputs, *scope.table.outputs]
        pairs = zip([*graph.inputs, *graph.outputs], indices, strict=True)
        return {value: self.declared(scope, index) for value, index in pairs}

    def structure(self) -> dict[str, list[str]]:
        """Describe the subgraphs and signatures of the file, in lines by title."""
        subgraphs = [
            f"{index}: {shortened(repr(table.name))}, {len(table.inputs)} inputs, "
            f"{len(table.outputs)} outputs, {len(table.operators)} operators"
            for index, table in enumerate(self.table.subgraphs)
        ]
        signatures = []
        for entry in self.table.signature_defs:
            sides = (shortened(", ".join(x.name for x in s)) for s in (entry.inputs, entry.outputs))
            ports = " -> ".join(f"({side})" for side in sides)
            key = shortened(repr(entry.signature_key))
            signatures.append(f"{key} {ports}, subgraph {entry.subgraph_index}")
        return {"subgraphs": subgraphs} | ({"signatures": signatures} if signatures else {})

    def results(self, scope: SubgraphScope, wanted: Sequence[tuple[int, str]]) -> list[Value]:
        """Return the outputs of the entry, which wait for its effects. Each has a unique name: the
        name ``wanted`` for its tensor, if there is one."""
        results: list[Value] = []
        for position, (index, own) in enumerate(wanted):
            value = scope.values.get(index)
            if value is None:
                self.unwritten(scope, index, f"output {position} of {scope.where}")
                continue
            # One value cannot be two outputs with different names, and an input keeps its own
            # name.
            shared = value in results or (own and value.producer is None)
            if shared or value.const is not None or scope.effect is not None:
                name = own or self.names.unique(value.name)
                # The output gets the tensor's name, so that the value before it must give that
                # up.
                if scope.effect is not None and value.producer is not None and not own:
                    name, value.name = value.name, name
                output = Value(name, value.type)
                origin = f"output {position} of {scope.where}"
                node = Node(standard("Identity"), [value], [output], name=name, origin=origin)
                node.control_inputs += [] if scope.effect is None else [scope.effect]
                scope.nodes.append(node)
                value = output
            elif own:
                value.name = own
            results.append(value)
        return results

    def aliases(self, graph: Graph) -> dict[str, str]:
        """Return the values of the entry by their names in its signatures."""
        aliases: dict[str, str] = {}
        subgraph = self.table.subgraphs[0]
        for signature in self.table.signature_defs:
            if signature.subgraph_index:
                continue
            ports = (
                (signature.inputs, subgraph.inputs, graph.inputs),
                (signature.outputs, subgraph.outputs, graph.outputs),
            )
            for entries, indices, values in ports:
                by_tensor = dict(zip(indices, values, strict=True))
                for entry in entries:
                    if entry.tensor_index in by_tensor:
                        aliases.setdefault(entry.name, by_tensor[entry.tensor_index].name)
        taken = {value.name for value in (*graph.inputs, *graph.outputs)}
        return {name: value for name, value in aliases.items() if name not in taken}

    # Subgraphs and tensors.

    def use(
        self, scope: SubgraphScope, index: int, arguments: Sequence[Value], prefix: str
    ) -> SubgraphScope:
        """Import subgraph ``index`` for these arguments, for an operator of ``scope``. Raises
        ``NodeError``."""
        subgraphs = self.table.subgraphs
        if not 0 < index < len(subgraphs):
            raise NodeError(f"uses subgraph {index}, of {len(subgraphs)}; the first is the entry")
        callers = (*scope.callers, scope.index)
        if index in callers:  # recursion, whose expansion would not end
            raise NodeError(f"uses subgraph {index}, which it is itself part of")
        table = subgraphs[index]
        where = f"subgraph {table.name or index!r} of {self.where}"
        self.diagnostics.check_depth(len(callers), where)
        if len(arguments) != len(table.inputs):
            raise NodeError(
                f"gives {len(arguments)} arguments to {where}, which takes {len(table.inputs)}"
            )
        inner = SubgraphScope(index, table, where, prefix, callers)
        inner.values.update(zip(table.inputs, arguments, strict=True))
        self.run(inner)
        for position, output in enumerate(table.outputs):
            if output not in inner.values:
                self.unwritten(inner, output, f"output {position} of {where}")
                self.diagnostics.raise_collected()
        return inner

    def run(self, scope: SubgraphScope) -> None:
        """Import the operators of a subgraph."""
        operators = scope.table.operators
        self.diagnostics.count_nodes(1 + len(operators))
        for position, operator in enumerate(with_checkpoints(operators)):
            self.convert(scope, position, operator)
        for index in scope.table.outputs:
            self.value(scope, index)

    def fault(self, message: str) -> NoReturn:
        """Raise ``InvalidModel`` with this fault and those found before."""
        self.diagnostics.problem(f"{message}; the file is damaged: export the model again")
        self.diagnostics.raise_collected()
        raise AssertionError("a fault was not raised")

    def unwritten(self, scope: SubgraphScope, index: int, reader: str) -> None:
        name = self.declared(scope, index).table.name
        self.diagnostics.problem(
            f"{reader} is tensor {index} ({name!r}), which nothing has written"
        )

    def value(self, scope: SubgraphScope, index: int) -> Value | None:
        """Return the value of a tensor: what was written, or a constant; ``None`` if it is neither.
        A tensor without elements needs no contents."""
        value = scope.values.get(index)
        if value is not None:
            return value
        key = (scope.index, index)
        constant = self._constants.get(key)
        if constant is None:
            dtype, _, tensor = self.declared(scope, index)
            try:
                place = self.reader.place(tensor)
                if place is None:
                    if dtype is None or tensor.is_variable or 0 not in tensor.shape:
                        return None
                    array = self.without_elements(tensor.shape, dtype)
                else:
                    array = self.reader.read(tensor, dtype, place)
                    if (blocks := blocks_of(tensor)) is not None:
                        array = self.dequantized_blocks(scope, blocks, array)
            except TensorError as error:
                self.fault(f"tensor {index} ({tensor.name!r}) of {scope.where} {error}")
            name = self.names.unique(tensor.name or f"tensor_{index}")  # converters repeat names
            constant = self._constants[key] = Value(name, const=array)
        scope.values[index] = constant
        return constant

    def without_elements(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return an array of a shape with a dim of 0. ``TensorError``: impossible dims."""
        try:
            return np.empty([max(dim, 0) for dim in shape], dtype)
        except ValueError as error:  # the other dims are too large, even without elements
            raise TensorError(f"has dims {list(shape)} that no array can have") from error

    def dequantized_blocks(
        self, scope: SubgraphScope, blocks: FlatTable, codes: np.ndarray
    ) -> np.ndarray:
        """Return the real numbers of weights with a scale for each block of the last axis. Raises
        ``TensorError``."""
        size, parameters = blocks.block_size, []
        for index in (blocks.scales, *[blocks.zero_points][: blocks.zero_points > 0]):
            plain = blocks_of(self.declared(scope, index).table) is None
            value = self.value(scope, index) if plain else None
            if value is None or value.const is None or value.const.size * size != codes.size:
                raise TensorError(f"has blocks of {size} without a constant scale for each")
            parameters.append(value.const.reshape(-1, 1))
        if not codes.shape or codes.shape[-1] % size:
            raise TensorError(f"has blocks of {size}, but rows of shape {codes.shape}")
        # As float32 they take more memory than the file has bytes, and so count for the limit.
        self.reader.spend(4 * codes.size)
        numbers = codes.reshape(-1, size).astype(np.float32)
        numbers = numbers - parameters[1] if parameters[1:] else numbers
        return (numbers * parameters[0]).astype(np.float32).reshape(codes.shape)

    def declared(self, scope: SubgraphScope, index: int) -> DeclaredTensor:
        """Return a tensor of a subgraph. Raises ``InvalidModel`` for an unknown number."""
        key = (scope.index, index)
        declared = self._declared.get(key)
        if declared is None:
            tensors = scope.table.tensors
            if not 0 <= index < len(tensors):
                self.fault(f"{scope.where} refers to tensor {index}, of {len(tensors)}")
            tensor = tensors[index]
            dtype, quantization = dtype_of(tensor), None
            try:
                # Integers with a scale for each block are read as real numbers.
                if tensor.quantization is not None and dtype is not None and dtype.kind in "iu":
                    quantization = None if blocks_of(tensor) else quantization_of(tensor)
            except TensorError as error:
                self.fault(f"tensor {index} ({tensor.name!r}) of {scope.where} {error}")
            declared = self._declared[key] = DeclaredTensor(dtype, quantization, tensor)
        return declared

    def custom_options(self, operator: FlatTable) -> bytes:
        """Return the options of a custom operator, which may be outside of the flatbuffer. Raises
        ``NodeError``."""
        offset, size = operator.large_custom_options_offset, operator.large_custom_options_size
        # TFLite only accepts offsets above 1 for places after the flatbuffer.
        if offset <= 1:
            return operator.content("custom_options")
        if offset + size > self.reader.weights.size:
            raise NodeError("has options behind the end of the file: it was cut short")
        return self.reader.weights.read(offset, size).tobytes()

    def zeros(self, scope: SubgraphScope, index: int) -> np.ndarray:
        """Return the initial value of a tensor that is a variable. Raises ``NodeError``."""
        dtype, _, tensor = self.declared(scope, index)
        dims = tuple(tensor.shape)
        try:
            if dtype is None or not tensor.is_variable:
                raise TensorError("is no variable")
            size = self.reader.count(dims, dtype) * dtype.itemsize
            if excess := self.reader.limits.beyond("max_bytes", size):
                raise TensorError(f"takes {size} bytes, more {excess}")
            self.reader.spend(size)
        except TensorError as error:
            raise NodeError(f"has tensor {index} ({tensor.name!r}) as state: {error}") from error
        return np.zeros(dims, dtype)

    # Operators.

    @cached_property
    def operations(self) -> list[str]:
        """The names of the operators that are used, custom ones with the prefix "CUSTOM:"."""
        names = []
        for code in self.table.operator_codes:
            # Old files only have the deprecated code, a byte; negative ones are Circle's own.
            numbers = code.builtin_code, code.deprecated_builtin_code
            number = min(numbers) if min(numbers) < 0 else max(numbers)
            name = schema().operators.get(number, f"number {number}")
            names.append(f"CUSTOM:{code.custom_code}" if name == "CUSTOM" else name)
        return names

    def convert(self, scope: SubgraphScope, position: int, operator: FlatTable) -> None:
        """Emit the nodes into which one operator is converted."""
        if operator.opcode_index >= len(self.operations):
            count = len(self.operations)
            self.fault(f"{self.where} has an operator whose type is not among its {count}")
        op = self.operations[operator.opcode_index]
        origin = f"{op}_{position} in {scope.where}"
        inputs: list[Value | None] = []
        quantizations: list[Quantization | None] = []
        known, values, faults, place = self._declared, scope.values, [], scope.index
        for i, index in enumerate(operator.inputs):
            if index == -1:  # TFLite's index of an input that is left out
                inputs.append(None)
                quantizations.append(None)
                continue
            value = values.get(index) or self.value(scope, index)
            tensor = known.get((place, index)) or self.declared(scope, index)
            # A variable may be read before it is written: it starts with zeros.
            if value is None and not tensor.table.is_variable:
                faults.append(f"reads tensor {index} as input {i}, which nothing has written")
            inputs.append(value)
            quantizations.append(tensor.quantization)
        outputs, output_quantizations, output_dtypes = [], [], []
        for index in operator.outputs:
            tensor = known.get((place, index)) or self.declared(scope, index)
            name = tensor.table.name
            if index in values:
                faults.append(f"writes tensor {index} ({name!r}), which has a value already")
            outputs.append(Value(self.names.unique(scope.prefix + (name or f"tensor_{index}"))))
            output_quantizations.append(tensor.quantization)
            output_dtypes.append(tensor.dtype)
        rule = RULES.get(op) or rule_of(op)
        if faults:
            self.diagnostics.problem(*[f"{origin} {fault}" for fault in faults])
        elif rule is None:
            self.diagnostics.unsupported(f"tflite.{op}", NO_KERNEL, origin)
        else:
            conversion = OperatorConversion(
                f"{scope.prefix}{op.removeprefix('CUSTOM:')}_{position}",
                inputs,
                outputs,
                {},
                types=self.types,
                unique=self.names.unique,
                origin=origin,
                op=op,
                scope=scope,
                context=self,
                operator=operator,
                quantizations=quantizations,
                output_quantizations=output_quantizations,
                output_dtypes=output_dtypes,
            )
            self.diagnostics.convert(partial(conversion.apply, rule), f"tflite.{op}", origin)
            scope.nodes += conversion.nodes
        # Operators that read what could not be converted have no fault of their own to report.
        values.update(zip(operator.outputs, outputs, strict=True))


def rule_of(op: str) -> RuleEntry | None:
    """The rule of an operator; those that few models have are imported when one is asked for."""
    if op.startswith("CUSTOM:"):
        # Custom operators of images have rules among those of other such operators.
        from penstock.frontends.tflite import rules_custom, rules_images

        return RULES.get(op) or RuleEntry(rules_custom.custom)
    if op not in RULES:
        from penstock.frontends.tflite import rules_images  # noqa: F401
    if op not in RULES:
        from penstock.frontends.tflite import rules_control, rules_recurrent  # noqa: F401
    return RULES.get(op)
