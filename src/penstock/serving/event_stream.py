"""Streaming of a run's values as events of a response (text/event-stream).

::

    data: {"model_name": ..., "outputs": [{"name": "token", "datatype": "INT64", "data": [17]}]}
    data: {"model_name": ..., "outputs": [{"name": "token", "datatype": "INT64", "data": [4]}]}
    event: outputs
    data: {"model_name": ..., "outputs": [ the outputs of the model ]}

If the run fails, the last event is ``error`` instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from penstock.core.types import NamedValues
from penstock.executors.control import CancelToken
from penstock.serving.protocol import InferenceRequest, encode_response

if TYPE_CHECKING:
    from penstock.serving.repository import ServedModel


async def events(
    model: ServedModel,
    asked: InferenceRequest,
    timeout: float,
    priority: int | None,
    describe: Callable[[Exception], str],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a run: the values that ``asked`` names, also in the bodies of loops.
    Errors before the first event are raised. Closing the generator ends the run."""
    token = CancelToken()
    run = model.replicas.stream(
        asked.feeds, asked.fetches or [], timeout=timeout, cancel=token, priority=priority
    )
    began = False
    try:
        values = await asyncio.to_thread(run.__enter__)
        try:
            async for name, value in values:
                yield _event(model, asked, {name: value})
                began = True
            outputs = values.result()
        finally:
            token.cancel()
            run.__exit__(None, None, None)
        yield _event(model, asked, outputs, "outputs")
    except Exception as error:
        if not began:
            raise
        yield b"event: error\ndata: %s\n\n" % json.dumps({"error": describe(error)}).encode()
    finally:
        token.cancel()


def _event(
    model: ServedModel, asked: InferenceRequest, outputs: NamedValues, kind: str = ""
) -> bytes:
    plain = InferenceRequest(asked.id, {}, None)  # no bytes behind the text
    parts, _ = encode_response(plain, model.name, model.version, outputs)
    head = f"event: {kind}\n" if kind else ""
    return b"".join([head.encode(), b"data: ", *parts, b"\n\n"])
