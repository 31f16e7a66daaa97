"""Results of a request for text."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import NamedTuple, dataclass, field


class TokenLogprob(NamedTuple):
    """A token, its log probability, and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float
    alternatives: Sequence[tuple[int, float]]


@dataclass(eq=False)
class GeneratedText:
    """A text and its ``tokens``.

    ``finish`` says why it ended: "stop" (an end token, a stop text, or the end of a grammar) or
    "length". ``stop`` is the stop text, if there was one. ``score`` is the sum of the log
    probabilities, for beams divided by a power of the length; NaN if these were not requested."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    stop: str | None = None
    score: float = float("nan")
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Generation:
    """The ``texts`` of a request, the likeliest first if several were compared; the number of
    tokens of the prompt, and the number of generated ones, including those of dropped texts."""

    texts: Sequence[GeneratedText]
    prompt_tokens: int
    generated_tokens: int

    @property
    def text(self) -> str:
        """The first text."""
        return self.texts[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first text."""
        return self.texts[0].tokens


@dataclass(frozen=True, eq=False)
class TextPiece:
    """A piece of a text as it is generated. ``index`` is the index of the text in the request;
    ``tokens`` are the tokens of the piece, with their ``logprobs`` if requested. The last piece of
    a text has ``finish``, as in ``GeneratedText``."""

    text: str
    tokens: Sequence[int] = ()
    index: int = 0
    finish: str = ""
    logprobs: Sequence[TokenLogprob] = ()
