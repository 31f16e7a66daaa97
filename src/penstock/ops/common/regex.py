"""Regular expressions in RE2's syntax, matched in time linear in the text.

Python's own ``re`` backtracks: a pattern of a few characters can take it years, and a pattern comes
with an untrusted model. Here a pattern becomes a program of the kind Thompson described
(Communications of the ACM 11, 1968): all states that a text can lead to are followed at once. Sets
of states seen before are remembered with where each character leads, which makes a deterministic
automaton of as much of the pattern as the texts need (Cox, "Regular Expression Matching Can Be
Simple And Fast", 2007).

All of RE2's syntax but for names of scripts (``\\p{Greek}``) and single bytes (``\\C``). As in RE2,
there are no backreferences and no lookaround; ``\\d``, ``\\s`` and ``\\w`` are ASCII, and ``$`` is
the end of the text.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple

MAX_PROGRAM = 20_000
# RE2 has the same bound on the counts of repetitions.
MAX_REPEAT = 1000
# Groups are parsed and emitted by recursion, of which Python bounds the depth.
MAX_DEPTH = 100
MAX_TRANSITIONS = 50_000
MAX_STATES_SIZE = 500_000

Predicate: TypeAlias = Callable[[str], bool]
Flags: TypeAlias = frozenset[str]
"""i: ignore case; m: ``^`` and ``$`` match at lines; s: ``.`` matches line feeds"""

_WORD = frozenset(string.ascii_letters + string.digits + "_")
# Unlike [[:space:]], RE2's \s has no vertical tab.
_PERL = {"d": string.digits, "s": "\t\n\f\r ", "w": _WORD}
_POSIX: dict[str, Collection[str]] = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "ascii": [chr(i) for i in range(128)],
    "blank": "\t ",
    "cntrl": [*map(chr, range(32)), "\x7f"],
    "digit": string.digits,
    "graph": [chr(i) for i in range(33, 127)],
    "lower": string.ascii_lowercase,
    "print": [chr(i) for i in range(32, 127)],
    "punct": string.punctuation,
    "space": "\t\n\v\f\r ",
    "upper": string.ascii_uppercase,
    "word": _WORD,
    "xdigit": string.hexdigits,
}
_ESCAPES = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}

# Conditions between two characters, of which ``Regex._category`` says what they depend on.
_Assertion: TypeAlias = Callable[[str, str], bool]
_ASSERTIONS: dict[str, _Assertion] = {
    "\\A": lambda before, after: not before,
    "\\z": lambda before, after: not after,
    "\\b": lambda before, after: (before == "w") != (after == "w"),
    "\\B": lambda before, after: (before == "w") == (after == "w"),
    "^": lambda before, after: before in ("", "\n"),
    "$": lambda before, after: after in ("", "\n"),
}

_FLAGS = re.compile(r"\(\?([imsU]*)(?:-([imsU]*))?([:)])")
_REPETITION = re.compile(r"(?:([*+?])|\{([0-9]{1,5})(,([0-9]{1,5})?)?\})\??")
_CODE = re.compile(r"x\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|([0-7]{1,3})")


class RegexError(ValueError):
    """The pattern is not valid in RE2's syntax, or is too large."""


class _Instruction(NamedTuple):
    """A test consumes a character that passes; an assertion consumes none, and must hold. With
    neither, it is a fork, whose first target is preferred; ``slot`` numbers the ends of groups."""

    targets: tuple[int, ...] = ()
    test: Predicate | None = None
    assertion: _Assertion | None = None
    slot: int | None = None


Fragment: TypeAlias = Callable[[int], int]
"""Given the instruction that comes after, appends instructions and returns the first."""


class _Parser:
    """Turns a pattern into a program; ``capturing``: with the ends of groups."""

    def __init__(self, pattern: str, capturing: bool = False) -> None:
        self.pattern = pattern
        self.capturing = capturing
        self.groups = 0
        self.at = 0
        self.depth = 0
        self.repeated = 0
        self.program = [_Instruction()]  # number 0: the text matches

    def fail(self, what: str) -> RegexError:
        return RegexError(f"{what} at {self.at} in the pattern {self.pattern!r}")

    def too_large(self) -> RegexError:
        return RegexError(f"the pattern {self.pattern[:60]!r} is too large")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if not self.peek(text):
            return False
        self.at += len(text)
        return True

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.fail("unexpected end")
        self.at += 1
        return self.pattern[self.at - 1]

    def until(self, end: str) -> str:
        content, stop, _ = self.pattern[self.at :].partition(end)
        if not stop:
            raise self.fail(f"missing {end!r}")
        self.at += len(content) + len(end)
        return content

    # Emitting

    def emit(self, *instruction: Any) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise self.too_large()
        self.program.append(_Instruction(*instruction))
        return len(self.program) - 1

    def test(self, predicate: Predicate) -> Fragment:
        return lambda after: self.emit((after,), predicate)

    def assertion(self, condition: _Assertion) -> Fragment:
        return lambda after: self.emit((after,), None, condition)

    def sequence(self, parts: Sequence[Fragment]) -> Fragment:
        def emit(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return emit

    def choice(self, parts: Sequence[Fragment]) -> Fragment:
        if len(parts) == 1:
            return parts[0]
        return lambda after: self.emit(tuple([part(after) for part in parts]))

    def captured(self, part: Fragment, group: int) -> Fragment:
        """``part`` between the ends of a group."""
        if not self.capturing:
            return part

        def emit(after: int) -> int:
            inside = part(self.emit((after,), None, None, 2 * group + 1))
            return self.emit((inside,), None, None, 2 * group)

        return emit

    def repeat(self, part: Fragment, low: int, high: int | None, lazy: bool) -> Fragment:
        def emit(after: int) -> int:
            # Repetitions of nothing emit nothing, but take their time.
            self.repeated += max(low, high or 0)
            if self.repeated > MAX_PROGRAM:
                raise self.too_large()
            if high is None:
                # The part leads back to the fork, which thus has a number before it has targets.
                loop = self.emit()
                both = (part(loop), after)
                self.program[loop] = _Instruction(both[::-1] if lazy else both)
                after = loop
            else:
                end = after
                for _ in range(high - low):
                    both = (part(after), end)
                    after = self.emit(both[::-1] if lazy else both)
            for _ in range(low):
                after = part(after)
            return after

        return emit

    # Parsing

    def alternatives(self, flags: Flags) -> Fragment:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail("groups are nested too deeply")
        branches: list[list[Fragment]] = [[]]
        while self.at < len(self.pattern) and not self.peek(")"):
            if self.take("|"):
                branches.append([])
                continue
            if self.peek("(?") and not self.peek("(?P<") and not self.peek("(?<"):
                group = _FLAGS.match(self.pattern, self.at)
                if group is None:
                    raise self.fail("unknown or unsupported group")
                self.at = group.end()
                changed = (flags | set(group[1])) - set(group[2] or "")
                if group[3] == ")":  # for the rest of this group
                    flags = changed
                    continue
                part = self.group(changed)
            else:
                part = self.item(flags)
            branches[-1].append(self.repetition(part, flags))
        self.depth -= 1
        return self.choice([self.sequence(parts) for parts in branches])

    def group(self, flags: Flags) -> Fragment:
        inside = self.alternatives(flags)
        if not self.take(")"):
            raise self.fail("missing ')'")
        return inside

    def repetition(self, part: Fragment, flags: Flags) -> Fragment:
        """``part`` and the repetition after it, which prefers fewer if it is lazy."""
        match = _REPETITION.match(self.pattern, self.at)
        if match is None:
            return part
        sign, first, comma, second = match.groups()
        if sign:
            low, high = int(sign == "+"), 1 if sign == "?" else None
        else:
            low = int(first)
            high = int(second) if second else None if comma else low
            if low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
                raise self.fail("bad repetition count")
        self.at = match.end()
        if _REPETITION.match(self.pattern, self.at):
            # RE2 refuses these as well.
            raise self.fail("repetition of a repetition")
        lazy = len(match[0]) > 1 and match[0].endswith("?")
        # Flag U swaps the meanings of x* and x*?.
        return self.repeat(part, low, high, lazy != ("U" in flags))

    def item(self, flags: Flags) -> Fragment:
        char = self.next()
        if char == "(":
            named = self.take("?P<") or self.take("?<")
            if named and not self.until(">").isidentifier():
                raise self.fail("bad group name")
            self.groups += 1
            number = self.groups
            return self.captured(self.group(flags), number)
        if char == "[":
            return self.test(self.char_class(flags))
        if char == ".":
            return self.test((lambda c: True) if "s" in flags else (lambda c: c != "\n"))
        if char in "^$":
            whole = {"^": "\\A", "$": "\\z"}[char]
            return self.assertion(_ASSERTIONS[char if "m" in flags else whole])
        if char in "*+?":
            raise self.fail("nothing to repeat")
        if char != "\\":
            return self.literal(char, flags)
        # Without \E the quoted text goes on to the end of the pattern.
        if self.take("Q"):
            text, end, _ = self.pattern[self.at :].partition("\\E")
            self.at += len(text) + len(end)
            return self.sequence([self.literal(c, flags) for c in text])
        condition = _ASSERTIONS.get(self.pattern[self.at - 1 : self.at + 1])
        if condition is not None:
            self.at += 1
            return self.assertion(condition)
        escaped = self.escape()
        return self.literal(escaped, flags) if isinstance(escaped, str) else self.test(escaped)

    def literal(self, char: str, flags: Flags) -> Fragment:
        return self.test(_member(_folded(char) if "i" in flags else char))

    def escape(self) -> str | Predicate:
        """The meaning of a backslash, in a class or out of it: a character or a class of them."""
        code = _CODE.match(self.pattern, self.at)
        if code is not None:
            self.at = code.end()
            # A digit alone would refer to a group; of two or three the code of a character is
            # octal.
            if len(code[0]) == 1 and code[0] != "0":
                raise self.fail("backreferences are not supported")
            return self.code(code[3], 8) if code[3] else self.code(code[1] or code[2], 16)
        char = self.next()
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char.lower() in _PERL:
            return _member(_PERL[char.lower()], char.isupper())
        if char in "pP":
            return self.category(char == "P")
        if char in string.punctuation:
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

    def char_class(self, flags: Flags) -> Predicate:
        negate = self.take("^")
        tests: list[Predicate] = []
        # A bracket that comes first is a member of the class.
        while not tests or not self.peek("]"):
            if self.take("[:"):
                name = self.until(":]")
                chars = _POSIX.get(name.removeprefix("^"))
                if chars is None:
                    raise self.fail(f"unknown class [:{name}:]")
                tests.append(_member(chars, name.startswith("^")))
                continue
            low = self.class_item()
            if not isinstance(low, str):
                tests.append(low)
                continue
            high: str | Predicate = low
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.class_item()
            if not isinstance(high, str) or high < low:
                raise self.fail("bad range")
            tests.append(_between(low, high))
        self.at += 1

        def passes(char: str) -> bool:
            # Case is folded before negation: with i, [^a] must not match A either.
            variants = _folded(char) if "i" in flags else char
            return any(test(c) for c in variants for test in tests) != negate

        return passes

    def class_item(self) -> str | Predicate:
        char = self.next()
        return self.escape() if char == "\\" else char


def _member(chars: Collection[str], negate: bool = False) -> Predicate:
    chars = frozenset(chars)
    return lambda c: (c in chars) != negate


def _between(low: str, high: str) -> Predicate:
    return lambda c: low <= c <= high


def _folded(char: str) -> frozenset[str]:
    """The characters that differ from ``char`` in nothing but case."""
    variants = {char, char.lower(), char.upper()}
    variants |= {c.lower() for c in variants} | {c.upper() for c in variants}
    # The upper case of some characters, as of "ß", is two.
    return frozenset(c for c in variants if len(c) == 1)


# Patterns that ``re`` matches in linear time, and alike: literals, and runs of one class.

# Doubled, &, |, ~ and - may come to be set operations in re. \s is no item: that of re has the
# vertical tab.
_ITEM = r"\w-\w|[^\\\[\]^&|~-]|\\[wd.\-\[\]\\]"
_CLASS = rf"(?:\[\^?(?:{_ITEM})+-?\]|\\w|\\d|\.)"
_WORDS = r"(?:\\w|\[a-zA-Z0-9_\])"
_SIMPLE = re.compile(
    r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])+"  # literals
    rf"|(?P<one>{_CLASS})(?P=one)*\+?|\\b(?P<word>{_WORDS})(?P=word)*\+(?:\\b)?"
)


def simple_pattern(pattern: str) -> re.Pattern[str] | None:
    """The pattern for ``re``, if it is of a kind for which that finds the leftmost longest matches,
    none of them empty, and never tries again what has failed."""
    # RE2's \w and \d are ASCII.
    return re.compile(pattern, re.ASCII) if _SIMPLE.fullmatch(pattern) else None


def members_of(pattern: str, separator: bool = False) -> tuple[np.ndarray, bool] | None:
    """The ASCII characters, by code, whose longest runs ``pattern`` matches, and whether all others
    are among them; None for another kind of pattern. Of a ``separator``, of one character or of
    runs, the characters between."""
    one = _CLASS + ("[+]?" if separator else "[+]")
    if not pattern.isascii() or not (
        re.fullmatch(one, pattern) or (separator and len(pattern) == 1 and simple_pattern(pattern))
    ):
        return None
    # One character stands for all that are not ASCII, as no class of this kind tells them apart.
    single = re.compile(pattern, re.ASCII)
    members = [single.fullmatch(char) is not None for char in (*map(chr, range(128)), "\xe9")]
    return np.array(members[:-1]) ^ separator, members[-1] ^ separator


# Matching

# Characters between two looks at the run.
_SECTION = 4096

_State: TypeAlias = tuple[str, frozenset[int]]
"""The category of the last character, and the instructions to follow from there."""
_Move: TypeAlias = tuple[_State, bool]
"""The state after a character, and whether the text before the character matches."""


class Regex:
    """A compiled pattern. Raises ``RegexError`` where it is not valid."""

    def __init__(self, pattern: str, capturing: bool = False) -> None:
        parser = _Parser(pattern, capturing)
        whole = parser.alternatives(frozenset())
        if parser.at < len(pattern):
            raise parser.fail("unexpected ')'")
        start = whole(0)
        self.groups = parser.groups
        self._program = parser.program
        self._looks_back = any(i.assertion for i in parser.program)
        self._start = (self._category(""), frozenset((start,)))
        self._moves: dict[tuple[_State, str], _Move] = {}
        self._size = 0  # of all states in it, in instructions

    def fullmatch(self, text: str) -> bool:
        """Whether the whole of ``text`` matches."""
        moves, state, ends = self._moves, self._start, False
        for start in range(0, len(text) + 1, _SECTION):
            checkpoint()
            end = start + _SECTION
            for char in text[start:end] if end <= len(text) else (*text[start:], ""):
                following = moves.get((state, char))
                state, ends = self._move(state, char) if following is None else following
                if char and not state[1]:
                    return False
        return ends

    def search(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """The first match in ``text`` from ``start`` on, and of those that begin there the longest:
        where it begins and ends. Takes time in proportion to the square of the text at worst."""
        moves, first = self._moves, self._start[1]
        for begin in range(start, len(text) + 1):
            checkpoint()
            state = self._category(text[begin - 1] if begin else ""), first
            longest = -1
            for at in range(begin, len(text) + 1):
                char = text[at] if at < len(text) else ""
                following = moves.get((state, char))
                state, ends = self._move(state, char) if following is None else following
                if ends:
                    longest = at
                if not state[1]:
                    break
            if longest >= 0:
                return begin, longest
        return None

    def _category(self, char: str) -> str:
        """The kind of character that assertions look at: "w" of a word, " " other, "" for none."""
        # Fewer categories are fewer states: only assertions tell them apart.
        if not self._looks_back or not char or char == "\n":
            return char if self._looks_back else " "
        return "w" if char in _WORD else " "

    def _move(self, state: _State, char: str) -> _Move:
        """The state after ``char``, or after the end of the text, and whether a match may end
        before it."""
        checkpoint()
        before, after = state[0], self._category(char)
        reached: set[int] = set()
        ends = False
        seen: set[int] = set()
        stack = list(state[1])
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            targets, test, assertion, _ = self._program[at]
            if at == 0:
                ends = True
            elif test is not None:
                if char and test(char):
                    reached.update(targets)
            elif assertion is None or assertion(before, after):
                stack.extend(targets)
        following = (after, frozenset(reached)), ends
        size = len(reached) + len(state[1])  # the state that it leads from may be kept by it alone
        # Texts of an attacker could make a state for each prefix: the automaton starts anew then.
        if len(self._moves) >= MAX_TRANSITIONS or self._size + size > MAX_STATES_SIZE:
            self._moves.clear()
            self._size = 0
        self._moves[state, char] = following
        self._size += size
        return following


class Groups(Regex):
    """A compiled pattern that tells where its groups match: ``spans`` follows all states at once,
    in the order of their preference, each with the ends of groups on its way (Pike, "The text
    editor sam", 1987)."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern, capturing=True)
        (self._first,) = self._start[1]

    def spans(self, text: str, start: int = 0) -> tuple[int, ...] | None:
        """Return the span of the leftmost match from ``start`` on, of several the one that the
        pattern prefers, and those of its groups, -1 for groups without a part in it; None if there
        is none. Takes time in proportion to the text and the pattern."""
        threads: dict[int, tuple[int, ...]] = {}
        seen: set[int] = set()
        found: tuple[int, ...] | None = None
        for at in range(start, len(text) + 1):
            checkpoint()
            # A match that begins later is not the leftmost.
            if found is None:
                ends = (at, -1) + (-1,) * (2 * self.groups)
                self._follow(threads, seen, self._first, ends, text, at)
            elif not threads:
                break
            current, threads, seen = threads, {}, set()
            for number, ends in current.items():
                if number == 0:
                    found = (ends[0], at, *ends[2:])
                    break  # what follows is preferred less
                targets, test, _, _ = self._program[number]
                if at < len(text) and test is not None and test(text[at]):
                    self._follow(threads, seen, targets[0], ends, text, at + 1)
        return found

    def _follow(
        self,
        threads: dict[int, tuple[int, ...]],
        seen: set[int],
        number: int,
        ends: tuple[int, ...],
        text: str,
        at: int,
    ) -> None:
        """Add what an instruction leads to before a character is consumed."""
        before = self._category(text[at - 1] if at else "")
        after = self._category(text[at] if at < len(text) else "")
        stack = [(number, ends)]
        while stack:
            number, ends = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            targets, test, assertion, slot = self._program[number]
            if number == 0 or test is not None:
                threads[number] = ends
            elif assertion is None or assertion(before, after):
                if slot is not None:
                    ends = (*ends[:slot], at, *ends[slot + 1 :])
                # The target on top is followed first, and so is the preferred one.
                stack += [(target, ends) for target in reversed(targets)]


# Moves are bytes, and 0 is for those that are not known.
_MOST_STATES = 255
_MOST_STATE_SIZE = 1000


class Automaton(Regex):
    """A pattern with what ``fullmatch`` has learned of it as tables, for compiled code.

    A row of ``moves`` is a state, the first of texts row 1. A character below 2**16 has the column
    ``columns`` says: those that no part of the pattern tells apart have the same, those that are
    new 0. A move is 1 where no text matches any more, and else the state that it leads to, plus 1;
    in column 0 it is 1 or 2 as the text ends without or with a match. A move of 0 is not known.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.columns = np.zeros(1 << 16, np.uint8)
        self.moves = np.zeros((_MOST_STATES + 1, 256), np.uint8)
        self._states = {self._start: 1}
        self._classes: dict[object, int] = {}
        self._tests = [instruction.test for instruction in self._program if instruction.test]

    def _column(self, char: str) -> int:
        """The column of a character; 0 if it has none, or for the end of the text."""
        if not char or ord(char) >= len(self.columns):
            return 0
        known = int(self.columns[ord(char)])
        if not known:
            passes = bytes([test(char) for test in self._tests])
            number = len(self._classes) + 1
            known = self._classes.setdefault((self._category(char), passes), number)
            if known < 256:
                self.columns[ord(char)] = known
        return known if known < 256 else 0

    def _move(self, state: _State, char: str) -> _Move:
        following, ends = move = super()._move(state, char)
        row, column = self._states.get(state), self._column(char)
        if row is None or (char and not column):
            return move
        if not char:
            self.moves[row, 0] = 2 if ends else 1
        elif not following[1]:
            self.moves[row, column] = 1
        elif len(following[1]) <= _MOST_STATE_SIZE:
            if len(self._states) < _MOST_STATES - 1:
                self._states.setdefault(following, len(self._states) + 1)
            # A state without a row makes the move 0: not known.
            self.moves[row, column] = self._states.get(following, -1) + 1
        return move
