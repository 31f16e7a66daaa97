"""One operator of a TFLite file for the rule that converts it.

A rule is a function of an ``OperatorConversion``, registered by the names of its operators. It
receives the operator's inputs as values, which are integers where the file has quantized tensors:
``quantizations`` and ``output_quantizations`` say what they represent. Quantized tensors reach a
rule in one of two ways:

* ``@operator_rule(..., moves=True)``: the operator only moves elements, so the integers are moved
  directly if inputs and outputs have the same quantization;
* by default the rule operates on real numbers, between DequantizeLinear and QuantizeLinear nodes,
  which later passes may fuse into kernels of 8-bit codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.core.records import KW_ONLY, NamedTuple, dataclass, field
from penstock.core.types import FLOAT32, INT64, TensorType, dtype_name
from penstock.frontends.common.builder import NodeBuilder, Operand
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.flatbuffer import FlatTable, schema
from penstock.frontends.tflite.tensors import DeclaredTensor, Quantization
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import AttrDict, Attrs
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW

if TYPE_CHECKING:
    from penstock.ops.tensorflow.state import Store


class OperatorContext(Protocol):
    """The import as rules see it. ``store`` holds the variables, which start with the values
    of ``initial``; ``handles`` has the numbers of tables, ``tables`` their keys and values."""

    table: FlatTable
    initial: dict[str, np.ndarray]
    handles: dict[Value, int]
    tables: dict[int, tuple[Value, Value]]

    @property
    def store(self) -> Store: ...

    def use(
        self, scope: SubgraphScope, index: int, arguments: Sequence[Value], prefix: str
    ) -> SubgraphScope:
        """Import a subgraph for these arguments, for an operator of ``scope``."""

    def declared(self, scope: SubgraphScope, index: int) -> DeclaredTensor:
        """Return a tensor of a subgraph."""

    def zeros(self, scope: SubgraphScope, index: int) -> np.ndarray:
        """Return the initial value of a tensor that is a variable."""

    def custom_options(self, operator: FlatTable) -> bytes:
        """Return the options of a custom operator."""


Rule = Callable[["OperatorConversion"], object]


class RuleEntry(NamedTuple):
    """A rule, and the arguments of ``operator_rule`` for it."""

    convert: Rule
    outputs: int | None = None
    moves: bool = False
    integers: bool | Callable[[OperatorConversion], bool] = False
    codes: Callable[[OperatorConversion], CodeLayer | None] | None = None


_type_of_codes = cache(TensorType)
_element_number = cache(lambda dtype: element_number(dtype.name))
RULES: dict[str, RuleEntry] = {}
BOUNDS = {0: (-math.inf, math.inf), 1: (0.0, math.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}
"""the bounds that activations impose on results, by their number in the schema"""


def operator_rule(
    *operators: str,
    outputs: int | None = 1,
    moves: bool = False,
    integers: bool | Callable[[OperatorConversion], bool] = False,
    codes: Callable[[OperatorConversion], CodeLayer | None] | None = None,
) -> Callable[[Rule], Rule]:
    """Register a rule for operators with this number of ``outputs``, or any. ``moves``: they
    only move elements. ``integers``: the rule converts quantized tensors itself, if it is True or
    returns True; it also does so where ``codes`` describes them (``OperatorConversion.codes``)."""

    def register(function: Rule) -> Rule:
        entry = RuleEntry(function, outputs, moves, integers, codes)
        RULES.update(dict.fromkeys(operators, entry))
        return function

    return register


class CodeLayer(NamedTuple):
    """Scales and zero points of x, weights and the result, for ONNX's operations on 8-bit codes;
    and the smallest and largest code of the result, as bounded by the activation."""

    x: Sequence[Operand]
    w: Sequence[Operand]
    y: Sequence[Operand]
    limits: list[int]

    def convolved(self, image: Value, weights: Value, bias: Operand = None) -> list[Operand]:
        """Return the inputs of a QLinearConv."""
        return [image, *self.x, weights, *self.w, *self.y, bias]

    @property
    def attrs(self) -> AttrDict:
        """The attributes of operations whose sums are rescaled in integers."""
        return {"code_limits": self.limits, "fixed_point": 1}


@dataclass(eq=False)
class OperatorConversion(NodeBuilder):
    """An operator. ``op`` is its name in the schema, ``options`` the table of its options, which
    ``option`` reads. ``inputs`` that are left out are ``None``."""

    _: KW_ONLY
    op: str
    scope: SubgraphScope
    context: OperatorContext
    operator: FlatTable
    quantizations: list[Quantization | None]
    output_quantizations: list[Quantization | None]
    output_dtypes: list[np.dtype | None]
    options: FlatTable | None = field(init=False)
    codes: CodeLayer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Operators that were added later, those of StableHLO, have their options in a second union.
        options = self.operator.builtin_options
        self.options = self.operator.builtin_options2 if options is None else options

    def option(self, name: str, kind: str = "") -> Any:
        """Return a field of the options, or its default if they are left out and ``kind`` names
        their table. Raises ``NodeError`` for the options of another operator."""
        if self.options is None or name not in schema().tables[self.options.kind]:
            given = schema().tables[kind].get(name) if kind else None
            if given is None or self.options is not None:
                raise NodeError(f"has no option {name!r}; export the model again")
            return given.default
        return getattr(self.options, name)

    def declared_shape(self, index: int) -> Sequence[int]:
        """Return the shape that the file declares for input ``index``, without inference. It may
        be wrong: rules use it for operations that reject other shapes when they are compiled."""
        table = self.context.declared(self.scope, self.operator.inputs[index]).table
        return table.shape

    def take(self, least: int, most: int | None = None) -> list[Any]:
        """Return ``least`` inputs, or up to ``most`` (-1: any number); ``None`` if left out."""
        count = len(self.inputs)
        if most is not None and most < 0:
            least = most = max(least, count)
        if not least <= count <= (most or least):
            raise NodeError(f"has {count} inputs, but {self.op} takes {least}")
        if None in self.inputs[:least]:
            raise NodeError(f"leaves out input {self.inputs.index(None)}, which {self.op} needs")
        return [*self.inputs, *[None] * ((most or least) - count)]

    def emit_tensorflow(self, op: str, inputs: Sequence[Operand], **attrs: Any) -> None:
        """Emit an operation of the domain "tensorflow" as the final node."""
        self.emit_final(op, inputs, attrs, domain=TENSORFLOW)

    def reshaped(self, value: Value, shape: Value) -> Value:
        """Return a value in another shape; if it was dequantized, its codes are reshaped."""
        node = value.producer
        if node is None or node.op.name != "DequantizeLinear":
            return self.emit("Reshape", [value, shape], allowzero=1)
        # The conversion stays next to the operation that reads it, where later passes look for it.
        codes, *scales = node.inputs
        codes = self.emit("Reshape", [codes, shape], allowzero=1)
        return self.emit("DequantizeLinear", [codes, *scales], node.attrs)

    def cast_final(self, value: Any, dtype: np.dtype | None, op: str = "Cast") -> None:
        if dtype is None:
            raise InexpressibleError("its output is a handle")
        self.emit_final(op, [value], {"to": _element_number(dtype)})

    def append_cast(self, value: Value, output: Value | None, dtype: np.dtype | None) -> None:
        """Emit one more output, cast to its element type."""
        number = element_number("int32" if dtype is None else dtype.name)
        self.append("Cast", "", [value], [output], {"to": number}, f"{self.name}/{value.name}")

    def emit_activated(
        self, op: str, inputs: Sequence[Operand], attrs: Attrs | None = None, *, kind: str = ""
    ) -> None:
        """Emit the final operation, followed by the fused activation that the options name; the
        options' table is by default named after the operation."""
        number = self.option("fused_activation_function", kind or f"{op}Options")
        if number:
            op, inputs, attrs = *self.activation(number, self.emit(op, inputs, attrs)), None
        self.emit_final(op, inputs, attrs)

    def activation(self, number: int, value: Value) -> tuple[str, list[Value]]:
        """Return an activation's operation and inputs, by its number in the schema."""
        # ActivationFunctionType of TFLite's schema: RELU, RELU_N1_TO_1, RELU6 and TANH, from 1 on.
        if number == 1:
            return "Relu", [value]
        if number in (2, 3):
            # The result has the type that the file declares, or Clip would reject its bounds.
            bounds, dtype = BOUNDS[number], self.output_dtypes[0]
            if dtype is None:
                raise InexpressibleError("its output is a handle")
            return "Clip", [value, *[self.constant(bound, dtype) for bound in bounds]]
        if number == 4:
            return "Tanh", [value]
        raise InexpressibleError(f"it has the activation number {number}, which no kernel computes")

    # Effects.

    def effect(self, node: Node) -> None:
        """Let a node with effects wait for the previous one."""
        if self.scope.effect is not None and self.scope.effect is not node:
            node.control_inputs.append(self.scope.effect)
        self.scope.effect = node

    def variable_attrs(self, container: str, name: str) -> AttrDict:
        """Return the attributes of a node that names a variable, with its initial value's type."""
        from penstock.ops.tensorflow.state import variable_name  # most models have no variables

        attrs = {"container": container, "shared_name": name, "store": self.context.store}
        first = self.context.initial.get(variable_name(attrs, ""))
        if first is not None:
            attrs |= {"dtype": dtype_name(first.dtype), "shape": list(first.shape)}
        return attrs

    def transposed(self, value: Value, perm: Sequence[int]) -> Value:
        """Return a value with permuted dims: a view of a constant, or the original value if another
        operator has applied the inverse permutation before."""
        if value.const is not None:
            return Value(self.fresh("transpose"), const=value.const.transpose(perm))
        before = value.producer
        if before is not None and before.op.name == "Transpose":
            earlier = before.attrs["perm"]
            if [earlier[axis] for axis in perm] == list(range(len(perm))):  # the two cancel out
                whole = before.inputs[0]
                assert whole is not None
                return whole
        return self.emit("Transpose", [value], perm=[*perm])

    # Channels first.

    def channels_first(self, value: Value, rank: int = 4) -> Value:
        """Return an image that has channels last with its channels before its spatial dims."""
        return self.transposed(value, [0, rank - 1, *range(1, rank - 1)])

    def emit_image(
        self,
        op: str,
        inputs: Sequence[Operand],
        attrs: Attrs,
        *,
        rank: int = 4,
        domain: str = "",
        activation: int = 0,
    ) -> None:
        """Emit an operation with channels first, its activation, and the resulting image with
        channels last."""
        value = self.emit(op, inputs, attrs, domain=domain)
        if activation:
            value = self.emit(*self.activation(activation, value))
        self.emit_final("Transpose", [value], {"perm": [0, *range(2, rank), 1]})

    # Quantized tensors.

    @property
    def moved_as_integers(self) -> bool:
        """Whether inputs and outputs have one quantization, so that moving integers is exact."""
        given = [q for q in (*self.quantizations, *self.output_quantizations) if q is not None]
        return not given or all(map(given[0].equals, given[1:]))

    def apply(self, entry: RuleEntry) -> None:
        """Apply a rule to the operator, whose tensors may be quantized."""
        if entry.outputs not in (None, len(self.outputs)):
            raise NodeError(f"has {len(self.outputs)} outputs, but {self.op} has {entry.outputs}")
        quantized = any((*self.quantizations, *self.output_quantizations))
        self.codes = entry.codes(self) if quantized and entry.codes else None
        integers = not quantized or self.codes is not None
        integers = integers or (entry.moves and self.moved_as_integers)
        if not integers:
            integers = entry.integers(self) if callable(entry.integers) else entry.integers
        if not integers:
            self.apply_to_reals(entry.convert)
            return
        entry.convert(self)
        # Rules of operators that read the outputs ask for their type, which then is known.
        given = [v.type.dtype for v in self.inputs if v and isinstance(v.type, TensorType)]
        for value, dtype in zip(self.outputs, self.output_dtypes, strict=True):
            if value and dtype and (self.codes is not None or dtype in given):
                value.type = _type_of_codes(dtype)

    def apply_to_reals(self, convert: Rule) -> None:
        """Apply a rule to the real numbers that quantized tensors represent."""
        self.codes = None
        for i, (value, given) in enumerate(zip(self.inputs, self.quantizations, strict=True)):
            if value is not None and given is not None:
                self.inputs[i] = dequantized(self, value, given)  # type: ignore[index]
        outputs = self.outputs
        reals = [
            value if given is None or value is None else Value(self.fresh("real"))
            for value, given in zip(outputs, self.output_quantizations, strict=True)
        ]
        self.outputs, dtypes = reals, self.output_dtypes
        self.output_dtypes = [FLOAT32 if q else d for q, d in self._output_types()]
        convert(self)
        for (given, _), dtype, value, output in zip(
            self._output_types(), dtypes, reals, outputs, strict=True
        ):
            if given is not None and value is not None and output is not None:
                emit_quantized(self, value, given, output, dtype)

    def _output_types(self) -> list[tuple[Quantization | None, np.dtype | None]]:
        return list(zip(self.output_quantizations, self.output_dtypes, strict=True))


def dequantized(b: NodeBuilder, value: Value, given: Quantization) -> Value:
    """Return the real numbers that a quantized tensor represents."""
    dtype = value.dtype or b.types.tensor(value).dtype or np.dtype(np.int8)
    attrs = _attributes(given)
    if dtype == INT64:  # biases of 16-bit activations
        if given.per_channel and given.axis:
            raise InexpressibleError("it has int64 codes with a scale for each channel")
        scale, _ = _parameters(b, given, FLOAT32)
        return b.emit("Mul", [b.cast(value, "float32"), scale])
    scale, zero = _parameters(b, given, dtype)
    # ONNX's DequantizeLinear takes no zero point for int32.
    return b.emit("DequantizeLinear", [value, scale, None if dtype == np.int32 else zero], attrs)


def emit_quantized(
    b: NodeBuilder, value: Value, given: Quantization, output: Value, dtype: Any
) -> None:
    """Emit ``output``, of integers that represent the real numbers of ``value``."""
    scale, zero = _parameters(b, given, dtype)
    if dtype == np.int32:  # ONNX's QuantizeLinear cannot produce it
        steps = b.emit("Round", [b.emit("Div", [value, scale])])
        codes = b.emit("Cast", [steps], {"to": element_number("int32")})
        inputs = [codes, zero]
        b.append("Add", "", inputs, [output], None, f"{b.name}/{output.name}")
        return
    inputs, attrs = [value, scale, zero], _attributes(given)
    b.append("QuantizeLinear", "", inputs, [output], attrs, f"{b.name}/{output.name}")
    output.type = _type_of_codes(dtype)


def _parameters(b: NodeBuilder, given: Quantization, dtype: np.dtype) -> tuple[Value, Value]:
    """Return the scale, and the zero point in that type, shared by all nodes with this tensor."""
    parameters = given.values
    for key, numbers in ((FLOAT32, given.scales), (dtype, given.zero_points)):
        if key not in parameters:
            array = np.array(numbers if len(numbers) > 1 else numbers[0]).astype(key)
            parameters[key] = Value(b.fresh("constant"), const=array)
    return parameters[FLOAT32], parameters[dtype]


def _attributes(given: Quantization) -> Attrs:
    return {"axis": given.axis} if given.per_channel else {}


# Codes.


def layer_of_codes(c: OperatorConversion, places: Sequence[int] = (0, 1, 2)) -> CodeLayer | None:
    """Return the codes' parameters of an operator with x, weights and bias, in these ``places``, if
    ONNX's operations on codes compute the same: weights and bias are constants, and all are codes
    of one type."""
    count = len(c.inputs)
    x, w, bias = [c.quantizations[i] if i < count else None for i in places]
    at, weights_at, bias_at = places
    axis = 3 if c.op == "DEPTHWISE_CONV_2D" else 0
    value = c.inputs[weights_at] if w is not None else None
    weights = None if value is None else value.const
    if x is None or w is None or weights is None or weights.dtype != c.dtype(at):
        return None
    if w.per_channel and w.axis != axis:
        return None
    # ONNX's operations do not define a bias's scale; it has the scale of products.
    value = c.inputs[bias_at] if count > bias_at else None
    if value is not None and (value.const is None or not bias or not bias.is_of_products(x, w)):
        return None
    return code_layer(c, x, w, c.dtype(at))


def is_dynamic_range(c: OperatorConversion) -> bool:
    """Whether real numbers are multiplied by constant weights of int8."""
    (w, *_), (weights, *_) = [*c.quantizations[1:], None], [*c.inputs[1:], None]
    if w is None or weights is None or weights.const is None or c.dtype(0) != FLOAT32:
        return False
    if c.output_quantizations[0] is not None:
        return False
    is_biased = len(c.inputs) > 2 and c.inputs[2] is not None
    if is_biased and (c.quantizations[2] is not None or c.dtype(2) != FLOAT32):
        return False
    known = weights.const.dtype == np.int8 and not any(w.zero_points) and w.axis == 0
    if c.op == "BATCH_MATMUL":
        return known
    kind = "FullyConnectedOptions" if c.op == "FULLY_CONNECTED" else ""
    return known and c.option("fused_activation_function", kind) in BOUNDS


def image_of_codes(c: OperatorConversion) -> CodeLayer | None:
    """Return the codes' parameters of an operator on an image, whose elements count alike."""
    x, *_ = [*c.quantizations, None]
    return None if x is None else code_layer(c, x, Quantization([1.0], [0]), c.dtype(0))


def code_layer(
    c: OperatorConversion, x: Quantization, w: Quantization, given: np.dtype | None
) -> CodeLayer | None:
    """Return the parameters of an operator's 8-bit codes and the activation's bounds, or None."""
    (y,), (dtype,) = c.output_quantizations, c.output_dtypes
    if y is None or x.per_channel or y.per_channel:
        return None
    if dtype not in (np.int8, np.uint8) or given != dtype:
        return None
    name, options = "fused_activation_function", c.options
    number = options is not None and name in schema().tables[options.kind] and c.option(name)
    bounds = BOUNDS.get(int(number))
    if bounds is None or min(*x.scales, *w.scales, *y.scales) <= 0:
        return None
    of_x, of_w, of_y = [_parameters(c, each, dtype) for each in (x, w, y)]
    return CodeLayer(of_x, of_w, of_y, y.codes_of(bounds, dtype))


# A subgraph, or one use of it, while it is imported: the meaning of its tensors.


@dataclass(eq=False)
class SubgraphScope:
    """One use of subgraph ``index``. ``callers`` are the subgraphs in which it is used, and
    ``prefix`` precedes the names of its values and nodes.

    ``values`` has the values of the tensors that have been written so far. ``effect`` is the last
    node with effects: the next one waits for it.
    """

    index: int
    table: FlatTable
    where: str
    prefix: str
    callers: tuple[int, ...]
    values: dict[int, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    effect: Node | None = None

    @property
    def outputs(self) -> list[Value]:
        """The values that the subgraph returns."""
        return [self.values[index] for index in self.table.outputs]

    def graph(self, name: str, inputs: Sequence[Value] = ()) -> Graph:
        """Return the subgraph as a nested graph."""
        targets = () if self.effect is None else [self.effect]
        return Graph(inputs, self.outputs, self.nodes, name, targets)
