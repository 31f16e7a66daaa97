"""Environment variables for options of deployments that neither the caller nor a package gives.

Like a package's options, they apply where an option is not given.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from penstock.backends.registry import BACKENDS, backends_of
from penstock.compiler.options import EXECUTORS, CompileOptions
from penstock.core.errors import OptionError, warn
from penstock.core.records import NamedTuple
from penstock.ir.graph import Model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.observers.sampled_profile import SampledProfile
    from penstock.observers.trace import Trace


class Variable(NamedTuple):
    """An environment variable, the option of ``compile`` that it sets, and the function that reads
    it. ``read`` raises ``ValueError`` with the form that the text should have."""

    option: str
    read: Callable[[str], Any]


def _backends(text: str) -> list[str]:
    return [_one_of(BACKENDS, name.strip()) for name in text.split(",")]


def _place(text: str) -> dict[str, str]:
    place = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        key, equals, name = entry.rpartition("=")
        if not equals:
            raise ValueError("the form is OPERATION=BACKEND;node:NAME=BACKEND")
        place[key.strip()] = _one_of(BACKENDS, name.strip())
    return place


def _threads(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError("a number of threads is needed, at least 1")
    return int(text)


def _one_of(names: Mapping[str, Any] | tuple[str, ...], name: str) -> str:
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}")
    return name


VARIABLES = {
    "PENSTOCK_EXECUTOR": Variable("executor", partial(_one_of, EXECUTORS)),
    "PENSTOCK_BACKENDS": Variable("backends", _backends),
    "PENSTOCK_PLACE": Variable("place", _place),
    "PENSTOCK_THREADS": Variable("threads", _threads),
}
TRACE = "PENSTOCK_TRACE"
"""the file for a trace of the runs of the process, of the last ``TRACED`` events; or, with ``@1/N``
appended, for a profile of one run in N"""
TRACED = 500_000  # about 150 MB


def with_environment(options: CompileOptions, model: Model) -> CompileOptions:
    """Return ``options`` completed by those of the environment. These apply to any model, so
    placements of nodes that this model lacks are ignored, as is an executor if ``cluster=`` or
    ``devices=`` decide. Raises ``ValueError``, which names the variable."""
    given: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if text := os.environ.get(name, "").strip():
            try:
                given[variable.option] = variable.read(text)
            # The message names the variable, since the program may set the option itself.
            except ValueError as error:
                raise OptionError(f"{name}={text!r}: {error}") from None
    if options.cluster is not None or options.devices is not None:
        given.pop("executor", None)  # these options decide the executor
    # One variable applies to all models that a process runs.
    if place := given.get("place"):
        from penstock.tuning.placement import NODE

        backends = {b.name for b in backends_of(options.backends or given.get("backends"))}
        nodes = list(model.graph.walk())
        keys = {k for n in nodes for k in (n.op.name, n.op.full_name, NODE + n.name)}
        given["place"] = {k: b for k, b in place.items() if k in keys and b in backends}
    return options.filled(given)


def trace() -> Trace | None:
    """Return the trace of the runs of this process, if the environment asks for one."""
    path, interval = _recording()
    # One per process: a forked child has its own trace, and its own file if `%p` is in the name.
    return _trace(path, os.getpid()) if path and not interval else None


def sampled_profile() -> SampledProfile | None:
    """Return the profile of sampled runs of this process, if the environment asks for one."""
    path, interval = _recording()
    return _profile(path, interval, os.getpid()) if interval else None


def save_recording() -> None:
    """Write the trace or profile recorded so far; ``%p`` in the file's name stands for the process
    ID."""
    recording = trace() or sampled_profile()
    if recording is not None:
        recording.save(_own(_recording()[0]))


def _recording() -> tuple[str, int]:
    """Return the file of the trace and 0, or the file of a profile of one run in N and N. Raises
    ``OptionError``."""
    text = os.environ.get(TRACE, "").strip()
    path, at, interval = text.rpartition("@1/")
    if not at:
        return text, 0
    if not (path and interval.isdecimal() and int(interval)):
        raise OptionError(f"{TRACE}={text!r}: the form is FILE, or FILE@1/100")
    return path, int(interval)


@cache
def _trace(path: str, process: int) -> Trace:
    from penstock.observers.trace import Trace

    atexit.register(save_recording)
    return Trace(TRACED)


@cache
def _profile(path: str, interval: int, process: int) -> SampledProfile:
    from penstock.observers.sampled_profile import SampledProfile

    def write() -> None:
        try:
            profile.save(_own(path))
        except OSError as error:  # a warning, since the run itself has succeeded
            warn(f"{TRACE}: no profile is written: {error}")

    profile = SampledProfile(interval, write)
    atexit.register(save_recording)
    return profile


def _own(path: str) -> Path:
    from pathlib import Path

    return Path(path.replace("%p", str(os.getpid())))
