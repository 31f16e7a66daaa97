"""Penstock's own compiled kernels, and the registry of their families.

A family is the kernels of some operations, and registers itself in its file::

    @family("Hardmax", "LogSoftmax", "Softmax", work=by_memory)
    def softmax_call(site: Site) -> NativeCall | None: ...

The file is imported when one of its operations is first looked up. ``families.txt`` says which it
is: ``make kernels`` writes that from what the files register. No file of this folder may have the
name of something here, which it would replace.

Its kernels are for known shapes, bound once to arrays in the arena (``family``); for arrays of any
shapes, in any layout (``of_any_shape``); or tried ahead of those for known shapes that a run has
made so far (``ahead_of_cache``; ``backends/dynamic_shapes.py``).
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
"""a compiled function that takes another function, a checkpoint, settings and arrays of any shapes;
and the settings"""
AheadOfCache: TypeAlias = Callable[[Site], AnyShapeCall | None]
Chooser = TypeVar("Chooser", bound=Callable[..., RunValue])

INDEX = os.path.join(os.path.dirname(__file__), "families.txt")

LANES = {"x86-64-v4": 16, "x86-64-v3": 8}
"""float32 numbers of a vector, of the levels that have kernels for what fits into one"""

# Rates on one core, of an Intel Xeon of the generation of 2023 with AVX-512: fitted to times of
# layers of common networks. The estimate of a call compares backends; that of a part of it divides
# the call among threads.

# Of a call that does nothing.
_CALL = 0.12e-6

RATES: RateTable = {
    # Most families: bytes in the cache, additions, and rows or other parts of some overhead.
    "": Rates(_CALL, 60e9, element_s=0.05e-9, item_s=10e-9),
    "view": Rates(_CALL),
    # Bytes that are gathered one by one.
    "gather": Rates(_CALL, 8e9),
    # Half of NumPy's time, whose seconds are items: compiled kernels are there as they are faster.
    "other": Rates(item_s=0.5),
    # Products. Elements: of results whose rows do not fill whole vectors.
    "dense": Rates(0.2e-6, flops_per_s=160e9, weights_per_s=25e9, element_s=0.2e-9),
    "product float32": Rates(0.25e-6, flops_per_s=150e9, item_s=30e-9),
    "product float64": Rates(0.25e-6, flops_per_s=70e9, item_s=30e-9),
    "product int32": Rates(0.25e-6, flops_per_s=100e9, item_s=30e-9),
    "product int64": Rates(0.25e-6, flops_per_s=50e9, item_s=30e-9),
    # Operations for each that the processor's instructions compute at once.
    "codes product": Rates(0.4e-6, flops_per_s=1e9, weights_per_s=35e9, item_s=50e-9),
    # Bytes of keys and values that are copied; elements are scores.
    "attention": Rates(0.35e-6, 4 / 0.15e-9, 180e9, element_s=0.15e-9),
    # Items are time steps.
    "recurrent": Rates(1e-6, flops_per_s=210e9, item_s=0.1e-6),
    # Images in their own order: elements are copied, items are groups. One filter alone is bound
    # by loads.
    "planes": Rates(0.5e-6, flops_per_s=140e9, element_s=0.17e-9, item_s=0.1e-6),
    "planes, one filter": Rates(0.5e-6, flops_per_s=100e9, element_s=0.17e-9, item_s=0.1e-6),
    # Channels innermost: elements of whole vectors; items are addresses that are looked up.
    "image": Rates(0.24e-6, 350e9, 200e9, element_s=0.05e-9, item_s=1.65e-9),
    "depthwise image": Rates(0.24e-6, 130e9, 110e9, element_s=0.05e-9, item_s=0.6e-9),
    # As images; bytes are codes to copy, elements are sums that become codes.
    "codes image": Rates(0.4e-6, 20e9, 4e9, 60e9, 0.11e-9),
    "codes layer": Rates(0.3e-6, 20e9, 4e9, 100e9, 0.11e-9),
    # Groups of one filter: operations are fours of taps, items codes to copy.
    "depthwise codes image": Rates(
        0.4e-6, flops_per_s=1 / 0.012e-9, element_s=0.11e-9, item_s=0.03e-9
    ),
    # Parts of calls, where threads were divided by other measurements.
    "recurrent, a part": Rates(flops_per_s=100e9),
    "planes, a part": Rates(flops_per_s=40e9, item_s=100e-9),
    "codes image, a part": Rates(bytes_per_s=20e9, flops_per_s=4e9, element_s=0.11e-9),
    # Pixels that are gathered for each term, and products of them.
    "deformable": Rates(flops_per_s=1 / 0.03e-9, item_s=1.5e-9),
}
"""``""`` is for families without a row"""

# Items of a product for threads: the least, of each core at least and at most, and operations of
# one; and rows of one that is divided for them. With fewer operations, no item is handed out.
_LEAST_ITEMS, _ITEMS_OF_CORE, _MOST_OF_CORE, _ITEM_FLOPS, _LEAST_BLOCK = 8, 2, 12, 1_000_000, 24
_LEAST_FLOPS = 250_000

_NUMPY = NumpyBackend()


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels of an operation. ``static`` returns the call of a compiled kernel for a node of
    known shapes; with ``data_dependent`` those of outputs follow from data, and are left out.
    ``any_shape`` returns a kernel for arrays of any shapes. ``ahead_of_cache`` gets a site whose
    shapes may be unknown; its compiled function calls the other for what it has no code for. Each
    returns None if it has no kernel for the node; the first and the third may also raise
    ``UnsupportedError``. ``work`` is that of a call, in the units of ``RATES``; None for nodes
    without a kernel."""

    work: WorkloadOf
    static: Static | None = None
    any_shape: AnyShape | None = None
    ahead_of_cache: AheadOfCache | None = None
    data_dependent: bool = False


REGISTERED: dict[str, dict[str, Any]] = {}
"""fields of families that the modules register that were imported, by full names of operations. Two
threads may import files that register forms of the same one: dicts are changed by one call each."""


str_ = cache(str)
"""the text of a dtype, which NumPy takes microseconds to make"""


def part_ns(work: Workload) -> float:
    """The nanoseconds of a part of a call that does this work."""
    return part_seconds(RATES, work) * 1e9


_OF_ROWS = RATES[""]


def rows_ns(additions: float, rows: float = 0) -> float:
    """The nanoseconds of a part of a call with these numbers of additions and of rows."""
    return (rows * _OF_ROWS.item_s + additions * _OF_ROWS.element_s) * 1e9


def blocks_of_rows(rows: int, panels: int, most: int, flops: float) -> int:
    """The blocks, of ``most`` rows at most, of a product of these panels, rows and operations."""
    cores = core_budget()
    # Items are unequal, such as a panel and the rest of the columns: with more of them threads end
    # at the same time, as long as each takes far longer than to hand it out.
    more = min(_MOST_OF_CORE * cores, int(flops / _ITEM_FLOPS)) if cores > 1 else 0
    items = max(_LEAST_ITEMS, _ITEMS_OF_CORE * cores, more)
    # Of little work, what each item begins with would take longer than its products.
    items = min(items, max(int(flops / _LEAST_FLOPS), 1))
    # Narrow matrices have fewer panels than threads: rows are divided as well, as long as enough
    # are left to share what is read of a panel.
    return max(math.ceil(rows / most), min(math.ceil(items / panels), rows // _LEAST_BLOCK))


def cheaper(first: Workload | None, second: Workload | None) -> Workload | None:
    """The work that takes less time."""
    return first if estimate(RATES, first) <= estimate(RATES, second) else second


def below_numpy(node: Node) -> Workload:
    """The seconds of NumPy's kernel, as items; the rates take a part of them."""
    return Workload("other", items=_NUMPY.seconds(node))


def by_call(node: Node) -> Workload:
    """A call alone, for views."""
    return Workload("view")


def by_memory(node: Node, additions: float = 1) -> Workload | None:
    """The bytes read and written, and this number of additions for each element of the result; None
    if a shape is unknown."""
    moved = elements = 0
    for value in (*node.inputs, *node.outputs):
        if value is not None and not value.is_constant:
            if not isinstance(type_ := value.type, TensorType) or not type_.static:
                return None
            moved, elements = moved + type_.nbytes, type_.elements
    return Workload(nbytes=moved, elements=elements * additions)


def by_result(node: Node) -> Workload | None:
    """The bytes of the result: of the rest, only some is read."""
    types_ = [v.type for v in node.outputs if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return None
    return Workload("gather", sum([t.nbytes for t in tensors]))


def family(
    *names: str, work: WorkloadOf = below_numpy, data_dependent: bool = False
) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.static`` of the operations of these full names."""
    options = {"work": work, "data_dependent": data_dependent}
    return lambda choose: _register(names, "static", choose, options)


def of_any_shape(*names: str, work: WorkloadOf | None = None) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.any_shape``; with its work where that is known in no
    other way."""
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
    """The name under which families register for fused nodes that begin with an operation, such as
    "MatMul"."""
    return f"{FUSED.full_name}({first})"


def family_of(node: Node) -> Family | None:
    """The family of a node's operation, and of a fused node by what it begins with; None if there
    are no kernels."""
    if node.op is not FUSED:
        return _family(node.op.full_name)
    nodes = node.attrs["region"].nodes
    first = nodes[0].op.full_name
    # Products of codes begin with it, and elementwise chains may, too.
    if first == "DequantizeLinear" and COMPUTING.isdisjoint([n.op.full_name for n in nodes]):
        return _family(FUSED.full_name)
    return _family(fused_with(first)) or _family(FUSED.full_name)


@cache
def _family(name: str) -> Family | None:
    # `REGISTERED` does not do: the file of another operation may have registered one form of this
    # one, and a second file the other.
    for module in _index().get(name, ()):
        # Only now: a model needs few of the families, and each import delays its first run.
        import_module(f"{__name__}.{module}")
    return Family(**{"work": below_numpy, **REGISTERED[name]}) if name in REGISTERED else None


@cache
def _index() -> Mapping[str, Sequence[str]]:
    """The modules of this folder that register a name."""
    modules: dict[str, list[str]] = {}
    module = ""
    with open(INDEX, encoding="ascii") as file:
        for word in file.read().split():
            if word.endswith(":"):
                module = word[:-1]
            else:
                modules.setdefault(word, []).append(module)
    return modules
