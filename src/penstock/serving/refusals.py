"""Explanations of invalid requests, in terms of the request's JSON object.

The error of a run that refuses its feeds names arrays and Python's options. Only after such an
error, the request is compared with the model here, so that other requests take no longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.types import STRING, TensorType, Type
from penstock.ops.common.shape_rules import fits
from penstock.serving.protocol import InferenceRequest, datatype_of
from penstock.session.facts import Port

_MOST_NAMES = 16


class HasPorts(Protocol):
    """The target of a request: a session or sequences. ``values`` may be fed and fetched."""

    @property
    def inputs(self) -> Sequence[Port]: ...
    @property
    def outputs(self) -> Sequence[Port]: ...
    @property
    def values(self) -> Iterable[Port]: ...


def refusal(error: InvalidInput, model: HasPorts, request: InferenceRequest) -> InvalidInput:
    """Return an error for the first field of a request that the model rejects, or ``error``."""
    reason = next(_reasons(model, request), None)
    return error if reason is None else InvalidInput(reason)


def _reasons(model: HasPorts, request: InferenceRequest) -> Iterator[str]:
    # A client may feed any value, and fetch any: those between inputs and outputs, too.
    values = {value.name: value.type for value in model.values}
    inputs = {port.name: port.type for port in model.inputs}
    outputs = [port.name for port in model.outputs]
    for name in request.feeds:
        if name not in values:
            yield f'"inputs" has {name!r:.80}, but the model has {_names(inputs)}'
    for name in request.fetches or ():
        if name not in values:
            yield f'"outputs" has {name!r:.80}, but the model has {_names(outputs)}'
    # For other fetches, the run reports which inputs it lacks.
    missing = inputs.keys() - request.feeds.keys()
    if missing and request.fetches is None:
        yield f'"inputs" lacks {_names([name for name in inputs if name in missing])}'
    for name, x in request.feeds.items():
        yield from _of_input(name, x, values)


def _of_input(name: str, x: np.ndarray, values: Mapping[str, Type]) -> Iterator[str]:
    type_ = values.get(name)
    if not isinstance(type_, TensorType):
        return
    wanted, shape = datatype_of(type_.dtype or STRING), type_.shape
    if type_.dtype is not None and wanted != (given := datatype_of(x.dtype)):
        yield f'input {name!r:.80} has "datatype" {given}, but the model expects {wanted}'
    if shape is not None and not fits(x.shape, shape):
        dims = [dim if isinstance(dim, int) else -1 for dim in shape]
        yield f'input {name!r:.80} has "shape" {[*x.shape]}, but the model expects {dims}'


def _names(names: Iterable[str]) -> str:
    shown = [*map(repr, names)]
    more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
    return ", ".join(shown[:_MOST_NAMES]) + more
