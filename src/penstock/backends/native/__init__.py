"""Penstock's compiled kernels, and the registry of kernel families.

A family implements a group of operations, and registers itself in its module::

    @family("Hardmax", "LogSoftmax", "Softmax", work=by_memory)
    def softmax_call(site: Site) -> NativeCall | None: ...

The module is imported when one of its operations is first looked up, by the index ``families.txt``,
which ``make kernels`` generates from the registrations. No module in this folder may share its name
with an attribute of this package, which it would shadow.

Kernels are for static shapes, bound once to arrays in the arena (``family``); for arrays of any
shape and layout (``of_any_shape``); or tried before the cached kernels for shapes of earlier runs
(``ahead_of_cache``; ``backends/dynamic_shapes.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from penstock.backends.native.kernel import NativeCall, Site
from penstock.backends.numpy import NumpyBackend
from penstock.core.errors import InternalError
from penstock.core.records import dataclass
from penstock.core.types import RunValue, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import FUSED
from penstock.ops.registry import COMPUTING
from penstock.ops.work_estimate import Rates, RateTable, Workload, estimate, part_seconds

WorkloadOf: TypeAlias = Callable[[Node], Workload | None]
Static: TypeAlias = Callable[[Site], NativeCall | None]
AnyShape: TypeAlias = Callable[[NativeLibrary, Node, Sequence[Type | None]], Kernel | None]
AnyShapeCall: TypeAlias = tuple[Callable[..., RunValue], object]
"""a compiled function of a fallback, a checkpoint, settings and arrays; and the settings"""
AheadOfCache: TypeAlias = Callable[[Site], AnyShapeCall | None]
Chooser = TypeVar("Chooser", bound=Callable[..., RunValue])

INDEX = os.path.join(os.path.dirname(__file__), "families.txt")

LANES = {"x86-64-v4": 16, "x86-64-v3": 8}
"""float32 lanes of a vector, for the instruction sets with kernels for single-vector operands"""

# Rates of one core of a 2023 Intel Xeon with AVX-512, fitted to measured times of layers of common
# networks. The estimate for a call is used to compare backends; that for a part of it, to divide
# the call among threads.

# Overhead of a call, in seconds.
_CALL = 0.12e-6

RATES: RateTable = {
    # Most families: bytes in the cache; elements are additions, items rows or other parts with
    # overhead.
    "": Rates(_CALL, 60e9, element_s=0.05e-9, item_s=10e-9),
    "view": Rates(_CALL),
    # Gathered bytes.
    "gather": Rates(_CALL, 8e9),
    # Items are seconds of NumPy's kernel: compiled kernels are assumed to take half.
    "other": Rates(item_s=0.5),
    # Matrix products. Elements are those of results whose rows do not fill whole vectors.
    "dense": Rates(0.2e-6, flops_per_s=160e9, weights_per_s=25e9, element_s=0.2e-9),
    "product float32": Rates(0.25e-6, flops_per_s=150e9, item_s=30e-9),
    "product float64": Rates(0.25e-6, flops_per_s=70e9, item_s=30e-9),
    "product int32": Rates(0.25e-6, flops_per_s=100e9, item_s=30e-9),
    "product int64": Rates(0.25e-6, flops_per_s=50e9, item_s=30e-9),
    # Products of codes: operations, divided by those that one instruction computes.
    "codes product": Rates(0.4e-6, flops_per_s=1e9, weights_per_s=35e9, item_s=50e-9),
    # Bytes are copied keys and values; elements are scores.
    "attention": Rates(0.35e-6, 4 / 0.15e-9, 180e9, element_s=0.15e-9),
    # Items are time steps.
    "recurrent": Rates(1e-6, flops_per_s=210e9, item_s=0.1e-6),
    # Channels-first (NCHW) images: elements are copied, items are groups. A single filter is bound
    # by loads.
    "planes": Rates(0.5e-6, flops_per_s=140e9, element_s=0.17e-9, item_s=0.1e-6),
    "planes, one filter": Rates(0.5e-6, flops_per_s=100e9, element_s=0.17e-9, item_s=0.1e-6),
    # Channels-last (NHWC) images: elements in whole vectors; items are address lookups.
    "image": Rates(0.24e-6, 350e9, 200e9, element_s=0.05e-9, item_s=1.65e-9),
    "depthwise image": Rates(0.24e-6, 130e9, 110e9, element_s=0.05e-9, item_s=0.6e-9),
    # As "image"; bytes are copied codes, elements are requantized accumulators.
    "codes image": Rates(0.4e-6, 20e9, 4e9, 60e9, 0.11e-9),
    "codes layer": Rates(0.3e-6, 20e9, 4e9, 100e9, 0.11e-9),
    # Groups of one filter: operations are groups of four taps, items are copied codes.
    "depthwise codes image": Rates(
        0.4e-6, flops_per_s=1 / 0.012e-9, element_s=0.11e-9, item_s=0.03e-9
    ),
    # Parts of calls, where work was divided among threads by other measurements.
    "recurrent, a part": Rates(flops_per_s=100e9),
    "planes, a part": Rates(flops_per_s=40e9, item_s=100e-9),
    "codes image, a part": Rates(bytes_per_s=20e9, flops_per_s=4e9, element_s=0.11e-9),
    # Items are gathered pixels, operations their products.
    "deformable": Rates(flops_per_s=1 / 0.03e-9, item_s=1.5e-9),
}
"""``""`` is for families without a row"""

# Work items of a product: the minimum, the minimum and maximum per core, the operations of one, and
# the minimum of rows per item where rows are divided.
_LEAST_ITEMS, _ITEMS_OF_CORE, _MOST_OF_CORE, _ITEM_FLOPS, _LEAST_BLOCK = 8, 2, 12, 1_000_000, 24
_LEAST_FLOPS = 250_000

_NUMPY = NumpyBackend()


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels of an operation. ``static`` returns the call of a compiled kernel for a node of
    static shapes; with ``data_dependent``, output shapes depend on data, and are omitted.
    ``any_shape`` returns a kernel for arrays of any shapes. ``ahead_of_cache`` gets a site whose
    shapes may be unknown; its compiled function calls the fallback for cases that it does not
    implement. Each returns None if it has no kernel for the node; the first and the third may also
    raise ``UnsupportedError``. ``work`` is the workload of a call, in the units of ``RATES``; None
    for nodes without a kernel."""

    work: WorkloadOf
    static: Static | None = None
    any_shape: AnyShape | None = None
    ahead_of_cache: AheadOfCache | None = None
    data_dependent: bool = False


REGISTERED: dict[str, dict[str, Any]] = {}
"""family fields registered by the imported modules, by full operation name. Two threads may import
modules that register forms of one operation, so each dict is changed by a single call."""


str_ = cache(str)
"""cached name of a dtype, which NumPy takes microseconds to compute"""


def part_ns(work: Workload) -> float:
    """Return the nanoseconds of a part of a call with this workload."""
    return part_seconds(RATES, work) * 1e9


_OF_ROWS = RATES[""]


def rows_ns(additions: float, rows: float = 0) -> float:
    """Return the nanoseconds of a part of a call with these numbers of additions and of rows."""
    return (rows * _OF_ROWS.item_s + additions * _OF_ROWS.element_s) * 1e9


def blocks_of_rows(rows: int, panels: int, most: int, flops: float) -> int:
    """Return the number of row blocks, of at most ``most`` rows, of a product with these rows,
    panels and operations."""
    cores = core_budget()
    smaller, larger = min, max
    if type(flops) not in (int, float):
        from penstock.core.traced import EXTREMES  # which saved sessions do not import

        smaller, larger = EXTREMES[True]
    # Items are unequal, such as a panel and the remaining columns: more of them balance threads, as
    # long as each takes far longer than its dispatch.
    more = smaller(_MOST_OF_CORE * cores, math.floor(flops / _ITEM_FLOPS)) if cores > 1 else 0
    items = larger(max(_LEAST_ITEMS, _ITEMS_OF_CORE * cores), more)
    # With little work, the setup of each item would take longer than its products.
    items = smaller(items, larger(math.floor(flops / _LEAST_FLOPS), 1))
    # Narrow matrices have fewer panels than threads, so rows are divided as well, as long as each
    # block has enough rows to amortize reading a panel.
    least = smaller(math.ceil(items / panels), rows // _LEAST_BLOCK)
    return larger(math.ceil(rows / most), least)


def cheaper(first: Workload | None, second: Workload | None) -> Workload | None:
    """Return the workload that takes less time."""
    return first if estimate(RATES, first) <= estimate(RATES, second) else second


def below_numpy(node: Node) -> Workload:
    """Return the seconds of NumPy's kernel, as items of the family "other"."""
    return Workload("other", items=_NUMPY.seconds(node))


def by_call(node: Node) -> Workload:
    """Return the workload of a mere call, for views."""
    return Workload("view")


def by_memory(node: Node, additions: float = 1) -> Workload | None:
    """Return a workload of the bytes read and written, and ``additions`` per result element; None
    if a shape is unknown."""
    moved = elements = 0
    for value in (*node.inputs, *node.outputs):
        if value is not None and not value.is_constant:
            if not isinstance(type_ := value.type, TensorType) or not type_.static:
                return None
            moved, elements = moved + type_.nbytes, type_.elements
    return Workload(nbytes=moved, elements=elements * additions)


def by_result(node: Node) -> Workload | None:
    """Return a workload of the result's bytes, as only part of the input is read."""
    types_ = [v.type for v in node.outputs if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return None
    return Workload("gather", sum([t.nbytes for t in tensors]))


def family(
    *names: str, work: WorkloadOf = below_numpy, data_dependent: bool = False
) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.static`` of the operations with these full names."""
    options = {"work": work, "data_dependent": data_dependent}
    return lambda choose: _register(names, "static", choose, options)


def of_any_shape(*names: str, work: WorkloadOf | None = None) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.any_shape``; ``work`` if no other form declares it."""
    options = {} if work is None else {"work": work}
    return lambda choose: _register(names, "any_shape", choose, options)


def ahead_of_cache(*names: str) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.ahead_of_cache``."""
    return lambda choose: _register(names, "ahead_of_cache", choose, {})


def _register(
    names: Sequence[str], form: str, choose: Chooser, options: Mapping[str, Any]
) -> Chooser:
    for name in names:
        fields = REGISTERED.setdefault(name, {})
        if fields.setdefault(form, choose) is not choose:
            raise InternalError(f"two native families register {name} as {form}")
        fields.update(options)
    return choose


def fused_with(first: str) -> str:
    """Return the name under which families register fused nodes that begin with the operation
    ``first``, such as "MatMul"."""
    return f"{FUSED.full_name}({first})"


def family_of(node: Node) -> Family | None:
    """Return the family of a node's operation, or of a fused node's first operation; None if there
    are no kernels."""
    if node.op is not FUSED:
        return _family(node.op.full_name)
    nodes = node.attrs["region"].nodes
    first = nodes[0].op.full_name
    # Products of codes begin with DequantizeLinear, and so may elementwise chains.
    if first == "DequantizeLinear" and COMPUTING.isdisjoint([n.op.full_name for n in nodes]):
        return _family(FUSED.full_name)
    return _fused_family(first)


@cache
def _fused_family(first: str) -> Family | None:
    return _family(fused_with(first)) or _family(FUSED.full_name)


@cache
def _family(name: str) -> Family | None:
    # `REGISTERED` is not sufficient: two modules may register different forms of an operation, and
    # only one of them may be imported yet.
    for module in _index().get(name, ()):
        # Lazy: a model needs few families, and each import delays its first run.
        import_module(f"{__name__}.{module}")
    return Family(**{"work": below_numpy, **REGISTERED[name]}) if name in REGISTERED else None


@cache
def _index() -> Mapping[str, Sequence[str]]:
    """Return the modules of this folder that register each name."""
    modules: dict[str, list[str]] = {}
    module = ""
    with open(INDEX, encoding="ascii") as file:
        for word in file.read().split():
            if word.endswith(":"):
                module = word[:-1]
            else:
                modules.setdefault(word, []).append(module)
    return modules
