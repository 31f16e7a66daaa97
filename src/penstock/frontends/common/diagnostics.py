"""Problems of a model, collected while it is read and raised together.

Code that reads one node or one tensor raises a ``ConversionError``, whose message continues a
sentence; the importer, which knows the node, passes it to ``Diagnostics.record`` and continues with
the next node. At the end ``raise_collected`` raises ``InvalidModel`` or ``Unsupported`` with all of
them, so that a user sees all faults of a file in one attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import (
    MAX_SENTENCE,
    MOST_COUNTED,
    InvalidModel,
    ProblemList,
    Unsupported,
    shortened,
    used_by,
)
from penstock.core.limits import FREE_NODES, Limits

NO_KERNEL = "no kernel is available for it"


class ConversionError(Exception):
    """Part of a model cannot be converted. Base of the errors that conversion rules raise."""


class NodeError(ConversionError):
    """A node breaks a rule of its format; the message continues "<node> in <graph> ..."."""


class InexpressibleError(ConversionError):
    """A valid node that no operation of Penstock can express; the message is the reason."""


class TensorError(ConversionError):
    """A tensor, shape or element type is invalid; the message continues "<tensor> ..."."""


class Diagnostics:
    """The faults of one model. ``where`` is its name in messages, such as ``model.onnx``. ``nodes``
    counts the nodes that have been read, from a file of ``size()`` bytes."""

    def __init__(
        self, where: str, limits: Limits, size: Callable[[], int] | None = None, nodes: int = 0
    ) -> None:
        self.where = where
        self.limits = limits
        self._size = size
        self._problems = ProblemList()
        self._shared_problems: dict[str, list[str]] = {}
        self._unsupported: list[tuple[str, str, str]] = []
        self.nodes = nodes

    def problem(self, *messages: str) -> None:
        """Add faults of the file, each a whole sentence that names the place."""
        self._problems.add(*messages)

    def shared_problem(self, message: str, origin: str) -> None:
        """Add a fault that many nodes may share; it is reported once, with all their names."""
        origins = self._shared_problems.setdefault(shortened(message, MAX_SENTENCE), [])
        origins.append(origin)

    def unsupported(self, operation: str, reason: str, origin: str) -> None:
        """Add a node whose operation (its full name) Penstock cannot run."""
        self._unsupported.append((shortened(operation), reason, origin))
        if len(self._unsupported) >= MOST_COUNTED:
            self.raise_collected()

    def record(self, error: ConversionError, operation: str, origin: str, subject: str) -> None:
        """Add the error that converting one node raised. ``subject`` begins the sentence."""
        if isinstance(error, InexpressibleError):
            self.unsupported(operation, str(error), origin)
        else:
            self.problem(f"{subject} {error}")

    def convert(
        self, rule: Callable[[], object], operation: str, origin: str, subject: str = ""
    ) -> None:
        """Call ``rule``, which converts one node, and record its errors. Rules assume the
        attributes and inputs that exporters write, so Python's own errors mean that the file has
        others."""
        try:
            rule()
        except ConversionError as error:
            self.record(error, operation, origin, subject or origin)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            self.problem(
                f"{subject or origin} has attributes or inputs that it cannot have: {error!r}; "
                "export the model again"
            )

    def count_nodes(self, count: int) -> None:
        """Count nodes before they are read. Raises ``InvalidModel`` as ``check_nodes`` does."""
        self.nodes += count
        self.check_nodes(self.nodes)

    def check_nodes(self, count: int) -> None:
        """Raise ``InvalidModel`` if ``count`` nodes exceed the limits: see ``Limits``."""
        if excess := self.limits.beyond("max_nodes", count):
            raise InvalidModel(f"{self.where} has more nodes {excess} (function bodies expanded)")
        density = self.limits.max_nodes_per_byte
        if count <= FREE_NODES or density is None or self._size is None:
            return
        if count - FREE_NODES > density * (size := self._size()):
            raise InvalidModel(
                f"{self.where} has more nodes, function bodies expanded, than {FREE_NODES} and "
                f"Limits.max_nodes_per_byte = {density} for each of its {size} bytes; raise the "
                "limit if you trust the model"
            )

    def check_depth(self, depth: int, subject: str) -> None:
        """Raise ``InvalidModel`` if ``subject``, at this depth, is beyond ``Limits.max_depth``."""
        if excess := self.limits.beyond("max_depth", depth):
            raise InvalidModel(f"{subject} nests deeper {excess}")

    def raise_collected(self) -> None:
        """Raise ``InvalidModel`` if there are problems, else ``Unsupported`` if there are
        unsupported operations."""
        for message, origins in self._shared_problems.items():
            self.problem(f"{message} (used by {used_by(origins)})")
        self._shared_problems.clear()
        self._problems.raise_any()
        if self._unsupported:
            raise Unsupported.of(self._unsupported)
