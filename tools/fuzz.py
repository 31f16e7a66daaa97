"""Fuzz Penstock: ``python -m tools.fuzz [--seconds 60] [--seed N] [--out FOLDER]``.

Cases are mutants of the models of the tests: ONNX files, GraphDefs, SavedModels, TFLite and Circle
files, nnpackages as folders and zip files, and graphs as text. Each is loaded, compiled and run by
every executor within tight limits, in one of as many worker processes as there are cores, which
watchdogs observe. What must never happen is reported, with the smallest file that was found to show
it under ``--out``:

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
import io
import json
import os
import random
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
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from bench.zoo.sample import samples
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from tests.support import differential, mutants, tf_cases, tflite_cases
from tests.support.kernel_draws import DRAWS
from tests.support.random_graphs import seeded

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.frontends.load import load_text
from penstock.frontends.nnpackage.package import MANIFEST
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, SavedModel
from penstock.host.threads import usable_cores
from penstock.ir.graph import Model
from penstock.ops.registry import registered
from penstock.textual.printer import format_model
from tools.mutations import (
    change_message,
    changed_bytes,
    changed_json,
    changed_numbers,
    changed_text,
    shrunk,
)

MAX_BYTES = 2**26
LIMITS = ps.Limits(
    max_bytes=MAX_BYTES, max_constant_bytes=MAX_BYTES, max_iterations=1000, max_nodes=10_000
)
EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret", "auto")
TIMEOUT_S = 1.0
HANG_S = 10.0
MEMORY = MAX_BYTES + 2**30
CASES_PER_WORKER = 500
SHRINKING_S = 20.0

SAVED_MODELS = tf_cases.FOLDER.parent / "tf_saved"
MESSAGES: Mapping[str, type[Message]] = {"onnx": onnx.ModelProto, "pb": GraphDef}

# Operations whose answers differ between runs, or whose order other than data decides.
UNDEFINED = re.compile(
    rb"Random|Multinomial|Bernoulli|Dropout|Truncated|Variable|VarHandle|Assign|Stack|TensorArray"
)


# Cases.


@dataclass(frozen=True)
class Case:
    """A file, or the files of a folder: ``content`` by the path below ``name``, "" for a file."""

    name: str
    content: Mapping[str, bytes]

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        for below, data in self.content.items():
            file = path / below if below else path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return path


@cache
def words() -> Mapping[str, Sequence[str]]:
    """Values worth trying, by the field's name: operations that there are."""
    names = sorted({op.name for op in registered()})
    return {"op_type": names, "op": names, "method": names}


@cache
def graph_defs() -> Mapping[str, GraphDef]:
    return {case.name: read_graph(case.path) for case in tf_cases.cases()}


@cache
def saved_models() -> Mapping[str, Mapping[str, bytes]]:
    return files_of_folders(SAVED_MODELS)


def files_of_folders(parent: Path) -> Mapping[str, Mapping[str, bytes]]:
    """By the name of each folder in ``parent``, its files by their path below it."""
    return {
        folder.name: {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for folder in sorted(parent.iterdir())
        if folder.is_dir()
    }


@cache
def suite() -> Sequence[bytes]:
    """The models of the official ONNX suite, of which there is one or more for each operation."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case.model.SerializeToString() for case in load_model_tests(kind="node")]


@cache
def exported() -> Sequence[bytes]:
    """Small models as exporters wrote them, with the operations of classical models."""
    models = [model for _, model, _ in samples()]
    return [model for model in models if len(model) < 30_000]


def onnx_case(draw: random.Random, with_suite: bool) -> Case:
    seeds = [*mutants.models().values()] if draw.random() < 0.7 else exported()
    data = draw.choice(suite()) if with_suite and draw.random() < 0.6 else draw.choice(seeds)
    chance = draw.random()
    if chance < 0.4:
        return Case("model.onnx", {"": mutants.mutant(data, str(draw.random()))})
    if chance < 0.5:
        return Case("model.onnx", {"": changed_bytes(data, draw)})
    proto = onnx.ModelProto.FromString(data)
    change_message(proto, draw, words())
    return Case("model.onnx", {"": proto.SerializeToString()})


def graph_def_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(graph_defs()))
    graph = GraphDef()
    graph.CopyFrom(graph_defs()[name])
    chance = draw.random()
    if chance < 0.15:
        return Case(f"{name}.pb", {"": changed_bytes(graph.SerializeToString(), draw)})
    if chance < 0.3:
        text = text_format.MessageToString(graph)
        return Case(f"{name}.pbtxt", {"": changed_text(text, draw).encode(errors="replace")})
    change_message(graph, draw, words())
    return Case(f"{name}.pb", {"": graph.SerializeToString()})


def saved_model_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(saved_models()))
    files = dict(saved_models()[name])
    if draw.random() < 0.3:
        below = draw.choice(sorted(files))
        files[below] = changed_bytes(files[below], draw)
    else:
        proto = SavedModel.FromString(files["saved_model.pb"])
        change_message(proto, draw, words())
        files["saved_model.pb"] = proto.SerializeToString()
    return Case(name, files)


@cache
def flat_buffers() -> Sequence[bytes]:
    """The TFLite and Circle models of the corpus, those that must be refused left out."""
    folders = ("op", "control", "dynamic", "net", "circle")
    return [case.path.read_bytes() for case in tflite_cases.cases(*folders)]


def tflite_case(draw: random.Random, _: bool) -> Case:
    change = draw.choice([changed_bytes, changed_numbers, changed_numbers])
    return Case("model.tflite", {"": change(draw.choice(flat_buffers()), draw)})


@cache
def packages() -> Mapping[str, Mapping[str, bytes]]:
    return {
        name: files
        for name, files in files_of_folders(tflite_cases.FOLDER / "nnpkg").items()
        if "error" not in name
    }


# Values worth trying in a manifest: places of inputs and outputs, types and files.
_MANIFEST_WORDS = (
    *("0:0:0", "1:0:0", "0:0:1", "0:1:0", "9:0:0", "-1:0:0", "0:0", "00:00:00"),
    *("tflite", "circle", "a.tflite", "../a.tflite", "/dev/zero", MANIFEST, "metadata", "."),
    *([], {}, None, True, [["0:0:0"]], {"from": "0:0:0", "to": ["1:0:0"]}),
)


def package_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(packages()))
    files = dict(packages()[name])
    chance = draw.random()
    if chance < 0.5:
        files[MANIFEST] = changed_json(files[MANIFEST], draw, _MANIFEST_WORDS)
    elif chance < 0.6:
        files[MANIFEST] = changed_bytes(files[MANIFEST], draw)
    elif chance < 0.9:
        below = draw.choice(sorted(files.keys() - {MANIFEST}))
        files[below] = draw.choice([changed_bytes, changed_numbers])(files[below], draw)
    if draw.random() < 0.5:
        return Case(name, files)
    data = packed(files, draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    if chance >= 0.9 or draw.random() < 0.2:
        data = draw.choice([changed_bytes, changed_numbers])(data, draw)
    return Case("package.zip", {"": data})


def packed(files: Mapping[str, bytes], compression: int) -> bytes:
    """A zip file of ``files`` by name, of which each is written at a fixed date."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return memory.getvalue()


def text_case(draw: random.Random, _: bool) -> Case:
    graph = seeded(draw.randrange(1000), 6)
    text = format_model(Model({graph.name: graph}, graph.name))
    return Case("model.txt", {"": changed_text(text, draw).encode(errors="replace")})


def kernel_case(draw: random.Random, _: bool) -> Case:
    operation = draw.choice([name for name in differential.operations() if name in DRAWS])
    number = draw.randrange(2**32)
    return Case("node.kernel", {"": json.dumps([operation, number]).encode()})


_CASES = {
    "onnx": (onnx_case, 5),
    "graphdef": (graph_def_case, 4),
    "tflite": (tflite_case, 3),
    "package": (package_case, 2),
    "savedmodel": (saved_model_case, 1),
    "text": (text_case, 1),
    "kernel": (kernel_case, 4),
}
"""how cases of each format are drawn, and their part of all"""


def drawn(seed: str, number: int, with_suite: bool, only: str = "") -> Case:
    """A case of the format ``only``, or of any."""
    draw = random.Random(f"{seed} {number}")
    cases, weights = zip(*([_CASES[only]] if only else _CASES.values()), strict=True)
    (case,) = draw.choices(cases, weights)
    return case(draw, with_suite)


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
    for executor in EXECUTORS:
        print(json.dumps({"executor": executor}), flush=True)
        faulthandler.dump_traceback_later(HANG_S - 0.5)
        try:
            outcomes[executor] = outcome(path, executor)
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


def outcome(
    path: Path, executor: str, precision: str = "float32", nudged: Bits | None = None
) -> Any:
    """The outputs of all runs, or the ``PenstockError`` that there was. Where ``nudged`` has the
    size of floats, those in the feeds differ by what it has for it."""
    rng = np.random.default_rng(0)
    backends = None if executor == "auto" else ["numpy"]
    try:
        session = session_of(path, executor=executor, backends=backends, precision=precision)
        outputs = []
        for feeds, fetches, targets in runs_of(path, session, rng):
            if nudged is not None:
                feeds = {name: _nudged(x, rng, nudged) for name, x in feeds.items()}
            outputs.append(session.run(feeds, fetches, targets, timeout=TIMEOUT_S))
        return outputs
    except ps.InternalError:
        raise
    except ps.PenstockError as error:
        return error


def session_of(path: Path, **options: Any) -> ps.Session:
    source: Any = path
    if path.suffix == ".txt":
        source = load_text(path.read_text(errors="replace"), LIMITS)
    return ps.compile(source, limits=LIMITS, **options)


def runs_of(path: Path, session: ps.Session, rng: np.random.Generator) -> list[Any]:
    """Feeds, fetches and targets: those of the case that a GraphDef is of, or of all types."""
    description = tf_cases.FOLDER / f"{path.stem}.json"
    if description.exists():
        runs = json.loads(description.read_text())["runs"][:2]
        return [(tf_cases.feeds(run), run["fetches"], run["targets"]) for run in runs]
    feeds = {port.name: mutants.feed(port.type, rng) for port in session.inputs}
    return [(feeds, None, None)]


def disagreements(path: Path, outcomes: Mapping[str, Any]) -> list[tuple[str, str]]:
    # How much memory and time there is, and what control flow can be structured, are no matters of
    # the model's meaning.
    excused = (ps.LimitExceeded, ps.DeadlineExceeded, ps.Unsupported)
    counted = {
        e: o
        for e, o in outcomes.items()
        if not isinstance(o, excused)
        and not isinstance(getattr(o, "__cause__", None), MemoryError)  # of the machine
    }
    refused = {e: o for e, o in counted.items() if isinstance(o, ps.PenstockError)}
    ran = {e: o for e, o in counted.items() if e not in refused}
    if not ran or (path.is_file() and UNDEFINED.search(path.read_bytes())):
        return []
    if refused:
        error, *_ = refused.values()
        # Control edges to nodes without effects are dropped where structured control flow is run:
        # what only they need, and fails, then does not run. Calls of functions by their names have
        # such edges to all nodes of the bodies.
        graph = ps.load(path, limits=LIMITS).graph if path.suffix in (".pb", ".pbtxt") else None
        edges = graph is not None and any(node.control_inputs for node in graph.walk())
        if edges and refused.keys() == {"frames"} and type(error) is ps.RunError:
            return []
        text = f"{', '.join(ran)} ran; {', '.join(refused)} did not: {type(error).__name__}: "
        return [("disagreement", f"{text}{str(error)[:300]}")]
    first, *others = [executor for executor in ran if executor != "auto"] or ["auto"]
    for other in others:
        if not alike(ran[first], ran[other]):
            if other == "interpret" and is_of_rounding(path, first, ran[other]):
                continue
            if not stays_finite(path) or is_of_last_bits(path, first, ran[first], ran[other]):
                continue
            return [("disagreement", f"{first} answers {ran[first]}, {other} {ran[other]}"[:600])]
    return []


def is_of_rounding(path: Path, executor: str, answer: Any) -> bool:
    """Whether the interpreter's answer is what an executor gives that rounds each value, and is so
    for certain: it has overflowed, or differs as much where the last bits of the feeds do."""
    if not alike(outcome(path, executor, "strict"), answer):
        return False
    return not are_finite(answer) or not alike(outcome(path, "interpret", nudged=HALVES), answer)


def is_of_last_bits(path: Path, executor: str, answer: Any, other: Any) -> bool:
    """Whether answers differ in integers alone, and in no more of these than the last bits of the
    feeds decide: integers that are made of floats differ by one, or from 0 to 255, where rounding
    takes a float across a whole number."""
    try:
        graph = ps.load(path, limits=LIMITS).graph
        infer_types(graph)
    except ps.PenstockError:
        return False
    values = [v for node in graph.walk() for v in node.inputs if v]
    dtypes = {v.dtype for v in values if v.dtype is not None}
    halves = any(dtype.kind in "fV" and dtype.itemsize == 2 for dtype in dtypes)
    bits = {**HALVES, 4: HALVES[2]} if halves else {**HALVES, 4: 2.0**-23, 8: 2.0**-52}
    nudged = outcome(path, executor, nudged=bits)
    apart, by_last_bits = integers_apart(answer, other), integers_apart(answer, nudged)
    return apart is not None and by_last_bits is not None and apart <= by_last_bits


def integers_apart(a: Any, b: Any) -> int | None:
    """The number of integers that differ; None if there are other differences."""
    if isinstance(a, list | tuple | dict) and type(a) is type(b) and len(a) == len(b):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        if isinstance(b, dict) and keys != b.keys():
            return None
        found = [integers_apart(a[key], b[key]) for key in keys]
        return None if None in found else sum([n for n in found if n is not None])
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape
    if arrays and a.dtype == b.dtype and a.dtype.kind in "iub":
        return int((a != b).sum())
    return 0 if alike(a, b) else None


def stays_finite(path: Path) -> bool:
    """Whether all values within the runs are finite: of sums that overflow, or have infinite terms,
    the order decides what they are (``docs/guarantees.md``)."""
    try:
        session = session_of(path, executor="linear", backends=["numpy"])
        for feeds, fetches, targets in runs_of(path, session, np.random.default_rng(0)):
            session.run(
                feeds, fetches, targets, timeout=TIMEOUT_S, observers=[ps.NanGuard(infinities=True)]
            )
    except ps.RunError:
        return False
    except ps.PenstockError:  # which the executors that are compared have met or not
        return True
    return True


Bits = Mapping[int, float]
"""by the size of floats in bytes, a part of a number"""
HALVES: Bits = {2: 2.0**-10}
"""the last bit of float16; that of bfloat16 is 8 times as much"""


def _nudged(x: Any, rng: np.random.Generator, bits: Bits) -> Any:
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fV" or x.dtype.itemsize not in bits:
        return x
    bit = bits[x.dtype.itemsize] * (8 if x.dtype.kind == "V" else 1)
    return (x.astype(np.float64) * (1 + bit * rng.choice([-1, 1], x.shape))).astype(x.dtype)


# Values in 16 bits are rounded once, or after each operation (decision 45). Of the official suite,
# attention as a function of 80 to 100 nodes differs most: from the input to the output lie nine
# roundings (both scales, two products, mask, differences, Exp, sum and quotient), and Exp makes the
# absolute error of a score a relative one, three to five roundings for scores of that size. By the
# measure of ``alike``, answers differ by 8.5 roundings in bfloat16 and 7.3 in float16. This is a
# little more than twice as much; wider types get what float16 needs.
ROUNDINGS = 20


def are_finite(values: Any) -> bool:
    """Whether all numbers in an answer are finite."""
    if isinstance(values, np.ndarray):
        is_bfloat16 = values.dtype.itemsize == 2 and values.dtype.kind == "V"
        array = values.astype(np.float32) if is_bfloat16 else values
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if isinstance(values, list | tuple | dict):
        return all(map(are_finite, values.values() if isinstance(values, dict) else values))
    return not isinstance(values, float) or isfinite(values)


def alike(a: Any, b: Any, roundings: float = ROUNDINGS) -> bool:
    """Whether two answers are the same but for rounding: they differ by at most ``roundings`` units
    of each element, and a fifth of that of the largest."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind not in "fcV":
            return bool(np.array_equal(a, b))
        is_bfloat16 = a.dtype.itemsize == 2 and a.dtype.kind == "V"
        most = roundings * (2.0**-8 if is_bfloat16 else 2.0**-11)
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        with np.errstate(all="ignore"):
            size = np.abs(a[np.isfinite(a)]).max(initial=0)
            return bool(np.allclose(a, b, rtol=most, atol=most / 5 * size, equal_nan=True))
    if isinstance(a, list | tuple):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(alike(x, y, roundings) for x, y in pairs)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key], roundings) for key in a)
    if isinstance(a, float):
        return alike(np.array(a), np.array(b), roundings)
    return bool(a == b)


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
    parser.add_argument("--format", default="", choices=[*_CASES], help="of all cases")
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
