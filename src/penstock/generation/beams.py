"""Beam search: find the likeliest texts by continuing a few candidates side by side.

At each step all continuations of all beams are compared, and the best become beams. Those that end
are kept as hypotheses, with scores divided by a power of their length. As in ``generate`` of
Hugging Face's transformers, whose ``early_stopping`` the options have, the search ends when no beam
can beat the worst hypothesis that is kept (Freitag and Al-Onaizan,
https://arxiv.org/abs/1702.01806).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import InvalidInput, RunError
from penstock.core.records import NamedTuple
from penstock.generation.result import GeneratedText
from penstock.generation.sampling import (
    TokenChoice,
    TokenSampler,
    choice_of,
    largest_first,
    log_sum_exp,
)
from penstock.generation.text_request import TextSource, TextWriter

if TYPE_CHECKING:
    from penstock.generation.grammar import TokenGrammar
    from penstock.generation.options import GenerationOptions
    from penstock.host.stop_condition import StopCondition
    from penstock.stepping.sequence import Rows
    from penstock.stepping.stepper import StepSequence


class _Beam(NamedTuple):
    """A text so far: its tokens after the prompt with their alternatives, the sum of their log
    probabilities, the sequence that has read all tokens but the last, the grammar's state, and
    the sampler, which counts its tokens."""

    choices: tuple[TokenChoice, ...]
    score: float
    sequence: StepSequence
    grammar: TokenGrammar | None
    sampler: TokenSampler | None = None

    @property
    def tokens(self) -> list[int]:
        return [choice.token for choice in self.choices]


class BeamSearch:
    """A search for ``options.count`` texts among ``options.beams``. ``ended`` is called with the
    texts, or with an error."""

    def __init__(
        self,
        source: TextSource,
        prompt: Sequence[int],
        options: GenerationOptions,
        ended: Callable[[Sequence[GeneratedText], BaseException | None], object],
    ) -> None:
        self.source, self.prompt, self.options, self.ended = source, [*prompt], options, ended
        self._found: list[tuple[float, tuple[TokenChoice, ...], str]] = []
        self._beams: list[_Beam] = []
        self._logits: dict[int, np.ndarray] = {}
        self._ends = source.ends_of(options)
        self._over = False
        self._stop: StopCondition | None = None
        limits = [options.max_tokens, source.context and source.context - len(prompt)]
        self._most = min([n for n in limits if n is not None], default=None)
        if options.early_stopping == "never" and self._most is None:
            raise InvalidInput("early_stopping='never' compares texts of max_tokens: give it")

    def begin(
        self, sequence: StepSequence, grammar: TokenGrammar | None, stop: StopCondition | None
    ) -> None:
        """Compute the prompt."""
        self._stop = stop
        self._beams = [_Beam((), 0.0, sequence, grammar)]
        self._feed(0, self.prompt)

    def _feed(self, place: int, tokens: Sequence[int]) -> None:
        def stepped(outputs: Rows | None, error: BaseException | None) -> None:
            if self._over:
                self.close()  # also closes what was begun while another thread closed the others
                return
            try:
                if outputs is None:
                    raise error or RuntimeError("there are no outputs")
                self._logits[place] = outputs[self.source.logits][0, -1]
                if len(self._logits) == len(self._beams):
                    self._advance()
            except Exception as own:
                self._end(own)

        self._beams[place].sequence.feed(self.source.rows_of(tokens), 1, stepped, self._stop)

    def _advance(self) -> None:
        """Continue the best beams, once the logits of all are known."""
        logits = [self._logits[i] for i in range(len(self._beams))]
        if self._beams[0].sampler is None:
            sampler = self.source.sampler(self.options, logits[0].shape[-1])
            self._beams = [self._beams[0]._replace(sampler=sampler)]
        self._logits = {}
        chosen: list[tuple[float, int, int]] = []
        candidates = self._candidates(logits)
        if not candidates and not self._found:
            raise RunError(
                "no beam has a possible next token: logit_bias, min_tokens and a grammar forbid "
                "all of them"
            )
        length = len(self._beams[0].choices) + 1
        finish = "length" if length == self._most and self.options.forced_end_ids else "stop"
        for rank, (score, place, token) in enumerate(candidates):
            beam = self._beams[place]
            # An ending only counts as a hypothesis if it ranks among the beams.
            counts = rank < self.options.beams
            if token in self._ends:
                if counts:
                    self._keep(beam.choices, score, length, finish)
            elif _completes(beam.grammar, token):
                if counts:
                    choices = (*beam.choices, self._choice(token, logits[place]))
                    self._keep(choices, score, length, "stop")
            else:
                chosen.append((score, place, token))
            if len(chosen) == self.options.beams:
                break
        self._continue(chosen, logits)
        finished = not self._beams or length == self._most
        if finished:
            for beam in self._beams:
                self._keep(beam.choices, beam.score, length, "length")
        if finished or (len(self._found) == self.options.beams and self._is_best(length)):
            self._end(None)
            return
        for place, beam in enumerate(self._beams):
            self._feed(place, beam.tokens[-1:])

    def _is_best(self, length: int) -> bool:
        """Whether the search ends with the texts that are kept, as many as beams, before those of
        ``length`` tokens go on."""
        if self.options.early_stopping is True:
            return True
        if self.options.early_stopping == "never" and self.options.length_penalty > 0:
            assert self._most is not None
            length = self._most
        best = max([beam.score for beam in self._beams], default=-inf)
        return self._scored(best, length) <= self._found[-1][0]

    def _scored(self, score: float, length: int) -> float:
        """Return the score by which texts of ``length`` tokens are compared."""
        return float(score / (length + self.source.forced) ** self.options.length_penalty)

    def _candidates(self, logits: Sequence[np.ndarray]) -> list[tuple[float, int, int]]:
        """Return the best continuations, of each beam one more than tokens that end it."""
        count, candidates = (1 + max(len(self._ends), 1)) * self.options.beams, []
        for place, (beam, numbers) in enumerate(zip(self._beams, logits, strict=True)):
            assert beam.sampler is not None
            mask = None if beam.grammar is None else beam.grammar.mask()
            text = [*self.prompt, *beam.tokens]
            # A token forbidden in one beam must not favour the other tokens of that beam.
            logs = numbers - np.float32(log_sum_exp(numbers))
            adjusted = beam.sampler.adjusted(logs, text, len(beam.choices), mask)
            for token in largest_first(adjusted, min(count, adjusted.size)):
                number = float(adjusted[token])
                if number > -inf:
                    candidates.append((beam.score + number, place, token))
        return sorted(candidates, key=lambda own: -own[0])[:count]

    def _continue(
        self, chosen: Sequence[tuple[float, int, int]], logits: Sequence[np.ndarray]
    ) -> None:
        """Replace the beams. The first continuation of an old beam takes over its sequence."""
        old, beams = self._beams, []
        taken: set[int] = set()
        for score, place, token in chosen:
            beam = old[place]
            sequence, sampler, grammar = beam.sequence, beam.sampler, beam.grammar
            if place in taken:
                sequence, sampler = sequence.fork(), sampler and sampler.fork()
            if grammar is not None:
                grammar = grammar.copy()
                grammar.accept(token)
            taken.add(place)
            choice = self._choice(token, logits[place])
            beams.append(_Beam((*beam.choices, choice), score, sequence, grammar, sampler))
        for place, beam in enumerate(old):
            if place not in taken:
                beam.sequence.close()
        self._beams = beams

    def _choice(self, token: int, logits: np.ndarray) -> TokenChoice:
        """Return a token with its log probability and alternatives, if these are requested."""
        if self.options.logprobs is None:
            return TokenChoice(token, nan, [])
        return choice_of(token, logits, self.options.logprobs)

    def _keep(
        self, choices: tuple[TokenChoice, ...], score: float, length: int, finish: str
    ) -> None:
        """Keep a hypothesis if it is among the best."""
        hypothesis = self._scored(score, length), choices, finish
        self._found = sorted([*self._found, hypothesis], key=lambda own: -own[0])
        del self._found[self.options.beams :]

    def close(self) -> None:
        """Release the states of all beams, and stop the search."""
        self._over = True
        for beam in self._beams:
            beam.sequence.close()

    def _end(self, error: BaseException | None) -> None:
        self.close()
        texts = [self._text(*hypothesis) for hypothesis in self._found[: self.options.count]]
        self.ended(texts, error)

    def _text(self, score: float, choices: tuple[TokenChoice, ...], finish: str) -> GeneratedText:
        writer = TextWriter(self.source, self.prompt, self.options, 0)
        for choice in choices:
            writer.take(choice)
            if writer.result.finish:
                break
        result = writer.finished(finish)
        result.score = score
        return result


def _completes(grammar: TokenGrammar | None, token: int) -> bool:
    """Whether the grammar allows nothing after a token."""
    if grammar is None:
        return False
    behind = grammar.copy()
    behind.accept(token)
    return behind.is_finished
