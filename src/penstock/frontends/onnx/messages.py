"""The messages of ONNX files, as ``proto/onnx.proto`` declares them. The code that protobuf's
compiler generates would import most of protobuf, which takes longer than importing Penstock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from google.protobuf.internal import api_implementation  # type: ignore[import-untyped]

from penstock.frontends.common.encoding import read_varint

if TYPE_CHECKING:
    from penstock.frontends.onnx.proto.onnx_pb2 import *  # noqa: F403


def _file() -> bytes:
    """Return the descriptor of the file, the only one of the set."""
    with open(os.path.join(os.path.dirname(__file__), "proto", "onnx.binpb"), "rb") as file:
        content = file.read()
    size, at = read_varint(content, 1)
    assert at + size == len(content)
    return content[at:]


def _messages() -> dict[str, Any]:
    """Return the classes of the messages by name."""
    if api_implementation.Type() != "upb":
        from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]

        pool, message = descriptor_pool.Default(), message_factory.GetMessageClass
    else:
        from google.protobuf.message import Message  # type: ignore[import-untyped]
        from google.protobuf.pyext import cpp_message  # type: ignore[import-untyped]

        pool = api_implementation._c_module.default_pool

        def message(descriptor: Any) -> Any:
            """Return a message's class, as ``google.protobuf.message_factory`` creates it."""
            fields = {"DESCRIPTOR": descriptor, "__module__": __name__}
            return cpp_message.GeneratedProtocolMessageType(descriptor.name, (Message,), fields)

    file = pool.AddSerializedFile(_file())
    return {name: message(descriptor) for name, descriptor in file.message_types_by_name.items()}


globals().update(_messages())
