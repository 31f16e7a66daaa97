"""Options of a request for text: its length, the sampling of tokens, and its form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from penstock.core.errors import InvalidInput, shortened, wrong_type
from penstock.core.records import dataclass, replace

GREEDY_BELOW = 1e-5
"""temperatures below this count as 0: quotients of logits would exceed the range of float32"""
LARGEST_BIAS = 1e38
"""sums of a larger bias and a logit may be infinite in float32"""
LEAST_REPETITION_PENALTY = 0.01
"""quotients of logits and a smaller penalty could exceed the range of float32"""
MOST_STOP_LETTERS = 1 << 14
"""letters of all stop texts of a request, which are searched for after each token"""
MOST_TOKENS = 2**31 - 1
MOST_LOGPROBS = 1000
MOST_TEXTS = 1024
"""texts of one request, and beams of a search"""
PRECEDENCE = {"max_tokens": "max_length", "min_tokens": "min_length"}
"""options in whose presence others have no effect"""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of text generation. The defaults choose the likeliest token at each step.

    Every value is checked on creation: a wrong type raises ``TypeError``, a value out of its bounds
    ``InvalidInput``. Sequences become tuples, and a schema that is a mapping becomes text.
    """

    max_tokens: int | None = None
    """the most generated tokens; None for as many as the model has positions"""
    min_tokens: int = 0
    """the least generated tokens, before which no token ends the text"""
    max_length: int | None = None
    """the most tokens of the prompt and the text together, unless ``max_tokens`` is given; of an
    encoder-decoder, of what its decoder reads and writes"""
    min_length: int = 0
    """the least tokens of these together, before which no token ends the text"""
    temperature: float = 0.0
    """the divisor of logits before a token is drawn; 0 chooses the likeliest token"""
    top_k: int | None = None
    """draw from this many of the likeliest tokens; None or 0 for all"""
    top_p: float = 1.0
    """draw from the fewest tokens whose probabilities sum to this"""
    min_p: float = 0.0
    """draw from tokens whose probability is at least this fraction of the likeliest one's"""
    repetition_penalty: float = 1.0
    """positive logits of tokens of the prompt and the text are divided by it, others multiplied"""
    presence_penalty: float = 0.0
    """subtracted from the logits of tokens of the text"""
    frequency_penalty: float = 0.0
    """subtracted from the logits of tokens of the text, once for each occurrence"""
    logit_bias: Mapping[int, float] | None = None
    """added to the logits of single tokens; minus infinity forbids one"""
    no_repeat_ngram_size: int = 0
    """this many tokens in a row, of the prompt or the text, never come again; 0 for no limit"""
    encoder_no_repeat_ngram_size: int = 0
    """the text never has this many tokens in a row as its prompt has; 0 for no limit"""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """sequences of tokens that the text never has"""
    seed: int | None = None
    """the seed of random numbers; None for a different one in each request"""
    stop: str | Sequence[str] = ()
    """the text ends before one of these"""
    stop_ids: Sequence[int] = ()
    """tokens that end the text, beside those of the tokenizer"""
    ignore_end: bool = False
    """continue after tokens that end the text, up to ``max_tokens``"""
    forced_end_ids: Sequence[int] = ()
    """tokens of which one ends a text that reaches its maximum, unless it has a grammar"""
    logprobs: int | None = None
    """return the log probability of each token, and of this many of the likeliest ones"""
    grammar: str | None = None
    """a Lark grammar of the text"""
    json_schema: str | Mapping[str, object] | None = None
    """a JSON schema of the text"""
    regex: str | None = None
    """a regular expression that the text matches"""
    decoder_prompt: str | Sequence[int] | None = None
    """the text or tokens that the decoder of an encoder-decoder starts with; by default those in
    the files of the model"""
    beams: int = 1
    """the number of texts that a beam search keeps; 1 for no search"""
    length_penalty: float = 1.0
    """the power of the length that divides the score of a beam; above 0, long texts gain"""
    early_stopping: bool | str = False
    """end a beam search once as many texts as beams have ended (True); once no beam can beat them
    at its length (False), or at the maximum (``"never"``)"""
    best_of: int = 1
    """draw this many texts, at least ``count``, and return the likeliest ``count``"""
    count: int = 1
    """the number of texts for one prompt"""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        if not isinstance(self.ignore_end, bool):
            raise wrong_type("ignore_end", self.ignore_end, "True or False")
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _texts("stop", texts))
        for name in ("stop_ids", "forced_end_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        object.__setattr__(self, "bad_words_ids", _words(self.bad_words_ids))
        if not isinstance(self.decoder_prompt, str | None):
            tokens = _token_ids("decoder_prompt", self.decoder_prompt)
            object.__setattr__(self, "decoder_prompt", tokens)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        for name in constraints:
            if not isinstance(getattr(self, name), str):
                raise wrong_type(name, getattr(self, name), "a text")
        if len(constraints) > 1:
            raise InvalidInput(f"{' and '.join(constraints)}: one of them is possible at a time")

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 100)
        _number("presence_penalty", self.presence_penalty, -100, 100)
        _number("frequency_penalty", self.frequency_penalty, -100, 100)
        _number("length_penalty", self.length_penalty, -100, 100)

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MOST_TOKENS)
        if self.max_length is not None:
            _whole("max_length", self.max_length, 1, MOST_TOKENS)
        for name in ("min_tokens", "min_length", *_NGRAMS):
            _whole(name, getattr(self, name), 0, MOST_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if self.top_k is not None:
            _whole("top_k", self.top_k, 0, MOST_TOKENS)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        for name in ("beams", "best_of", "count"):
            _whole(name, getattr(self, name), 1, MOST_TEXTS)
        if self.early_stopping not in (True, False, "never"):
            given = shortened(repr(self.early_stopping))
            raise InvalidInput(f"early_stopping={given}: True, False or 'never' is needed")
        if self.beams > 1:
            self._check_beams()
        elif self.best_of == 1:
            object.__setattr__(self, "best_of", self.count)
        elif self.best_of < self.count:
            raise InvalidInput(f"best_of={self.best_of} is less than count={self.count}")

    def _check_beams(self) -> None:
        if not self.greedy:
            raise InvalidInput(
                f"beams={self.beams} needs temperature=0, not {self.temperature}: a beam search "
                "draws nothing"
            )
        if self.best_of > 1:
            raise InvalidInput(f"beams={self.beams} and best_of={self.best_of}: one of them is 1")
        if self.count > self.beams:
            raise InvalidInput(f"count={self.count} is more than beams={self.beams}")

    @property
    def forbids_repeats(self) -> bool:
        """Whether tokens may be forbidden since they repeat parts of texts, or end bad words."""
        return bool(
            self.no_repeat_ngram_size or self.encoder_no_repeat_ngram_size or self.bad_words_ids
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen at each step."""
        return self.temperature < GREEDY_BELOW

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The option that constrains the form of the text, one of ``CONSTRAINTS``; its value."""
        for name in CONSTRAINTS:
            if (text := getattr(self, name)) is not None:
                return name, text
        return None

    def behind(self, prompt: int, context: int | None = None) -> GenerationOptions:
        """Return the options with ``max_tokens`` and ``min_tokens`` of a text behind ``prompt``
        tokens, where both have at most ``context`` tokens. Raises ``InvalidInput`` for a longer
        prompt than ``max_length``."""
        limits = [self.max_tokens, None if context is None else context - prompt]
        if self.max_tokens is None and self.max_length is not None:
            if prompt >= self.max_length:
                raise InvalidInput(
                    f"a prompt of {prompt} tokens is too long: with its text it may have "
                    f"max_length={self.max_length}; give max_tokens"
                )
            limits.append(self.max_length - prompt)
        most = min([n for n in limits if n is not None], default=None)
        least = max(self.min_tokens, self.min_length - prompt)
        # A text that reaches its maximum ends, however short it is.
        least = least if most is None else min(least, most)
        if (most, least) == (self.max_tokens, self.min_tokens):
            return self
        return replace(self, max_tokens=most, min_tokens=least)


def request_options(
    given: Mapping[str, object], defaults: Mapping[str, object]
) -> GenerationOptions:
    """Return the options of a request: those that are given, and else the defaults.

    Args:
        given: Fields of ``GenerationOptions``.
        defaults: Such fields; those that contradict given ones have no effect.
    """
    usual = {name: value for name, value in defaults.items() if name not in given}
    own = GenerationOptions(**given)  # type: ignore[arg-type]
    if "beams" in usual and (
        ("temperature" in given and not own.greedy) or own.best_of > own.count
    ):
        # Texts that are drawn: a search draws nothing.
        del usual["beams"]
    for name, other in PRECEDENCE.items():
        if name in given:
            usual.pop(other, None)
    # The file cannot know how short a text a request wants.
    least = usual.get("min_tokens")
    if own.max_tokens is not None and isinstance(least, int):
        usual["min_tokens"] = min(least, own.max_tokens)
    return GenerationOptions(**{**usual, **given})  # type: ignore[arg-type]


_NGRAMS = "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"
CONSTRAINTS = ("grammar", "json_schema", "regex")
"""options that constrain the form of a text"""


def _number(option: str, value: object, least: float, most: float, above: bool = False) -> None:
    bounds = f"a number {'above' if above else 'from'} {least} {'up ' if above else ''}to {most}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(option, value, bounds)
    number = _float(value)
    # Comparisons with NaN are false.
    if not (least < number if above else least <= number) or not number <= most:
        raise InvalidInput(f"{option}={shortened(repr(value))}: {bounds} is needed")


def _float(value: Real) -> float:
    """Return the float of a number, infinite for an integer beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _whole(option: str, value: object, least: int, most: int) -> None:
    bounds = f"a whole number from {least} to {most:,}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(option, value, bounds)
    if not least <= int(value) <= most:
        raise InvalidInput(f"{option}={shortened(repr(value))}: {bounds} is needed")


def _texts(option: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise wrong_type(option, value, "a text or a sequence of texts")
    if "" in value:
        raise InvalidInput(f"{option}={shortened(repr(value))}: an empty text would end all others")
    letters = sum(map(len, value))
    if letters > MOST_STOP_LETTERS:
        raise InvalidInput(
            f"{option} has {letters:,} letters, more than the maximum of {MOST_STOP_LETTERS:,}"
        )
    return tuple(value)


def _token_ids(option: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong_type(option, value, "a sequence of tokens")
    for token in value:
        _whole(option, token, 0, MOST_TOKENS)
    return tuple([int(token) for token in value])


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong_type("bad_words_ids", value, "a sequence of sequences of tokens")
    words = tuple([_token_ids("bad_words_ids", word) for word in value])
    if () in words:
        raise InvalidInput("bad_words_ids has a word without tokens: remove it")
    return words


def _biases(value: object) -> dict[int, float]:
    needed = "a mapping of tokens to numbers"
    if not isinstance(value, Mapping):
        raise wrong_type("logit_bias", value, needed)
    for token, bias in value.items():
        _whole("logit_bias", token, 0, MOST_TOKENS)
        if isinstance(bias, bool) or not isinstance(bias, Real):
            raise wrong_type(f"logit_bias[{token}]", bias, "a number")
        if math.isnan(_float(bias)) or _float(bias) > LARGEST_BIAS:
            raise InvalidInput(
                f"logit_bias[{token}]={shortened(repr(bias))}: a number up to {LARGEST_BIAS:g}, "
                "or minus infinity, is needed"
            )
    # Smaller biases are minus infinity in float32.
    least = -LARGEST_BIAS
    return {int(n): -math.inf if bias < least else _float(bias) for n, bias in value.items()}


def _schema_text(value: Mapping[str, object]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"json_schema is not JSON: {error}") from error
