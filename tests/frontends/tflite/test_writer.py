"""TFLite files that are read, written and read again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tflite import flatbuffer, writer
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.writer import OUTSIDE, fields_of, serialized
from tests.support.litert import by_litert
from tests.support.tflite_cases import FOLDER, Case, cases
from tests.support.tflite_models import model, subgraph

FILES = sorted(FOLDER.glob("*/*.tflite"))
CATEGORIES = sorted({path.parent.name for path in FILES} - {"error"})
ABS = [
    subgraph(
        {"x": ("float32", [3])},
        [("ADD", ["x", "c"], ["y"], ("AddOptions", {}))],
        ["y"],
        {"c": np.arange(3, dtype=np.float32)},
        y={"shape": [3]},
    )
]


def read(data: bytes, name: str = "m.tflite") -> writer.Fields:
    with opened_model(data, name) as (table, weights):
        return fields_of(table, weights)


@pytest.mark.parametrize("category", CATEGORIES)
def test_files_that_are_written_again_have_equal_tables(category: str) -> None:
    for path in FILES:
        if path.parent.name == category:
            data = path.read_bytes()
            fields = read(data, path.name)
            again = serialized(fields)
            assert read(again) == fields, path.name
            # A table of three fields may take a few bytes more, weights may not.
            assert len(again) < 1.15 * len(data) + 64, path.name


@pytest.mark.parametrize("case", [*cases("net")], ids=lambda case: case.name)
def test_networks_that_are_written_again_give_the_same_in_litert(case: Case) -> None:
    data = case.path.read_bytes()
    again = serialized(read(data))
    feeds = case.feeds(case.data["runs"][0])
    for a, b in zip(by_litert(again, feeds), by_litert(data, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_contents_behind_the_flatbuffer_stay_there() -> None:
    fields = read(model(ABS))
    (place,) = [i for i, own in enumerate(fields["buffers"]) if own]
    content = fields["buffers"][place].pop("data")
    fields["buffers"][place][OUTSIDE] = content
    options = fields["subgraphs"][0]["operators"][0]
    options[OUTSIDE] = b"options"
    data = serialized(fields)
    assert data.endswith((b"options", content))
    assert read(data) == fields
    with opened_model(data, "m") as (table, _):
        assert table.buffers[place].offset % 16 == 0
        assert table.buffers[place].offset + 12 <= len(data)
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(by_litert(data, {"x": x})[0], [1, 2, 3])
    np.testing.assert_array_equal(ps.compile(data)(x), [1, 2, 3])
    with pytest.raises(ps.InvalidModel, match=r"needs bytes .* cut short"):
        read(data[: -len(content)])


def test_fields_of_a_newer_schema_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = serialized({"version": 3, "signature_defs": [{"signature_key": "main"}]})
    tables = flatbuffer.schema().tables
    known = {key: field for key, field in tables["Model"].items() if key != "signature_defs"}
    monkeypatch.setitem(tables, "Model", known)
    with pytest.raises(ps.PenstockError, match="Model has fields of a newer schema"):
        read(data)


def test_options_of_an_unknown_operator_are_refused() -> None:
    operator = {"builtin_options_type": 240, "builtin_options": ("AddOptions", {})}
    with pytest.raises(ps.PenstockError, match="Operator has a builtin_options of a newer schema"):
        read(serialized({"subgraphs": [{"operators": [operator]}]}))


def test_file_too_large_for_a_flatbuffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_SIZE", 2**10)
    buffers = [{}, {OUTSIDE: bytes(2**11)}]
    assert read(serialized({"buffers": buffers}))["buffers"] == buffers
    with pytest.raises(ps.PenstockError, match="more than a flatbuffer can have"):
        serialized({"buffers": [{}, {"data": bytes(2**11)}]})


def test_damaged_files_are_refused_or_read() -> None:
    data = Path(FOLDER / "net" / "mini_lstm_while.tflite").read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(150):
        mutant = bytearray(data)
        for _ in range(3):
            at = rng.randrange(8, len(data))
            mutant[at] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del mutant[rng.randrange(len(mutant)) :]
        try:
            serialized(read(bytes(mutant)))
        except ps.PenstockError:
            refused += 1
    assert refused
