"""Keep compiled plans out of the walks of Python's collector of cycles.

A plan is thousands of objects: nodes, values, slots, steps, kernels and their bindings. The
collector looks for cycles by walking all objects that it tracks, and stops all threads meanwhile:
120 plans of a text recognizer take 350 ms. Plans do not need this: a plan is freed with its last
reference, since nodes refer to their inputs, and back only through weak references. So the objects
of a compilation are untracked, as the collector itself does with tuples of numbers.

    >>> import gc
    >>> class Record: ...
    >>> Record.__module__ = "penstock.plan.example"
    >>> record = Record()
    >>> record.parts = [[1], (record.__class__, [2])]
    >>> untrack(record)
    >>> gc.is_tracked(record), gc.is_tracked(record.parts)
    (False, False)

Still tracked are functions, cells and bound methods, whose deallocators require it; objects that
are older than the last collection, which plans may share; and those of users and of other packages,
through which there may be cycles.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, deque
from functools import partial
from threading import RLock
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from weakref import ref

from penstock.host.native import FREE_THREADED, library

# The parts of the package whose objects are parts of plans.
_PARTS = ("algorithms", "backends", "codegen", "core", "executors", "ir", "ops", "plan")
_OWN = tuple([f"penstock.{part}." for part in _PARTS])
# Python types whose deallocators are known to allow it, in the versions that are tested.
_ALLOW: tuple[type, ...] = (
    list,
    tuple,
    dict,
    OrderedDict,
    deque,
    partial,
    ref,
    BuiltinFunctionType,
    type(RLock()),
)
# The deallocators of these types unlink the object from the collector's list unconditionally:
# untracked, they crash.
_WALKED: tuple[type, ...] = (FunctionType, CellType, MethodType)
# Above this number of young objects listing them takes too long: users may disable the collector.
_MOST_YOUNG = 1 << 20
# Python does not document which deallocators check first: a test frees objects of each type. The
# collector of a free-threaded build walks the heap, and has no young generation.
_TESTED = (3, 11) <= sys.version_info < (3, 14) and not FREE_THREADED


_KNOWN: dict[type, object] = {**dict.fromkeys(_ALLOW, True), **dict.fromkeys(_WALKED, False)}
"""Python's types, and classes of the package that were met, which live as long"""


class _Types(dict[type, object]):
    """Whether objects of a type are untracked (True), walked (False) or left alone (...)."""

    def __missing__(self, type_: type) -> object:
        # The deallocator of a Python class checks whether the object is tracked, in any case.
        is_own = str(type_.__module__).startswith(_OWN)
        self[type_] = is_own or ...
        if is_own:
            _KNOWN[type_] = True
        return self[type_]


def untrack(root: object) -> None:
    """Untrack the young objects of plans that are reachable from ``root``. Nothing happens without
    the compiled module. Pause the collector first: a collection would make the objects old."""
    native = library() if _TESTED else None
    if native is not None and gc.get_count()[0] < _MOST_YOUNG:
        types = _Types(_KNOWN)
        types[native.functions.Call] = types[native.functions.Sequence] = None  # never tracked
        native.functions.untrack(root, types, gc)
