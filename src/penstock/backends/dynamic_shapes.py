"""Nodes whose shapes are known only during a run: one kernel for each set of shapes.

After an operation such as NonZero, and in some bodies of loops, dtypes are known and dims are not;
behind an If of differing branches, not even ranks. The kernel of such a node looks at the shapes of
its inputs in each run, and calls the kernel for these::

    MatMul(float32[?, 64], w)  ──(100, 64)──>  a compiled kernel for 100 rows
                               ──(1, 64)────>  NumPy's kernel, which is faster for one
                               ──(0, 64)────>  an array without elements

A kernel is made once NumPy's, which takes any shapes, has lost as much time on these shapes as
making it takes: at once for large tensors, and never for shapes that do not come back.

The third kernel of a node is made with traced dims (``core/traced.py``), which gives a formula for
the numbers by which kernels differ. It makes further ones in a tenth of the time, as long as the
same choices hold for their dims::

    (100, 64)  ──>  compiled in full, as (110, 64)
    (130, 64)  ──>  compiled with traced dims: rows > 64, blocks = ceil(rows / 64), ...
    (200, 64)  ──>  made by the formula
    (  8, 64)  ──>  compiled with traced dims: the formula holds for rows > 64

Where the shape of an output also follows from the contents of a small input, such as the k of TopK,
the kernel looks at these contents as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from operator import index
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from penstock.backends.base import Backend, HostBackend
from penstock.backends.numpy import NumpyBackend, run_node
from penstock.core.records import NamedTuple
from penstock.core.traced import NumberFormula, NumberTrace, UntraceableError
from penstock.core.types import ANY, RunValue, RunValues, ShapeError, TensorType, Type
from penstock.host.malloc import give_back_memory
from penstock.ir.graph import Contents, Node, Value
from penstock.ir.kernel import WORTH_PACKING, FunctionParts, Kernel, PackedConstants, RuntimeShapes
from penstock.ir.layout import order_in_memory
from penstock.ops.internal.fused import fused, is_fused
from penstock.ops.internal.node_key import node_key
from penstock.ops.work_estimate import flops

Tensors: TypeAlias = Sequence[TensorType | None]

# Kernels of one node that are kept, and bytes of one beside its code; shapes of one node that are
# waited for.
_MOST_KERNELS = 128
_MOST_AWAITED = 256
_KERNEL_BYTES = 6 << 10
# Formulas of one node that are kept, and bytes of one.
_MOST_FORMULAS, _FORMULA_BYTES = 8, 14 << 10
# Times in which a formula makes a kernel, and in which it is made, in that of compiling one.
_FORMULA_PART, _TRACE_PARTS = 0.1, 4
# Kernels after which all are counted, since that takes longer than making one, and after which the
# pages that are free between them are given back: malloc gives back those at its end by itself.
_LOOK_EVERY, _GIVE_BACK_EVERY = 40, 170

# Bytes of inputs from which on it may pay at once to make a kernel.
_WORTH_ESTIMATING = 1 << 16

# Elements of inputs whose contents are looked at.
_MOST_CONTENTS = 8

# Assumed sizes in estimates: of unknown dims, and of lists of integers, such as shapes.
_NOMINAL_DIM, _NOMINAL_LENGTH, _NOMINAL_RANK = 32, 4, 2

_NUMPY = NumpyBackend()


class Specializing(Backend, Protocol):
    """A ``SpecializingBackend``."""

    making_s: float
    reproducible: bool
    most_bytes: int

    @property
    def caches(self) -> KernelCaches: ...
    def supports(self, node: Node) -> bool: ...
    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None: ...


def kernel_of_unknown_shapes(
    backend: Specializing, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """The kernel of a node with unknown dims, which looks at the shapes in each run; None if the
    backend has none for plausible ones."""
    tensors = _tensors(types)
    if tensors is None:  # sequences and the like, of which kernels know no shapes anyway
        return backend.static_kernel(node, types)
    key = node_key(node)
    cache = backend.caches.find(key)
    if cache is None:
        for plausible_node, contents in _guessed_nodes(node, tensors):
            if backend.supports(plausible_node):
                pays = _gain(backend, plausible_node) >= backend.making_s
                cache = KernelCache(backend, node, tensors, contents, pays)
                backend.caches.add(cache, key, flops(plausible_node))
                break
        else:
            return None
    return backend.caches.kernel(cache)


def _gain(backend: Specializing, node: Node) -> float:
    """The seconds that a call takes less than NumPy's, for a node with the shapes of a run."""
    return late_estimate(_NUMPY, node) - late_estimate(backend, node)


class KernelCaches:
    """The caches of the nodes of one backend, as long as their functions hold them: dropped plans
    leave none. Plans with the same node share its cache."""

    def __init__(self) -> None:
        self._caches: WeakValueDictionary[Hashable, KernelCache] = WeakValueDictionary()
        # The plans that have had each cache, and about the flops of a run of its node.
        self._plans: WeakKeyDictionary[KernelCache, int] = WeakKeyDictionary()
        self._flops: WeakKeyDictionary[KernelCache, int] = WeakKeyDictionary()
        self._made = count(1)

    def find(self, key: Hashable | None) -> KernelCache | None:
        """The cache of the node with this ``node_key``, which is that of another plan."""
        return None if key is None else self._caches.get(key)

    def add(self, cache: KernelCache, key: Hashable | None = None, flops: int = 0) -> None:
        self._caches[id(cache) if key is None else key] = cache
        self._plans[cache], self._flops[cache] = 0, flops

    def kernel(self, cache: KernelCache) -> Kernel:
        """The kernel of a node for one more plan, which counts its part of the cache's bytes."""
        plans = self._plans
        plans[cache] += 1
        shapes = RuntimeShapes(lambda: cache.nbytes() // plans[cache], self._flops[cache])
        packed = PackedConstants(tuple(cache.weights))
        return Kernel(cache.function(), packed=packed, shapes=shapes)

    def make_room(self, most_bytes: int) -> None:
        """Count a kernel that was made, and now and then drop some, of the fullest caches first,
        down to ``most_bytes`` of all."""
        made = next(self._made)
        if made % _LOOK_EVERY == 0:
            # References do not change while a collection drops caches.
            caches = [reference() for reference in self._caches.valuerefs()]
            held = {cache: cache.nbytes() for cache in caches if cache is not None}
            while sum(held.values()) > most_bytes:
                fullest = max(held, key=lambda cache: held[cache])
                fullest.halve()
                held[fullest] = fullest.nbytes()
        if made % _GIVE_BACK_EVERY == 0:
            give_back_memory()


class _Formula(NamedTuple):
    """How a kernel is made for other dims: ``make`` takes the values of ``formula`` for the dims at
    ``places``, pairs of an input and an axis; for inputs of these ``layouts``. ``read`` are the
    weights that its function looks at."""

    layouts: tuple[tuple[int, ...], ...]
    places: Sequence[tuple[int, int]]
    formula: NumberFormula
    make: Callable[..., Callable[..., RunValue]]
    read: Mapping[int, np.ndarray | None]

    def function(self, inputs: RunValues) -> Callable[..., RunValue] | None:
        """The function for inputs; None where the formula does not hold for their dims."""
        arguments = self.formula([inputs[i].shape[axis] for i, axis in self.places])
        return None if arguments is None else _with_weights(self.make(*arguments), self.read)


class KernelCache:
    """The functions of one node's kernels, by the shapes of the inputs that have unknown dims and
    the bytes of those whose ``contents`` matter. ``pays``: a kernel is expected to pay at once.
    ``weights``: large constants, which the functions have already; None may stand for them.

    There is no lock: several threads change dicts, by one call each. Two threads may make the same
    kernel, and one of the two is kept.
    """

    __slots__ = (
        *("__weakref__", "_awaited", "_compiled", "_estimate", "_formulas", "_least"),
        *("_lost", "_made", "_nbytes", "_paid", "_plain", "_price", "_traced", "_varying"),
        *("backend", "contents", "kernels", "node", "pays", "types", "weights"),
    )

    def __init__(
        self, backend: Specializing, node: Node, types: Tensors, contents: Sequence[int], pays: bool
    ) -> None:
        self.backend, self.node, self.types = backend, node, types
        self.contents, self.pays = contents, pays
        self.kernels: dict[Any, Callable[..., RunValue]] = {}
        # Calls that NumPy's kernel still gets before another is made; None if not yet estimated.
        self._awaited: dict[Any, int | None] = {}
        # Bytes of the inputs of the last estimate, and the calls that NumPy's kernel then got.
        self._estimate = (0, 0)
        self._paid = 0  # bytes of the inputs of the last estimate by which a kernel paid at once
        # Those used last come first; bytes of inputs from which on they are used without an
        # estimate; kernels made by formulas, those of which a formula could be made, and traces.
        self._formulas: list[_Formula] = []
        # Seconds in which a kernel is made, and that NumPy's has lost, in those of compiling one.
        self._price, self._lost = backend.making_s, 0.0
        self._least = math.inf
        self._made = self._compiled = self._traced = 0
        self._plain: Callable[..., RunValue] | None = None
        is_const = [v is None or v.is_constant for v in node.inputs]
        self._varying = [i for i, t in enumerate(types) if t is not None and not is_const[i]]
        self._nbytes = sum([t.nbytes for t, own in zip(types, is_const, strict=True) if t and own])
        self.weights = {
            i: v
            for i, (v, t) in enumerate(zip(node.inputs, types, strict=True))
            if v is not None and v.is_constant and t is not None and t.nbytes >= WORTH_PACKING
        }

    def nbytes(self) -> int:
        """About what the kernels take in memory."""
        return _KERNEL_BYTES * len(self.kernels) + _FORMULA_BYTES * len(self._formulas)

    @property
    def plain(self) -> Callable[..., RunValue]:
        """The function of NumPy's kernel, made when it is called for."""
        if self._plain is None:
            kernel = self.node.op.compile(self.node, self.types)
            self._plain = _with_weights(kernel.function, self._read(kernel))
        return self._plain

    def _read(self, kernel: Kernel) -> Mapping[int, np.ndarray | None]:
        """The weights that the function of a kernel looks at, by input."""
        return {i: v.const for i, v in self.weights.items() if i not in kernel.packed.inputs}

    def _parts(self, kernel: Kernel, inputs: RunValues) -> FunctionParts | None:
        fallback = partial(run_node, self.node, self.types)  # no method, which would make a cycle
        return None if kernel.binder is None else kernel.binder.function_parts(inputs, fallback)

    def _compile(self, node: Node, inputs: RunValues) -> Callable[..., RunValue] | None:
        """The function of the backend's kernel for a node with the shapes of ``inputs``."""
        kernel = self.backend.static_kernel(node, _types(node.inputs))
        if kernel is None:
            return None
        parts = self._parts(kernel, inputs)
        if parts is None:
            self._raise_price()
        self._compiled += parts is not None
        function = kernel.function if parts is None else parts[0](*parts[1])
        return _with_weights(function, self._read(kernel))

    def _trace(self, inputs: RunValues) -> None:
        """Make a formula of kernels for the layouts of ``inputs``, if that is possible."""
        self._traced += 1
        trace, types, kernel, parts = NumberTrace(), [*self.types], None, None
        shapes = {
            i: [trace.number(n) for n in inputs[i].shape]
            for i, t in enumerate(types)
            if t is not None and not t.static
        }
        for i, shape in shapes.items():
            known = self.types[i]
            assert known is not None
            # Dims that the type knows are guards.
            for axis, dim in enumerate(known.shape or ()):
                if isinstance(dim, int) and axis < len(shape):
                    shape[axis] = index(shape[axis])
            types[i] = TensorType(known.dtype, tuple(shape))
        try:
            node = _typed(self.node, types, {})
            kernel = self.backend.static_kernel(node, _types(node.inputs))
            parts = None if kernel is None else self._parts(kernel, inputs)
            formula = None if parts is None else trace.formula(parts[1])
        except (UntraceableError, TypeError, AttributeError):  # traced numbers lack some operations
            formula = None
        if kernel is None or parts is None or formula is None:
            self._raise_price()
            return
        places = [(i, axis) for i, shape in shapes.items() for axis in range(len(shape))]
        own = _Formula(self._layouts(inputs), places, formula, parts[0], self._read(kernel))
        self._formulas = [own, *self._formulas[: _MOST_FORMULAS - 1]]
        self._lower_price()

    def _layouts(self, inputs: RunValues) -> tuple[tuple[int, ...], ...]:
        """The rank of each array that is no constant, and its order of dims where that is not
        C's."""
        arrays = [inputs[i] for i in self._varying]
        return tuple([(x.ndim, *order_in_memory(x)) for x in arrays])

    def _by_formula(self, inputs: RunValues) -> Callable[..., RunValue] | None:
        """The function that a formula makes for the dims of ``inputs``; None if none holds."""
        layouts = self._layouts(inputs)
        for own in self._formulas:
            if own.layouts == layouts and (function := own.function(inputs)) is not None:
                self._made += 1
                if own is not self._formulas[0]:
                    self._formulas = [own, *[x for x in self._formulas if x is not own]]
                return function
        return None

    def drop(self, count: int) -> None:
        """Drop the ``count`` kernels that were made first."""
        for key in list(self.kernels)[:count]:
            self.kernels.pop(key, None)

    def halve(self) -> None:
        """Drop half of the kernels, and of the formulas those that were not used lately."""
        self.drop((len(self.kernels) + 1) // 2)
        self._formulas = self._formulas[: len(self._formulas) // 2]

    def function(self) -> Callable[..., RunValue]:
        """The function of the node's kernel."""
        get, make, contents = self.kernels.get, self._make, self.contents
        # A look is paid in each run: keys are as small as the node allows.
        places = [i for i, t in enumerate(self.types) if t is not None and not t.static]
        first, last = (*places, -1)[0], (-1, *places)[-1]
        # Kernels of images read the order of dims in which the kernel before has written them.
        images = any(t is not None and (t.shape is None or len(t.shape) > 2) for t in self.types)

        def by_shape(*inputs: RunValue) -> RunValue:
            key = inputs[first].shape
            return (get(key) or make(key, inputs))(*inputs)

        def by_order(*inputs: RunValue) -> RunValue:
            key = inputs[first].strides, inputs[first].shape
            return (get(key) or make(key, inputs))(*inputs)

        def by_two(*inputs: RunValue) -> RunValue:
            key = inputs[first].shape, inputs[last].shape
            return (get(key) or make(key, inputs))(*inputs)

        def by_all(*inputs: RunValue) -> RunValue:
            key = (*[inputs[i].shape for i in places], *[inputs[i].tobytes() for i in contents])
            key += tuple([inputs[i].strides for i in places]) if images else ()
            return (get(key) or make(key, inputs))(*inputs)

        if contents or len(places) > (1 if images else 2):
            return by_all
        if images:
            return by_order
        return by_shape if len(places) == 1 else by_two

    def _await(self, key: object, calls: int | None) -> None:
        """Let NumPy's kernel have some calls with these shapes."""
        for old in list(self._awaited)[: max(len(self._awaited) + 1 - _MOST_AWAITED, 0)]:
            self._awaited.pop(old, None)
        self._awaited[key] = calls

    def _waits(self, key: object, size: int) -> bool:
        """Whether NumPy's kernel gets a call with inputs of ``size`` bytes, where that is known
        without an estimate, which takes longer than most calls."""
        if key not in self._awaited and size < _WORTH_ESTIMATING and not self.pays:
            self._await(key, None)
            return True
        calls = self._awaited.get(key)
        estimated, most = self._estimate
        if calls is None and most > 1 and _is_near(size, estimated):
            calls = most + 1
            # All shapes together may be worth a formula, even if none comes back.
            self._lost += 1 / most
            if self._lost >= _TRACE_PARTS:
                self._lower_price()
        if calls is None or calls <= 1:
            return False
        self._await(key, calls - 1)
        return True

    def _gain(self, node: Node, size: int) -> float:
        """``_gain`` for inputs of ``size`` bytes; infinity where making a kernel paid at once for
        about as many bytes, as an estimate takes a seventh of the time in which one is made."""
        # The estimate is not for these bytes, or sizes that shrink slowly would never get another.
        if _is_near(size, self._paid):
            return math.inf
        gain = _gain(self.backend, node)
        self._paid = size if gain > self._price else 0
        return gain

    def _fixed_results(self, node: Node, inputs: RunValues) -> Callable[..., RunValue] | None:
        """A function that copies the result of a node, if nothing else than inputs without elements
        varies, such as of a reduction."""
        values = zip(self.node.inputs, inputs, strict=True)
        varying = [v for v, x in values if v and not v.is_constant and np.size(x)]
        if varying or self.contents or len(node.outputs) > 1 or not node.op.pure:
            return None
        result = self.plain(*inputs)
        if not isinstance(result, np.ndarray) or result.nbytes > _KERNEL_BYTES:
            return None
        return partial(_copied, result.copy())

    def _lower_price(self) -> None:
        """From now on kernels are made by formulas, which must gain less to pay."""
        if self._price == self.backend.making_s:
            self._price *= _FORMULA_PART
            self._estimate = 0, 0

    def _raise_price(self) -> None:
        """Kernels are not made by formulas, as the last trace failed."""
        if not self._formulas:
            self._price, self._lost, self._paid = self.backend.making_s, -math.inf, 0

    def _make(self, key: Any, inputs: RunValues) -> Callable[..., RunValue]:
        """The function for inputs of shapes that have none yet: NumPy's as long as making another
        does not pay. Raises ``ShapeError`` where the shapes do not fit the operation."""
        size = sum([inputs[i].nbytes for i in self._varying], self._nbytes)
        if size >= self._least:
            function = self._by_formula(inputs)
            if function is not None:
                return self._keep(key, function)
        # To give weights back to NumPy's kernel takes as long as to make another, and memory.
        own = self.backend.reproducible
        may_wait = self._plain is not None or all(v.is_held for v in self.weights.values())
        may_wait &= not own
        if may_wait and self._waits(key, size):
            return self.plain
        calls = self._awaited.get(key)
        types = [
            t if t is None or t.static else TensorType(t.dtype, x.shape)
            for t, x in zip(self.types, inputs, strict=True)
        ]
        # Copies: kernels keep these as constants, and the arrays belong to the run.
        node = _typed(self.node, types, {i: np.array(inputs[i]) for i in self.contents})
        # Libraries refuse dims of 0, with which many a cache begins.
        unknown = [x for t, x in zip(self.types, inputs, strict=True) if t and not t.static]
        empty = all(x.size == 0 for x in unknown)
        if empty and (results := _empty_results(node) or self._fixed_results(node, inputs)):
            self.kernels[key] = results
            return results
        gain = self._gain(node, size)
        if may_wait and calls is None and 0 < gain < self._price:
            self._estimate = size, int(self._price / gain)
            self._await(key, self._estimate[1])
            return self.plain
        return self._keep(key, self._faster(node, inputs, size, gain))

    def _faster(
        self, node: Node, inputs: RunValues, size: int, gain: float
    ) -> Callable[..., RunValue]:
        """The function for inputs of ``size`` bytes that is the faster one: where that is NumPy's,
        it is kept for these shapes, and no estimate is made again."""
        function, own = None, self.backend.reproducible
        if own or gain > 0:
            if self._may_trace():
                self._trace(inputs)
                function = self._by_formula(inputs)
            if function is None:
                function = self._compile(node, inputs)
        if own and function is None:
            from penstock.ops.exactness import check_exact

            check_exact([node])
        if own or _FORMULA_PART * self.backend.making_s < gain < math.inf:
            self._least = min(self._least, size / 2)
        return self.plain if function is None else function

    def _may_trace(self) -> bool:
        """Whether another formula is worth its time, that of four kernels: after two kernels, then
        the later the fewer kernels the formulas before have made."""
        made = self._compiled + 2 * self._made
        return made >= 2 * (self._traced + 1) ** 2 and not self.contents

    def _keep(self, key: object, function: Callable[..., RunValue]) -> Callable[..., RunValue]:
        """Keep a function for calls with these shapes."""
        self._awaited.pop(key, None)
        self.kernels[key] = function
        if len(self.kernels) > _MOST_KERNELS:
            self.drop(len(self.kernels) - _MOST_KERNELS)
        self.backend.caches.make_room(self.backend.most_bytes)
        return function


def _with_weights(
    function: Callable[..., RunValue], read: Mapping[int, np.ndarray | None]
) -> Callable[..., RunValue]:
    """A function of inputs of which those in ``read`` are given."""
    if not read:
        return function
    return lambda *inputs: function(*[read.get(i, x) for i, x in enumerate(inputs)])


def _is_near(size: int, other: int) -> bool:
    """Whether an estimate for inputs of ``other`` bytes holds for ``size`` bytes."""
    return other <= 2 * size <= 4 * other


def _copied(result: np.ndarray, *inputs: RunValue) -> np.ndarray:
    return result.copy()


def _empty_results(node: Node) -> Callable[..., RunValue] | None:
    """A function that makes the outputs of a node, if none of them has elements."""
    types = [t for t in _types(node.outputs) if isinstance(t, TensorType) and t.static]
    if len(types) < len(node.outputs) or any(t.elements for t in types):
        return None
    made = [(t.dims, t.dtype) for t in types]
    if len(made) == 1:
        return lambda *inputs: np.empty(*made[0])
    return lambda *inputs: tuple([np.empty(*of) for of in made])


def guess(node: Node) -> Node:
    """The node with plausible dims in place of unknown ones; the node itself if no guess fits the
    operation."""
    tensors = _tensors(_types(node.inputs))
    guesses = [] if tensors is None else [guessed for guessed, _ in _guessed_nodes(node, tensors)]
    return next((guessed for guessed in guesses if _are_static(_types(guessed.outputs))), node)


def late_estimate(backend: Backend, node: Node) -> float:
    """The seconds of a node with the shapes of a run, which its kernel has to look at."""
    late = backend.unbound_cost(node) if isinstance(backend, HostBackend) else 0.0
    return backend.seconds(node) + late


def _guessed_nodes(node: Node, types: Tensors) -> Iterator[tuple[Node, list[int]]]:
    """The node with plausible dims in place of unknown ones; then with plausible contents of small
    inputs as well, and their indices. None of these where no guess fits the operation."""
    small = [i for i, value in enumerate(node.inputs) if _is_small(value)]
    for contents in [[], small] if small else [[]]:
        if contents or not _are_static(types):
            for guessed in _guesses(types):
                ones = {
                    i: np.ones(t.dims, t.dtype) for i, t in guessed.items() if t and i in contents
                }
                with suppress(ShapeError):
                    yield _typed(node, [*guessed.values()], ones), contents
                    break


def _guesses(types: Tensors) -> Iterator[dict[int, TensorType | None]]:
    """Static types of inputs, by index: all unknown dims alike, or each as that of another input at
    the same place from the right. Unknown ranks are the highest of the others, but 2 at least."""
    known = [() if t is None else t.shape for t in types]
    rank = max([_NOMINAL_RANK, *[len(shape) for shape in known if shape is not None]])
    shapes = [(None,) * rank if shape is None else shape for shape in known]
    dims = [dim for shape in shapes for dim in shape if isinstance(dim, int)]

    def filled(fill: Callable[[int], int]) -> dict[int, TensorType | None]:
        filled_types: dict[int, TensorType | None] = {}
        for i, (type_, shape) in enumerate(zip(types, shapes, strict=True)):
            filled_types[i] = type_
            if type_ is not None and not type_.static:
                places = enumerate(shape, -len(shape))
                dims = tuple([d if isinstance(d, int) else fill(place) for place, d in places])
                filled_types[i] = TensorType(type_.dtype, dims)
        return filled_types

    def beside(place: int) -> int:
        others = [shape[place] for shape in shapes if len(shape) >= -place]
        return max([dim for dim in others if isinstance(dim, int)], default=_NOMINAL_DIM)

    unknown = [t for t in types if t is not None and not t.static]
    is_list = all(
        t.shape is not None and len(t.shape) < 2 and t.dtype and t.dtype.kind in "biu"
        for t in unknown
    )
    yield filled(lambda place: _NOMINAL_LENGTH if is_list else _NOMINAL_DIM)
    yield filled(beside)
    for dim in dict.fromkeys(dims):
        yield filled(lambda place, dim=dim: dim)  # type: ignore[misc]


def _typed(node: Node, types: Sequence[Type | None], known: Mapping[int, np.ndarray]) -> Node:
    """A copy of a node for inputs of these types and ``known`` contents, with the types of outputs
    that follow. Raises ``ShapeError`` for types that the operation does not take."""
    inputs: list[Value | None] = []
    for i, v in enumerate(node.inputs):
        if v is not None and i in known:
            inputs.append(Value(v.name, const=known[i]))  # whose type has its contents
        elif v is None or v.is_constant:
            inputs.append(v)  # itself: kernels of all shapes share what they make of its contents
        else:
            # Estimates ask which layout its producer writes.
            inputs.append(Value(v.name, types[i] or ANY, producer=v.producer))
    if not is_fused(node):
        return _inferred(node, inputs)
    region = node.attrs["region"]
    copies: dict[Value | None, Value | None] = dict(zip(region.inputs, inputs, strict=True))
    nodes = []
    for part in region.nodes:
        nodes.append(_inferred(part, [copies.get(value) for value in part.inputs]))
        copies[part.outputs[0]] = nodes[-1].outputs[0]
    return fused(nodes)


def _inferred(node: Node, inputs: Sequence[Value | None]) -> Node:
    """A copy of a node with other inputs, and outputs of the types that follow."""
    types = node.op.infer(_types(inputs), node.attrs, Contents(inputs))
    outputs = [
        None if value is None else Value(value.name, types[i] if i < len(types) else value.type)
        for i, value in enumerate(node.outputs)
    ]
    return node.derived(inputs, outputs)


def _types(values: Sequence[Value | None]) -> list[Type | None]:
    return [None if value is None else value.type for value in values]


def _are_static(types: Sequence[Type | None]) -> bool:
    return False not in [t is None or (isinstance(t, TensorType) and t.static) for t in types]


def _tensors(types: Sequence[Type | None]) -> list[TensorType | None] | None:
    """``types``, if all are tensors of known dtypes, else None."""
    tensors = [t for t in types if t is None or (isinstance(t, TensorType) and t.dtype is not None)]
    return tensors if len(tensors) == len(types) else None


def _is_small(value: Value | None) -> bool:
    """Whether an input has few numbers, which only the run knows."""
    type_ = None if value is None or value.is_constant else value.type
    return (
        isinstance(type_, TensorType)
        and type_.shape is not None
        and len(type_.shape) < 2
        and 0 <= type_.elements <= _MOST_CONTENTS
        and type_.dtype is not None
        and type_.dtype.kind in "iuf"
    )
