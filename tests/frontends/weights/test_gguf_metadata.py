"""Metadata of a GGUF file, in the texts of a model, are those of the file."""

from __future__ import annotations

import penstock as ps
from penstock.frontends.weights.gguf_metadata import parsed_metadata
from tests.frontends.weights.test_decoder import CASES


def test_parsed_metadata_are_those_of_the_file() -> None:
    writer = CASES["llama"].gguf()
    values = {"a": "text", "b": "7", "c": 7, "d": ["7", "x"], "e": True, "f": '"quoted"', "g": ""}
    writer.metadata |= values
    parsed = parsed_metadata(ps.load(writer.bytes()).metadata)
    assert {key: parsed[key] for key in values} == values
