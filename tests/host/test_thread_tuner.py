"""One thread or several: what runs have shown, and when it is tried again."""

from __future__ import annotations

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
    assert 3 <= given.count(1) <= 20
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
    assert given[:5_000].count(1) > 2 * given[15_000:].count(1)


def test_tuner_ignores_other_thread_counts():
    pace = ThreadTuner(8)
    for _ in range(100):
        pace.took(4, 0.001)  # beside another run
    assert pace.threads() == 8
