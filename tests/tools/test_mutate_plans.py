"""The mutator of plans: its cases follow from the seed, and what it looks for is found."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import InternalError
from tests.support.plan_models import plan_models
from tools.mutate_plans import (
    OPTIONS,
    Subject,
    is_finding,
    outcome_of,
    report,
    saved_case,
    schedule_case,
    subject,
)
from tools.mutations import SavedDocuments, changed_plan
from tools.schedule_mutations import changed_schedule

FORKING = """
import os, sys, time
from tools import mutate_plans

def one(number):
    if number == 3:
        os.abort()
    if number == 5:
        time.sleep(60)
    return "fine"

mutate_plans.HANG_S = 2.5
left, counts = list(range(8)), {}
while left:
    child = mutate_plans.forked(left, one)
    hung = False
    while not hung:
        ready = mutate_plans.select.select([child.pipe], [], [], 0.1)[0]
        if ready and not child.read():
            break
        hung = mutate_plans.time.monotonic() - child.started > mutate_plans.HANG_S
    left = mutate_plans.ended(child, hung=hung)
    counts |= child.outcomes
print({number: outcome.partition(" ")[0].rstrip(":") for number, outcome in counts.items()})
"""


@pytest.fixture(scope="module")
def products() -> Subject:
    return subject("products", dict(plan_models())["products"], OPTIONS[0])


def test_unchanged_documents_are_the_same_session(products: Subject, tmp_path: Path) -> None:
    path = tmp_path / "same.penstock"
    path.write_bytes(SavedDocuments(products.content).to_bytes())
    with ps.open(path, strict=True) as session:
        assert session.run(dict(products.feeds)).keys() == (products.answers or {}).keys()


def test_changes_follow_from_the_seed(products: Subject) -> None:
    def changed() -> list[bytes]:
        return [changed_plan(products.content, random.Random(seed))[0] for seed in range(20)]

    assert changed() == changed()
    assert len({*changed()}) > 10


def test_changed_schedules_are_mostly_other_ones(products: Subject) -> None:
    schedule = products.schedule
    assert schedule is not None
    mutants = [changed_schedule(schedule, random.Random(seed))[0] for seed in range(40)]
    same = [
        all(a is b for a, b in zip(mutant.plan.slots, schedule.plan.slots, strict=True))
        and mutant.plan.steps == schedule.plan.steps
        and mutant.arena_plan.offsets == schedule.arena_plan.offsets
        and mutant.arena_plan.order == schedule.arena_plan.order
        for mutant in mutants
    ]
    assert same.count(True) < 10


@pytest.mark.parametrize("case", [saved_case, schedule_case])
def test_cases_are_refused_and_run(products: Subject, tmp_path: Path, case: object) -> None:
    counts = Counter(
        outcome_of(lambda seed=seed: case(products, random.Random(seed), tmp_path / "m.penstock"))  # type: ignore[operator,misc]
        for seed in range(40)
    )
    assert not any(map(is_finding, counts))
    assert any(outcome.startswith("refused") for outcome in counts)
    assert any(not outcome.startswith("refused") for outcome in counts)


def test_only_errors_of_penstock_are_no_findings() -> None:
    def raising(error: Exception) -> str:
        def case() -> str:
            raise error

        return outcome_of(case)

    assert raising(ps.InvalidModel("no")) == "refused by InvalidModel"
    assert is_finding(raising(InternalError("ours")))
    assert is_finding(raising(IndexError("list index out of range")))


def test_findings_are_printed_once_of_each_sort(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    for number, outcome in enumerate(["refused", "crash (-6): a", "crash (-7): a", "refused"]):
        report(counts, number, outcome)
    assert counts == {"refused": 2, "crash (-): a": 2}
    assert capsys.readouterr().out == "case 1: crash (-6): a\n"


def test_child_that_dies_or_hangs_is_a_finding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    fine = dict.fromkeys(range(8), "fine")
    assert done.stdout.strip() == str({**fine, 3: "crash", 5: "hang"})
