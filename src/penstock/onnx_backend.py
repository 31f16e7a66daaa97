"""Penstock as an ONNX backend, for the official test suite and tools that use backends.

Implements ``onnx.backend.base``: ``prepare`` a model, ``run`` it with inputs by position. It needs
the onnx package: ``pip install 'penstock-runtime[onnx]'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    import onnx
    from onnx.backend.base import Backend, BackendRep, namedtupledict
except ImportError as error:
    message = "penstock.onnx_backend needs onnx: pip install 'penstock-runtime[onnx]'"
    raise ImportError(message) from error

from penstock.core.errors import InvalidInput, PenstockError, Unsupported
from penstock.core.types import RunValue
from penstock.session.session import Session, compile


class PenstockRep(BackendRep):  # type: ignore[misc]
    """A compiled model."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[RunValue, ...]:
        """Return outputs as a named tuple; ``inputs`` are given by position or by name."""
        ports = self.session.inputs
        if isinstance(inputs, Mapping):
            feeds = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            if len(values) > len(ports):
                raise InvalidInput(f"{len(values)} inputs given, the model takes {len(ports)}")
            feeds = {port.name: value for port, value in zip(ports, values, strict=False)}
        outputs = self.session.run(feeds, **kwargs)
        names = [port.name for port in self.session.outputs]
        return namedtupledict("Outputs", names)(*outputs.values())


class PenstockBackend(Backend):  # type: ignore[misc]
    """Compiles models; keyword arguments are options of ``penstock.compile``."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether every operation of the model is supported; raises for an invalid model."""
        try:
            compile(model, **kwargs)
        except Unsupported:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PenstockRep:
        """Compile a model; raises ``PenstockError`` for one that is invalid or unsupported."""
        if not cls.supports_device(device):
            raise PenstockError(f"device {device!r} is not supported, only CPU is")
        return PenstockRep(compile(model, **kwargs))

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[RunValue, ...]:
        """Run a single node; ``opset_version`` is the version of its operator set."""
        version = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        opsets = [onnx.helper.make_opsetid(node.domain, version)]
        if node.domain not in ("", "ai.onnx"):
            opsets.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
        names = [name for name in node.input if name]
        feeds = dict(zip(names, inputs, strict=False))
        infos = []
        for name in dict.fromkeys(names):
            code = onnx.helper.np_dtype_to_tensor_dtype(feeds[name].dtype)
            infos.append(onnx.helper.make_tensor_value_info(name, code, list(feeds[name].shape)))
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", infos, outputs)
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        return cls.prepare(model, device, **kwargs).run(feeds)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether ``device`` is supported: only ``CPU`` is."""
        return device.split(":")[0] == "CPU"


is_compatible = PenstockBackend.is_compatible
prepare = PenstockBackend.prepare
run_model = PenstockBackend.run_model
run_node = PenstockBackend.run_node
supports_device = PenstockBackend.supports_device
