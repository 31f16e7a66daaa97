"""Jobs of a pool as futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.host.threads import Workers, fulfil


def run_on(workers: Workers, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The future of ``function(*arguments, **options)``, submitted to ``workers``."""
    future: Future[Any] = Future()
    workers.submit(partial(fulfil, future, partial(function, *arguments, **options)))
    return future
