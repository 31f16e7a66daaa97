"""Executors that are compared by the runs of users, and how often."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from weakref import ref

import pytest

from penstock.tuning import trial
from penstock.tuning.trial import FEWEST, PAIRS, RAREST, as_usual, converse, in_turns, judged_again


class Runs:
    """Plays a trial: runs of ``used`` and ``other`` take these seconds."""

    def __init__(self, used: str, seconds: dict[str, float]) -> None:
        self.used = used
        self.seconds = seconds
        self.log: list[str] = []
        self.switches: list[int] = []

    def switch(self, executor):
        self.switches.append(len(self.log))
        replaced, self.used = self.used, executor
        return lambda: replaced

    def play(self, generator, count: int = 10**9):
        """The result of the trial; None if it has not ended after ``count`` runs."""
        runner = next(generator)
        for _ in range(count):
            name = self.used if runner is as_usual else runner.args[0]
            self.log.append(name)
            try:
                runner = generator.send(self.seconds[name])
            except StopIteration as end:
                return end.value
        return None


@pytest.mark.parametrize(("margin", "wins"), [(0.95, False), (1.02, True)])
def test_in_turns_compares_by_the_margin(margin, wins):
    runs = Runs("order", {"order": 1.0, "tasks": 1.0})
    assert runs.play(in_turns("tasks", 3, margin)) is wins
    assert runs.log == ["order", "tasks"] * 3


def test_choice_that_stays_right_is_judged_ever_more_seldom():
    runs = Runs("tasks", {"order": 2.0, "tasks": 1.0})
    runs.play(judged_again(lambda: "order", converse(0.95), runs.switch), 50_000)
    assert not runs.switches
    turns = [i for i, name in enumerate(runs.log) if name == "order"]
    begins = [i for i in turns if i - 2 not in turns]
    assert begins[0] == FEWEST + 1
    gaps = [after - before for before, after in pairwise(begins)]
    assert gaps[:3] == [2 * FEWEST + 2 * PAIRS, 4 * FEWEST + 2 * PAIRS, 8 * FEWEST + 2 * PAIRS]
    assert max(gaps) == RAREST + 2 * PAIRS
    assert len(turns) < 0.01 * len(runs.log)


def test_wrong_choice_lasts_until_the_first_trial():
    runs = Runs("tasks", {"order": 1.0, "tasks": 1.5})
    runs.play(judged_again(lambda: "order", converse(0.95), runs.switch), 1000)
    assert runs.used == "order"
    assert runs.switches == [FEWEST + 2 * PAIRS]


def test_new_choice_is_judged_at_once():
    runs = Runs("tasks", {"order": 2.0, "tasks": 1.0})
    runs.play(judged_again(lambda: "order", converse(0.95), runs.switch, first=0), 2 * PAIRS)
    assert runs.log == ["tasks", "order"] * PAIRS


def test_choice_follows_a_machine_that_changes():
    seconds = {"order": 1.0, "tasks": 1.5}
    runs = Runs("tasks", seconds)
    generator = judged_again(lambda: "order", converse(0.95), runs.switch)
    runs.play(generator, 1)
    for tasks, used in ((1.5, "order"), (0.5, "tasks"), (1.5, "order")):
        seconds["tasks"] = tasks
        for _ in range(2 * RAREST):
            runner = generator.send(seconds[runs.used])
            if runner is not as_usual:
                generator.send(seconds[runner.args[0]])
        assert runs.used == used


def test_equal_executors_are_not_exchanged_for_each_other():
    runs = Runs("order", {"order": 1.0, "tasks": 1.0})
    runs.play(judged_again(lambda: "tasks", 0.95, runs.switch), 5000)
    assert not runs.switches


def test_trial_ends_with_the_session():
    runs = Runs("tasks", {"order": 1.0, "tasks": 2.0})
    runs.play(judged_again(lambda: "order", 1.0, lambda executor: None))
    assert len(runs.log) == FEWEST + 2 * PAIRS


def test_executor_that_loses_lives_as_long_as_its_trial():
    class Loser:
        pass

    made = []

    def recipe():
        loser = Loser()
        made.append(ref(loser))
        return loser

    generator = judged_again(recipe, 0.95, lambda executor: None)
    runner = next(generator)
    while len(made) < 3:
        is_turn = runner is not as_usual
        assert sum(loser() is not None for loser in made) <= 1
        runner = generator.send(2.0 if is_turn else 1.0)
    assert [loser() is None for loser in made] == [True, True, False]


def test_executor_that_cannot_be_made_is_tried_later():
    attempts = []

    def recipe():
        attempts.append(1)
        raise trial.PenstockError("there is no room for it")

    generator = judged_again(recipe, 0.95, lambda executor: None)
    next(generator)
    for _ in range(4 * FEWEST):
        assert generator.send(1.0) is as_usual
    assert len(attempts) == 2


@pytest.mark.parametrize(("margin", "other"), [(0.5, 2.0), (0.0, inf), (inf, 0.0)])
def test_converse_margin(margin, other):
    assert converse(margin) == other


def test_faster_keeps_the_other_if_runs_fail():
    class Fails:
        def run(self, inputs, control):
            raise trial.PenstockError("no")

    one, other = Fails(), Fails()
    assert trial.faster(one, other, [], 1.0) == (other, one)
