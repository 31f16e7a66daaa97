"""LiteRT's ``CompiledModel`` on top of Penstock, compared with LiteRT's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.compat.ai_edge_litert import compiled_model as ours
from penstock.compat.ai_edge_litert.hardware_accelerator import HardwareAccelerator
from penstock.compat.ai_edge_litert.options import CpuOptions, Options
from penstock.compat.ai_edge_litert.tensor_buffer import TensorBuffer
from tests.cli.test_formats import two_signatures
from tests.compat.ai_edge_litert.test_interpreter import FILES, assert_near_one, doubling

theirs = pytest.importorskip("ai_edge_litert.compiled_model")
interpreters = pytest.importorskip("ai_edge_litert.interpreter")
BOTH = pytest.mark.parametrize("runtime", [ours, theirs], ids=["penstock", "litert"])


def fed(inputs: Sequence[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    """What the inputs with these details are fed."""
    rng = np.random.default_rng(0)
    for details in inputs:
        kind, shape = np.dtype(details["dtype"]), details["shape"]
        numbers = rng.integers(0, 9, shape) if kind.kind in "iu" else rng.random(shape)
        yield numbers.astype(kind)


def reference(path: Path) -> list[np.ndarray]:
    """What LiteRT's reference kernels give, which its ``CompiledModel`` does not use."""
    resolver = interpreters.OpResolverType.BUILTIN_REF
    interpreter = interpreters.Interpreter(str(path), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    inputs = interpreter.get_input_details()
    for details, values in zip(inputs, fed(inputs), strict=True):
        interpreter.set_tensor(details["index"], values)
    interpreter.invoke()
    outputs = [details["index"] for details in interpreter.get_output_details()]
    return [interpreter.get_tensor(index).reshape(-1) for index in outputs]


def ran(runtime: ModuleType, path: Path) -> tuple[list, list[np.ndarray]]:
    """The details of a model, and its outputs."""
    model = runtime.CompiledModel.from_file(str(path))
    (key,) = model.get_signature_list()
    inputs, outputs = model.create_input_buffers(0), model.create_output_buffers(0)
    for buffer, values in zip(inputs, fed([b.get_tensor_details() for b in inputs]), strict=True):
        buffer.write(values)
    model.run_by_index(0, inputs, outputs)
    read = [
        buffer.read(int(np.prod(details["shape"])), np.dtype(details["dtype"]))
        for buffer in outputs
        for details in [buffer.get_tensor_details()]
    ]
    details = [
        model.get_signature_list(),
        model.get_input_tensor_details(key),
        model.get_output_tensor_details(key),
        [buffer.get_tensor_details() for buffer in (*inputs, *outputs)],
        model.get_input_buffer_requirements(0)["buffer_size"],
        model.get_signature_by_index(0),
    ]
    return details, read


# LiteRT's own ``CompiledModel`` cannot load the first, and its buffers have no int16 and int64.
UNREADABLE = {"mini_lstm_fused", "int16_dequantize", "int8_arg_max"}


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in UNREADABLE], ids=lambda path: path.stem
)
def test_details_and_answers_are_those_of_litert(path: Path) -> None:
    details, outputs = ran(ours, path)
    expected, wanted = ran(theirs, path)
    assert details == expected
    for one, other, exact in zip(outputs, wanted, reference(path), strict=True):
        if one.dtype.kind in "iu":
            assert_near_one(one, other, exact)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=0.02 * np.abs(other).max())


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.stem in UNREADABLE], ids=lambda path: path.stem
)
def test_files_that_litert_cannot_load_are_run(path: Path) -> None:
    _, outputs = ran(ours, path)
    assert outputs and all(np.isfinite(output).all() for output in outputs)


def test_signatures_are_run_by_name() -> None:
    model = ours.CompiledModel.from_buffer(two_signatures())
    assert model.get_num_signatures() == 2
    assert [model.get_signature_index(key) for key in ("negate", "absolute", "other")] == [0, 1, -1]
    x = model.create_input_buffer_by_name("absolute", "c")
    y = model.create_output_buffer_by_name("absolute", "d")
    x.write(np.float32([-1, 2]))
    model.run_by_name("absolute", {"c": x}, {"d": y})
    np.testing.assert_array_equal(y.read(2, np.float32), [1, 2])
    assert model.is_fully_accelerated()


@BOTH
def test_inputs_are_resized(runtime: ModuleType) -> None:
    model = runtime.CompiledModel.from_buffer(doubling())
    (key,) = model.get_signature_list()
    with pytest.raises(RuntimeError, match="not compatible"):
        model.resize_input_tensor(0, [4, 3])
    model.resize_input_tensor_by_name(key, "x", [4, 3], strict=False)
    assert model.get_output_tensor_details(key)["y"]["shape"] == [4, 3]
    x, y = model.create_input_buffers(0), model.create_output_buffers(0)
    x[0].write(np.ones((4, 3), np.float32))
    model.run_by_index(0, x, y)
    np.testing.assert_array_equal(y[0].read(12, np.float32), np.full(12, 2))
    with pytest.raises(ValueError, match="Unknown input"):
        model.resize_input_tensor_by_name(key, "z", [4, 3])


WRONG = {
    "another input": lambda model: model.create_input_buffer_by_name("negate", "z"),
    "another signature": lambda model: model.create_input_buffers(3),
    "few buffers": lambda model: model.run_by_index(0, [], []),
}


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_a_runtime_error(runtime: ModuleType, name: str) -> None:
    model = runtime.CompiledModel.from_buffer(two_signatures())
    with pytest.raises(RuntimeError):
        WRONG[name](model)


@BOTH
def test_file_that_is_no_model_is_a_runtime_error(runtime: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Failed to load model"):
        runtime.CompiledModel.from_file(str(tmp_path / "none.tflite"))


def test_buffers_that_do_not_fit_are_a_runtime_error() -> None:
    model = ours.CompiledModel.from_buffer(doubling())
    y = model.create_output_buffers(0)
    with pytest.raises(RuntimeError, match="reshape"):
        model.run_by_index(0, [TensorBuffer(np.ones((3, 3), np.float32))], y)
    with pytest.raises(RuntimeError, match="float32"):
        model.run_by_index(0, [TensorBuffer(np.ones((2, 3), np.int32))], y)
    with pytest.raises(RuntimeError, match=r"buffers of \['z'\]"):
        key = model.get_signature_by_index(0)["key"]
        model.run_by_name(key, {"z": y[0]}, {"y": y[0]})


def test_threads_are_those_of_the_options() -> None:
    def threads(**options: object) -> int | None:
        model = ours.CompiledModel.from_buffer(doubling(), **options)
        return model._signature(0).session.options.threads

    assert threads() == 1
    assert threads(options=Options(cpu_options=CpuOptions(num_threads=2))) == 2
    assert threads(options=Options.create()) is None
    with pytest.raises(ValueError, match="not both"):
        threads(options=Options(), hardware_accel=HardwareAccelerator.CPU)


def test_devices_beside_the_processor_are_warned_of_and_alone_refused() -> None:
    both = HardwareAccelerator.GPU | HardwareAccelerator.CPU
    with pytest.warns(UserWarning, match="options without effect on Penstock: .*GPU"):
        ours.CompiledModel.from_buffer(doubling(), both)
    with pytest.raises(RuntimeError, match="add CPU to the devices"):
        ours.CompiledModel.from_buffer(doubling(), HardwareAccelerator.NPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.CompiledModel.from_buffer(doubling(), HardwareAccelerator.CPU)


def test_model_is_closed_at_the_end_of_a_block() -> None:
    with ours.CompiledModel.from_buffer(doubling()) as model:
        x, y = model.create_input_buffers(0), model.create_output_buffers(0)
        model.run_by_index(0, x, y)
        assert model.environment is not None
    with pytest.raises(RuntimeError, match="closed"):
        model.run_by_index(0, x, y)


def test_public_names_are_those_of_litert() -> None:
    for mine, real in (
        (ours.CompiledModel, theirs.CompiledModel),
        (TensorBuffer, theirs.TensorBuffer),
    ):
        names = {name for name in dir(real) if not name.startswith("_")}
        assert names - {"capsule"} <= set(dir(mine))
