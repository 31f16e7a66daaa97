"""Bindings of inputs and outputs, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np

from tests.compat.test_onnxruntime import BOTH, I, X, model, raised


@BOTH
def test_values_and_bindings(runtime):
    session = runtime.InferenceSession(model())
    value = runtime.OrtValue.ortvalue_from_numpy(X.copy())
    assert (value.shape(), value.data_type(), value.device_name()) == (
        [2, 3],
        "tensor(float)",
        "cpu",
    )
    assert value.is_tensor() and value.has_value() and value.element_type() == 1
    value.update_inplace(2 * X)
    np.testing.assert_array_equal(value.numpy(), 2 * X)
    outputs = session.run_with_ort_values(
        ["y"], {"x": value, "i": runtime.OrtValue.ortvalue_from_numpy(I)}
    )
    np.testing.assert_array_equal(outputs[0].numpy(), -2 * X)

    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    i, y = I.copy(), np.empty_like(X)
    binding.bind_input("i", "cpu", 0, np.int64, [3], i.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, [2, 3], y.ctypes.data)
    binding.bind_output("j")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, -X)
    first, second = binding.copy_outputs_to_cpu()
    np.testing.assert_array_equal(first, y)
    np.testing.assert_array_equal(second, 2 * I)
    target = runtime.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    binding.clear_binding_outputs()
    binding.bind_ortvalue_input("x", runtime.OrtValue.ortvalue_from_numpy(-X))
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(target.numpy(), X)
    assert len(binding.get_outputs()) == 1


@BOTH
def test_bindings_and_runs_fail_with_the_same_errors(runtime):
    session = runtime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    assert raised(lambda: binding.bind_cpu_input("z", X)) == "RuntimeError"
    assert raised(lambda: session.run_with_iobinding(binding)) == "RuntimeError"
    binding.bind_cpu_input("x", X)
    binding.bind_cpu_input("i", I)
    small = runtime.OrtValue.ortvalue_from_shape_and_type([1, 1], np.float32)
    binding.bind_ortvalue_output("y", small)
    assert raised(lambda: session.run_with_iobinding(binding)) == "RuntimeError"
    assert raised(lambda: small.update_inplace(np.zeros(4, np.float32))) == "RuntimeError"
    options = runtime.RunOptions()
    options.terminate = True
    assert raised(lambda: session.run(None, {"x": X, "i": I}, options)) == "Fail"
    assert raised(lambda: runtime.InferenceSession(b"")) == "InvalidArgument"
    assert hasattr(runtime.capi.onnxruntime_pybind11_state, "Fail")
