"""The text of a program while it is written: lines, and the step that each line runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.plan.plan import Step

# Where comments begin.
_COMMENT_COLUMN = 60


class ProgramText:
    """Lines of Python. ``steps[i]`` is the step that line i runs, if any; ``constants`` are values
    that names in the text stand for, the same in every arena."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[Step | None] = []
        self.constants: dict[str, Any] = {}
        self.depth = 0

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        text = "    " * self.depth + text
        self.lines.append(f"{text:<{_COMMENT_COLUMN}}  # {comment}" if comment else text)
        self.steps.append(step)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def printable(text: str) -> str:
    """``text`` without characters that could end a comment: names come from model files."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
