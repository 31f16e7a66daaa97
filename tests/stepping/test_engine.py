"""Which rows of which sequences a step has."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import penstock as ps
from tests.support.decoders import VOCABULARY, fed, stepper_of
from tests.support.timing import wait_until

RNG = np.random.default_rng(1)


def text_of(length: int) -> np.ndarray:
    return RNG.integers(0, VOCABULARY, length)


def test_rows_of_sequences_that_wait_are_computed_in_one_step() -> None:
    """While a step runs, others begin to wait; the next one has the rows of all of these."""
    with stepper_of(max_rows=64) as stepper:
        engine = stepper._engine
        ends: list[str] = []
        for name in "abc":
            rows = stepper._checked(fed(text_of(5)))
            engine.feed(engine.sequence(0), rows, 1, lambda _, e, n=name: ends.append(n))
        assert engine.step()
        assert sorted(ends) == ["a", "b", "c"]
        assert (engine.steps, engine.rows) == (1, 15)
        assert not engine.step()


def test_single_rows_do_not_wait_for_a_long_prompt() -> None:
    with stepper_of(max_rows=64) as stepper:
        engine, ends = stepper._engine, []
        for name, length in (("prompt", 200), ("single", 1)):
            rows = stepper._checked(fed(text_of(length)))
            engine.feed(engine.sequence(0), rows, 1, lambda _, e, n=name: ends.append(n))
        engine.step()
        assert ends == ["single"]
        while engine.step():
            pass
        assert ends == ["single", "prompt"]


def test_higher_priorities_come_first_and_lower_ones_in_the_end() -> None:
    with stepper_of(max_rows=16) as stepper:
        engine, ends = stepper._engine, []
        for name, priority in (("low", 0), ("high", 3)):
            rows = stepper._checked(fed(text_of(40)))
            engine.feed(engine.sequence(priority), rows, 1, lambda _, e, n=name: ends.append(n))
        while engine.step():
            pass
        assert ends == ["high", "low"]


def test_error_of_one_sequence_is_not_that_of_others() -> None:
    with stepper_of() as stepper:
        engine, ends = stepper._engine, {}
        for name, ids in (("bad", np.array([VOCABULARY + 5])), ("good", text_of(3))):
            rows = stepper._checked(fed(ids))
            engine.feed(engine.sequence(0), rows, 1, lambda y, e, n=name: ends.update({n: (y, e)}))
        engine.step()
        assert isinstance(ends["bad"][1], ps.PenstockError)
        assert ends["good"][1] is None


def test_step_waits_for_the_next_rows_of_those_who_got_results() -> None:
    with stepper_of() as stepper:
        engine, ends = stepper._engine, []
        first, second = engine.sequence(0), engine.sequence(0)
        for sequence in (first, second):
            sequence.returns = True
            rows = stepper._checked(fed(text_of(3)))
            engine.feed(sequence, rows, 1, lambda *end: ends.append(end))
        engine.step()
        assert engine._expected == 2
        engine._took = 60.0
        thread = threading.Thread(target=engine.drive, args=(lambda: len(ends) == 4,))
        engine.feed(first, rows, 1, lambda *end: ends.append(end))
        thread.start()
        wait_until(lambda: engine._gates)
        engine.feed(second, rows, 1, lambda *end: ends.append(end))
        thread.join(60)
        assert engine.steps == 2


def test_step_that_waited_in_vain_is_followed_by_some_that_do_not() -> None:
    with stepper_of() as stepper:
        engine = stepper._engine
        sequence, other = stepper.sequence(), stepper.sequence()
        sequence.step(fed(text_of(3)))
        engine._expected, engine._took = 2, 0.0
        other.step(fed(text_of(3)))
        assert engine._patient_from > engine.steps
        engine._expected, engine._took = 2, threading.TIMEOUT_MAX
        sequence.step(fed(text_of(3)))


def test_thread_that_waits_runs_steps_when_the_one_that_did_leaves() -> None:
    with stepper_of() as stepper:
        engine, ends = stepper._engine, []
        engine._running = True  # another thread does
        thread = threading.Thread(target=engine.drive, args=(lambda: bool(ends),))
        rows = stepper._checked(fed(text_of(3)))
        engine.feed(engine.sequence(0), rows, 1, lambda *end: ends.append(end))
        thread.start()
        wait_until(lambda: engine._parked)
        engine._running = False
        engine.hand_over()
        thread.join(60)
        assert engine.steps == 1


def test_rows_that_are_fed_to_a_closed_sequence_end_with_an_error() -> None:
    with stepper_of() as stepper:
        engine, ends = stepper._engine, []
        sequence = engine.sequence(0)
        engine.close(sequence)
        rows = stepper._checked(fed(text_of(3)))
        engine.feed(sequence, rows, 1, lambda _, error: ends.append(error))
        with pytest.raises(ps.InvalidInput, match="was closed"):
            raise ends[0]
        assert not engine.waiting
