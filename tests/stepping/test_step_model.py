"""Plans of steps that another stepper of the same file has left in the cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.artifact.container import ArtifactFile
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS
from penstock.ir.graph import Model
from penstock.session import compile_cache
from penstock.session.opening import DerivedModel
from penstock.stepping.step_model import joined_steps_of
from tests.session.test_compile_cache import nothing_is_compiled
from tests.support.cross_decoders import cross_decoder, cross_logits, fixed_of
from tests.support.decoders import VOCABULARY, decoder_model, fed, reference_logits

IDS = np.random.default_rng(0).integers(0, VOCABULARY, 40)
PIECES = (30, 1, 1, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_SETTLED_NS", -(10**12))  # files of just now count as old
    monkeypatch.setattr(compile_cache, "USER_OPERATIONS", set())
    return tmp_path / "cache" / "sessions"


def written(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(decoder_model("spelled"), tmp_path / "model.onnx")


def check(stepper: ps.Stepper, kind: str = "spelled") -> None:
    """Compare all logits of a text in pieces with those of ONNX Runtime for the whole."""
    want, at = reference_logits(decoder_model(kind), IDS.tolist()), 0
    with stepper.sequence() as sequence:
        for size in PIECES:
            got = sequence.step(fed(IDS[at : at + size]), wanted=size)["logits"]
            at += size
            np.testing.assert_allclose(got[0], want[at - size : at], rtol=0, atol=2e-5)


def use(path: Path, **options: object) -> None:
    """Step through a text in a stepper that is dropped, with which its plans are kept."""
    check(ps.Stepper(path, **options))
    gc.collect()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["spelled", "groups", "onnx", "slopes"])
def test_second_stepper_reads_no_model_and_compiles_no_plan(kind: str, tmp_path: Path) -> None:
    path = written(decoder_model(kind), tmp_path / f"{kind}.onnx")
    check(ps.Stepper(path), kind)
    gc.collect()
    with nothing_is_compiled(), ps.Stepper(path) as stepper:
        check(stepper, kind)
        assert stepper._engine.runner.session._executors.opened == len({*PIECES})


def test_second_stepper_has_the_interface_of_the_first(path: Path) -> None:
    first = ps.Stepper(path)
    check(first)
    facts = first.rows, first.fixed, first.outputs, first.metadata, first.path, first.reason
    del first
    gc.collect()
    with nothing_is_compiled():
        second = ps.Stepper(str(path))
        again = second.rows, second.fixed, second.outputs, second.metadata, second.path
        assert (*again, second.reason) == facts
        with pytest.raises(ps.InvalidInput, match="cannot step 'other'"):
            second.sequence().step({"other": [[1]]})
    assert second.model.graph.inputs[0].name == "ids"


def test_second_stepper_of_cross_attention_compiles_no_plan(tmp_path: Path) -> None:
    path = written(cross_decoder("unmasked"), tmp_path / "cross.onnx")
    fixed, tokens = fixed_of("unmasked", 40, 3), [3, 1, 4]
    for context in (None, nothing_is_compiled()):
        with context or pytest.MonkeyPatch.context():
            stepper = ps.Stepper(path)
            with stepper.sequence(initial=fixed) as sequence:
                got = sequence.step({"ids": [tokens]}, wanted=3)["logits"][0]
            del stepper, sequence
            gc.collect()
        want = cross_logits(cross_decoder("unmasked"), fixed, tokens)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_file_that_was_changed_is_read_again(path: Path) -> None:
    use(path)
    written(decoder_model("slopes"), path)
    check(ps.Stepper(path), "slopes")


def test_model_itself_is_kept_beside_its_steps(path: Path, folder: Path) -> None:
    use(path)
    feeds = {"ids": IDS[None, :3], "mask": np.ones((1, 3), np.int64)}
    with ps.compile(path) as session:
        empty = {
            port.name: np.zeros(
                [
                    1 if isinstance(n, str) and i == 0 else 0 if isinstance(n, str) else n
                    for i, n in enumerate(port.type.shape)
                ],
                np.float32,
            )
            for port in session.inputs
            if port.name not in feeds
        }
        assert session.run({**feeds, **empty})["logits"].shape == (1, 3, VOCABULARY)
    assert len([*folder.glob("*.penstock")]) == 2
    with nothing_is_compiled():
        check(ps.Stepper(path))


@pytest.mark.parametrize("options", [{"cache": False}, {"backends": ["numpy"]}])
def test_steppers_with_other_options_find_nothing(path: Path, options: dict[str, object]) -> None:
    use(path)
    with pytest.raises(TypeError), nothing_is_compiled():
        ps.Stepper(path, **options)


@pytest.mark.parametrize("read", [ps.load, Path.read_bytes, onnx.load])
def test_model_in_memory_is_not_kept(read: Callable[[Path], Any], path: Path, folder: Path) -> None:
    check(ps.Stepper(read(path)))
    gc.collect()
    assert not folder.exists()


def test_folder_of_the_caller_keeps_steps(path: Path, tmp_path: Path) -> None:
    use(path, cache=str(tmp_path / "own"))
    with nothing_is_compiled():
        check(ps.Stepper(path, cache=str(tmp_path / "own")))


def test_most_plans_are_those_that_were_used_last(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_PLANS", 2)
    use(path)  # pieces of 30, 1, 1 and 8 rows
    (kept,) = folder.glob("*.penstock")
    with kept.open("rb") as file:
        keys = ArtifactFile(file, kept.name, DEFAULT_LIMITS).document("head")["plans"]
    assert sorted(key[0] for key in keys) == [[1, 1], [1, 8]]


WRONG = [
    "",
    "[]",
    "{}",
    '{"rows": {"ids": 5}, "outputs": {}, "caches": [], "page_size": 1, "fed": {}}',
    '{"rows": {}, "outputs": {}, "caches": [[1]], "page_size": 1, "fed": {}}',
]


@pytest.mark.parametrize("text", WRONG)
def test_what_says_nothing_of_steps_is_refused(text: str) -> None:
    with pytest.raises(InvalidModel, match="damaged"):
        joined_steps_of(Model({}, "main", metadata={"penstock.steps": text}))


def test_derived_model_is_pickled_by_its_contents(path: Path) -> None:
    use(path)
    with nothing_is_compiled():
        session = ps.Stepper(path)._engine.runner.session
    assert session.model.path is None


def test_error_of_what_is_derived_is_that_of_the_session(path: Path) -> None:
    def refuse(model: Model) -> Model:
        raise ps.InvalidInput("not this one")

    with pytest.raises(ps.InvalidInput, match="not this one"):
        ps.Session(DerivedModel(str(path), "refused", refuse))
