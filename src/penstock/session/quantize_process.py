"""``penstock quantize`` in a process of its own, on one thread with the lowest priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock.core.errors import DeadlineExceeded, PenstockError
from penstock.core.types import JsonObject
from penstock.session.environment import TRACE

_LOWEST_PRIORITY = 19
# Time of the search besides its timeout: to start, and to measure the choice once more.
_MORE_SECONDS = 120.0
_MOST_CHARACTERS = 500
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class QuantizeProcess:
    """A running search, for the model and options that ``source`` gives on the command line, with
    the samples in a folder. ``output`` will be the file of the model."""

    def __init__(
        self, source: Sequence[str], samples: Path, output: Path, max_error: float, timeout: float
    ) -> None:
        self.output = output
        self._timeout = timeout
        command = [
            *(sys.executable, "-P", "-m", "penstock.cli", "quantize", *source),
            *("--data", str(samples), "--max-error", str(max_error), "--threads", "1"),
            *("--timeout", str(timeout), "--output", str(output), "--json"),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            creationflags=getattr(subprocess, "IDLE_PRIORITY_CLASS", 0),
        )
        if hasattr(os, "setpriority"):
            with suppress(OSError):  # the process has ended, or the system does not allow it
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST_PRIORITY)

    def report(self) -> JsonObject:
        """Wait for the end, and return the report of ``penstock.quantize``. Raises
        ``DeadlineExceeded``, or ``PenstockError`` with the output of the process."""
        process = self._process
        try:
            text, errors = process.communicate(timeout=self._timeout + _MORE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise DeadlineExceeded(f"the search did not end within {self._timeout} s") from None
        if process.returncode:
            raise PenstockError(
                f"penstock quantize ended with {process.returncode}: {_reason(text, errors)}"
            )
        report: JsonObject = json.loads(text)
        return report

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()


def _reason(text: str, errors: str) -> str:
    """Return why a search has failed, from its output."""
    with suppress(ValueError, LookupError, TypeError):  # the process may end before it prints JSON
        return str(json.loads(text)["error"]["message"])
    return errors.strip()[-_MOST_CHARACTERS:]


def _environment() -> dict[str, str]:
    """Return the environment of the search, in which nothing writes to this process's files."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **_ONE_THREAD, TRACE: "", "PYTHONPATH": paths}


def write_sample(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` file. np.savez takes names as keyword arguments, which could collide."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
