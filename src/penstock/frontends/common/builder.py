"""One node of a file, and the graph nodes into which it is converted.

A conversion rule is a function that takes a ``NodeBuilder``: it reads attributes, constants and
types of inputs, and emits nodes. The last one has the node's name and outputs::

    def relu6(b: NodeBuilder) -> None:
        b.emit_final("Clip", [b.inputs[0], b.like(0, b.inputs[0]), b.like(6, b.inputs[0])])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.errors import MAX_NAME
from penstock.core.records import KW_ONLY, dataclass, field
from penstock.core.types import ANY, FLOAT32, INT64, Dim, Shape, TensorType, Type
from penstock.frontends.common.diagnostics import NO_KERNEL, InexpressibleError, NodeError
from penstock.frontends.common.inferred_types import InferredTypes, constant_of
from penstock.ir.graph import Node, Value
from penstock.ir.op import Attrs, Op
from penstock.ops.common.shape_rules import all_known, element_number
from penstock.ops.internal import internal_operation
from penstock.ops.registry import find

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Operand: TypeAlias = Value | int | Sequence[int] | None
"""an input of a node that a rule emits: an integer means an int64 constant, None an input that is
left out"""

# The most elements of a constant that rules examine one by one.
_MAX_INTEGERS = 65536


def short_name(name: str) -> str:
    """Return ``name``, or a short unique name in its place if it is long."""
    if len(name) <= MAX_NAME:
        return name
    from penstock.core.digests import digest  # rarely needed

    own = digest(name.encode("utf-8", "surrogatepass"), 8)
    return f"{name[:80]}...{name[-80:]}~{own}"


class UniqueNames:
    """Creates names that nothing in a model has. ``taken`` returns those of the file, when the
    first new name is requested; ``plain`` formats a name, ``numbered`` a name with a number."""

    def __init__(
        self, taken: Callable[[], Iterable[str]], plain: str = "{}", numbered: str = "{}_{}"
    ) -> None:
        self._of_file = taken
        self._forms = plain, numbered
        self._taken: set[str] | None = None
        self._numbers: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """Return ``name``, or ``name_1``, ``name_2``, ... if it is taken, and mark it as taken."""
        if self._taken is None:
            self._taken = set(self._of_file())  # late, since most models need no new names
        plain, numbered = self._forms
        n = self._numbers.get(name, 0)
        candidate = plain.format(name)
        while candidate in self._taken:
            n += 1
            candidate = numbered.format(name, n)
        self._numbers[name] = n  # otherwise many nodes of one name would take quadratic time
        self._taken.add(candidate)
        return candidate


@dataclass(eq=False)
class NodeBuilder:
    """A node of the file as its conversion rule sees it.

    ``inputs``, ``outputs`` and ``attrs`` are those of the file's node. ``nodes`` are the emitted
    ones, which the importer adds to the graph when the rule returns; ``final`` is the one with the
    node's name; the others are named after their outputs. ``unique`` returns a name that nothing in
    the model has.
    """

    name: str
    inputs: Sequence[Value | None]
    outputs: Sequence[Value | None]
    attrs: Attrs
    _: KW_ONLY
    types: InferredTypes
    unique: Callable[[str], str] = str
    origin: str = ""
    device: str = ""
    nodes: list[Node] = field(default_factory=list, init=False)
    final: Node | None = field(default=None, init=False)

    # Information in the file about the inputs.

    def input_constant(self, index: int) -> np.ndarray | None:
        """Return input ``index`` if it is a constant, else None."""
        value = self.inputs[index]
        return None if value is None else constant_of(value)

    def integers(self, index: int) -> list[int] | None:
        """Return the elements of an input that is a constant of integers, row-major, else None."""
        array = self.input_constant(index)
        if array is None or array.dtype.kind not in "iu" or array.size > _MAX_INTEGERS:
            return None
        return [*map(int, array.reshape(-1))]

    def constant_integers(self, index: int, role: str) -> list[int]:
        """``integers``, but raise ``InexpressibleError`` if the input is not such a constant;
        ``role`` names the input in the message."""
        elements = self.integers(index)
        if elements is None:
            raise InexpressibleError(
                f"its {role} is not a constant; export the model with a constant one"
            )
        return elements

    def vector(self, index: int, *, transposed: bool = False) -> Value:
        """Return input ``index``, of integers, as the int64 vector that ONNX takes. Paddings [n, 2]
        are ``transposed``: in ONNX, those at the beginning of all axes come first."""
        array = self.input_constant(index)
        if array is not None:
            if array.dtype.kind not in "iu":
                raise NodeError(f"has {array.dtype} as input {index}, which must be integers")
            return self.constant((array.T if transposed else array).reshape(-1))
        source = self.inputs[index]
        if transposed:
            source = self.emit("Transpose", [source], perm=[1, 0])
        return self.cast(self.emit("Reshape", [source, [-1]]), "int64")

    def integer(self, index: int) -> int | None:
        """Return the element of input ``index`` if it is a constant of one integer, else None."""
        elements = self.integers(index)
        return elements[0] if elements is not None and len(elements) == 1 else None

    def elements(self, index: int) -> Sequence[Dim] | None:
        """Return the elements of input ``index``, a vector of integers, as far as they can be
        inferred: an unknown element is ``None`` or a name."""
        elements = self.integers(index)
        return self.tensor_type(index).data if elements is None else elements

    def tensor_type(self, index: int) -> TensorType:
        """Return the type of input ``index`` as far as it can be inferred."""
        value = self.inputs[index]
        return TensorType() if value is None else self.types.tensor(value)

    def dtype(self, index: int) -> np.dtype | None:
        """Return the element type of input ``index``: declared, or else inferred."""
        value = self.inputs[index]
        return None if value is None else self._dtype_of(value)

    def _dtype_of(self, value: Value) -> np.dtype | None:
        return self.types.tensor(value).dtype if value.dtype is None else value.dtype

    def shape(self, index: int) -> Shape | None:
        """Return the shape of input ``index`` as far as it can be inferred."""
        array = self.input_constant(index)
        return self.tensor_type(index).shape if array is None else array.shape

    def rank(self, index: int) -> int | None:
        """Return the number of dims of input ``index`` if it can be inferred."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def static_shape(self, index: int, role: str) -> tuple[int, ...]:
        """Return the shape of input ``index``. Raises ``InexpressibleError`` if part of it is
        unknown; ``role`` names the input in the message."""
        shape = all_known(self.shape(index))
        if shape is None:
            raise InexpressibleError(
                f"the shape of {role} is not known before a run; export the model with it"
            )
        return shape

    # Methods that emit nodes in place of the file's node.

    def fresh(self, hint: str) -> str:
        """Return a name for a new value."""
        output = self.outputs[0] if self.outputs else None
        name = self.name if output is None else output.name
        return self.unique(f"{name if len(name) <= MAX_NAME else short_name(name)}/{hint}")

    def constant(self, data: ArrayLike, dtype: np.dtype = INT64) -> Value:
        """Return a constant. Numbers beyond the dtype's range become infinite, as in a Cast."""
        if isinstance(data, (np.ndarray, np.generic)):
            array = np.asarray(data)
        else:
            array = np.asarray(data, np.float64 if dtype.kind not in "iubc" else None)
        if array.dtype != dtype:
            with np.errstate(all="ignore"):  # overflow gives infinity, as in a Cast during a run
                array = array.astype(dtype)
        return Value(self.fresh("constant"), const=array)

    def like(self, number: float, value: Value) -> Value:
        """Return a scalar of the dtype of ``value``, cast during the run if that is unknown."""
        dtype = self._dtype_of(value)
        if dtype is not None:
            return self.constant(number, dtype)
        return self.emit("CastLike", [self.constant(number, FLOAT32), value])

    def cast(self, value: Operand, dtype: str) -> Value:
        """Return ``value`` with elements of another dtype, given by its name."""
        return self.emit("Cast", [value], to=element_number(dtype))

    def emit(
        self,
        op: str,
        inputs: Sequence[Operand],
        attrs: Attrs | None = None,
        *,
        domain: str = "",
        type_: Type = ANY,
        **more: Any,
    ) -> Value:
        """Emit a node before the final one, and return its one output. ``more``: attributes."""
        output = Value(self.fresh(op.lower()), type_)
        self.append(op, domain, inputs, [output], {**(attrs or {}), **more}, output.name)
        return output

    def emit_several(
        self,
        op: str,
        inputs: Sequence[Operand],
        attrs: Attrs | None = None,
        *,
        count: int,
        domain: str = "",
    ) -> list[Value]:
        """Emit a node before the final one, and return its ``count`` outputs."""
        outputs = [Value(self.fresh(op.lower())) for _ in range(count)]
        self.append(op, domain, inputs, outputs, attrs, outputs[0].name)
        return outputs

    def emit_final(
        self,
        op: str,
        inputs: Sequence[Operand] | None = None,
        attrs: Attrs | None = None,
        *,
        domain: str = "",
        outputs: Sequence[Value | None] | None = None,
    ) -> Node:
        """Emit the node that has the name of the file's node, and by default its inputs and
        outputs."""
        inputs = self.inputs if inputs is None else inputs
        outputs = self.outputs if outputs is None else outputs
        self.final = self.append(op, domain, inputs, outputs, attrs, self.name)
        return self.final

    def append(
        self,
        op: str,
        domain: str,
        inputs: Sequence[Operand],
        outputs: Sequence[Value | None],
        attrs: Attrs | None,
        name: str,
    ) -> Node:
        """Emit a node; an ONNX node without trailing inputs that are left out. Raises
        ``InexpressibleError`` if there is no such operation."""
        operation, defaults = self.operation(op, domain)
        attrs = {**defaults, **(attrs or {})} if defaults else attrs
        values = [x if x is None or isinstance(x, Value) else self.constant(x) for x in inputs]
        while not domain and values and values[-1] is None:
            values.pop()
        node = Node(operation, values, outputs, attrs, name=name, origin=self.origin)
        node.device = self.device
        self.nodes.append(node)
        return node

    def operation(self, op: str, domain: str) -> tuple[Op, Attrs]:
        """Return an operation, and the default attributes of its nodes."""
        operation = find(op, domain) or internal_operation(op, domain)
        if operation is None:
            raise InexpressibleError(NO_KERNEL)
        return operation, {}
