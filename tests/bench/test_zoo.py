"""The zoo: its files, how it compares answers, what its report says; no exporter is run."""

from __future__ import annotations

import math
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from bench.cases import chain
from bench.tables import LOADING_PEER, OURS
from bench.zoo import check, sample, store
from bench.zoo.__main__ import GENERATORS
from bench.zoo.check import Finding, difference
from bench.zoo.report import report
from bench.zoo.store import Case, Entry, Product, Recipe, entries, flat, generate, read_feeds
from bench.zoo.worker import Job, Worker

INF = math.inf
# Recipes of scikit-learn are of those estimators that are installed.
GROUPS = [group for group in GENERATORS if group not in ("scikit-learn", "derived")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "CACHE", tmp_path)
    monkeypatch.setattr(check, "CACHE", tmp_path)
    monkeypatch.setattr(check, "FINDINGS", tmp_path / "findings.jsonl")
    return tmp_path


def product(answer: float = 0.0) -> Product:
    """A chain of two nodes, with an answer of a library that is off by ``answer``."""
    x = np.arange(16, dtype=np.float32)
    y = (x + answer) * np.float32(1) + np.float32(1 + 1 / 64)
    return Product(chain(2).SerializeToString(), {"row": Case({"v0": x}, [y])})


def refused() -> Product:
    model = chain(2)
    model.graph.node[0].op_type = "Unheard"
    return Product(model.SerializeToString(), product().cases)


def failing() -> Product:
    raise ValueError("no converter")


@pytest.mark.parametrize("group", GROUPS)
def test_recipes_have_names_of_their_own_that_are_names_of_files(group):
    names = [
        recipe.name for recipe in import_module(f"bench.zoo.{GENERATORS[group]}").recipes(group)
    ]
    assert len(names) > 10
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


@pytest.mark.parametrize(
    ("outputs", "want"),
    [
        ([np.array([1.0, 2.0])], [[1.0, 2.0]]),
        ([[{0: 0.25, 1: 0.75}, {1: 0.5, 0: 0.5}]], [[[0.25, 0.75], [0.5, 0.5]]]),
        ([[np.array([1]), np.array([2, 3])]], [[1], [2, 3]]),
        ([np.array(["a", "bc"], object)], [["a", "bc"]]),
        ([None, 3], [3]),
        ([[]], []),
    ],
)
def test_outputs_are_flattened_to_arrays(outputs, want):
    assert [array.tolist() for array in flat(outputs)] == want


@pytest.mark.parametrize(
    ("got", "want", "how_far"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 2.2]], [[1.0, 2.0]], 0.1),
        ([[0, 1, 2, 2]], [[0, 1, 2, 1]], 0.25),
        ([["a", "b"]], [["a", "c"]], 0.5),
        ([[1.0]], [[1.0], [2.0]], INF),
        ([[1.0]], [[1.0, 2.0]], INF),
        ([[[1.0], [2.0]]], [[1.0, 2.0]], INF),
        ([["a"]], [[1.0]], INF),
    ],
)
def test_difference_is_of_numbers_or_of_labels(got, want, how_far):
    found = difference([np.array(a) for a in got], [np.array(a) for a in want], same_types=True)
    assert found == pytest.approx(how_far)


def test_difference_from_a_library_allows_another_type_and_shape():
    got, want = [np.array([[1.0], [2.0]], np.float32)], [np.array([1.0, 2.0])]
    assert difference(got, want) == 0.0
    assert difference(got, [want[0][:, None]], same_types=True) == INF


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        ({"difference": 1e-6}, False),
        ({"difference": 1e-2}, True),
        ({"difference": 1e-2, "from_library": 1e-2, "peer_from_library": 1e-7}, True),
        ({"difference": 1e-2, "from_library": 1e-7, "peer_from_library": 1e-2}, False),
        ({"difference": 1e-2, "from_library": 9e-3, "peer_from_library": 5e-3}, False),
        ({"difference": 1e-2, "from_library": 9e-3, "peer_from_library": 4e-3}, True),
        ({"refused": "no", "difference": None}, False),
        ({"peer_refused": "no"}, False),
        ({"peer_refused": "no", "from_library": 1e-2}, True),
    ],
)
def test_finding_is_wrong_only_where_the_peer_is_nearer_to_the_library(figures, wrong):
    assert Finding("g", "n", tolerance=1e-4, **figures).wrong is wrong


def test_files_hold_what_recipes_make(cache: Path):
    recipes = [Recipe("chain", product), Recipe("broken", failing)]
    generate("g", recipes, [], again=False)
    broken, made = entries()
    assert (broken.name, broken.error) == ("broken", "ValueError: no converter")
    assert (made.inputs, made.cases, made.error) == (["v0"], ["row"], None)
    onnx.checker.check_model(onnx.load(made.path))
    feeds = read_feeds(made.inputs, made.case("row"))
    np.testing.assert_array_equal(feeds["v0"], np.arange(16, dtype=np.float32))
    assert [a.shape for a in made.answers("row")] == [(16,)]
    assert [e.name for e in entries(["g/ch"])] == ["chain"]


def test_files_that_are_there_are_made_again_only_when_told(cache: Path):
    made = []
    recipe = Recipe("chain", lambda: made.append(1) or product())
    for again in (False, False, True):
        generate("g", [recipe], [], again)
    assert len(made) == 2


def test_strings_are_fed_as_objects(cache: Path):
    texts = np.array([["a"], ["longer"]], object)
    store.save_arrays(cache / "feeds.npz", feed=[texts])
    feeds = read_feeds(["x"], cache / "feeds.npz")
    assert feeds["x"].dtype == object
    assert feeds["x"].tolist() == texts.tolist()


def test_check_finds_what_is_right_refused_and_off(cache: Path):
    recipes = [Recipe("off", lambda: product(1.0)), Recipe("ok", product), Recipe("op", refused)]
    generate("g", recipes, [], again=False)
    off, ok, op = check.check(entries(), turns=1, seconds=1e-3)
    assert ok.difference is not None and ok.difference < 1e-6
    assert (ok.wrong, ok.refused, ok.peer_refused) == (False, None, None)
    assert ok.ratios.keys() == {"row 1", "row default", "load"}
    assert any(name in ok.steps["row"] for name in ("Add", "Mul", "between steps"))
    # Both engines are off from what is said to be the library's answer: Penstock is not to blame.
    assert off.from_library is not None and off.from_library > 0.01
    assert not off.wrong
    assert "Unheard" in op.refused and op.peer_refused
    assert check.kept() == [off, ok, op]


def test_unoptimized_peer_answers_for_a_library_that_is_not_known(cache: Path):
    own = product()
    case = Case(own.cases["row"].feeds)
    generate("g", [Recipe("ok", lambda: Product(own.model, {"row": case}))], [], again=False)
    (entry,) = entries()
    assert entry.answers("row") is None
    (y,) = check.unoptimized(entry, "row")
    np.testing.assert_allclose(y, own.cases["row"].answers[0], rtol=1e-6)


def test_worker_that_dies_is_an_error_and_starts_again(cache: Path):
    generate("g", [Recipe("ok", product)], [], again=False)
    (entry,) = entries()
    worker = Worker(OURS, 1, cache)
    job = Job(str(entry.path), entry.inputs, {"row": str(entry.case("row"))})
    try:
        assert worker.work(Job("nowhere.onnx", [], {"row": "nowhere.npz"})).error
        assert worker.work(job).error is None
    finally:
        worker.close()


def test_report_counts_by_group_and_names_the_worst():
    made = [Entry("g", name) for name in ("a", "b", "c", "d")] + [Entry("g", "e", error="no")]
    times = {"row 1": [4e-5, 1e-5], "batch 1": [1e-3, 1e-3]}
    findings = [
        Finding("g", "a", ratios={"row 1": 4.0, "batch 1": 1.0}, times=times,
                steps={"row": "Conv 90%"}),
        Finding("g", "b", difference=1.0, tolerance=1e-4),
        Finding("g", "c", refused="Unsupported: x|y"),
        Finding("g", "d", refused="no", peer_refused="no"),
    ]  # fmt: skip
    lines = report(made, findings)
    for line in (
        "| g | 4 | 1 | 1 | 1 | 1 | 4.00 | 1.00 | - | - | - |",
        "| g/c | Unsupported: x\\|y |",
        f"| g/b | 1.0e+00 apart; from the library -, {LOADING_PEER} - |",
        "| g/a | row | 4.00 | 40 | 10 | Conv 90% |",
        "| Conv | 1 | 4.00 | 30 | g/a row 4.0 |",
    ):
        assert line in lines


def test_sample_keeps_the_models_of_groups_that_are_not_generated(cache, monkeypatch):
    monkeypatch.setattr(sample, "FILE", cache / "sample.zip")

    def write(*groups: str) -> list[str]:
        for group in groups:
            generate(group, [Recipe(f"of_{group}", product)], (), again=False)
        made = entries()
        sample.write(made, [Finding(e.group, e.name) for e in made])
        return [found.name for found, _, _ in sample.samples()]

    assert write("jax") == ["jax/of_jax"]
    for file in (cache / "jax").iterdir():
        file.unlink()
    assert write("keras") == ["keras/of_keras", "jax/of_jax"]
