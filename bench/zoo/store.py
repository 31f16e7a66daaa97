"""The files of the zoo: models, their feeds, and the answers of the libraries they come from.

A recipe makes one model. In the folder of its group it has NAME.onnx; for each of its cases, such
as "row" and "batch", NAME.CASE.npz with the feeds and the library's answers; and NAME.json, which
says what they are called, or why the exporter wrote no model.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# A file of another version of the recipes or their exporters is another model: raise the number.
CACHE = Path(os.environ.get("PENSTOCK_ZOO", Path(__file__).parents[2] / ".cache" / "zoo-1"))
TIMEOUT = 240  # seconds that a recipe may take
EXACT = 1e-4

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """What a model is fed, and what the library that it comes from answers, where that is known."""

    feeds: Feeds
    answers: Sequence[Any] | None = None


@dataclass(frozen=True)
class Product:
    """What an exporter wrote: the bytes of a model, and its cases."""

    model: bytes
    cases: dict[str, Case]


@dataclass(frozen=True)
class Recipe:
    """A model that an exporter can write.

    ``tolerance``: how far outputs of two engines may be apart, relative to the largest element.
    """

    name: str
    make: Callable[[], Product]
    tolerance: float = EXACT


@dataclass(frozen=True)
class Entry:
    """A recipe's files. ``inputs`` are the names of its feeds in their order; ``error`` says why
    there is no model."""

    group: str
    name: str
    inputs: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    tolerance: float = EXACT
    error: str | None = None

    @property
    def folder(self) -> Path:
        return CACHE / self.group

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.onnx"

    def case(self, name: str) -> Path:
        return self.folder / f"{self.name}.{name}.npz"

    def answers(self, name: str) -> list[np.ndarray] | None:
        return load_arrays(self.case(name), "answer")


def entries(wanted: Sequence[str] = ()) -> list[Entry]:
    """All that was generated, or those whose GROUP/NAME has one of ``wanted`` in it."""
    files = sorted(CACHE.glob("*/*.json"))
    found = [Entry(**json.loads(file.read_text())) for file in files]
    return [e for e in found if not wanted or any(w in f"{e.group}/{e.name}" for w in wanted)]


def generate(group: str, recipes: Iterable[Recipe], wanted: Sequence[str], again: bool) -> None:
    """Make the models of ``recipes`` that are not there yet; ``again``: and those that are."""
    folder = CACHE / group
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        note = folder / f"{recipe.name}.json"
        named = not wanted or any(part in f"{group}/{recipe.name}" for part in wanted)
        if not named or (note.exists() and not again):
            continue
        begin = time.perf_counter()
        entry = _made(group, recipe)
        note.write_text(json.dumps(asdict(entry), indent=1) + "\n")
        seconds = time.perf_counter() - begin
        print(f"{group}/{recipe.name} {seconds:.1f} s {entry.error or ''}", flush=True)


def _made(group: str, recipe: Recipe) -> Entry:
    try:
        with _time_limit():
            product = recipe.make()
    except Exception as error:
        if os.environ.get("ZOO_TRACEBACK"):
            traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Entry(group, recipe.name, error=text[:300])
    inputs = list(next(iter(product.cases.values())).feeds)
    entry = Entry(group, recipe.name, inputs, list(product.cases), recipe.tolerance)
    entry.path.write_bytes(product.model)
    for name, case in product.cases.items():
        save_arrays(entry.case(name), feed=case.feeds.values(), answer=case.answers)
    return entry


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {TIMEOUT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        yield
    finally:
        signal.alarm(0)


def save_arrays(path: Path, **lists: Iterable[Any] | None) -> None:
    """Write lists of arrays by name, of ``flat`` outputs, into an .npz file."""
    arrays = {
        f"{name}{number}": array
        for name, outputs in lists.items()
        if outputs is not None
        for number, array in enumerate(flat(outputs))
    }
    np.savez(path, **arrays)


def load_arrays(path: Path, name: str) -> list[np.ndarray] | None:
    """The list of that name, or None."""
    with np.load(path) as arrays:
        found = [array for key, array in arrays.items() if key.rstrip("0123456789") == name]
    return found or None


def flat(outputs: Iterable[Any]) -> list[np.ndarray]:
    """Outputs as arrays: maps in a sequence as an array with a row each, keys in their order;
    another sequence as its items; strings as fixed-width Unicode; bfloat16 as float32."""
    arrays: list[np.ndarray] = []
    for output in outputs:
        if isinstance(output, (list, tuple)):
            if output and isinstance(output[0], dict):
                arrays.append(np.array([[row[key] for key in sorted(row)] for row in output]))
            else:
                arrays += flat(output)
        elif isinstance(output, dict):
            arrays += flat([[output]])
        elif output is not None:
            array = np.asarray(output)
            if array.dtype == object:
                array = array.astype(str)
            elif array.dtype.kind == "V":
                array = array.astype(np.float32)
            arrays.append(array)
    return arrays


def read_feeds(entry_inputs: Sequence[str], path: Path) -> Feeds:
    """The feeds of a case; strings as arrays of objects, as engines take them."""
    arrays = load_arrays(path, "feed") or []
    arrays = [a.astype(object) if a.dtype.kind == "U" else a for a in arrays]
    return dict(zip(entry_inputs, arrays, strict=True))
