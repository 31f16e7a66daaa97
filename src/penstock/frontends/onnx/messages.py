"""The messages of ONNX's files. The rest of the onnx package, and most of protobuf's modules, take
longer to import than Penstock; the package, if it is imported later, has the same classes."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from google.protobuf.internal import api_implementation  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from onnx import AttributeProto as AttributeProto
    from onnx import FunctionProto as FunctionProto
    from onnx import GraphProto as GraphProto
    from onnx import ModelProto as ModelProto
    from onnx import NodeProto as NodeProto
    from onnx import OperatorSetIdProto as OperatorSetIdProto
    from onnx import SparseTensorProto as SparseTensorProto
    from onnx import TensorProto as TensorProto
    from onnx import TensorShapeProto as TensorShapeProto
    from onnx import TypeProto as TypeProto
    from onnx import ValueInfoProto as ValueInfoProto

_MODULE = "onnx.onnx_ml_pb2"
_FILE = b"\n\x12onnx/onnx-ml.proto"  # how its descriptor begins


def _messages() -> dict[str, Any]:
    """The classes by their names."""
    if "onnx" in sys.modules or api_implementation.Type() != "upb":
        import onnx

        return vars(onnx)
    from google.protobuf.message import Message  # type: ignore[import-untyped]
    from google.protobuf.pyext import cpp_message  # type: ignore[import-untyped]

    def message(descriptor: Any, prefix: str = "") -> Any:
        """The class of a message, as ``google.protobuf.internal.builder`` makes it."""
        name = prefix + descriptor.name
        nested = descriptor.nested_types_by_name.items()
        fields = {key: message(inner, f"{name}.") for key, inner in nested}
        fields |= {"DESCRIPTOR": descriptor, "__module__": _MODULE, "__qualname__": name}
        return cpp_message.GeneratedProtocolMessageType(descriptor.name, (Message,), fields)

    package = find_spec("onnx")
    assert package is not None and package.submodule_search_locations
    path = f"{package.submodule_search_locations[0]}/onnx_ml_pb2.py"
    code = SourceFileLoader(_MODULE, path).get_code(_MODULE)
    assert code is not None
    constants = (x for x in code.co_consts if isinstance(x, bytes) and x.startswith(_FILE))
    pool = api_implementation._c_module.default_pool
    descriptors = pool.AddSerializedFile(next(constants)).message_types_by_name
    return {name: message(descriptor) for name, descriptor in descriptors.items()}


globals().update({name: c for name, c in _messages().items() if name.endswith("Proto")})
