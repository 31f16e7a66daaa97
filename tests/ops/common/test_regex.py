"""The automaton of a regular expression: its memory, and that a run can stop it."""

from __future__ import annotations

import random

import pytest

import penstock as ps
from penstock.executors.control import CancelToken, begin_run
from penstock.host.current_run import working_for
from penstock.ops.common import regex
from penstock.ops.common.regex import Regex

EXPLODING = "(a|b)*a" + "(a|b){300}" * 3


def test_regex_keeps_states_of_bounded_size(monkeypatch):
    monkeypatch.setattr(regex, "MAX_STATES_SIZE", 10_000)
    pattern = Regex(EXPLODING)
    text = "".join(random.Random(1).choices("ab", k=500))
    assert not pattern.fullmatch(text + "b" * 901)
    kept = {state for pair in pattern._moves.items() for state in (pair[0][0], pair[1][0])}
    assert sum(len(state[1]) for state in kept) <= 10_000


def test_regex_stops_with_its_run():
    token = CancelToken()
    control = begin_run(None, token)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        working_for(control, Regex("a*").fullmatch, "a" * 100_000)
