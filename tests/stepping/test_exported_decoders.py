"""Joined steps of decoders as exporters write them, compared with ONNX Runtime.

``tests/models/decoders.zip`` has them: ALiBi of Bloom and MPT, buckets of T5, cross attention of T5, BART and
Whisper, rotation by angles that are picked from a table for GPT-J, and positions behind padding of M2M100.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.generation.encoder_files import read_halves
from penstock.passes.lowering.join_steps import join_steps

ARCHIVE = Path(__file__).parents[1] / "models" / "decoders.zip"
WORDS, LENGTH = 40, 150


def names() -> list[str]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        return archive.namelist()


@pytest.fixture(scope="module", params=names())
def model(request: pytest.FixtureRequest) -> Iterator[bytes]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        yield archive.read(request.param)


def numbers_by_distance(model: bytes) -> list[tuple[int, ...]]:
    graph, _ = join_steps(ps.load(model).graph)
    paged = [node for node in graph.nodes if node.op.name == "PagedAttention"]
    assert len(paged) in (2, 4)
    return [node.inputs[6].shape for node in paged if len(node.inputs) > 6]


def test_rows_of_several_sequences_are_those_of_each_alone(model: bytes) -> None:
    rng, runtime = np.random.default_rng(4), onnxruntime.InferenceSession(model)
    with ps.Stepper(ps.load(model), max_rows=64) as stepper:
        assert stepper.reason is None
        cases = []
        for source in (5, 40):
            feeds: dict[str, np.ndarray] = {}
            for value in runtime.get_inputs():
                dims = [n if isinstance(n, int) else source for n in value.shape]
                if value.name == "encoder_attention_mask":
                    feeds[value.name] = np.ones(dims, np.int64)
                    feeds[value.name][0, source // 2 :: 3] = 0
                elif ".encoder." in value.name:
                    feeds[value.name] = rng.standard_normal(dims).astype(np.float32)
            fixed = {**feeds}
            ids = rng.integers(3, WORDS, LENGTH)
            for value in runtime.get_inputs():
                if value.name == "input_ids":
                    feeds[value.name] = ids[None]
                elif value.name == "attention_mask":
                    feeds[value.name] = np.ones((1, LENGTH), np.int64)
                elif value.name not in feeds:
                    dims = [n if isinstance(n, int) else 0 for n in value.shape]
                    feeds[value.name] = np.zeros(dims, np.float32)
            wanted = runtime.run(["logits"], feeds)[0][0]
            cases.append((stepper.sequence(initial=fixed), ids, wanted))
        at = 0
        for size in (1, 1, 20, 3, 120, 5):
            for sequence, ids, wanted in cases:
                rows = {"input_ids": ids[None, at : at + size]}
                got = sequence.step(rows, wanted=size)["logits"][0]
                # Both are computed in float32. Of T5, whose scores are not scaled, ONNX Runtime's
                # logits are 0.8e-5 of the largest from those of float64, and ours 0.5e-5.
                most = 2e-5 * np.abs(wanted).max()
                np.testing.assert_allclose(got, wanted[at : at + size], rtol=0, atol=most)
            at += size


@pytest.mark.parametrize("exporter", ["script", "dynamo"])
def test_padding_within_a_text_is_read_as_in_steps_of_one_row(exporter: str) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        model = archive.read(f"M2M100_{exporter}.onnx")
    rng, runtime = np.random.default_rng(5), onnxruntime.InferenceSession(model)
    feeds: dict[str, np.ndarray] = {}
    for value in runtime.get_inputs()[1:]:
        dims = [
            n if isinstance(n, int) else 9 if "encoder" in value.name else 0 for n in value.shape
        ]
        feeds[value.name] = rng.standard_normal(dims).astype(np.float32)
    feeds["encoder_attention_mask"] = np.ones((1, 9), np.int64)
    fixed = {name: array for name, array in feeds.items() if "encoder" in name}
    ids, wanted = np.array([[5, 7, 0, 0, 3, 0, 9]]), []
    for i in range(ids.size):
        logits, *caches = runtime.run(None, feeds | {"input_ids": ids[:, i : i + 1]})
        feeds |= zip([name for name in feeds if name not in fixed], caches, strict=True)
        wanted.append(logits)
    with ps.Stepper(ps.load(model)) as stepper:
        got = stepper.sequence(initial=fixed).step({"input_ids": ids}, wanted=None)["logits"]
    np.testing.assert_allclose(got, np.concatenate(wanted, 1), rtol=0, atol=1e-4)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
def test_steps_of_decoders_that_optimum_exports_are_joined(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(ARCHIVE.with_name("encoder_decoders.zip")) as archive:
        archive.extractall(tmp_path)
    halves = read_halves(tmp_path / name, None)
    assert halves is not None
    _, steps = join_steps(halves.step.graph)
    assert len(steps.fixed) == 4
    assert (steps.mask is None) == (name == "whisper")


@pytest.mark.parametrize("name", names())
def test_alibi_is_slopes_and_buckets_are_a_table(name: str) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        shapes = numbers_by_distance(archive.read(name))
    wanted = {"Bloom": [(2, 2)] * 2, "Mpt": [(2, 2)] * 2, "T5": [(2, 38)] * 2}
    assert shapes == wanted.get(name.partition("_")[0], [])
