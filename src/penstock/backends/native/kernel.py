"""Kernels of compiled code: what a call needs, and how it is bound to arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from penstock.algorithms.checkpoints import checkpoint
from penstock.backends.native.library import NativeLibrary
from penstock.errors import InternalError
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.types import INT64, TensorType, Type


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument of a call: tensor ``index`` of a node, its inputs first, then its outputs."""

    index: int


class _Workspace:
    """An argument of a call: the kernel's workspace."""


WORKSPACE = _Workspace()

Word: TypeAlias = int | float | np.ndarray | Tensor | _Workspace | None
"""An argument of a compiled kernel: a number, an array made at compile time, a tensor of the node,
the workspace, or a null pointer."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A node as the families of kernels see it: the types of its inputs and then of its outputs, of
    known shapes (None for one left out), and the arrays of those that are constants."""

    node: Node
    tensors: tuple[TensorType | None, ...]
    constants: tuple[np.ndarray | None, ...]

    def input(self, i: int) -> TensorType | None:
        """The type of an input; None if it is left out."""
        return self.tensors[i] if i < len(self.constants) else None

    def constant(self, i: int) -> np.ndarray | None:
        """An input, if it is a constant."""
        return self.constants[i] if i < len(self.constants) else None

    def output(self, i: int = 0) -> TensorType:
        """The type of an output that is not left out."""
        type_ = self.tensors[len(self.constants) + i]
        assert type_ is not None
        return type_

    def result(self, i: int = 0) -> Tensor:
        """Output ``i``, as an argument of a call."""
        return Tensor(len(self.constants) + i)

    def attr(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attrs.get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class NativeCall:
    """A compiled kernel with its arguments, in the order of its struct in ``c/``.

    ``items`` is the number of independent parts of the work; ``item_ns``, roughly the time of one,
    decides about threads. ``workspace`` and ``inplace`` are as for ``Kernel``. A kernel that
    ``can_fail`` reports inputs that are at fault, and the NumPy kernel raises the error.

    ``texts``: strings of output 0, whose indices (int64) the kernel computes in its place.
    ``keep`` is held with the call, such as what its arrays are shared by.
    """

    kernel: str
    words: tuple[Word, ...]
    items: int
    item_ns: float
    workspace: int = 0
    inplace: tuple[int, ...] = ()
    can_fail: bool = False
    texts: np.ndarray | None = None
    keep: Any = None


def site_of(node: Node, types: Sequence[Type | None]) -> Site | None:
    """The site of a node with these types of inputs; None if a shape is unknown, or a value is no
    tensor of numbers in the processor's byte order."""
    outputs = [None if value is None else value.type for value in node.outputs]
    tensors: list[TensorType | None] = []
    for type_ in (*types, *outputs):
        if type_ is None:
            tensors.append(None)
        elif isinstance(type_, TensorType) and type_.static and type_.dtype is not None:
            tensors.append(type_)
        else:
            return None
    constants = [None if value is None else value.const for value in node.inputs]
    return Site(node, tuple(tensors), tuple(constants))


def native_kernel(library: NativeLibrary, site: Site, call: NativeCall) -> Kernel:
    """The kernel that makes ``call``."""
    if call.texts is not None:
        return _text_kernel(library, site, call, call.texts)
    binder = _CallBinder(library, site, call)
    count = len(site.constants)
    outputs = site.tensors[count:]
    run, places = binder.bind_all([_LATE] * len(site.tensors), _LATE if call.workspace else None)

    pick = itemgetter(*places) if len(places) > 1 else lambda arrays: arrays[places[0] :][:1]
    first, several, size = outputs[0], len(outputs) > 1, call.workspace
    dims, dtype = ((), None) if first is None else (first.dims, first.dtype)

    def into(*arrays: Any) -> None:
        if size and len(arrays) == len(site.tensors):
            arrays = (*arrays, np.empty(size, np.uint8))
        run(*pick(arrays))

    def function(*inputs: Any) -> Any:
        if several:
            results = [None if t is None else np.empty(t.dims, t.dtype) for t in outputs]
            into(*inputs, *results)
            return tuple(results)
        result = np.empty(dims, dtype)
        into(*inputs, result)
        return result

    return Kernel(
        function,
        into,
        workspace=call.workspace,
        contiguous=True,
        contiguous_inputs=tuple([i for i in places if i < count and site.constants[i] is None]),
        prefer_bound=True,
        binder=binder,
        inplace=tuple([i for i in call.inplace if site.tensors[i] == outputs[0]]),
    )


def _text_kernel(library: NativeLibrary, site: Site, call: NativeCall, texts: np.ndarray) -> Kernel:
    """The kernel of a call that computes indices of ``texts`` in place of output 0."""
    count = len(site.constants)
    indices = TensorType(INT64, site.output().dims)
    tensors = (*site.tensors[:count], indices, *site.tensors[count + 1 :])
    function = native_kernel(
        library, replace(site, tensors=tensors), replace(call, texts=None)
    ).function

    def run(*inputs: Any) -> Any:
        results = function(*inputs)
        if isinstance(results, tuple):
            return texts.take(results[0]), *results[1:]
        return texts.take(results)

    return Kernel(run)


class _Late:
    """Stands for an array that is given during the run."""


_LATE = _Late()


@dataclass(frozen=True, slots=True, eq=False)
class _CallBinder:
    """Binds a call to arrays."""

    library: NativeLibrary
    site: Site
    native: NativeCall

    @property
    def implementation(self) -> str:
        """The name of the compiled kernel, and the instruction set."""
        return f"{self.native.kernel}:{self.library.level}"

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        arrays = [*inputs, *outputs]
        run, places = self.bind_all(arrays, workspace)
        return run, tuple([arrays[i] for i in places])

    def bind_all(
        self, arrays: Sequence[Any], workspace: Any
    ) -> tuple[Callable[..., Any], list[int]]:
        """The function that makes the call, and the indices of those of ``arrays`` that it takes as
        arguments, because they are no arrays yet, or have gaps."""
        words: list[Any] = []
        late: list[tuple[int, int, bool]] = []
        places: list[int] = []
        for place, word in enumerate(self.native.words):
            if isinstance(word, Tensor | _Workspace):
                index, array, type_ = len(arrays), workspace, None
                if isinstance(word, Tensor):
                    index = word.index
                    array, type_ = arrays[index], self.site.tensors[index]
                word = None
                if isinstance(array, np.ndarray) and array.flags.carray:
                    word = array
                elif array is not None:
                    nbytes = self.native.workspace if type_ is None else type_.nbytes
                    late.append((place, nbytes, index >= len(self.site.constants)))
                    places.append(index)
            words.append(word)
        native = self.native
        failed = _Failed(self.site, native, tuple(arrays), tuple(places))
        call = self.library.call(
            native.kernel,
            tuple(words),
            tuple(late),
            native.items,
            float(native.item_ns),
            failed if native.can_fail else None,
            checkpoint,
        )
        return call.run, places


@dataclass(frozen=True, slots=True, eq=False)
class _Failed:
    """Raises the error of a call whose inputs are at fault: that of the NumPy kernel."""

    site: Site
    native: NativeCall
    arrays: tuple[Any, ...]
    places: tuple[int, ...]

    def __call__(self, status: int, late: tuple[np.ndarray, ...]) -> None:
        arrays = list(self.arrays)
        for i, array in zip(self.places, late, strict=True):
            arrays[i] = array
        node, count = self.site.node, len(self.site.constants)
        inputs = arrays[:count]
        node.op.compile(node, self.site.tensors[:count]).function(*inputs)
        raise InternalError(
            f"{self.native.kernel} reports status {status} for inputs that NumPy's kernel takes"
        )
