"""What ONNX Runtime has for a whole process."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import onnxruntime
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime import environment
from tests.compat.test_onnxruntime import I, X, model

ENUMS = [
    name
    for name, x in vars(environment).items()
    if isinstance(x, type) and issubclass(x, IntEnum) and x is not IntEnum
]


@pytest.mark.parametrize("name", ENUMS)
def test_numbers_are_those_of_onnxruntime(name: str) -> None:
    theirs = getattr(onnxruntime, name).__members__
    for key, value in getattr(ort, name).__members__.items():
        assert int(theirs[key]) == value, key


def test_devices_are_the_processor_alone() -> None:
    (device,) = ort.get_ep_devices()
    assert device.ep_name == "CPUExecutionProvider"
    assert device.device.type == ort.OrtHardwareDeviceType.CPU
    real = onnxruntime.get_ep_devices()[0]
    assert [
        n
        for n in ("ep_name", "ep_metadata", "ep_options", "ep_vendor", "device")
        if not hasattr(real, n)
    ] == []
    assert "Penstock" in ort.get_build_info()
    assert not ort.has_collective_ops()


def test_debug_info_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ort.print_debug_info()
    assert "Penstock" in capsys.readouterr().out
    ort.preload_dlls()


CALLS = {
    "set_seed": (3,),
    "set_global_thread_pool_sizes": (2, 2),
    "create_and_register_allocator": (environment.HOST_MEMORY, ort.OrtArenaCfg(0, 0, 0, 0)),
    "create_and_register_allocator_v2": ("CPU", environment.HOST_MEMORY, {}, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_function_without_effect_is_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} has no effect on Penstock: "):
        getattr(ort, name)(*CALLS[name])


def test_tensors_are_copied() -> None:
    source = ort.OrtValue.ortvalue_from_numpy(X)
    target = ort.OrtValue.ortvalue_from_shape_and_type(X.shape, np.float32)
    ort.copy_tensors([source], [target])
    np.testing.assert_array_equal(target.numpy(), X)


def test_sessions_run_on_lists_of_values() -> None:
    session = ort.InferenceSession(model())
    feeds = [ort.OrtValue.ortvalue_from_numpy(array) for array in (I, X)]
    fetches = environment.OrtValueVector()
    session.run_with_ortvaluevector(None, ["i", "x"], feeds, ["y"], fetches, [])
    np.testing.assert_array_equal(fetches[0].numpy(), -X)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", feeds[1])
    binding.bind_ortvalue_input("i", feeds[0])
    binding.bind_output("j")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs_as_ortvaluevector()[0].numpy(), I + I)
    assert [len(x) for x in (session.get_input_epdevices(), session.get_output_memory_infos())] == [
        2,
        2,
    ]
    assert session.get_input_memory_infos()[0].name == "Cpu"
