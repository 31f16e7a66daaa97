"""The automaton of a regular expression: its memory, its groups, and that a run can stop it."""

from __future__ import annotations

import random
import re

import pytest

import penstock as ps
from penstock.executors.control import CancelToken, begin_run
from penstock.host.current_run import working_for
from penstock.ops.common import regex
from penstock.ops.common.regex import Groups, Regex, simple_pattern

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


SIMPLE = [" ", ",;", r"\.", "é", "[a-c]", "[^ab]+", r"[\w-]+", r"\w+", r"\d", ".+", "..", "ab", r"\b\w\w+\b",
          r"\b[a-zA-Z0-9_]+", "[a-zA-Z0-9_]+", "[. ]", "a-b", r"[\[\]]+"]  # fmt: skip
OTHERS = ["", "a*", "a|b", "(a)", "a?", "^a", r"\s", r"\b", r"a\b", r"[^a]+\b", "[[:alpha:]]", "a+b", "[a&&b]",
          "a{2}", "(?i)a", r"\pL", "[a-c]d", r"\b[ab]+\b", "[^\\s]"]  # fmt: skip


@pytest.mark.parametrize("pattern", SIMPLE)
def test_simple_pattern_finds_what_the_engine_finds(pattern: str) -> None:
    simple = simple_pattern(pattern)
    assert simple is not None
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("ab,; .-é_1[]\n\v", k=draw.randrange(12)))
        found, start = [], 0
        while (match := Regex(pattern).search(text, start)) is not None:
            found.append(match)
            start = match[1]
        assert [match.span() for match in simple.finditer(text)] == found, text


@pytest.mark.parametrize("pattern", OTHERS)
def test_pattern_that_re_may_match_otherwise_is_not_simple(pattern: str) -> None:
    assert simple_pattern(pattern) is None


# Groups.

PREFERRING = [
    "(a)(b)?",
    "a|ab",
    "(a*)(a|ab)(b*)",
    "a*?b",
    "(?:a(b))+c",
    "(a{1,2}?)(a|b)",
    "(b|(a))+?c",
    r"\b(a+)\b",
    "^(a)|(b)$",
    "(a|b)*?(c)",
    "x(y)?",
    "((a)|b)(c|$)",
]


@pytest.mark.parametrize("pattern", PREFERRING)
def test_groups_are_those_that_a_backtracking_search_prefers(pattern):
    compiled, chance = Groups(pattern), random.Random(3)
    # Python's groups keep what an earlier repetition matched, as RE2's do.
    for _ in range(300):
        text = "".join(chance.choices("abc x", k=chance.randrange(9)))
        start = chance.randrange(len(text) + 1)
        match = re.compile(pattern).search(text, start)
        wanted = None
        if match is not None:
            wanted = tuple([end for i in range(compiled.groups + 1) for end in match.span(i)])
        assert compiled.spans(text, start) == wanted, (pattern, text, start)


def test_groups_of_a_pattern_that_backtracks_without_end_are_found():
    assert Groups("((a*)*)*b").spans("a" * 2000) is None
    assert Groups("(x+x+)+y").spans("x" * 500 + "y") == (0, 501, 0, 500)


def test_groups_stop_with_their_run():
    token = CancelToken()
    control = begin_run(None, token)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        working_for(control, Groups("(a|b)*c").spans, "ab" * 20_000)
