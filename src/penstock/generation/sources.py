"""A generator's settings besides the model: tokenizer, names of ports, context length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidInput, extra_needed
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.generation.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from penstock.stepping.stepper import Stepper

_CONTEXTS = ("max_target_positions", "max_position_embeddings", "n_positions", "context_length")
_HIDDEN = "hidden"  # in names of outputs of encoders
_SETTINGS = "generation_config.json", "genai_config.json", "config.json"


def interface_of(stepper: Stepper) -> tuple[str, np.dtype, str]:
    """Return the name and dtype of the input of tokens, and the name of the output of logits."""
    rows, outputs = stepper.rows, [*stepper.outputs]
    logits = "logits" if "logits" in outputs else outputs[0]
    types = [*rows.values()]
    if (
        len(types) != 1
        or not isinstance(types[0], TensorType)
        or types[0].dtype is None
        or types[0].dtype.kind != "i"
    ):
        raise InvalidInput(f"the model generates no text: its rows are {[*rows]}, not tokens alone")
    if _HIDDEN in logits.lower():
        raise InvalidInput(
            f"the model generates no text: it returns {logits!r}, not logits of tokens; give a "
            "decoder, or the folder of an encoder-decoder"
        )
    return next(iter(rows)), types[0].dtype, logits


def vocabulary_size_of(stepper: Stepper, logits: str) -> int | None:
    """Return the size of the last axis of ``logits``, or None if it is not fixed."""
    types = {port.name: port.type for port in stepper._engine.runner.session.outputs}
    shape = getattr(types[logits], "shape", None)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def tokenizer_of(
    given: str | Path | Tokenizer | TextTokenizer | None,
    place: str | Path | None,
    metadata: Mapping[str, str],
) -> TextTokenizer:
    """Return the given tokenizer, or the one in the ``metadata`` of the model, or in a file beside
    it."""
    if isinstance(given, TextTokenizer):
        return given
    if isinstance(given, str | Path):
        return TextTokenizer.load(given)
    if given is not None:
        return TextTokenizer(given)
    if "tokenizer.ggml.model" in metadata:
        from penstock.frontends.weights.gguf_metadata import parsed_metadata

        return TextTokenizer.of_gguf(parsed_metadata(metadata))
    for folder in folders_of(place):
        if (folder / "tokenizer.json").exists():
            return TextTokenizer.load(folder)
    raise InvalidInput(
        "the model has no tokenizer, and there is no tokenizer.json beside it: give tokenizer="
    )


def folders_of(place: str | Path | None) -> list[Path]:
    """Return the folders of files beside a model: its own, and the one around a folder ``onnx``."""
    if place is None:
        return []
    folder = Path(place) if Path(place).is_dir() else Path(place).parent
    return [folder, folder.parent] if folder.name == "onnx" else [folder]


def has_settings(folders: Sequence[Path]) -> bool:
    """Whether one of the folders has a file with settings of texts."""
    return any(file.is_file() for folder in folders for file in map(folder.joinpath, _SETTINGS))


def numbers_tokenizer() -> TextTokenizer:
    """Return a tokenizer for a model without one: prompts are tokens, and texts are not used."""
    with extra_needed("a tokenizer needs tokenizers", "generate"):
        from tokenizers import Tokenizer, models
    return TextTokenizer(Tokenizer(models.WordLevel({"0": 0}, unk_token="0")))


class ContextLimit(NamedTuple):
    """The ``most`` tokens of a text, and ``where`` this limit is from."""

    most: int
    where: str


def context_of(
    metadata: Mapping[str, str], place: str | Path | None, names: Sequence[str] = _CONTEXTS
) -> ContextLimit | None:
    """Return the most tokens of a text if the model's metadata or a file beside it has one of the
    settings ``names``, else None."""
    key = f"{metadata.get('general.architecture')}.context_length"
    settings: list[tuple[object, str]] = [(metadata.get(key), f"{key} of the model's metadata")]
    for text, file in _configurations(metadata, place):
        name, value = _setting(text, names)
        settings.append((value, f"{name} in {file}"))
    known = [(int(x), at) for x, at in settings if isinstance(x, int | str) and str(x).isdecimal()]
    limits = [ContextLimit(n, where) for n, where in known if n > 1]
    return min(limits, key=lambda limit: limit.most, default=None)


def _configurations(
    metadata: Mapping[str, str], place: str | Path | None
) -> Iterator[tuple[str, str]]:
    """Yield the texts of files with a model's sizes, and their names."""
    if "config.json" in metadata:
        yield metadata["config.json"], "the model's config.json"
        return
    for folder in folders_of(place):
        for name in ("config.json", "genai_config.json"):
            with suppress(OSError, UnicodeDecodeError):
                yield (folder / name).read_text(encoding="utf-8"), str(folder / name)


def _setting(text: str, names: Sequence[str]) -> tuple[str, object]:
    """Return the first of some settings in a JSON file, in its outer object or one within."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return "", None
    inner = [settings, *(settings.values() if isinstance(settings, dict) else ())]
    for own in inner:
        for name in names:
            if isinstance(own, dict) and isinstance(own.get(name), int):
                return name, own[name]
    return "", None
