"""Conversion of text to tokens and back, also token by token while a text is generated.

::

    tokens   push()    ┌────────────┐  pieces of text   push()    ┌───────────┐  text to give
    ───────────────────┤ TextStream ├─────────────────────────────┤ StopTexts ├──────────────
                       └────────────┘                             └───────────┘
               holds parts of letters                  holds what may begin a stop text
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidInput, InvalidModel, extra_needed, quoted, wrong_type
from penstock.core.records import cached_property

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not a letter
# Replacements at the end of a text that cannot be an incomplete letter: a letter has four bytes at
# most, but decoders of single bytes take one before the letter with it.
_MOST_REPLACEMENTS = 12
_HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
_LONGEST_WINDOW = 64  # tokens without text that are decoded again with each further one


class TextTokenizer:
    """Divides texts into tokens, and knows which of them begin and end a text.

    Args:
        tokenizer: One of Hugging Face's package; its truncation and padding are not used.
        start_id: The token that texts begin with.
        end_id: The token that templates write after a text.
        end_ids: Further tokens that end a text.
        chat_templates: Jinja templates that render messages as text, by name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start_id: int | None = None,
        end_id: int | None = None,
        end_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())  # leave the caller's unchanged
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.start_id = start_id
        """the token that texts begin with, or None"""
        self.end_id = end_id
        """the token that templates write after a text, or None"""
        self.end_ids = tuple(sorted({*end_ids, *([] if end_id is None else [end_id])}))
        """the tokens that end a text"""
        self.chat_templates = dict(chat_templates or {})
        """Jinja templates that render messages as text, by name"""
        self.is_of_bytes = _is_of_bytes(tokenizer)
        """whether the text of tokens is that of their concatenated bytes"""
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(i for i, token in added if token.special)

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read a ``tokenizer.json``, or a folder with one and perhaps ``tokenizer_config.json``,
        ``special_tokens_map.json``, ``generation_config.json``, ``config.json``,
        ``genai_config.json`` and ``chat_template.jinja``. For a single file, the other files are
        not read. Raises ``InvalidModel`` if a file is not in its format.

        Args:
            path: The file or the folder.
        """
        path = Path(path)
        if not path.is_dir():
            return cls(_read_tokenizer(path))
        if not (path / "tokenizer.json").is_file():
            raise InvalidModel(f"{path} has no tokenizer.json")
        tokenizer = _read_tokenizer(path / "tokenizer.json")
        settings = read_json(path / "tokenizer_config.json")
        special = {**read_json(path / "special_tokens_map.json"), **settings}
        ends: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ends += _ids_of(read_json(path / name).get("eos_token_id"))
        of_genai = read_json(path / "genai_config.json").get("model")
        ends += _ids_of(of_genai.get("eos_token_id")) if isinstance(of_genai, dict) else []
        return cls(
            tokenizer,
            start_id=_token_of(tokenizer, special.get("bos_token")),
            end_id=_token_of(tokenizer, special.get("eos_token")),
            end_ids=ends,
            chat_templates=_read_templates(path, settings),
        )

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, object]) -> TextTokenizer:
        """Return the tokenizer in the metadata of a GGUF file. Raises ``InvalidModel`` if there is
        none, or one of an unknown kind.

        Args:
            metadata: Its entries by name, such as ``tokenizer.ggml.tokens``.
        """
        from penstock.generation import gguf_vocabulary as gguf

        return cls(
            gguf.gguf_tokenizer(metadata),
            start_id=gguf.gguf_start_id(metadata),
            end_id=gguf.gguf_end_id(metadata),
            end_ids=gguf.gguf_end_ids(metadata),
            chat_templates=gguf.gguf_chat_templates(metadata),
        )

    @property
    def chat_template(self) -> str | None:
        """The template that renders messages as text, or None."""
        return self.chat_templates.get("default")

    @cached_property
    def size(self) -> int:
        """One more than the largest token, including added ones. Vocabularies may have gaps."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: Any text.
            add_special: Whether to add the tokens that the tokenizer puts before and after a text;
                the text of a chat template has them already.
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a string")
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special).ids
        except TypeError as error:
            raise InvalidInput(f"the text has half of a surrogate pair ({error})") from error
        except BaseException as error:
            if not is_of_rust(error):
                raise
            raise InvalidInput(
                f"the tokenizer cannot divide {quoted(text)}: {error}; the tokenizer.json may be "
                "damaged, or not the one of the model"
            ) from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of some tokens; tokens that the tokenizer does not have are skipped.

        Args:
            ids: The tokens.
            skip_special: Whether to skip special tokens.
        """
        try:
            return self.tokenizer.decode([*ids], skip_special_tokens=skip_special)
        except BaseException as error:
            if not is_of_rust(error):
                raise
            raise InvalidInput(
                f"the tokenizer cannot join tokens: {error}; the tokenizer.json may be damaged"
            ) from error

    def text_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None if there is no such token.

        Args:
            token: Its number.
        """
        return self.tokenizer.id_to_token(token)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token if ``is_of_bytes``; b"" for a special token.

        Args:
            token: Its number.
        """
        text = None if token in self._special else self.tokenizer.id_to_token(token)
        if text is None:
            return b""
        spelled = _bytes_by_letter()
        try:
            return bytes([spelled[letter] for letter in text])
        except KeyError:  # an added token
            return text.encode()


def _is_of_bytes(tokenizer: Tokenizer) -> bool:
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.decoder, ByteLevel)


@cache
def _bytes_by_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for: printable bytes stand
    for themselves, others for the letters from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printed else next(others)): byte for byte in range(256)}


def _read_tokenizer(path: Path) -> Tokenizer:
    with extra_needed("a tokenizer needs tokenizers", "generate"):
        from tokenizers import Tokenizer
    text = _read_text(path)
    if '"merges"' in text and _HAS_PREFIX.search(text):
        _check_prefixes(path)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:
        if not is_of_rust(error):
            raise
        raise InvalidModel(f"{path} is not a tokenizer: {error}") from error


def _check_prefixes(path: Path) -> None:
    """Raise ``InvalidModel`` if the right part of a merge lacks the prefix of parts within a word:
    tokenizers cuts its length off whatever it is, and ends the process if that is within a letter.
    """
    model = read_json(path).get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not str(pair[1]).startswith(prefix):
            raise InvalidModel(
                f"{path} is not a tokenizer: its merge {quoted(str(merge))} is no pair whose "
                f"second part begins with the continuing_subword_prefix {quoted(prefix)}"
            )


def is_of_rust(error: BaseException) -> bool:
    """Whether a package in Rust may have raised it, whose panics are no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{path} is not text in UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} is not a JSON object")
    return content


def _read_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Return chat templates by name: those of separate files, or else of the settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": _read_text(file)}
    templates = settings.get("chat_template")
    if isinstance(templates, str):
        return {"default": templates}
    entries = templates if isinstance(templates, list) else []
    pairs = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, Mapping)]
    return {n: text for n, text in pairs if isinstance(n, str) and isinstance(text, str)}


def _token_of(tokenizer: Tokenizer, value: object) -> int | None:
    """Return the token that a setting names, by its text or by an object with it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    try:
        return tokenizer.token_to_id(text) if isinstance(text, str) else None
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def _ids_of(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]


class TextStream:
    """Converts tokens that come one by one to text; the pieces joined are the text of all.

    ``before`` are tokens that precede the text, such as the last ones of a prompt: decoders leave
    out a space at the beginning of a text, but not within one.
    """

    def __init__(self, tokenizer: TextTokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")
        # For tokenizers that are not of bytes: the tokens to decode, how many of them there were
        # when their text last ended with a whole letter, and the letters already returned.
        self._window = [*before]
        self._whole = len(self._window)
        self._given = 0 if tokenizer.is_of_bytes else len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """Take a token and return the text that is now certain, which may be empty."""
        if self._tokenizer.is_of_bytes:
            return self._letters.decode(self._tokenizer.bytes_of(token))
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        if len(text) - len(certain) > _MOST_REPLACEMENTS:
            certain = text  # the replacements are not the beginning of a letter
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(certain) == len(text) and (piece or len(self._window) > _LONGEST_WINDOW):
            # The text of a token depends on the preceding one, so keep that one.
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._given = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the rest of the text, with a replacement for an incomplete letter."""
        if self._tokenizer.is_of_bytes:
            return self._letters.decode(b"", final=True)
        return self._tokenizer.decode(self._window)[self._given :]


class StopTexts:
    """Cuts a text that comes in pieces before the first complete stop text in it.

    A piece is held back as long as it may be the beginning of a stop text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found: str | None = None
        """the stop text at which the text was cut"""

    def push(self, piece: str) -> str:
        """Take a piece and return the text that is now certain; "" after a stop text."""
        if self.found is not None:
            return ""
        if not self._texts:
            return piece
        text = self._held + piece
        hits = [(text.find(stop), stop) for stop in self._texts]
        ends = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
