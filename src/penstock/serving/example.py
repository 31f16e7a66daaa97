"""An example of a request for a model, of zeros and empty strings."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from penstock.core.records import dataclass
from penstock.core.types import JsonObject, TensorType
from penstock.serving.batching import shapes_of
from penstock.serving.protocol import HEADER_LENGTH, element_bytes
from penstock.serving.repository import ServedModel

# Of a dim that the model leaves open, other than the first.
_OPEN = 64
# Elements that are shown one by one: more of them are sent as bytes.
_MOST_SHOWN = 64


@dataclass(frozen=True)
class ExampleRequest:
    """The JSON object of a request, and the number of zero bytes behind it."""

    document: JsonObject
    zeros: int

    def curl(self, base_url: str, model: str) -> str:
        """A command that sends the request."""
        text = json.dumps(self.document)
        url = shlex.quote(f"{base_url.rstrip('/')}/v2/models/{quote(model, safe='')}/infer")
        if not self.zeros:
            return f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(text)}"
        body = f"(printf %s {shlex.quote(text)}; head -c {self.zeros} /dev/zero)"
        return f"{body} | curl {url} --data-binary @- -H '{HEADER_LENGTH}: {len(text)}'"


def example_request(model: ServedModel) -> ExampleRequest:
    """A request for a model: of the first shape that it was compiled for, or else of as many rows
    as one, and with as many elements as it takes."""
    session = model.replicas.session
    first = next((session._values_of(shapes) for shapes in shapes_of(session)), {})
    types = {port.name: port.type for port in session.inputs}
    inputs: list[JsonObject] = []
    sizes: dict[str, int] = {}  # a dim of one name has one size in all inputs
    for port in model.inputs:
        name, type_ = port["name"], types[port["name"]]
        declared = type_.shape if isinstance(type_, TensorType) else None
        dims = [*first[name].shape] if name in first else _closed(declared or (), sizes)
        inputs.append({"name": name, "datatype": port["datatype"], "shape": dims})
    long = sum(math.prod(of["shape"]) for of in inputs) > _MOST_SHOWN
    for of in inputs:
        count = math.prod(of["shape"])
        if long:
            size = count * element_bytes(of["datatype"])
            of["parameters"] = {"binary_data_size": size}
        else:
            zero: object = {"BYTES": "", "BOOL": False}.get(of["datatype"], 0)
            of["data"] = [zero] * count
    zeros = sum(of["parameters"]["binary_data_size"] for of in inputs) if long else 0
    return ExampleRequest({"inputs": inputs}, zeros)


def _closed(dims: Sequence[int | str | None], sizes: dict[str, int]) -> list[int]:
    """Dims with a size for those that are open, which ``sizes`` has by name."""
    closed = []
    for i, dim in enumerate(dims):
        size = dim if isinstance(dim, int) else _OPEN if i else 1
        closed.append(sizes.setdefault(dim, size) if isinstance(dim, str) else size)
    return closed
