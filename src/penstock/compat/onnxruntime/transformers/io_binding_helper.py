"""The types of inputs and outputs, from the texts that sessions say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.compat.onnxruntime.values import NodeArg, dtype_of_text, element_number

if TYPE_CHECKING:
    import torch


class _Described(Protocol):
    def get_inputs(self) -> list[NodeArg]: ...
    def get_outputs(self) -> list[NodeArg]: ...


class TypeHelper:
    """Types of NumPy, PyTorch and ONNX, by the names that ONNX Runtime gives them, such as
    ``tensor(float)``. Raises ``ValueError`` for other names."""

    @staticmethod
    def get_input_type(ort_session: _Described, name: str) -> str:
        return _named(ort_session.get_inputs(), name).type

    @staticmethod
    def get_output_type(ort_session: _Described, name: str) -> str:
        return _named(ort_session.get_outputs(), name).type

    @staticmethod
    def ort_type_to_numpy_type(ort_type: str) -> type:
        return dtype_of_text(ort_type).type

    @staticmethod
    def ort_type_to_torch_type(ort_type: str) -> torch.dtype:
        import torch

        dtype = getattr(torch, dtype_of_text(ort_type).name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"PyTorch has no {ort_type}")
        return dtype

    @staticmethod
    def ort_type_to_onnx_type(ort_type: str) -> int:
        return element_number(dtype_of_text(ort_type))

    @staticmethod
    def get_io_numpy_type_map(ort_session: _Described) -> dict[str, type]:
        """The types of all inputs and outputs by name."""
        ports = [*ort_session.get_inputs(), *ort_session.get_outputs()]
        return {port.name: TypeHelper.ort_type_to_numpy_type(port.type) for port in ports}

    @staticmethod
    def get_io_onnx_type_map(ort_session: _Described) -> dict[str, int]:
        """The numbers of the types of all inputs and outputs by name."""
        ports = [*ort_session.get_inputs(), *ort_session.get_outputs()]
        return {port.name: TypeHelper.ort_type_to_onnx_type(port.type) for port in ports}


def _named(ports: list[NodeArg], name: str) -> NodeArg:
    for port in ports:
        if port.name == name:
            return port
    raise ValueError(f"there is no {name!r} among {[port.name for port in ports]}")
