"""The tokens that begin a text of an encoder-decoder, and those that it never contains, as read
from the model's ``generation_config.json`` or, without it, ``config.json``.

Texts of multilingual models begin with a token for the language. If the caller does not give one
for Whisper, the likeliest language token after the first token is used, as its authors do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.records import NamedTuple
from penstock.generation.model_defaults import generation_settings
from penstock.generation.tokenizer import read_json

if TYPE_CHECKING:
    import numpy as np

_FILES = "generation_config.json", "config.json"
_TASK = "transcribe"


class DecoderStart(NamedTuple):
    """The ``tokens`` that texts begin with; the tokens that end them, ``ends``, that they never
    contain, ``suppressed``, and that may not come first, ``not_first``. If there are ``languages``,
    the likeliest of these tokens follows the first one. The last ``forced`` tokens count as tokens
    of the text for its length. Without ``tokens``, each request gives the first tokens of its text.
    """

    tokens: Sequence[int]
    ends: Sequence[int] = ()
    suppressed: Sequence[int] = ()
    not_first: Sequence[int] = ()
    languages: Sequence[int] = ()
    forced: int = 0

    @classmethod
    def of(cls, folders: Sequence[Path]) -> DecoderStart:
        """Read the start from the files of some folders; earlier folders take precedence."""
        every: dict[str, object] = {}
        for path in [folder / name for folder in folders for name in _FILES]:
            every = {**read_json(path), **every}
        first = _ids(every.get("decoder_start_token_id")) or _ids(every.get("bos_token_id"))
        settings, _ = generation_settings(folders)
        languages = _ids(_values(settings.get("lang_to_id")))
        follow = _ids(settings.get("forced_bos_token_id"))
        plain = _ids(settings.get("no_timestamps_token_id"))
        # Older files list tokens by position, newer ones map tasks to tokens.
        if languages and settings.get("is_multilingual", True):
            tasks = settings.get("task_to_id")
            task = _ids(tasks.get(_TASK)) if isinstance(tasks, Mapping) else []
            follow = [*task, *plain]
        else:
            languages = []
            forced = _values(settings.get("forced_decoder_ids"))
            follow = follow or [n for pair in forced for n in _ids(pair)[1:]] or plain
        return cls(
            [*first[:1], *follow],
            _ids(every.get("eos_token_id")),
            _ids(settings.get("suppress_tokens")),
            _ids(settings.get("begin_suppress_tokens")),
            languages,
            len(follow) if follow == _ids(settings.get("forced_bos_token_id")) else 0,
        )

    def in_language(self, scores: np.ndarray) -> list[int]:
        """Return the tokens that a text begins with, given the logits after the first one."""
        first, *others = self.tokens
        # A table may list more tokens than the model has.
        languages = [token for token in self.languages if token < scores.size]
        return [first, languages[int(scores[languages].argmax())], *others]


def _ids(value: object) -> list[int]:
    """Return the tokens of an entry, a number or a list of numbers."""
    numbers = value if isinstance(value, list) else [value]
    return [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]


def _values(entry: object) -> list[object]:
    if isinstance(entry, Mapping):
        return [*entry.values()]
    return entry if isinstance(entry, list) else []
