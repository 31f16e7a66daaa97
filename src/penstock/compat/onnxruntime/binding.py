"""Inputs and outputs that are bound to memory ahead of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.compat.onnxruntime.environment import OrtValueVector
from penstock.compat.onnxruntime.values import OrtValue, check_device, dtype_of, plain_value
from penstock.core.types import RunValue


class IOBinding:
    """The memory of a run's inputs and outputs. An output that is bound to an array is written
    there (``Session.run`` with ``out=``), one that is bound to a device alone gets new memory.

    Args:
        session: The session of the names.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.feeds: dict[str, Any] = {}
        self.given: dict[str, np.ndarray | None] = {}
        self.results: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: RunValue) -> None:
        """Feed an array.

        Args:
            name: An input.
            arr_on_cpu: Its array.
        """
        self.feeds[self._known(name)] = arr_on_cpu

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Feed the tensor at an address, which must stay valid.

        Args:
            name: An input.
            device_type: "cpu"; for others it raises.
            device_id: Not looked at.
            element_type: A dtype, or ONNX's number of one.
            shape: Its dims.
            buffer_ptr: The address of C-contiguous elements.
        """
        check_device(device_type)
        self.feeds[self._known(name)] = _at(buffer_ptr, shape, dtype_of(element_type))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Feed a value.

        Args:
            name: An input.
            ortvalue: Its value.
        """
        self.feeds[self._known(name)] = ortvalue

    def _known(self, name: str) -> str:
        if all(port.name != name for port in self.session.get_inputs()):
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")
        return name

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Fetch an output, into memory of the caller's or new one.

        Args:
            name: An output.
            device_type: "cpu"; for others it raises.
            device_id: Not looked at.
            element_type: A dtype, or ONNX's number of one, if there is an address.
            shape: The dims of the memory.
            buffer_ptr: The address of memory for it; by default it gets new memory.
        """
        check_device(device_type)
        self.given[name] = (
            None if buffer_ptr is None else _at(buffer_ptr, shape or (), dtype_of(element_type))
        )

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Fetch an output into the memory of a value.

        Args:
            name: An output.
            ortvalue: The tensor whose memory it is written into.
        """
        self.given[name] = ortvalue.numpy()

    def synchronize_inputs(self) -> None:
        """Nothing to wait for: values are in the host's memory."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for: a run returns when its outputs are complete."""

    def get_outputs(self) -> list[OrtValue]:
        """The values of the outputs, in the order in which they were bound."""
        return [OrtValue(self.results[name]) for name in self.given if name in self.results]

    def get_outputs_as_ortvaluevector(self) -> OrtValueVector:
        """``get_outputs`` as another list."""
        return OrtValueVector(self.get_outputs())

    def copy_outputs_to_cpu(self) -> list[RunValue]:
        """The outputs as arrays, in the order in which they were bound."""
        return [value.value for value in self.get_outputs()]

    def clear_binding_inputs(self) -> None:
        self.feeds.clear()

    def clear_binding_outputs(self) -> None:
        self.given.clear()
        self.results.clear()

    def arguments(self) -> tuple[Mapping[str, Any], list[str], dict[str, np.ndarray]]:
        """Feeds, fetches and given arrays of a run."""
        feeds = {name: plain_value(value) for name, value in self.feeds.items()}
        given = {name: array for name, array in self.given.items() if array is not None}
        return feeds, list(self.given), given


def _at(pointer: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """The tensor at an address."""
    import ctypes

    # With a dtype: NumPy's product of no dims is a float.
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # As bytes: ctypes has no float16 or bfloat16.
    buffer = (ctypes.c_uint8 * size).from_address(pointer)
    return np.ctypeslib.as_array(buffer).view(dtype).reshape(tuple(shape))
