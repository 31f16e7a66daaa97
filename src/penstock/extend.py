"""The API for extending Penstock with operations, kernels, backends and types of values.

::

    from penstock.extend import Kernel, operator

    @operator("Twice", domain="com.example", infer=same_type)
    def twice(node, types):
        return Kernel(lambda x: x + x)

An installed package is found by entry points, when a model or a program first names what it offers:
``penstock.operations`` names modules that register operations when they are imported,
``penstock.backends`` classes of backends, by the names that ``backends=`` and ``place=`` use::

    [project.entry-points."penstock.operations"]
    example = "example.operations"

    [project.entry-points."penstock.backends"]
    example = "example.backend:ExampleBackend"

``penstock.testing.check_node`` checks an operation in all forms in which plans may run it.
"""

from __future__ import annotations

from penstock.backends.base import Backend, Device, DeviceStream, Event, HostBackend
from penstock.core.types import (
    ANY,
    FLOAT32,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    Type,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import (
    Binder,
    DeviceWork,
    Kernel,
    LayoutHints,
    MemoryUse,
    PackedConstants,
    RuntimeShapes,
    asynchronous,
    returning,
)
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import same_dtype, same_type, tensor
from penstock.ops.registry import operator

__all__ = [
    "ANY",
    "FLOAT32",
    "Attrs",
    "Backend",
    "Binder",
    "Consts",
    "Device",
    "DeviceStream",
    "DeviceWork",
    "Dim",
    "Event",
    "HostBackend",
    "Kernel",
    "LayoutHints",
    "MapType",
    "MemoryUse",
    "Node",
    "OptionalType",
    "PackedConstants",
    "RuntimeShapes",
    "SequenceType",
    "ShapeError",
    "TensorType",
    "Type",
    "Types",
    "asynchronous",
    "operator",
    "returning",
    "same_dtype",
    "same_type",
    "tensor",
]
