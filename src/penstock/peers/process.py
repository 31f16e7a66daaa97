"""An engine in a process of its own, so that its threads and its memory are its own.

The process runs ``main``. It takes a ``EngineJob``, and then requests:

    parent                          child
    EngineJob                        ->   import the engine, load the model
                               <-   its version and the seconds of both
    ("run", ())                ->   run once
                               <-   the outputs, and the seconds
    ("time", (clients, seconds)) -> run for a while
                               <-   the seconds of each run, and of all
    ("describe", ())           ->
                               <-   Engine.describe()

Messages are pickled behind their length: both ends are programs of ours, of one user.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, TypeAlias

from penstock.core.errors import PenstockError, shortened
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue
from penstock.peers.engines import ENGINES, EngineJob, Run, environment
from penstock.peers.timing import time_runs

# Not with -m: messages name the classes of this module.
_PROGRAM = "from penstock.peers.process import main; main()"
_LENGTH = 8
_MOST_CHARACTERS = 2_000
_SECONDS_TO_END = 5.0

Message: TypeAlias = object


class Loaded(NamedTuple):
    """The description of an engine that its process sends once the model is loaded."""

    version: str
    load_seconds: float


class Failure(NamedTuple):
    """Failure of a process: its ``reason``, and the ``package`` to install if one is missing."""

    reason: str
    package: str | None


# The parent's side.


class EngineProcess:
    """A process that runs a job. Raises ``PenstockError`` for whatever goes wrong in it."""

    def __init__(self, job: EngineJob) -> None:
        self.engine = job.engine
        # A pipe that nobody reads would fill, and stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**environment(), "PYTHONPATH": paths},
        )
        try:
            self.loaded: Loaded = self._answer(job)
        except BaseException:
            self.close()
            raise

    def run(self) -> tuple[list[RunValue], float]:
        """Run once: the outputs, and the seconds that took."""
        return self._answer(("run", ()))

    def time(self, clients: int, seconds: float) -> tuple[list[float], float]:
        """Run for some seconds with concurrent clients (``time_runs``)."""
        return self._answer(("time", (clients, seconds)))

    def describe(self) -> str | None:
        """The answer of the engine about its runs."""
        return self._answer(("describe", ()))

    def _answer(self, message: Message) -> RunValue:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, message)  # type: ignore[arg-type]
            answer = _receive(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError) as error:
            raise PenstockError(self._ending()) from error
        if not isinstance(answer, Failure):
            return answer
        if answer.package is not None:
            raise PenstockError(
                f"{self.engine} is not installed here: pip install {answer.package}"
            )
        raise PenstockError(f"{self.engine}: {answer.reason}")

    def _ending(self) -> str:
        """Return a message with the exit status of the process and its last line of errors."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return (
            f"the process of {self.engine} ended with status {self._process.returncode}: "
            f"{shortened(last)}"
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextmanager
def engine_processes(jobs: list[EngineJob]) -> Iterator[list[EngineProcess]]:
    """Processes of some jobs, each of which has loaded its model before the next one begins."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(EngineProcess(job))) for job in jobs]


def _send(pipe: BinaryIO, message: Message) -> None:
    data = pickle.dumps(message, protocol=5)
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> RunValue:
    """The next message. Raises ``EOFError`` if there is none any more."""
    head = pipe.read(_LENGTH)
    data = pipe.read(int.from_bytes(head, "little"))
    if len(head) < _LENGTH or not data:
        raise EOFError
    return pickle.loads(data)


# The child's side.


def main() -> None:
    """Answer requests until the parent closes its end."""
    # Redirect what libraries print: it must not come between answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(EOFError, BrokenPipeError):
        job = _receive(sys.stdin.buffer)
        work: Callable[[RunValue], Message] | None = None
        message: RunValue = job
        while True:
            try:
                if work is None:
                    answer, work = _load(job)
                else:
                    answer = work(message)
            except Exception as error:
                answer = _failure(error, job)
            _send(answers, answer)
            message = _receive(sys.stdin.buffer)


def _load(job: EngineJob) -> tuple[Message, Callable[[RunValue], Message]]:
    """Load a model: the answer to the parent, and the function that answers its requests."""
    if job.modules and "" not in sys.path:
        sys.path.insert(0, "")
    for module in job.modules:
        import_module(module)
    engine = ENGINES[job.engine]()
    begin = time.perf_counter()
    run = engine.load(job)
    load_seconds = time.perf_counter() - begin
    requests: dict[str, Callable[..., Message]] = {
        "run": lambda: _timed(run, job),
        "time": lambda clients, seconds: time_runs(lambda: run(job.feeds), clients, seconds),
        "describe": engine.describe,
    }
    answer = Loaded(engine.version, load_seconds)
    return answer, lambda message: requests[message[0]](*message[1])


def _timed(run: Run, job: EngineJob) -> Message:
    begin = time.perf_counter()
    outputs = run(job.feeds)
    return outputs, time.perf_counter() - begin


def _failure(error: Exception, job: EngineJob) -> Failure:
    engine = ENGINES[job.engine]
    names = (engine.package.replace("-", "_"), engine.package)
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in names
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(shortened(text, _MOST_CHARACTERS), engine.package if missing else None)
