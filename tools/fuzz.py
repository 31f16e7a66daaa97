"""Fuzz Penstock: ``python -m tools.fuzz [--seconds 60] [--seed N] [--out FOLDER]``.

Cases are mutants of the models of the tests: ONNX files, GraphDefs, SavedModels, TFLite and Circle
files, nnpackages as folders and zip files, checkpoints and GGUF files, and graphs as text; and
tokenizers, which divide and join texts. Each model is loaded, compiled and run by every executor
within tight limits, in one of as many worker processes as there are cores, which watchdogs observe.
What must never happen is reported, with the smallest file that was found to show it under
``--out``:

- crash: the worker has died;
- hang: loading, compiling and running by one executor took more than 10 s;
- memory: the worker took more than ``max_bytes`` and 1 GiB;
- foreign: an exception that is no ``PenstockError``, or an ``InternalError``;
- disagreement: executors differ in what they answer, or in whether they do.

Other cases are single nodes of every operation that there are compiled kernels for, with awkward
shapes and numbers (``tests/support/kernel_draws.py``). What these compute is compared with NumPy:

- difference: results differ by more than the rounding errors derived for the operation.

``--format NAME`` tries cases of one format, such as ``kernel`` or ``onnx``. A case follows from the
seed and its number, so that ``--seed N --case NUMBER`` with the same format repeats it;
``--file PATH`` tries a file. The exit code is 1 if anything was found. Saved sessions are for
``tools/mutate_plans.py``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message
from tests.support import differential

from penstock.frontends.tensorflow.proto.graphdef_pb2 import SavedModel
from penstock.host.threads import usable_cores
from tools.fuzz_answers import EXECUTORS, MAX_BYTES, disagreements, outcome, tokenizer_outcome
from tools.fuzz_cases import CASES, MESSAGES, TOKENIZER, VOCABULARY, Case, drawn
from tools.mutations import shrunk

HANG_S = 10.0
MEMORY = MAX_BYTES + 2**30
CASES_PER_WORKER = 500
SHRINKING_S = 20.0


# In the worker.


def work() -> None:
    """Try the files whose paths come in, a line each; answer with lines of JSON."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        path = Path(json.loads(line))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        findings = tried(path)
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        if peak > MEMORY:
            findings.append(("memory", f"{peak / 2**20:.0f} MiB"))
        print(json.dumps({"findings": findings}), flush=True)


def tried(path: Path) -> list[tuple[str, str]]:
    """What is wrong with how Penstock takes a file."""
    if path.suffix == ".kernel":
        return kernel_differences(path)
    outcomes: dict[str, Any] = {}
    is_tokenizer = path.name in (TOKENIZER, VOCABULARY)
    for executor in ["tokenizer"] if is_tokenizer else EXECUTORS:
        print(json.dumps({"executor": executor}), flush=True)
        faulthandler.dump_traceback_later(HANG_S - 0.5)
        try:
            answer = tokenizer_outcome(path) if is_tokenizer else outcome(path, executor)
            outcomes[executor] = answer
        except BaseException as error:
            trace = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in trace if "penstock" in frame.filename]
            where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
            return [("foreign", f"{executor}: {type(error).__name__} in {where}: {error}")]
        finally:
            faulthandler.cancel_dump_traceback_later()
    return disagreements(path, outcomes)


def kernel_differences(path: Path) -> list[tuple[str, str]]:
    """How a node that is drawn again differs on compiled kernels and on NumPy."""
    operation, number = json.loads(path.read_bytes())
    print(json.dumps({"executor": operation}), flush=True)
    text = differential.difference(operation, number)
    return [("difference", f"{operation} {number}: {text}")] if text else []


# The watchdog.


class Worker:
    """A process that tries files; a new one takes the place of one that has ended."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker lives
        self.process: subprocess.Popen[bytes] | None = None
        self.cases = 0

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            command = [sys.executable, "-m", "tools.fuzz", "--worker"]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self.log
            )
            self.cases = 0
        return self.process

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError), self.process:
                pass  # closes its pipes
            self.process = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self.log.close()

    def findings(self, path: Path) -> list[tuple[str, str]]:
        """What is wrong with how Penstock takes a file. What hangs once may do so because the
        machine has other work: it is tried again."""
        found = self._tried(path)
        return self._tried(path) if found and found[0][0] == "hang" else found

    def _tried(self, path: Path) -> list[tuple[str, str]]:
        if self.cases >= CASES_PER_WORKER:
            self.end()
        process = self.start()
        self.cases += 1
        self.log.truncate(0)
        assert process.stdin is not None
        process.stdin.write(json.dumps(str(path)).encode() + b"\n")
        executor = "start"
        while True:
            answer = self._answer(process, HANG_S if self.cases > 1 else 3 * HANG_S)
            if isinstance(answer, str):
                self.end()
                return [(answer, f"{executor}: {self._last_words()}")]
            if "findings" in answer:
                return [tuple(finding) for finding in answer["findings"]]
            executor = answer["executor"]

    def _answer(self, process: subprocess.Popen[bytes], patience: float) -> dict[str, Any] | str:
        """The next line of the worker; or what went wrong."""
        assert process.stdout is not None
        end = time.monotonic() + patience
        while not select.select([process.stdout], [], [], 0.2)[0]:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            if pages * os.sysconf("SC_PAGE_SIZE") > 2 * MEMORY:
                return "memory"
            if time.monotonic() > end:
                return "hang"
        line = process.stdout.readline()
        return json.loads(line) if line else "crash"

    def _last_words(self) -> str:
        self.log.seek(0)
        text = self.log.read().decode(errors="replace").strip("\0")
        main = text[max(text.rfind("Current thread"), text.rfind("Thread 0x"), 0) :]
        frames = re.findall(r'File ".*?penstock/(\S+)", line (\d+) in (\S+)', main)
        return ", ".join(":".join(frame) for frame in frames[:3]) or text[-300:]


def signature(finding: tuple[str, str]) -> str:
    """What findings of one cause have in common, more or less."""
    category, text = finding
    text = re.sub(r"'[^']*'|\([^)]*\)|\[[^]]*\]", "", text)
    return f"{category} {re.sub(r'[0-9]+', '', text)[:150]}"


def minimal(case: Case, finding: tuple[str, str], worker: Worker, folder: Path) -> Case:
    """The smallest case that is found to have the same finding."""
    end = time.monotonic() + SHRINKING_S
    saved = "saved_model.pb" in case.content
    kind_of_message = SavedModel if saved else MESSAGES.get(Path(case.name).suffix[1:])
    if kind_of_message is None:
        return case
    below = "saved_model.pb" if saved else ""

    def smaller(message: Message) -> Case:
        return Case(case.name, {**case.content, below: message.SerializeToString()})

    def fails(message: Message) -> bool:
        if time.monotonic() > end:
            raise TimeoutError
        again = worker.findings(smaller(message).write(folder / "smaller"))
        return any(signature(other) == signature(finding) for other in again)

    try:
        message = kind_of_message.FromString(case.content[below])
        if fails(message):
            return smaller(shrunk(message, fails))
    except (DecodeError, TimeoutError):
        pass
    return case


def fuzz(seed: str, numbers: Iterable[int], out: Path | None, args: Any) -> int:
    """Try cases until the time is over, as many at a time as there are cores; the number of
    different findings."""
    counts, tries, untried = Counter[str](), count(), iter(numbers)
    end, lock = time.monotonic() + args.seconds, threading.Lock()

    def report(case: Case, number: int, finding: tuple[str, str], worker: Worker) -> None:
        with lock:
            counts[signature(finding)] += 1
            if counts[signature(finding)] > 1:
                return
            print(f"case {number}: {': '.join(finding)}", flush=True)
        if out is not None:
            path = out / f"{finding[0]}-{seed}-{number}"
            with tempfile.TemporaryDirectory() as folder:
                small = minimal(case, finding, worker, Path(folder)).write(path)
            case.write(path / "original")
            print(f"  python -m tools.fuzz --file {small}", flush=True)

    def work_through() -> None:
        with tempfile.TemporaryDirectory() as folder, Worker() as worker:
            while time.monotonic() < end:
                with lock:
                    number = next(untried, None)
                if number is None:
                    return
                case = drawn(seed, number, args.suite, args.format)
                next(tries)
                path = case.write(Path(folder))
                for finding in worker.findings(path):
                    report(case, number, finding, worker)
                path = Path(folder) / case.name
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    with ThreadPoolExecutor(usable_cores()) as threads:
        for job in [threads.submit(work_through) for _ in range(usable_cores())]:
            job.result()
    print(f"seed {seed}: {next(tries)} cases, {len(counts)} findings, {counts.total()} in all")
    return len(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", default=None, help="by default a new one, which is printed")
    parser.add_argument("--cases", type=int, default=10**9, help="the most cases to try")
    parser.add_argument("--case", type=int, help="the number of one case to try again")
    parser.add_argument("--file", type=Path, help="a file or folder to try")
    parser.add_argument("--out", type=Path, help="a folder for files with findings")
    parser.add_argument("--suite", action="store_true", help="seeds of the official ONNX suite too")
    parser.add_argument("--format", default="", choices=[*CASES], help="of all cases")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
    elif args.file is not None:
        with Worker() as worker:
            findings = worker.findings(args.file)
        print(*[": ".join(finding) for finding in findings] or ["no findings"], sep="\n")
        sys.exit(bool(findings))
    else:
        seed = args.seed or secrets.token_hex(4)
        print(f"seed {seed}", flush=True)
        numbers = range(args.cases) if args.case is None else [args.case]
        sys.exit(bool(fuzz(seed, numbers, args.out, args)))


if __name__ == "__main__":
    main()
