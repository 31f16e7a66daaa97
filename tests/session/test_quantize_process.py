"""The process in which a session searches for a quantized model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.samples import samples_of
from penstock.session import quantize_process
from penstock.session.environment import TRACE
from penstock.session.quantize_process import QuantizeProcess, write_sample
from tests.support.modules import ModuleWith


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    names = ["file", "a/b", "serving_default_x:0", "arr_0"]
    arrays = {n: np.arange(i, dtype=np.int64) for i, n in enumerate(names)}
    write_sample(tmp_path / "0.npz", arrays)
    (sample,) = samples_of(tmp_path, names)
    for name, array in arrays.items():
        np.testing.assert_array_equal(sample[name], array)


def test_process_has_one_thread_and_no_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "trace.json"))
    seen: dict[str, Any] = {}

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        seen.update(options, command=command)
        return subprocess.Popen([*command[:1], "-S", "-c", "print('{}')"], **options)

    monkeypatch.setattr(quantize_process, "subprocess", ModuleWith(subprocess, Popen=popen))
    process = QuantizeProcess(["m.onnx"], tmp_path, tmp_path / "out.onnx", 0.01, 60.0)
    assert process.report() == {}
    assert seen["env"][TRACE] == "" and seen["env"]["OMP_NUM_THREADS"] == "1"
    command = seen["command"]
    assert command[command.index("--threads") + 1] == "1"
    assert command[command.index("quantize") + 1] == "m.onnx"


def test_what_the_command_says_is_in_the_error(tmp_path: Path) -> None:
    process = QuantizeProcess(
        [str(tmp_path / "none.onnx")], tmp_path, tmp_path / "out.onnx", 0.01, 60.0
    )
    with pytest.raises(ps.PenstockError, match=r"ended with [12]: .*none\.onnx"):
        process.report()
