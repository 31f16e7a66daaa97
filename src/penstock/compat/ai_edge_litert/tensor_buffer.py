"""The memory of one input or output of a ``CompiledModel``."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from penstock.compat.ai_edge_litert.tensors import Details
from penstock.core.types import dtype_name


class TensorBuffer:
    """A tensor in the host's memory.

    Args:
        array: Its elements, which are shared.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array: np.ndarray | None = array

    @classmethod
    def create_from_host_memory(cls, data_array: np.ndarray) -> TensorBuffer:
        """A buffer in the memory of an array: outputs are written there.

        Args:
            data_array: A C-contiguous array; others raise ``ValueError``.
        """
        if not isinstance(data_array, np.ndarray) or not data_array.flags.c_contiguous:
            raise ValueError("data_array must be a C-contiguous NumPy array")
        return cls(data_array)

    @property
    def array(self) -> np.ndarray:
        """The tensor itself. Raises ``ValueError`` once it is destroyed."""
        if self._array is None:
            raise ValueError("TensorBuffer has been destroyed")
        return self._array

    def write(self, data_array: np.ndarray) -> None:
        """Copy elements into the tensor, from its beginning. Raises ``RuntimeError`` for more than
        it has, and ``ValueError`` for those of another dtype, whose bytes LiteRT would copy.

        Args:
            data_array: An array.
        """
        if not isinstance(data_array, np.ndarray):
            raise ValueError("data_array must be a NumPy array")
        flat = self._flat(data_array.dtype)
        if data_array.size > flat.size:
            raise RuntimeError("WriteTensorBuffer: source buffer is larger than the tensor buffer")
        flat[: data_array.size] = data_array.reshape(-1)

    def read(self, num_elements: int, output_dtype: DTypeLike) -> np.ndarray:
        """A copy of the first elements, in one dim. Raises as ``write`` does.

        Args:
            num_elements: Their number.
            output_dtype: Their dtype, that of the tensor.
        """
        flat = self._flat(np.dtype(output_dtype))
        if num_elements > flat.size:
            raise RuntimeError(
                "ReadTensorToBuffer: destination buffer is larger than the tensor buffer"
            )
        return flat[:num_elements].copy()

    def _flat(self, dtype: np.dtype) -> np.ndarray:
        """The elements in one dim, as a view. Raises ``ValueError`` unless they have this dtype."""
        if dtype != self.array.dtype:
            raise ValueError(
                f"the tensor is {dtype_name(self.array.dtype)}, not {dtype_name(dtype)}"
            )
        return self.array.reshape(-1)

    def get_tensor_details(self) -> Details:
        """The dtype and the dims."""
        return {"dtype": dtype_name(self.array.dtype), "shape": list(self.array.shape)}

    def take(self, value: np.ndarray) -> None:
        """Have the elements of an output: in the same memory, if they are as many."""
        if value.size == self.array.size and value.dtype == self.array.dtype:
            np.copyto(self.array, value.reshape(self.array.shape))
        else:
            self._array = value.copy()

    def destroy(self) -> None:
        """Let the memory go."""
        self._array = None
