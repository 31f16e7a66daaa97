"""One thread or several: what runs have shown, and when it is tried again."""

from __future__ import annotations

import itertools

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
        assert set(given[10:30]) == {1}, quiet


def test_tuner_looks_again_soon_after_a_change():
    pace = ThreadTuner(2)
    after(pace, 200, {1: 2.0, 2: 1.0})
    after(pace, 20, {1: 2.0, 2: 3.0})
    given = after(pace, 60, {1: 2.0, 2: 1.0})
    assert given.index(2) < 32
    assert given[-10:].count(2) >= 9


def test_tuner_judges_by_medians_where_runs_vary():
    # Of three runs with several threads two are late, which the fastest of them does not show.
    pace, seconds = ThreadTuner(2), itertools.cycle([1.0, 4.0, 4.0])
    given = []
    for _ in range(300):
        threads = pace.threads()
        given.append(threads)
        pace.took(threads, 2.0 if threads == 1 else next(seconds))
    assert given[-100:].count(1) > 80


def test_tuner_does_not_repeat_a_trial_that_changed_nothing_at_once():
    pace = ThreadTuner(2)
    after(pace, 200, {1: 2.5, 2: 1.0})
    given = after(pace, 100, {1: 5.0, 2: 3.0})  # slower, and still the faster of both
    assert 3 <= given.count(1) <= 9


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
