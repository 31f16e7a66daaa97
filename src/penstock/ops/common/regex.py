"""Regular expressions in RE2's syntax, matched in time linear in the text.

Python's own ``re`` backtracks: a pattern of a few characters can take it years, and a pattern comes
with a model, which nobody has vouched for. Here a pattern becomes a program of the kind Thompson
described (Communications of the ACM 11, 1968): the states that a text can lead to are followed all
at once. Sets of states seen before are remembered with where each character leads, which makes a
deterministic automaton of as much of the pattern as the texts need (Cox, "Regular Expression
Matching Can Be Simple And Fast", 2007).

All of RE2's syntax but for names of scripts (``\\p{Greek}``) and single bytes (``\\C``). As in RE2,
there are no backreferences and no lookaround; ``\\d``, ``\\s`` and ``\\w`` are ASCII, and ``$`` is
the end of the text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

MAX_PROGRAM = 20_000
MAX_REPEAT = 1000
MAX_DEPTH = 100
MAX_TRANSITIONS = 50_000

Predicate: TypeAlias = Callable[[str], bool]

_DIGITS = frozenset("0123456789")
_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz")
_UPPER = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _DIGITS | _LOWER | _UPPER | {"_"}
_SPACE = frozenset("\t\n\f\r ")
_PERL = {"d": _DIGITS, "s": _SPACE, "w": _WORD}
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_POSIX = {
    "alnum": _DIGITS | _LOWER | _UPPER,
    "alpha": _LOWER | _UPPER,
    "ascii": frozenset(map(chr, range(128))),
    "blank": frozenset("\t "),
    "cntrl": frozenset(map(chr, range(32))) | {"\x7f"},
    "digit": _DIGITS,
    "graph": frozenset(map(chr, range(33, 127))),
    "lower": _LOWER,
    "print": frozenset(map(chr, range(32, 127))),
    "punct": _PUNCTUATION,
    "space": frozenset("\t\n\v\f\r "),
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": _DIGITS | frozenset("abcdefABCDEF"),
}
_ESCAPES = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_ASSERTIONS = {"A": "begin", "z": "end", "b": "word", "B": "not word"}


class RegexError(ValueError):
    """The pattern is not valid in RE2's syntax, or is too large."""


class _Flags(NamedTuple):
    fold: bool = False  # i
    multiline: bool = False  # m
    dot_all: bool = False  # s


# Programs: an instruction is a test of a character, an assertion, a fork, or the end.


class _Instruction:
    """``test`` consumes a character that passes; an ``assertion`` consumes none, and must hold."""

    __slots__ = ("assertion", "targets", "test")

    def __init__(
        self, test: Predicate | None = None, assertion: str = "", targets: tuple[int, ...] = ()
    ) -> None:
        self.test = test
        self.assertion = assertion
        self.targets = targets


Fragment: TypeAlias = Callable[[int], int]
"""Given the instruction that comes after, appends instructions and returns the first."""


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0
        self.repeated = 0
        self.program: list[_Instruction] = [_Instruction()]  # number 0: the text matches

    def fail(self, what: str) -> RegexError:
        return RegexError(f"{what} at {self.at} in the pattern {self.pattern!r}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.fail("unexpected end")
        self.at += 1
        return self.pattern[self.at - 1]

    def until(self, end: str) -> str:
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            raise self.fail(f"missing {end!r}")
        content = self.pattern[self.at : stop]
        self.at = stop + len(end)
        return content

    # Emitting

    def emit(self, instruction: _Instruction) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise RegexError(f"the pattern {self.pattern[:60]!r} is too large")
        self.program.append(instruction)
        return len(self.program) - 1

    def test(self, predicate: Predicate) -> Fragment:
        return lambda after: self.emit(_Instruction(test=predicate, targets=(after,)))

    def assertion(self, condition: str) -> Fragment:
        return lambda after: self.emit(_Instruction(assertion=condition, targets=(after,)))

    def sequence(self, parts: list[Fragment]) -> Fragment:
        def emit(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return emit

    def choice(self, parts: list[Fragment]) -> Fragment:
        if len(parts) == 1:
            return parts[0]
        return lambda after: self.emit(_Instruction(targets=tuple(p(after) for p in parts)))

    def repeat(self, part: Fragment, low: int, high: int | None) -> Fragment:
        def emit(after: int) -> int:
            # Repetitions of nothing emit nothing, but take their time.
            self.repeated += max(low, high or 0)
            if self.repeated > MAX_PROGRAM:
                raise RegexError(f"the pattern {self.pattern[:60]!r} is too large")
            if high is None:
                loop = self.emit(_Instruction())
                self.program[loop].targets = (part(loop), after)
                after = loop
            else:
                end = after
                for _ in range(high - low):
                    after = self.emit(_Instruction(targets=(part(after), end)))
            for _ in range(low):
                after = part(after)
            return after

        return emit

    # Parsing

    def alternatives(self, flags: _Flags) -> Fragment:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail("groups are nested too deeply")
        branches: list[Fragment] = []
        parts: list[Fragment] = []
        while self.at < len(self.pattern) and not self.peek(")"):
            if self.take("|"):
                branches.append(self.sequence(parts))
                parts = []
                continue
            if self.peek("(?") and not self.peek("(?P<") and not self.peek("(?<"):
                changed = self.flags(flags)
                if self.take(")"):  # for the rest of this group
                    flags = changed
                    continue
                self.at += 1  # the colon
                part = self.group(changed)
            else:
                part = self.item(flags)
            parts.append(self.repetitions(part))
        self.depth -= 1
        branches.append(self.sequence(parts))
        return self.choice(branches)

    def group(self, flags: _Flags) -> Fragment:
        inside = self.alternatives(flags)
        if not self.take(")"):
            raise self.fail("missing ')'")
        return inside

    def flags(self, flags: _Flags) -> _Flags:
        """The flags after ``(?``, up to ``)`` or ``:``."""
        self.at += 2
        on = True
        names = {"i": "fold", "m": "multiline", "s": "dot_all"}
        while not self.peek(")") and not self.peek(":"):
            char = self.next()
            if char == "-":
                on = False
            elif char in names:
                flags = flags._replace(**{names[char]: on})
            elif char != "U":  # who is greedy does not matter to a full match
                raise self.fail(f"unknown or unsupported group (?{char}")
        return flags

    def repetitions(self, part: Fragment) -> Fragment:
        repeated = False
        while True:
            start = self.at
            if self.take("*"):
                bounds: tuple[int, int | None] | None = (0, None)
            elif self.take("+"):
                bounds = (1, None)
            elif self.take("?"):
                bounds = (0, 1)
            else:
                bounds = self.counts()
            if bounds is None:
                return part
            if repeated:
                self.at = start
                raise self.fail("repetition of a repetition")
            repeated = True
            self.take("?")  # a lazy one matches the same texts in full
            part = self.repeat(part, *bounds)

    def counts(self) -> tuple[int, int | None] | None:
        """``{n}``, ``{n,}`` or ``{n,m}``; ``None`` where a brace is just a brace."""
        stop = self.pattern.find("}", self.at)
        if not self.peek("{") or stop < 0:
            return None
        first, comma, second = self.pattern[self.at + 1 : stop].partition(",")
        digits = [text for text in (first, second) if text]
        if not first or not all(t.isascii() and t.isdigit() and len(t) < 6 for t in digits):
            return None
        low = int(first)
        high = (int(second) if second else None) if comma else low
        if low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
            raise self.fail("bad repetition count")
        self.at = stop + 1
        return low, high

    def item(self, flags: _Flags) -> Fragment:
        char = self.next()
        if char == "(":
            named = self.take("?P<") or self.take("?<")
            if named and not self.until(">").isidentifier():
                raise self.fail("bad group name")
            return self.group(flags)
        if char == "[":
            return self.test(self.char_class(flags))
        if char == ".":
            return self.test((lambda c: True) if flags.dot_all else (lambda c: c != "\n"))
        if char in "^$":
            position = {"^": "begin", "$": "end"}[char]
            return self.assertion(f"{position} of line" if flags.multiline else position)
        if char in "*+?":
            raise self.fail("nothing to repeat")
        if char == "\\":
            if self.take("Q"):
                stop = self.pattern.find("\\E", self.at)
                text = self.pattern[self.at :] if stop < 0 else self.until("\\E")
                self.at = len(self.pattern) if stop < 0 else self.at
                return self.sequence([self.literal(c, flags) for c in text])
            if self.pattern[self.at : self.at + 1] in _ASSERTIONS:
                return self.assertion(_ASSERTIONS[self.next()])
            escaped = self.escape()
            return self.literal(escaped, flags) if isinstance(escaped, str) else self.test(escaped)
        return self.literal(char, flags)

    def literal(self, char: str, flags: _Flags) -> Fragment:
        if flags.fold:
            chars = _folded(char)
            return self.test(lambda c: c in chars)
        return self.test(lambda c: c == char)

    def escape(self) -> str | Predicate:
        """What a backslash means, in a class or out of it: a character or a class of them."""
        char = self.next()
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char.lower() in _PERL:
            chars, negate = _PERL[char.lower()], char.isupper()
            return lambda c: (c in chars) != negate
        if char in "pP":
            return self.category(char == "P")
        if char == "x":
            digits = self.until("}") if self.take("{") else self.next() + self.next()
            return self.code(digits, 16)
        if char in "01234567":
            digits = char
            while len(digits) < 3 and self.pattern[self.at : self.at + 1] in tuple("01234567"):
                digits += self.next()
            if char != "0" and len(digits) == 1:
                raise self.fail("backreferences are not supported")
            return self.code(digits, 8)
        if char in _PUNCTUATION:
            return char
        raise self.fail(f"unknown escape \\{char}")

    def code(self, digits: str, base: int) -> str:
        try:
            return chr(int(digits, base))
        except (ValueError, OverflowError):
            raise self.fail(f"bad character code {digits!r}") from None

    def category(self, negate: bool) -> Predicate:
        name = self.until("}") if self.take("{") else self.next()
        if name.startswith("^"):
            name, negate = name[1:], not negate
        if name == "Any":
            return lambda c: not negate
        if not 1 <= len(name) <= 2 or name[0] not in "CLMNPSZ":
            raise self.fail(f"unknown or unsupported character class {name!r}")
        return lambda c: unicodedata.category(c).startswith(name) != negate

    def char_class(self, flags: _Flags) -> Predicate:
        negate = self.take("^")
        chars: set[str] = set()
        ranges: list[tuple[str, str]] = []
        others: list[Predicate] = []
        first = True
        while first or not self.peek("]"):
            first = False
            if self.take("[:"):
                name = self.until(":]")
                inverse = name.startswith("^")
                if name.lstrip("^") not in _POSIX:
                    raise self.fail(f"unknown class [:{name}:]")
                others.append(_member(_POSIX[name.lstrip("^")], inverse))
                continue
            low = self.class_item()
            if not isinstance(low, str):
                others.append(low)
                continue
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.class_item()
                if not isinstance(high, str) or high < low:
                    raise self.fail("bad range")
                ranges.append((low, high))
            else:
                chars.add(low)
        self.at += 1
        fold = flags.fold

        def plain(c: str) -> bool:
            return (
                c in chars
                or any(low <= c <= high for low, high in ranges)
                or any(test(c) for test in others)
            )

        if fold:
            return lambda c: any(plain(variant) for variant in _folded(c)) != negate
        return lambda c: plain(c) != negate

    def class_item(self) -> str | Predicate:
        char = self.next()
        return self.escape() if char == "\\" else char


def _member(chars: frozenset[str], negate: bool) -> Predicate:
    return lambda c: (c in chars) != negate


def _folded(char: str) -> frozenset[str]:
    """The characters that differ from ``char`` in nothing but case."""
    variants = {char, char.lower(), char.upper()}
    variants |= {c.lower() for c in variants} | {c.upper() for c in variants}
    return frozenset(c for c in variants if len(c) == 1)


# Matching


class Regex:
    """A compiled pattern. Raises ``RegexError`` where it is not valid."""

    def __init__(self, pattern: str) -> None:
        parser = _Parser(pattern)
        whole = parser.alternatives(_Flags())
        if parser.at < len(pattern):
            raise parser.fail("unexpected ')'")
        start = whole(0)
        self._program = parser.program
        self._looks_back = any(i.assertion for i in parser.program)
        # A state of the automaton: what came before, and instructions not yet followed.
        self._start = (self._kind(""), frozenset((start,)))
        self._moves: dict[tuple[_State, str], _State] = {}

    def fullmatch(self, text: str) -> bool:
        """Whether the whole of ``text`` matches."""
        moves, state = self._moves, self._start
        for char in text:
            following = moves.get((state, char))
            if following is None:
                following = self._move(state, char)
            state = following
            if not state[1]:
                return False
        return self._move(state, "")[1] == _MATCHED

    def _kind(self, char: str) -> str:
        """What an assertion wants to know of a character; "" stands for none."""
        if not self._looks_back or not char or char == "\n":
            return char if self._looks_back else " "
        return "w" if char in _WORD else " "

    def _move(self, state: _State, char: str) -> _State:
        """The state after ``char``; at the end of the text, that of having matched or none."""
        before, after = state[0], self._kind(char)
        reached: set[int] = set()
        seen: set[int] = set()
        stack = list(state[1])
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            instruction = self._program[at]
            if at == 0:
                if not char:
                    reached.add(0)
            elif instruction.test is not None:
                if char and instruction.test(char):
                    reached.update(instruction.targets)
            elif not instruction.assertion or _holds(instruction.assertion, before, after):
                stack.extend(instruction.targets)
        following = (after, frozenset(reached))
        if len(self._moves) >= MAX_TRANSITIONS:
            self._moves.clear()
        self._moves[state, char] = following
        return following


_State: TypeAlias = tuple[str, frozenset[int]]
_MATCHED = frozenset((0,))


def _holds(assertion: str, before: str, after: str) -> bool:
    """Whether an assertion holds between characters of two kinds."""
    if assertion == "begin":
        return not before
    if assertion == "end":
        return not after
    if assertion == "begin of line":
        return before in ("", "\n")
    if assertion == "end of line":
        return after in ("", "\n")
    return ((before == "w") != (after == "w")) == (assertion == "word")
