"""The backends that come with Penstock, by name. Each is imported when a session uses it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from penstock.backends.base import Backend, HasHostBackend, Where
from penstock.core import capability
from penstock.core.errors import OptionError, PenstockError
from penstock.ops.internal.transfer import HOST

BACKENDS = {
    "native": "penstock.backends.native.backend.NativeBackend",
    "numpy": "penstock.backends.numpy.NumpyBackend",
    "torch": "penstock.backends.torch.backend.TorchBackend",
}
"""the class of each backend, by its name"""
_WITH_PRECISION = {"native", "torch"}
_REMOVED = {"onednn": "native"}
"""by the name of a backend of earlier versions, the one that computes what it did"""


def available() -> tuple[str, ...]:
    """The names of the backends that this machine can run, the preferred first: compiled kernels if
    they were built, and NumPy for all other kernels."""
    return tuple([name for name in ("native", "numpy") if missing(name) is None])


def missing(name: str) -> str | None:
    """Why a backend cannot run on this machine; None if it can."""
    if name == "torch":
        from importlib.util import find_spec

        found = find_spec("torch") is not None
        return None if found else "PyTorch is not installed: pip install 'penstock-runtime[torch]'"
    if name == "native":
        from penstock.host.native import library as native

        return None if native() is not None else "not compiled when Penstock was installed, or off"
    return None


def describe(name: str) -> str:
    """The library that a backend runs on, with its version, or why it cannot run."""
    if name == "numpy":
        return f"NumPy {np.__version__}"
    if (reason := missing(name)) is not None:
        return f"not available: {reason}"
    if name == "native":
        from penstock.host.native import library as native

        kernels = native()
        assert kernels is not None
        return f"{len(kernels.kernels)} native kernels for {kernels.instructions}, {kernels.path}"
    # Importing torch takes seconds.
    from importlib import metadata
    from pathlib import Path

    devices = len([*Path("/dev").glob("nvidia[0-9]*")])
    try:
        release = metadata.version("torch")
    except metadata.PackageNotFoundError:  # a folder on the path
        release = "(unknown version)"
    return f"PyTorch {release}, with {devices} devices of NVIDIA in /dev"


def backend_of(chosen: str | Backend, precision: str = "float32") -> Backend:
    """The backend of a name, or the object given as one. Raises ``ValueError`` for an unknown name,
    ``PenstockError`` if it cannot run on this machine, and ``TypeError`` for an object that does
    not answer ``kernel(node, types)``."""
    if not isinstance(chosen, str):
        if not callable(getattr(chosen, "kernel", None)):
            raise TypeError(
                f"backends= has a {type(chosen).__name__}, which is no backend: it takes names of "
                "backends, and objects with the methods of penstock.backends.base.Backend, such as "
                "kernel(node, types)"
            )
        return chosen
    if chosen not in BACKENDS:
        return _of_package(chosen)
    # Asked ahead of the import, whose error would name a module and no remedy.
    if chosen == "torch" and (reason := missing(chosen)) is not None:
        raise PenstockError(f"backend 'torch': {reason}")
    cls = _backend_class(chosen)
    options: dict[str, Any] = {"precision": precision} if chosen in _WITH_PRECISION else {}
    backend: Backend = cls(**options)
    return backend


def _of_package(chosen: str) -> Backend:
    """The backend that an installed package names as one of ``penstock.backends``."""
    from importlib.metadata import entry_points

    entries = entry_points(group="penstock.backends")
    for entry in entries:
        if entry.name == chosen:
            backend: Backend = entry.load()()
            return backend
    if chosen in _REMOVED:
        raise OptionError(
            f"backend {chosen!r} was removed: use {_REMOVED[chosen]!r}, which replaces it"
        )
    known = [*BACKENDS, *sorted(entry.name for entry in entries)]
    raise OptionError(f"backend {chosen!r} is not one of {', '.join(known)}")


@cache
def _backend_class(chosen: str) -> Any:
    module, _, name = BACKENDS[chosen].rpartition(".")
    return getattr(import_module(module), name)


def backends_of(
    chosen: Sequence[str | Backend] | None,
    precision: str = "float32",
    cuda_devices: Sequence[str] = (),
    places: Collection[Where] = (),
) -> list[Backend]:
    """The backends of a session: those ``chosen``, or all that are available. A backend with a
    memory of its own that needs one of the host beside it (``HasHostBackend``) gets that, if none
    is chosen, for what it has no kernels for. On ``cuda_devices`` there is a torch backend each, in
    the place of "torch", or else in front of the others. The groups of backends that ``places``
    name come behind them. Raises ``ValueError`` for two of one name, and as ``backend_of`` and
    ``groups_of`` do.
    """
    names_or_objects = [*(chosen or available())]
    if cuda_devices:
        own = _on_cuda(cuda_devices, precision)
        at = names_or_objects.index("torch") if "torch" in names_or_objects else 0
        names_or_objects[at : at + ("torch" in names_or_objects)] = own
    backends = [backend_of(backend, precision) for backend in names_or_objects]
    if all(backend.memory != HOST for backend in backends):
        needing = [b for backend in backends if (b := capability(backend, HasHostBackend))]
        backends += map(_fallback, dict.fromkeys([b.host_backend for b in needing]))
    names = [backend.name for backend in backends]
    if len(set(names)) < len(names):
        raise OptionError(f"backends= has two of one name: {names}")
    if all(isinstance(where, str) for where in places):
        return backends
    from penstock.backends.group import groups_of

    return [*backends, *groups_of(places, backends)]


def _on_cuda(devices: Sequence[str], precision: str) -> list[Backend]:
    """The torch backend on each of several devices."""
    if (reason := missing("torch")) is not None:
        raise PenstockError(f"devices={[*devices]!r}: {reason}")
    if len(set(devices)) < len(devices):
        raise OptionError(f"devices= has one device twice: {[*devices]}")
    cls = _backend_class("torch")
    names = ["torch", *[f"torch:{i}" for i in range(1, len(devices))]]
    return [
        cls(device, precision=precision, name=name)
        for device, name in zip(devices, names, strict=True)
    ]


def _fallback(name: str) -> Backend:
    """The backend of a name, which runs only what the others have no kernel for."""
    backend: Any = backend_of(name)
    # Costs must not bring back to the host what the user wants on the device.
    backend.fallback_only = True
    return backend
