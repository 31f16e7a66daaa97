"""The errors that Penstock raises. Each names the place at fault and says what to do.

``InvalidModel`` and ``Unsupported`` are about a model, ``InvalidInput`` about the arguments of a
run, ``RunError`` and its subclasses about a run that could not finish, ``ExtensionError`` about an
operation, kernel or backend of the user's own, ``InternalError`` about a bug of Penstock's own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Integral

from penstock.core.records import dataclass

# Names that are compared letter by letter with an unknown one, and the longest such name.
_MOST_COMPARED = 10_000
_LONGEST_COMPARED = 256

MAX_PROBLEMS = 20
"""the number of problems that a message lists in full; the others are only counted"""
MOST_COUNTED = 5000
"""the number of faults, or of nodes without a kernel, after which the search stops"""
MAX_SENTENCE = 2_000
"""characters of a problem in a message; a longer one is shortened in the middle"""
MAX_NAME = 200
"""characters of a name in a message"""


def shortened(text: str, most: int = MAX_NAME) -> str:
    """Return ``text``, without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...[{len(text) - 2 * half} characters]...{text[-half:]}"


def quoted(name: str) -> str:
    """Return a name as messages show it."""
    return repr(shortened(name))


def suggest(name: str, names: Iterable[str], preferred: Iterable[str] = ()) -> str:
    """Return a hint for an unknown name: close names, ``preferred`` ones, or the first few."""
    from difflib import get_close_matches

    names = list(dict.fromkeys(names))
    alike = [other for other in names if other.casefold() == name.casefold()][:3]
    if not alike and len(name) <= _LONGEST_COMPARED:
        short = (other for other in names if len(other) <= _LONGEST_COMPARED)
        alike = get_close_matches(name, list(islice(short, _MOST_COMPARED)), n=3, cutoff=0.6)
    if alike:
        return "the model has no such value; did you mean " + " or ".join(map(quoted, alike)) + "?"
    shown = list(preferred) or names
    more = ", ..." if len(shown) > 8 else ""
    return f"the model has no such value; it has {', '.join(map(quoted, shown[:8]))}{more}"


def wrong_type(option: str, value: object, needed: str) -> TypeError:
    """Return the error for an option whose value has a wrong type."""
    return TypeError(f"{option}={shortened(repr(value))}: {needed} is needed")


class OptionError(ValueError):
    """An option has a value that is not allowed, or not together with other options."""


def check_count(option: str, value: object, most: int | None = None, *, least: int = 1) -> None:
    """Raise ``TypeError`` unless the value of an option is a whole number, and ``OptionError``
    unless it is at least ``least`` and at most ``most``, if given."""
    range_ = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    needed = f"a whole number {range_}"
    if value.__class__ is not int and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise wrong_type(option, value, needed)
    number = int(value)
    if number < least or (most is not None and number > most):
        raise OptionError(f"{option}={shortened(repr(value))}: {needed} is needed")


def check_choice(
    option: str, value: object, choices: Sequence[str], hints: Mapping[str, str] | None = None
) -> None:
    """Raise ``TypeError`` unless the value of an option is a string, and ``OptionError`` unless it
    is one of ``choices``. ``hints`` maps some other values to advice."""
    if not isinstance(value, str):
        raise wrong_type(option, value, f"one of {', '.join(choices)}")
    if value not in choices:
        hint = (hints or {}).get(value)
        names = f"{', '.join(choices)}{f'; {hint}' if hint else ''}"
        raise OptionError(f"{option} {shortened(value)!r} is not one of {names}")


warnings_given = 0
"""the number of calls of ``warn``"""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first line outside of Penstock in the call stack. Warnings at lines of Penstock
    would mean nothing to users, and would be shown once for all calls."""
    global warnings_given
    warnings_given += 1
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_own(module: str | None) -> bool:
    # Generated programs have no ``__name__``.
    return module is None or module.partition(".")[0] == "penstock"


class PenstockError(Exception):
    """Base class of all errors that Penstock raises deliberately."""


@contextmanager
def extra_needed(purpose: str, extra: str) -> Iterator[None]:
    """Replace an ``ImportError`` by an error that names the extra to install for ``purpose``."""
    try:
        yield
    except ImportError as error:
        raise PenstockError(
            f"{purpose} ({error}): pip install 'penstock-runtime[{extra}]'"
        ) from error


class InvalidModel(PenstockError):  # noqa: N818 - the public names are fixed by the design
    """The model breaks a rule of its format. ``problems`` has one sentence for each fault,
    shortened if names make it long."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        sentences = (problems,) if isinstance(problems, str) else problems
        # Names come from files and may have any length.
        self.problems = tuple([shortened(sentence, MAX_SENTENCE) for sentence in sentences])
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class ProblemList:
    """The faults of one model: the first ``MAX_PROBLEMS``, shortened, and the number of the others.
    With ``MOST_COUNTED`` faults they are raised at once."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._more = 0

    def add(self, *sentences: str) -> None:
        for sentence in sentences:
            if len(self._first) < MAX_PROBLEMS:
                self._first.append(shortened(sentence, MAX_SENTENCE))
            else:
                self._more += 1
        if self._more >= MOST_COUNTED:
            self.raise_any()

    def raise_any(self) -> None:
        """Raise ``InvalidModel`` if there are faults."""
        if self._first:
            least = "at least " if self._more >= MOST_COUNTED else ""
            more = [f"and {least}{self._more} more"] if self._more else []
            raise InvalidModel([*self._first, *more])


@dataclass(frozen=True, slots=True)
class UnsupportedOperation:
    """An operation that Penstock cannot run: its full name, the reason, and its nodes."""

    operation: str
    reason: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{shortened(self.operation)}: {self.reason} (used by {used_by(self.nodes)})"
        return shortened(text, MAX_SENTENCE)


def used_by(nodes: Sequence[str]) -> str:
    """Return the names of the first five ``nodes`` and the number of the others."""
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    return f"{', '.join(map(shortened, nodes[:5]))}{more}"


class Unsupported(PenstockError):  # noqa: N818
    """The model is valid, but Penstock has no kernel for these ``operations``; the message lists
    the first ``MAX_PROBLEMS``."""

    def __init__(self, operations: Sequence[UnsupportedOperation]) -> None:
        self.operations = tuple(operations)
        lines = [f"  {operation}" for operation in self.operations[:MAX_PROBLEMS]]
        if len(self.operations) > MAX_PROBLEMS:
            lines.append(f"  and {len(self.operations) - MAX_PROBLEMS} more")
        text = "\n".join([f"{len(self.operations)} unsupported operation(s):", *lines])
        super().__init__(text)

    @classmethod
    def of(cls, uses: Iterable[tuple[str, str, str]]) -> Unsupported:
        """Return the error for uses of operations: the full name, reason and node of each."""
        nodes: dict[tuple[str, str], list[str]] = {}
        for operation, reason, node in uses:
            nodes.setdefault((operation, reason), []).append(node)
        return cls([UnsupportedOperation(*key, tuple(users)) for key, users in nodes.items()])

    def __reduce__(self) -> tuple[type, tuple[tuple[UnsupportedOperation, ...]]]:
        return type(self), (self.operations,)


class InvalidInput(PenstockError):  # noqa: N818
    """A feed, fetch or target does not fit the model: its name, dtype or shape."""


class QueueFull(PenstockError):  # noqa: N818
    """A request was refused because the queue is full."""


class RowsStay(Exception):  # noqa: N818 - not a user error: all rows are computed
    """Why rows of a graph that a mask hides must be computed: what a node does."""


class RunError(PenstockError):
    """A run failed. The message names the node, its origin and the shapes of its inputs. The
    attributes have the same information if one node is at fault."""

    operation: str | None = None
    """the operation of the node, as in "Conv" """
    node: str | None = None
    """the node: where it came from, as in "Conv_17 in model.onnx" """
    inputs: tuple[str, ...] = ()
    """the inputs of the node with their types, as in "x: float32[2, 3]" """
    by_feeds: bool = False
    """whether an operation rejected its inputs, such as an index out of range, or no text has the
    requested form, so that other feeds or options may succeed"""


class DeadTensor(RunError):  # noqa: N818
    """A fetched tensor is dead: the branch that would have produced it was not taken."""


class Cancelled(RunError):  # noqa: N818
    """The run was cancelled by its caller."""


class DeadlineExceeded(RunError):  # noqa: N818
    """The run did not finish within its timeout."""


class WorkerLost(RunError):  # noqa: N818
    """A worker of a cluster died or did not answer in time while it had a part of the run, or it
    held variables that the run needs."""


class LimitExceeded(RunError):  # noqa: N818
    """The model or the run exceeded one of its ``Limits``."""


class Aborted(RunError):  # noqa: N818
    """Raised in a waiting part of a run when another part has failed. The run itself raises the
    other part's error."""


class ExtensionError(PenstockError):
    """A user-defined operation, kernel or backend breaks a rule of its interface. The message names
    it, the node and the rule."""


class InternalError(PenstockError):
    """A bug in Penstock. Please report it with the model or the shapes in the message."""
