"""Which rows of which sequences a step has."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.support.decoders import VOCABULARY, decoder_model

RNG = np.random.default_rng(1)


def text_of(length: int) -> np.ndarray:
    return RNG.integers(0, VOCABULARY, length)


def stepper_of(kind: str = "spelled", **options: object) -> ps.Stepper:
    return ps.Stepper(ps.load(decoder_model(kind)), **options)


def fed(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"ids": ids[None]}


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
