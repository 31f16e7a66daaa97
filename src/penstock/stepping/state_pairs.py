"""Pairs of outputs and the inputs to which they are fed back, with their batch axes.

::

    h [2, batch, 64]  ─┐              ┌─> output [batch, 1]
    c [2, batch, 64]  ─┼──> model ────┼─> hn [2, batch, 64]    fed back to h
    input [batch, 512] ┘              └─> cn [2, batch, 64]    fed back to c
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.core.errors import InvalidInput, RowsStay
from penstock.session.facts import Port

_AFFIXES = frozenset(
    (
        *("in", "out", "input", "output", "new", "next", "prev", "previous", "old", "past", "n"),
        *("present", "cur", "current", "updated", "returned", "init", "initial"),
    )
)
"""words that distinguish a state before a step from the state after it"""
_FRAMES = frozenset(
    (
        *("audio", "pcm", "speech", "wav", "wave", "waveform", "signal", "sample", "samples"),
        *("frame", "frames", "chunk", "data", "spec", "spectrum", "spectrogram", "mag", "mel"),
        *("feat", "feats", "feature", "features", "mix", "noisy", "enhanced"),
    )
)
"""stems of inputs that are more likely frames, with an output for the transformed frame"""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


def match_state(inputs: Sequence[Port], outputs: Sequence[Port]) -> dict[str, str]:
    """Match outputs that are fed back with their inputs: they have the same dtype, dims and name,
    ignoring words such as ``in``, ``new`` and ``n``. Raises ``InvalidInput`` if names are
    ambiguous."""
    pairs: dict[str, str] = {}
    # Names such as h0 and hn differ at their ends; h0 and h0_out are matched before.
    for stem_of in (_stem, _stem_without_end):
        left = [port for port in inputs if port.name not in pairs]
        free = [port for port in outputs if port.name not in pairs.values()]
        for port in left:
            stem = stem_of(port.name)
            like = [y for y in free if stem and stem_of(y.name) == stem and _fit(port, y)]
            rivals = [x for x in left if stem_of(x.name) == stem and like and _fit(x, like[0])]
            if len(like) > 1 or len(rivals) > 1:
                names = [y.name for y in like], [x.name for x in rivals]
                what = f"which of the outputs {names[0]} are fed back to {names[1]}"
                raise _unknown(what, port.name, like[0].name)
            if like:
                pairs[port.name] = like[0].name
    _check_frames(pairs)
    return pairs


def _check_frames(pairs: Mapping[str, str]) -> None:
    """Refuse pairs that may be a frame and the transformed frame."""
    for name, output in pairs.items():
        words = {word for word in _stem(name) if word.isalpha()}
        if words <= _FRAMES or (words <= {"x", "y"} and len(pairs) > 1):
            what = f"whether {output!r} is fed back to {name!r}, or is what becomes of a frame,"
            raise _unknown(what, name, output)


def _unknown(what: str, name: str, output: str) -> InvalidInput:
    return InvalidInput(
        f"{what} is not known; name all states, as in state={{{name!r}: {output!r}}}"
    )


def check_state(
    state: Mapping[str, str], inputs: Sequence[Port], outputs: Sequence[Port]
) -> dict[str, str]:
    """Check the pairs of a user. Raises ``InvalidInput`` if an output cannot be fed back."""
    sources = {port.name: port for port in outputs}
    targets = {port.name: port for port in inputs}
    for name, output in state.items():
        if name not in targets or output not in sources:
            raise InvalidInput(
                f"state={{{name!r}: {output!r}}}: the model has inputs {[*targets]} and outputs "
                f"{[*sources]}"
            )
        if not _fit(targets[name], sources[output]):
            raise InvalidInput(f"{sources[output]} cannot be fed back to {targets[name]}")
    if len({*state.values()}) < len(state):
        raise InvalidInput(f"an output is fed back to several inputs: {dict(state)}")
    return dict(state)


def _stem(name: str) -> tuple[str, ...]:
    """Return the words of a name, except those that distinguish a state before and after a step."""
    words = [word.lower() for word in _WORD.findall(name)]
    # Inputs and outputs of many models consist only of such words: they are not states.
    stem = [word for word in words if word not in _AFFIXES]
    return tuple(stem) if any(word.isalpha() for word in stem) else ()


def _stem_without_end(name: str) -> tuple[str, ...]:
    """``_stem`` without the 0 of h0, or the n of hn."""
    stem = _stem(name)
    if stem[-1:] == ("0",):
        return stem[:-1]
    if stem and len(stem[-1]) > 1:
        return (*stem[:-1], stem[-1].removesuffix("n"))
    return stem


def _fit(port: Port, output: Port) -> bool:
    """Whether an output may be fed to an input, by their known types."""
    if port.dtype is None or port.shape is None:
        return False
    # Types of outputs may be partly unknown; runs check the rest.
    if output.dtype not in (None, port.dtype):
        return False
    if output.shape is None:
        return True
    pairs = zip(port.shape, output.shape, strict=False)
    fixed = [(m, n) for m, n in pairs if isinstance(m, int) and isinstance(n, int)]
    return len(port.shape) == len(output.shape) and all(m == n for m, n in fixed)


def batch_axes(inputs: Sequence[Port], states: Mapping[str, str]) -> dict[str, int]:
    """Return the batch axes of inputs that have one: the open dim with a name common to all states,
    else the first open dim. Raises ``RowsStay`` if a state has none."""
    # Frames may have other open dims, such as a length; most states only have a batch dim.
    fed = [port for port in inputs if port.name in states]
    for port in fed:
        if not _open(port):
            raise RowsStay(f"{port}, a state, has no open dim for those of several sequences")
    name = _name_of_batch(fed or [port for port in inputs if _open(port)])
    axes = {}
    for port in inputs:
        axis = _axis(port, name)
        if axis is not None:
            axes[port.name] = axis
    if not axes:
        raise RowsStay("no input has an open dim for the frames of several sequences")
    return axes


def _open(port: Port) -> list[int]:
    """Return the axes of open dims."""
    return [i for i, dim in enumerate(port.shape or ()) if not isinstance(dim, int)]


def _name_of_batch(ports: Sequence[Port]) -> str | None:
    """Return the name of a dim that all ``ports`` share, preferably one like "batch"."""
    shapes = [port.shape or () for port in ports]
    names = [dim for dim in (shapes or [()])[0] if isinstance(dim, str)]
    shared = [name for name in names if all(shape.count(name) == 1 for shape in shapes)]
    # States may share other dims, such as the number of units.
    likely = [name for name in shared if name.lower() in ("b", "n") or "batch" in name.lower()]
    return next(iter([*likely, *shared]), None)


def _axis(port: Port, name: str | None) -> int | None:
    shape = port.shape or ()
    # A trial with samples checks this guess.
    if name is not None and name in shape:
        return shape.index(name)
    # Without a batch name, names of dims carry no information.
    free = [i for i in _open(port) if name is None or shape[i] is None]
    return free[0] if free else None
