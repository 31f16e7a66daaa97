"""The metadata of a GGUF file, converted to a model's metadata, which are texts, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.frontends.weights.gguf import Metadata


def metadata_texts(metadata: Metadata) -> dict[str, str]:
    """Return the metadata as texts: in JSON, except texts that would not be read as JSON."""
    return {key: _text(value) for key, value in metadata.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) and _parsed(value) is value else json.dumps(value)


def parsed_metadata(texts: Mapping[str, str]) -> dict[str, object]:
    """Return the values of metadata that ``load_gguf`` has put into a model."""
    return {key: _parsed(text) for key, text in texts.items()}


def _parsed(text: str) -> object:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
