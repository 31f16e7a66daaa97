"""A sample of the zoo for the tests: ``tests/models/zoo.zip``, with small models of all groups.

The archive has GROUP/NAME.onnx and GROUP/NAME.npz, the feeds, of each, and an index. What the
models should answer is not in it: the tests ask ONNX Runtime.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.zoo.check import Finding
from bench.zoo.store import Entry, load_arrays

FILE = Path(__file__).parents[2] / "tests" / "models" / "zoo.zip"
MOST_BYTES = 20_000  # of a model, and of its feeds
# Models by group; derived ones of products that saturate on some processors are left out.
QUOTAS = {
    "scikit-learn": 40, "lightgbm": 4, "xgboost": 4, "torch-modules": 70, "derived": 32,
    "keras": 16, "tensorflow": 12, "jax": 12, "transformers": 0, "torchvision": 0, "timm": 0,
}  # fmt: skip
SATURATING = ("u8s8", "u8u8", "dynamic", "ort_all")


@dataclass(frozen=True)
class Sample:
    """A model of the archive: the names of its feeds in their order, and how far outputs of two
    engines may be apart."""

    name: str
    inputs: list[str]
    tolerance: float


def write(entries: Sequence[Entry], findings: Sequence[Finding]) -> None:
    """Write the archive: of each group, models that both engines run alike, evenly spread. Groups of
    which there are no ``entries`` keep the models that they have in it."""
    right = {f.key for f in findings if not (f.refused or f.peer_refused or f.wrong)}
    generated = {entry.group for entry in entries}
    index: list[Sample] = []
    kept = [found for found in _archived() if found[0].name.split("/")[0] not in generated]
    with zipfile.ZipFile(FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for group, quota in QUOTAS.items():
            small = [e for e in entries if e.group == group and _eligible(e, right)]
            count = min(quota, len(small))
            chosen = [small[place * len(small) // count] for place in range(count)]
            models = [
                (Sample(f"{group}/{e.name}", e.inputs, e.tolerance), e.path.read_bytes(), _feeds(e))
                for e in chosen
            ]
            models += [found for found in kept if found[0].name.startswith(f"{group}/")]
            for sample, model, feeds in models:
                index.append(sample)
                _add(archive, f"{sample.name}.onnx", model)
                _add(archive, f"{sample.name}.npz", feeds)
        text = json.dumps([asdict(sample) for sample in index], indent=1)
        _add(archive, "index.json", text.encode())
    print(f"{FILE}: {len(index)} models, {FILE.stat().st_size} bytes")


def samples() -> Iterator[tuple[Sample, bytes, dict[str, np.ndarray]]]:
    """Each model of the archive with its bytes and its feeds."""
    for sample, model, packed in _archived():
        with np.load(io.BytesIO(packed)) as arrays:
            feeds = [a.astype(object) if a.dtype.kind == "U" else a for a in arrays.values()]
        yield sample, model, dict(zip(sample.inputs, feeds, strict=True))


def _archived() -> list[tuple[Sample, bytes, bytes]]:
    """Each model of the archive with its bytes and those of its feeds."""
    if not FILE.exists():
        return []
    with zipfile.ZipFile(FILE) as archive:
        every = [Sample(**fields) for fields in json.loads(archive.read("index.json"))]
        return [
            (each, archive.read(f"{each.name}.onnx"), archive.read(f"{each.name}.npz"))
            for each in every
        ]


def _eligible(entry: Entry, right: set[str]) -> bool:
    return (
        f"{entry.group}/{entry.name}" in right
        and entry.path.stat().st_size <= MOST_BYTES
        and len(_feeds(entry)) <= MOST_BYTES
        and not any(part in entry.name for part in SATURATING)
    )


def _feeds(entry: Entry) -> bytes:
    """The feeds of the larger case that is small enough."""
    files = []
    for case in entry.cases:
        file = io.BytesIO()
        np.savez(file, *(load_arrays(entry.case(case), "feed") or []))
        files.append(file.getvalue())
    return max((f for f in files if len(f) <= MOST_BYTES), key=len, default=files[0])


def _add(archive: zipfile.ZipFile, name: str, contents: bytes) -> None:
    """The same bytes give the same archive: without the time."""
    archive.writestr(zipfile.ZipInfo(name), contents, zipfile.ZIP_DEFLATED)
