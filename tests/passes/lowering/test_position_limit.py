"""How many positions tables of decoders have."""

from __future__ import annotations

import zipfile

import pytest

import penstock as ps
from penstock.passes.lowering.join_steps import join_steps
from tests.stepping.test_exported_decoders import ARCHIVE
from tests.support.decoders import decoder_model


@pytest.mark.parametrize("kind", ["spelled", "counted", "onnx", "groups"])
def test_limit_is_the_size_of_the_table_of_positions(kind: str) -> None:
    _, steps = join_steps(ps.load(decoder_model(kind, places=77)).graph)
    assert steps.most == (75 if kind == "counted" else 77)  # behind an offset of two
    assert steps.table == ("cos" if kind == "groups" else "places")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "most"),
    [
        *[
            ("Bloom_script", None),
            ("T5_dynamo", None),
            ("Bart_dynamo", 160),
            ("Whisper_script", 160),
        ],
        *[
            ("GPTJ_script", 160),
            ("GPTJ_dynamo", 160),
            ("M2M100_script", 161),
            ("M2M100_dynamo", 161),
        ],
    ],
)
def test_limit_of_exported_decoders_is_that_of_their_configuration(
    name: str, most: int | None
) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        _, steps = join_steps(ps.load(archive.read(f"{name}.onnx")).graph)
    assert steps.most == most
