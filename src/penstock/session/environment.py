"""Options of deployments: environment variables, for what neither the caller nor a package says.

As a package's, they hold where an option is not given.
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
    """An environment variable, the option of ``compile`` that it stands for, and what reads it.
    ``read`` raises ``ValueError`` with the form that its text should have."""

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
behind it, for a profile of one run in N"""
TRACED = 500_000  # about 150 MB


def with_environment(options: CompileOptions, model: Model) -> CompileOptions:
    """``options`` with those of the environment, which are for any model: a placement of what this
    one lacks is left out, and an executor where ``cluster=`` or ``devices=`` decide. Raises
    ``ValueError``, which names the variable."""
    given: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if text := os.environ.get(name, "").strip():
            try:
                given[variable.option] = variable.read(text)
            # The message names the variable, since the program may set the option itself.
            except ValueError as error:
                raise OptionError(f"{name}={text!r}: {error}") from None
    if options.cluster is not None or options.devices is not None:
        given.pop("executor", None)  # they decide it
    # One variable is for all models that a process runs.
    if place := given.get("place"):
        from penstock.tuning.placement import NODE

        backends = {b.name for b in backends_of(options.backends or given.get("backends"))}
        nodes = list(model.graph.walk())
        keys = {k for n in nodes for k in (n.op.name, n.op.full_name, NODE + n.name)}
        given["place"] = {k: b for k, b in place.items() if k in keys and b in backends}
    return options.filled(given)


def trace() -> Trace | None:
    """The trace of the runs of this process, if the environment asks for one."""
    path, interval = _recording()
    # By process: a forked child has a trace of its own, and a file if `%p` is in the name.
    return _trace(path, os.getpid()) if path and not interval else None


def sampled_profile() -> SampledProfile | None:
    """The profile of some runs of this process, if the environment asks for one."""
    path, interval = _recording()
    return _profile(path, interval, os.getpid()) if interval else None


def save_recording() -> None:
    """Write that trace or profile as it is now; ``%p`` in its name stands for the number of the
    process."""
    recording = trace() or sampled_profile()
    if recording is not None:
        recording.save(_own(_recording()[0]))


def _recording() -> tuple[str, int]:
    """The file of the trace and 0, or that of a profile of one run in N and N. Raises
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
        except OSError as error:  # the run has its answer
            warn(f"{TRACE}: no profile is written: {error}")

    profile = SampledProfile(interval, write)
    atexit.register(save_recording)
    return profile


def _own(path: str) -> Path:
    from pathlib import Path

    return Path(path.replace("%p", str(os.getpid())))
