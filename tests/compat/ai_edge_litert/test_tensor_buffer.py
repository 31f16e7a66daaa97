"""The memory of inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.compat.ai_edge_litert.tensor_buffer import TensorBuffer
from tests.compat.ai_edge_litert.test_compiled_model import ours
from tests.compat.ai_edge_litert.test_interpreter import doubling

theirs = pytest.importorskip("ai_edge_litert.tensor_buffer")
BOTH = pytest.mark.parametrize(
    "buffer", [TensorBuffer, theirs.TensorBuffer], ids=["penstock", "litert"]
)


@BOTH
def test_elements_are_written_and_read_in_one_dim(buffer) -> None:
    made = buffer.create_from_host_memory(np.zeros((2, 2), np.float32))
    made.write(np.float32([[1, 2]]))
    np.testing.assert_array_equal(made.read(3, np.float32), [1, 2, 0])
    with pytest.raises(RuntimeError, match="source buffer is larger"):
        made.write(np.zeros(5, np.float32))
    with pytest.raises(RuntimeError, match="destination buffer is larger"):
        made.read(5, np.float32)
    with pytest.raises(ValueError, match="must be a NumPy array"):
        made.write([1.0])
    made.destroy()


@BOTH
def test_memory_that_is_not_contiguous_is_refused(buffer) -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        buffer.create_from_host_memory(np.zeros((2, 4), np.float32)[:, ::2])


def test_other_dtypes_are_refused() -> None:
    made = TensorBuffer(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="the tensor is float32, not int32"):
        made.write(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="the tensor is float32, not float64"):
        made.read(3, np.float64)


def test_outputs_are_written_into_the_memory_of_the_caller() -> None:
    model = ours.CompiledModel.from_buffer(doubling())
    x = TensorBuffer.create_from_host_memory(np.ones((2, 3), np.float32))
    memory = np.zeros((2, 3), np.float32)
    model.run_by_index(0, [x], [TensorBuffer.create_from_host_memory(memory)])
    np.testing.assert_array_equal(memory, np.full((2, 3), 2))


def test_outputs_of_other_dims_get_other_memory() -> None:
    made = TensorBuffer(np.zeros(2, np.float32))
    made.take(np.ones((2, 2), np.float32))
    assert made.get_tensor_details() == {"dtype": "float32", "shape": [2, 2]}
    made.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        made.get_tensor_details()
