"""Elementwise operations and fused chains of them: programs for the interpreter in
``c/core/elementwise.c``.

A program computes the result tile by tile. 16-bit floats are computed as float32, and rounded where
a value of the chain has that type: with ``precision="strict"``, at every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from itertools import chain, repeat
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.backends.native import AnyShapeCall, ahead_of_cache, by_memory, family, rows_ns
from penstock.backends.native.kernel import (
    NativeCall,
    Site,
    Tensor,
    UnsupportedError,
    native_kernel,
)
from penstock.backends.native.terms import (
    BLOCK,
    CHEAP_POWERS,
    KINDS,
    QUANTIZED,
    QUANTIZED_KINDS,
    TERMS,
    Term,
    converted,
)
from penstock.backends.native.tiles import (
    DIRECT,
    GATHERED,
    MOST_RANK,
    REGISTER_BYTES,
    check_strides,
    dense_steps,
    merged_dims,
    modes_of_rows,
    tiles_of,
    with_rows,
)
from penstock.core.records import replace
from penstock.core.traced import deferred, int64s
from penstock.core.types import TensorType, dtype_name
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import FUSED, is_fused, parts
from penstock.ops.registry import MICROSOFT
from penstock.ops.work_estimate import Workload

if TYPE_CHECKING:
    from penstock.backends.native.codes import CodePair

# As in c/core/elementwise.c.
_REGISTERS, _MOST_INPUTS = 32, 17
_OPERAND = Struct(f"=4i{MOST_RANK}q")  # register, mode, bytes of an element, 0, strides
_CONSTANT = Struct("=2i8s")  # register, bytes of an element, the element
_HEADER, _LATE = Struct("=8i"), Struct("=3i")  # as in c/late.c

# Cost, in additions, above which a lookup table of all bytes is faster.
_TABLE = 2
_NARROW = {"float16": "half", "bfloat16": "bfloat"}
_DTYPES = {kind: kind for kind in KINDS.values()} | {"b1": "u1", "s1": "i1", "s2": "i2"}
_SIZES = {kind: int(kind[1]) for kind in KINDS.values()} | dict.fromkeys(_NARROW.values(), 2)
"""bytes of an element in memory"""

# Approximate costs of operations, in additions; 1 for others.
_ADDITIONS = {
    "exp_f4": 3.4,
    "expm1_f4": 5,
    "sigmoid_f4": 5,
    "tanh_f4": 7.6,
    "erf_f4": 9,
    "gelu_f4": 10,
    "gated_f4": 6,
    "log_f4": 6.4,
    "log1p_f4": 10,
    "sin_f4": 4,
    "cos_f4": 4,
    **dict.fromkeys(("asin_f4", "acos_f4"), 8),
    "div_f4": 3,
    **dict.fromkeys(("div_i4", "floordiv_i4", "fmod_i4", "mod_i4"), 10),
    **dict.fromkeys(("div_i8", "floordiv_i8", "fmod_i8", "mod_i8"), 80),
    "sqrt_f4": 3,
    **dict.fromkeys(("fmod_f4", "mod_f4"), 20),
    "pow_f4": 120,
    "pow_f8": 300,
    **dict.fromkeys([f"quantize_{kind}" for kind in QUANTIZED_KINDS.values()], 2.6),
    **dict.fromkeys(("exp_f8", "sigmoid_f8"), 16),
    **dict.fromkeys(("expm1_f8", "log_f8", "log1p_f8", "tanh_f8"), 20),
    **dict.fromkeys(("acos_f8", "asin_f8", "cos_f8", "erf_f8", "sin_f8"), 120),
    **dict.fromkeys(("div_f8", "sqrt_f8", "f4_i8", "i8_f4", "f8_i8", "i8_f8"), 8),
    # Low enough that compiled kernels win over NumPy's rates, which ignore divisions.
    **dict.fromkeys(("FloorDiv", "FloorMod", "Mod", "TruncateMod"), 4),
    "IntegerArithmetic": 4,
    "QuantizeLinear": 2.6,
    "Swish": 7,
    "Mish": 10,
    "Softplus": 16,
    "Elu": 8,
    "Selu": 8,
}


_QUANTIZING = ("DequantizeLinear", "QuantizeLinear")
_CONVERTING = ("Cast", *_QUANTIZING, *[f"{MICROSOFT}.{name}" for name in _QUANTIZING])
OPERATIONS = (*TERMS, *_CONVERTING)
"""operations of programs"""

_Merged: TypeAlias = tuple[list[int], list[list[int]]]
"""Merged dims, and the strides of operands along them."""


def _by_program(node: Node) -> Workload | None:
    additions = additions_of(node)
    return None if additions is None else by_memory(node, additions)


@family(*OPERATIONS, FUSED.full_name, work=_by_program)
def elementwise_call(site: Site) -> NativeCall | None:
    """An elementwise operation, or a fused chain of them."""
    output = site.output()
    if not output.elements or len(site.tensors) != len(site.node.inputs) + 1:
        return None
    program = _Program(site)
    is_pair = site.node.op.full_name == "tflite.IntegerArithmetic" and len(program.inputs) == 2
    if is_pair and site.attr("operation", "") != "SquaredDifference":
        from penstock.backends.native.codes import integer_pair

        pair = integer_pair(site.node, QUANTIZED_KINDS[_name(output)])
        return program.of_integers(output, pair)
    return program.call(program.finished(program.result(), output), output)


@ahead_of_cache(*OPERATIONS, FUSED.full_name)
def elementwise_of_any_shape(site: Site) -> AnyShapeCall | None:
    """The program for arrays of any shapes: the settings of ``elementwise`` in
    ``c/core/any_shape.c``."""
    output = site.tensors[-1]
    if len(site.node.outputs) > 1 or output is None:
        return None
    program = _Program(site)
    settings = program.settings(program.finished(program.result(), output), output)
    return site.library.functions.elementwise, settings


def program_behind(
    site: Site, first: int
) -> Callable[[int, Sequence[tuple[int, ...] | None] | None], NativeCall]:
    """Return the epilogue of a fused node, its parts from ``first`` on, applied in place to the
    result of the parts before: a function that returns its call, given the elements of a contiguous
    row and the strides of tensors. Both raise ``UnsupportedError``. Input 0 of the program and its
    output are omitted. An item is a part of a row."""
    output, program = site.output(), _Program(site)
    return partial(_call_behind, program, program.finished(program.result(first), output), output)


def _call_behind(
    program: _Program,
    result: Term,
    output: TensorType,
    row: int,
    strides: Sequence[tuple[int, ...] | None] | None = None,
) -> NativeCall:
    call = program.call(result, output, strides, row=row)
    # Kernels set both to the address of their result whenever a part of it is ready.
    words = list(call.words)
    words[0] = words[_MOST_INPUTS] = None
    return replace(call, words=tuple(words))


def additions_of(node: Node) -> float | None:
    """Return the approximate cost of a result element of ``node``, which may be fused, in
    additions; None if it is not elementwise."""
    total = 0.0
    for part in parts(node):
        output = part.outputs[0] if part.outputs else None
        type_ = None if output is None else output.type
        is_double = isinstance(type_, TensorType) and type_.dtype == np.float64
        cheap = part.op.name == "Pow" and _constant_power(part) in CHEAP_POWERS
        additions = 1 if cheap else _additions(part.op.full_name, is_double)
        if additions is None:
            return None
        total += additions
    return total


def _constant_power(node: Node) -> float | None:
    exponent = node.inputs[1]
    const = None if exponent is None else exponent.const
    return float(const.item()) if const is not None and const.size == 1 else None


@cache
def _additions(full_name: str, is_double: bool) -> float | None:
    """As ``additions_of``, for an operation."""
    if full_name not in OPERATIONS:
        return None
    name = full_name.rpartition(".")[2]
    kind = "f8" if is_double else "f4"
    return _ADDITIONS.get(f"{name.lower()}_{kind}", _ADDITIONS.get(name, 1))


class _Program:
    """Builds the program of one call."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.inputs: dict[Term, int] = {}
        # Shapes of per-axis inputs, for broadcasting.
        self.dims: dict[int, tuple[int, ...]] = {}
        # Calls for other strides share the table of all bytes.
        self.table: np.ndarray | None = None

        def value_of(i: int) -> Term | None:
            type_ = site.tensors[i]
            if type_ is None:
                return None
            # Formulas may depend on a scalar, and its register is filled once for all tiles.
            constant = site.constants[i] if type_.elements == 1 else None
            name = _name(type_)
            narrow = _NARROW.get(name)
            kind = "f4" if narrow else KINDS.get(name)
            if kind is None:
                raise UnsupportedError
            if constant is not None:
                return Term(kind, constant=float(constant.item()) if narrow else constant.item())
            value = Term(narrow or kind)
            self.inputs[value] = i
            return Term("f4", f"{narrow}_f4", (value,)) if narrow else value

        self.values = [value_of(i) for i in range(len(site.node.inputs))]

    def result(self, first: int = 0) -> Term:
        """Return the term that the node computes; if ``first``, the part to begin with, is not 0,
        from the contents of its output."""
        site = self.site
        node = site.node
        known: dict[Any, Term | None] = {}
        if not is_fused(node):
            return self._apply(node, self.values)
        known = dict(zip(node.attrs["region"].inputs, self.values, strict=True))
        value: Term | None = None
        if first:
            # The preceding part's result is an input: the program computes in place on it.
            self.inputs = {Term("f4"): len(site.node.inputs), **self.inputs}
            known[parts(node)[first - 1].outputs[0]] = next(iter(self.inputs))
        for part in parts(node)[first:]:
            value = self._apply(part, [None if v is None else known[v] for v in part.inputs])
            # Inside of a chain, too: with precision="strict", fusion must be bitwise exact.
            known[part.outputs[0]] = _rounded(value, part.outputs[0])
        assert value is not None
        return value

    def _apply(self, node: Node, values: Sequence[Term | None]) -> Term:
        (output,) = node.outputs
        type_ = None if output is None else output.type
        if not isinstance(type_, TensorType):
            raise UnsupportedError
        name = _name(type_)
        if node.op.full_name in _CONVERTING:
            return self._convert(node, values, name)
        rule = TERMS.get(node.op.full_name)
        if rule is None:
            raise UnsupportedError
        while values and values[-1] is None:
            values = values[:-1]
        # Only Clip may omit an operand in the middle: it may have an upper bound only.
        if node.op.full_name != "Clip" and None in values:
            raise UnsupportedError
        if node.op.full_name not in QUANTIZED:
            codes = QUANTIZED_KINDS.values()
            values = [converted(v, "i4") if v and v.kind in codes else v for v in values]
        result = rule(node.attrs, *values)
        return converted(result, QUANTIZED_KINDS[name]) if name in QUANTIZED_KINDS else result

    def _convert(self, node: Node, values: Sequence[Term | None], name: str) -> Term:
        """Return the term of a Cast, QuantizeLinear or DequantizeLinear to the dtype ``name``."""
        x, scale, zero = [*values, None, None][:3]
        if x is None or name not in (*KINDS, *_NARROW):
            raise UnsupportedError
        kind = KINDS.get(name, "f4")
        # Through float32, float64 would be rounded twice, which differs near ties.
        if x.kind == "f8" and name in _NARROW:
            raise UnsupportedError
        if scale is None:
            return converted(x, kind)
        # Quotients are rounded to the type of the scale.
        scales = _tensor_type(node.inputs[1])
        if node.attrs.get("block_size") or node.attrs.get("precision") or scale.kind != "f4":
            raise UnsupportedError
        for value in node.inputs[1:3]:
            if value is not None and _tensor_type(value).elements > 1:
                self._spread(node, values[node.inputs.index(value)])
        zeros = Term("f4", constant=0.0) if zero is None else converted(zero, "f4")
        if node.op.name == "DequantizeLinear":
            return Term(kind, f"dequantize_{x.kind}", (x, scale, zeros))
        if x.kind != "f4" or scales.dtype != np.float32 or name not in QUANTIZED_KINDS:
            raise UnsupportedError
        # The instruction inverts a per-tensor scale. Per-axis scales are divided by in a separate
        # instruction, and the scale here is 1.
        if scale.constant is None:
            x, scale = x / scale, Term("f4", constant=1.0)
        return Term(kind, f"quantize_{kind}", (x, scale, zeros))

    def _spread(self, node: Node, parameter: Term | None) -> None:
        """Broadcast the per-axis scales or zero points of ``node`` along their axis."""
        rank, axis = len(_tensor_type(node.inputs[0]).dims), node.attrs.get("axis")
        behind = (-1 - (1 if axis is None else axis)) % rank if rank > 1 else 0
        i = None if parameter is None else self.inputs.get(parameter)
        type_ = None if i is None else self.site.tensors[i]
        if i is None or type_ is None or len(type_.dims) != 1:
            raise UnsupportedError
        # With trailing dims of 1, it broadcasts like any other operand.
        dims = (*type_.dims, *[1] * behind)
        if self.dims.setdefault(i, dims) != dims:
            raise UnsupportedError

    def finished(self, result: Term, output: TensorType) -> Term:
        """Return the term that is written: ``result``, rounded to the dtype of the output."""
        name = _name(output)
        if name in _NARROW:
            return Term(_NARROW[name], f"f4_{_NARROW[name]}", (result,))
        if result.kind != KINDS.get(name) or not result.operation:
            raise UnsupportedError
        return result

    def call(
        self,
        result: Term,
        output: TensorType,
        strides: Sequence[Any] | None = None,
        *,
        row: int = 0,
    ) -> NativeCall:
        """Return the call of the program that computes ``result``, for tensors with these
        ``strides`` in elements, None for contiguous ones. ``row``, if not 0: tiles are parts of
        rows of this many elements."""
        order = _in_order(result)
        held = [value for value in self.inputs if value in order]
        operands = [self.inputs[value] for value in held]
        if len(operands) > _MOST_INPUTS:
            raise UnsupportedError
        dims, steps = self._coalesced(operands, output, strides)
        size = math.prod(dims)
        if strides is not None:
            check_strides(steps, size)
        widest = max([_SIZES[value.kind] for value in order])
        registers, instructions = self._allocate(order, result)
        most = REGISTER_BYTES // widest
        if row:
            dims, steps = with_rows(dims, steps, row)
            tile, modes, items = most, modes_of_rows(dims, steps), -(-size // most)
        else:
            tile, modes, row, items = tiles_of(dims, steps, most, len(instructions))
        unused = [0] * (MOST_RANK - len(dims))
        placed = zip(held, modes, steps, strict=True)
        table = [(registers[v], m, _SIZES[v.kind], 0, *s, *unused) for v, m, s in placed]
        constants = _constants(order, registers)
        cost = sum([_ADDITIONS.get(value.operation, 1) for value in order if value.operation])
        cost += (2 if row else 20) * modes.count(GATHERED)
        can_fail = _can_fail(order)
        pointers: list[Any] = [Tensor(i) for i in operands]
        call = NativeCall(
            "elementwise",
            (
                *pointers,
                *[None] * (_MOST_INPUTS - len(pointers)),
                self.site.result(),
                deferred(_table_of, *chain(*table)),
                np.array(instructions, np.int32),
                _joined(constants) if constants else None,
                *int64s(dims),
                *(len(operands), len(instructions), len(constants), len(dims)),
                *(tile, size, _SIZES[result.kind], row),
            ),
            items=items,
            # A single thread would fetch operands that other threads computed from their cores'
            # caches: 0.15 ns per element, the time of three additions.
            item_ns=rows_ns(tile * (cost + 3 * modes.count(DIRECT)), rows=len(instructions)),
            # The operands must be intact to find the error again.
            inplace=()
            if can_fail
            else tuple([i for i, mode in zip(operands, modes, strict=True) if mode == DIRECT]),
            can_fail=can_fail,
            restrided=partial(_Program.call, self, result, output) if strides is None else None,
        )
        return self._by_kernel(call, result, held, (dims, steps), modes, cost)

    def _by_kernel(
        self,
        call: NativeCall,
        result: Term,
        held: Sequence[Term],
        merged: _Merged,
        modes: Sequence[int],
        cost: float,
    ) -> NativeCall:
        """Return ``call``, or an equivalent call of a faster specialized kernel."""
        size = self.site.output().elements
        # Filling the table runs the program on 256 bytes, which smaller results do not repay.
        bytes_only = [_SIZES[value.kind] for value in (*held, result)] == [1, 1]
        if bytes_only and call.inplace and size > 256 and cost > _TABLE:
            return self._by_table(call, result, size)
        if len(held) != 2 or result.kind not in QUANTIZED_KINDS.values():
            return call
        from penstock.backends.native.codes import pair_call, pair_of_codes

        ends = np.iinfo(_DTYPES[result.kind])
        pair = pair_of_codes(result, held, ends.min, ends.max)
        made = pair and pair_call(self.site, pair, [self.inputs[value] for value in held], merged)
        return replace(made, inplace=call.inplace, restrided=call.restrided) if made else call

    def of_integers(
        self,
        output: TensorType,
        pair: CodePair,
        strides: Sequence[tuple[int, ...] | None] | None = None,
    ) -> NativeCall:
        """Return the call of an IntegerArithmetic of two tensors: of a program, if no kernel reads
        the codes in place."""
        from penstock.backends.native.codes import pair_call

        dims, steps = merged = self._coalesced([0, 1], output, strides)
        made = pair_call(self.site, pair, (0, 1), merged)
        if made is None:
            return self.call(self.finished(self.result(), output), output, strides)
        return replace(
            made,
            inplace=tuple(
                [i for i in (0, 1) if math.prod(dims) > 1 and steps[i] == dense_steps(dims)]
            ),
            restrided=partial(_Program.of_integers, self, output, pair)
            if strides is None
            else None,
        )

    def settings(self, result: Term, output: TensorType) -> bytes:
        """Return the settings of the program for tensors of any shapes."""
        order = _in_order(result)
        held = [value for value in self.inputs if value in order]
        if len(held) > _MOST_INPUTS or self.dims or _can_fail(order) or output.dtype is None:
            raise UnsupportedError
        if not output.dtype.isbuiltin:
            raise UnsupportedError
        registers, instructions = self._allocate(order, result)
        constants = _constants(order, registers)
        cost = sum([_ADDITIONS.get(value.operation, 1) for value in order if value.operation])
        widest = max([_SIZES[value.kind] for value in order])
        header = _HEADER.pack(
            len(held),
            len(instructions),
            len(constants),
            len(output.shape or ()),
            output.dtype.num,
            _SIZES[result.kind],
            widest,
            round(50 * cost),  # picoseconds
        )
        read = [_LATE.pack(registers[v], _SIZES[v.kind], self.inputs[v]) for v in held]
        steps = np.array(instructions, np.int32).tobytes()
        return b"".join([header, *constants, *read, steps])

    def _by_table(self, call: NativeCall, result: Term, size: int) -> NativeCall:
        """Return ``call``, of a program of one input, as a table lookup by byte."""
        (i,), site = call.inplace, self.site
        if self.table is None:
            types = [None if t is None else TensorType(t.dtype, (256,)) for t in site.tensors]
            read, written = types[i], types[site.result().index]
            assert read is not None and read.dtype is not None and written is not None
            every, constants = copy(self), list(site.constants)
            every.site = replace(site, tensors=tuple(types))
            constants[i] = np.arange(256).astype(np.uint8).view(read.dtype)
            kernel = native_kernel(every.site, every.call(result, written))
            self.table = kernel.function(*constants).view(np.uint8)
        words = (Tensor(i), site.result(), self.table, size, BLOCK)
        items = -(-size // BLOCK)
        return replace(call, kernel="table", words=words, items=items, item_ns=rows_ns(2 * BLOCK))

    def _coalesced(
        self, operands: Sequence[int], output: TensorType, strides: Sequence[Any] | None
    ) -> tuple[list[int], list[list[int]]]:
        """Return the dims of the result in memory order, merged where all operands' strides allow,
        and the strides of each operand in elements, 0 where it is broadcast."""
        rank = len(output.dims)
        rows = []
        for i in (*operands, len(self.site.node.inputs)):
            type_, given = self.site.tensors[i], None if strides is None else strides[i]
            assert type_ is not None
            shape = self.dims.get(i, type_.dims)
            steps = dense_steps(shape) if given is None else (*given, *shape[len(given) :])
            # The stride of a dim of 1 is arbitrary; 0 marks a broadcast.
            own = [step if dim != 1 else 0 for dim, step in zip(shape, steps, strict=True)]
            rows.append([0] * (rank - len(own)) + own)
        return merged_dims(output.dims, rows[:-1], rows[-1])

    def _allocate(
        self, order: Iterable[Term], result: Term
    ) -> tuple[dict[Term, int], list[tuple[int, ...]]]:
        """Return the register of each term, and the instructions."""
        numbers = self.site.library.operations
        # Only registers of instruction results are reused. Those of constants, and of inputs that
        # are equal for all tiles, are filled once, before the first tile.
        last_use = {argument: i for i, value in enumerate(order) for argument in value.arguments}
        registers: dict[Term, int] = {}
        free = list(range(_REGISTERS - 1, 0, -1))
        instructions = []
        for value in order:
            if not value.operation:
                registers[value] = _taken(free)
        for i, value in enumerate(order):
            arguments, number = value.arguments, numbers.get(value.operation)
            if not value.operation:
                continue
            if number is None:
                raise UnsupportedError
            registers[value] = target = 0 if value is result else _taken(free)
            # The interpreter reads three operand registers for every operation.
            read = map(registers.__getitem__, (*arguments, *arguments[:1] * (3 - len(arguments))))
            instructions.append((number, target, *read))
            read_here = dict.fromkeys(arguments)
            free += [registers[x] for x in read_here if last_use[x] == i and x.operation]
        return registers, instructions


def _tensor_type(value: Value | None) -> TensorType:
    type_ = None if value is None else value.type
    if not isinstance(type_, TensorType) or not type_.static:
        raise UnsupportedError
    return type_


def _name(type_: TensorType) -> str:
    """Return the name of a dtype; empty if unknown."""
    return "" if type_.dtype is None else dtype_name(type_.dtype)


def _taken(free: list[int]) -> int:
    if not free:
        raise UnsupportedError
    return free.pop()


def _in_order(result: Term) -> dict[Term, None]:
    """Return the terms that ``result`` depends on, and itself, in topological order."""
    order: dict[Term, None] = {}
    # Iterative: chains may exceed Python's recursion limit.
    stack = [(result, False)]
    while stack:
        value, ready = stack.pop()
        if value in order:
            continue
        if ready:
            order[value] = None
        else:
            stack.append((value, True))
            stack += zip(value.arguments, repeat(False))
    return _in_order(result) if _join_products(order) else order


def _can_fail(order: Iterable[Term]) -> bool:
    return True in [value.operation.startswith("divisor_") for value in order]


def _join_products(order: Iterable[Term]) -> bool:
    """Contract sums of otherwise unread products to multiply-adds, which saves a pass over a tile.
    Return whether there are any."""
    uses, joined = dict[Term, int](), False
    for value in order:
        for argument in value.arguments:
            uses[argument] = uses.get(argument, 0) + 1
    for value in order:
        for i, product in enumerate(value.arguments if value.operation == "add_f4" else ()):
            if product.operation == "mul_f4" and uses[product] == 1:
                value.operation = "muladd_f4"
                value.arguments = (*product.arguments, value.arguments[1 - i])
                joined = True
                break
    return joined


def _constants(order: Iterable[Term], registers: Mapping[Term, int]) -> list[bytes]:
    """Return the table of constants, and their registers."""
    table = []
    for value in order:
        if value.constant is not None:
            # Compiled code fills a register with these bits, whatever their type.
            raw = np.array(value.constant).astype(_DTYPES[value.kind]).tobytes()
            table.append(_CONSTANT.pack(registers[value], _SIZES[value.kind], raw))
    return table


def _rounded(term: Term, value: Value | None) -> Term:
    """Return the term that other nodes of the chain read for a value computed as float32: rounded,
    if the value's type has 16 bits."""
    type_ = None if value is None else value.type
    narrow = _NARROW.get(_name(type_)) if isinstance(type_, TensorType) else None
    if narrow is None:
        return term
    return Term("f4", f"{narrow}_f4", (Term(narrow, f"f4_{narrow}", (term,)),))


def _joined(entries: Iterable[bytes]) -> np.ndarray:
    """Return the concatenated entries of a table."""
    return np.frombuffer(b"".join(entries), np.uint8)


def _table_of(*numbers: int) -> np.ndarray:
    """Return the table of operands with these numbers."""
    each = 4 + MOST_RANK
    return _joined([_OPERAND.pack(*numbers[i : i + each]) for i in range(0, len(numbers), each)])
