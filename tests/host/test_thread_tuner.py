"""One thread or several: what runs have shown, and when it is tried again."""

from __future__ import annotations

import itertools

import pytest

from penstock.host.thread_tuner import ThreadTuner


def after(pace: ThreadTuner, runs: int, seconds: dict[int, float]) -> list[int]:
    """The numbers of threads of ``runs`` runs, given the seconds for each number of threads."""
    given = []
    for _ in range(runs):
        threads = pace.threads()
        given.append(threads)
        pace.took(threads, seconds[threads])
    return given


def test_tuner_keeps_several_threads_if_faster():
    given = after(ThreadTuner(2), 1000, {1: 2.0, 2: 1.1})
    assert given[:4] == [2, 2, 2, 2]  # all of them first
    assert 3 <= given.count(1) <= 8  # of a trial the first shows it
    assert given[-1] == 2


def test_tuner_chooses_one_thread_if_faster():
    given = after(ThreadTuner(2), 1000, {1: 1.0, 2: 1.3})
    assert given.count(2) <= 25
    assert given[-1] == 1


def test_tuner_is_undecided_until_its_first_trial_has_ended_and_in_each_other():
    pace, given, undecided = ThreadTuner(2), [], []
    for _ in range(100):
        undecided.append(pace.undecided)
        given += after(pace, 1, {1: 2.0, 2: 1.0})
        assert pace.chosen == 2
    assert given[:8] == [2, 2, 2, 2, 1, 2, 2, 2]
    assert undecided[:6] == [True] * 5 + [False]
    assert [threads == 1 for threads in given[5:]] == undecided[5:]
    assert sum(undecided) > 5


def test_tuner_follows_changes():
    pace = ThreadTuner(4)
    after(pace, 300, {1: 2.0, 4: 1.0})
    # Somebody else takes the cores: each kernel waits for the thread that comes last.
    given = after(pace, 60, {1: 2.2, 4: 12.0})
    assert given[-1] == 1
    assert given.count(4) < 30
    given = after(pace, 5000, {1: 2.0, 4: 1.0})
    assert given[-1] == 4


def test_tuner_trials_become_rarer():
    given = after(ThreadTuner(2), 20_000, {1: 2.0, 2: 1.0})
    assert given[:1_000].count(1) > 2 * given[-1_000:].count(1)
    assert given[-10_000:].count(1) < 5  # not in the 99th percentile


def test_tuner_reacts_within_ten_runs_when_several_threads_become_slower():
    for quiet in range(100, 140):
        pace = ThreadTuner(2)
        after(pace, quiet, {1: 2.0, 2: 1.0})
        given = after(pace, 40, {1: 2.0, 2: 3.0})
        assert given[10:].count(2) <= 3, quiet  # of trials, of which the first run shows it


def test_tuner_looks_again_soon_after_a_change():
    pace = ThreadTuner(2)
    after(pace, 200, {1: 2.0, 2: 1.0})
    after(pace, 20, {1: 2.0, 2: 3.0})
    given = after(pace, 60, {1: 2.0, 2: 1.0})
    assert given.index(2) < 32
    assert given[-10:].count(2) >= 9


def test_moments_without_the_second_core_leave_few_runs_with_one_thread():
    for slow in range(1, 15):
        pace = ThreadTuner(2)
        after(pace, 600, {1: 1.5, 2: 1.0})
        given = after(pace, slow, {1: 1.5, 2: 3.0}) + after(pace, 400, {1: 1.5, 2: 1.0})
        assert given.count(1) <= slow + 12, slow


def test_tuner_judges_by_late_runs_too_where_runs_vary():
    # Of three runs with several threads two are late, which the fastest of them does not show.
    pace, seconds = ThreadTuner(2), itertools.cycle([1.0, 4.0, 4.0])
    given = []
    for _ in range(300):
        threads = pace.threads()
        given.append(threads)
        pace.took(threads, 2.0 if threads == 1 else next(seconds))
    assert given[-100:].count(1) > 80


def test_run_that_stood_still_for_a_moment_changes_nothing():
    pace = ThreadTuner(2)
    after(pace, 5, {1: 1.5, 2: 1.0})
    for _ in range(3):
        pace.took(2, 50.0)
    assert after(pace, 100, {1: 1.5, 2: 1.0}).count(1) < 20


def test_trial_alternates_so_that_both_counts_meet_the_same_disturbances():
    pace = ThreadTuner(2)
    given = after(pace, 14, {1: 1.0, 2: 1.1})
    assert given == [2, 2, 2, 2, 1, 2, 1, 2, 1, 2, 1, 1, 1, 1]
    given = after(pace, 7, {1: 1.0, 2: 1.1})
    assert given == [2, 1, 2, 1, 2, 1, 1]


def test_slow_runs_that_end_as_a_trial_begins_change_nothing():
    pace = ThreadTuner(2)
    after(pace, 100, {1: 1.6, 2: 1.0})
    while pace.threads() == 2:
        pace.took(2, 3.0)  # until a trial begins
    after(pace, 6, {1: 1.6, 2: 1.0})
    assert pace.chosen == 2


class _Machine:
    """A clock, in ms, of a machine whose second core is taken for 5 ms, and free for 5, in turn.

    A run takes ``alone`` ms with one thread; with two, 1 while they have both cores and ``late``
    while they do not, in proportion where it meets both.
    """

    def __init__(self, alone: float, late: float) -> None:
        self.alone, self.late, self.now = alone, late, 0.0

    def takes(self, threads: int) -> float:
        if threads == 1:
            return self.alone
        left, now = 1.0, self.now
        while True:
            pace = self.late if now % 10 < 5 else 1.0
            until_change = 5 - now % 5
            if left * pace <= until_change:
                return now + left * pace - self.now
            now += until_change
            left -= until_change / pace


@pytest.mark.parametrize("alone", [1.5, 1.6, 1.8])
def test_slices_without_the_second_core_leave_few_runs_slower_than_needed(alone: float):
    machine, pace, slower = _Machine(alone, 1.75), ThreadTuner(2), 0
    for _ in range(5000):
        threads = pace.threads()
        seconds = machine.takes(threads)
        slower += threads == 1 and seconds > 1.15 * machine.takes(2)
        machine.now += seconds
        pace.took(threads, seconds)
    assert slower <= 50  # of 5,000, so that they are not what the 99th percentile shows


def test_tuner_turns_to_one_thread_where_two_are_late_in_every_other_slice():
    machine, pace, given = _Machine(1.15, 4.0), ThreadTuner(2), []
    for _ in range(2000):
        given.append(pace.threads())
        seconds = machine.takes(given[-1])
        machine.now += seconds
        pace.took(given[-1], seconds)
    assert given[-1000:].count(1) > 900


def test_tuner_does_not_repeat_a_trial_that_changed_nothing_at_once():
    pace = ThreadTuner(2)
    after(pace, 200, {1: 2.5, 2: 1.0})
    given = after(pace, 100, {1: 5.0, 2: 3.0})  # slower, and still the faster of both
    assert 1 <= given.count(1) <= 3  # of a trial the first shows it


def test_slow_runs_trigger_no_trial_of_a_number_that_was_never_as_fast():
    pace = ThreadTuner(2)
    given = after(pace, 200, {1: 4.0, 2: 1.0})
    before = given.count(1)
    given = after(pace, 10_000, {1: 4.0, 2: 2.0})
    assert before <= 8
    assert given.count(1) <= 10


def test_tuner_that_began_on_a_busy_machine_finds_free_cores_soon():
    pace = ThreadTuner(2)
    after(pace, 5_000, {1: 2.0, 2: 6.0})  # several threads have never been fast
    given = after(pace, 600, {1: 2.0, 2: 1.0})  # which runs with one thread do not show
    assert given[-50:].count(2) >= 44


def test_tuner_ignores_other_thread_counts():
    pace = ThreadTuner(8)
    for _ in range(100):
        pace.took(4, 0.001)  # beside another run
    assert pace.threads() == 8


def test_runs_at_once_that_divide_the_threads_leave_nothing_to_judge_by():
    tuner = ThreadTuner(2)
    for _ in range(1000):
        tuner.took(1, 1.0)
    assert after(tuner, 1000, {1: 2.0, 2: 1.0}).count(1) < 100


def test_waking_threads_in_a_trial_of_short_runs_does_not_count():
    pace = ThreadTuner(2)
    after(pace, 50, {1: 40e-6, 2: 200e-6})  # a busy machine
    last, given = 1, []
    for _ in range(1000):
        threads = pace.threads()
        given.append(threads)
        # The second thread waits between two runs with both, and has slept after one without it.
        woken = 60e-6 if last == 1 != threads else 0.0
        pace.took(threads, {1: 40e-6, 2: 22e-6}[threads] + woken)
        last = threads
    assert given[-1] == 2
    assert given.count(2) > 400


def test_threads_that_must_be_woken_for_each_short_run_are_left_out():
    # As where runs are far apart.
    given = after(ThreadTuner(2), 1000, {1: 40e-6, 2: 80e-6})
    assert given[-1] == 1
    assert given.count(2) <= 30
