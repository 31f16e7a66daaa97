"""``bench.against``: two checkouts take turns with each model, each with its own Penstock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.against import Compared, of_zoo
from bench.cases import chain
from bench.trial import ROOT
from bench.zoo import store
from bench.zoo.store import Case, Product, Recipe, generate


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def product() -> Product:
        return Product(chain(3).SerializeToString(), {"row": Case({"v0": np.ones(16, np.float32)})})

    monkeypatch.setattr(store, "CACHE", tmp_path / "zoo")
    generate("g", [Recipe("chain", product)], [], again=False)


@pytest.mark.usefixtures("zoo")
def test_a_checkout_beside_itself():
    (row,) = of_zoo(["g/"], [str(ROOT)] * 2, [1], turns=1)
    assert (row.name, row.threads, row.error) == ("g/chain row", 1, None)
    assert row.here is not None and row.there is not None
    assert 0 < min(row.here, row.there) < 1


@pytest.mark.usefixtures("zoo")
def test_each_process_imports_the_penstock_of_its_checkout(tmp_path: Path):
    other = tmp_path / "src" / "penstock" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise ImportError('another checkout')\n")
    (row,) = of_zoo(["g/"], [str(ROOT), str(tmp_path)], [1], turns=1)
    assert row.error is not None


@pytest.mark.parametrize(
    ("here", "there", "end"),
    [
        (1.2e-3, 1e-3, "| 1.200 | ** |"),
        (1.0e-3, 1e-3, "| 1.000 |  |"),
        (1.2e-5, 1e-5, "| 1.200 |  |"),  # too short to tell
    ],
)
def test_longer_runs_that_take_more_are_marked(here: float, there: float, end: str):
    assert Compared("m", 1, here, there).line.endswith(end)


def test_what_fails_says_why():
    assert Compared("m", 2, error="no such file").line == "| m | 2 |  |  | fails | no such file |"
