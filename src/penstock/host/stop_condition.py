"""The condition to stop work: a deadline has passed, or a token is cancelled."""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import Protocol

from penstock.core.errors import Cancelled, DeadlineExceeded, wrong_type
from penstock.host.current_run import Budget


class Cancellation(Protocol):
    """A token that may be cancelled from any thread."""

    @property
    def cancelled(self) -> bool: ...


class StopCondition:
    """The condition to stop work: ``timeout`` seconds after the construction, or when ``cancel`` is
    cancelled. ``subject`` names the work in messages. ``budget`` counts its allocations if their
    size is not known in advance."""

    __slots__ = ("budget", "cancel", "deadline", "subject", "timeout")

    def __init__(
        self,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
        subject: str = "the run",
    ) -> None:
        if timeout is not None and (not isinstance(timeout, Real) or timeout != timeout):
            raise wrong_type("timeout", timeout, "a number of seconds")
        if cancel is not None and not hasattr(cancel, "cancelled"):
            raise wrong_type("cancel", cancel, "a penstock.CancelToken")
        self.timeout = timeout = None if timeout is None else float(timeout)
        self.cancel = cancel
        self.subject = subject
        self.budget: Budget | None = None
        self.deadline = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def limited(self) -> bool:
        """Whether anything can ever stop the work."""
        return self.timeout is not None or self.cancel is not None

    @property
    def seconds_left(self) -> float | None:
        """Return the time until the deadline, or None without one."""
        return None if self.timeout is None else self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise ``DeadlineExceeded`` or ``Cancelled`` if the work must stop."""
        if self.cancel is not None and self.cancel.cancelled:
            raise Cancelled(f"{self.subject} was cancelled by its caller")
        if time.monotonic() >= self.deadline:
            raise self.timed_out()

    def timed_out(self) -> DeadlineExceeded:
        """Return the error of work that has not ended at its deadline."""
        return DeadlineExceeded(
            f"{self.subject} did not end within its timeout of {self.timeout} s"
        )
