"""The metadata of a GGUF file as texts, in which a model has them, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.frontends.weights.gguf import Metadata


def metadata_texts(metadata: Metadata) -> dict[str, str]:
    """The metadata as texts: what is no text as JSON, and so a text that reads as such."""
    return {key: _text(value) for key, value in metadata.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) and _parsed(value) is value else json.dumps(value)


def parsed_metadata(texts: Mapping[str, str]) -> dict[str, object]:
    """The values of metadata that ``load_gguf`` has put into a model."""
    return {key: _parsed(text) for key, text in texts.items()}


def _parsed(text: str) -> object:
    """The value of a text in JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
