"""Declarations of the library are those that its bindings were made from."""

from __future__ import annotations

from penstock.backends.onednn import declarations


def test_generated_bindings_match_the_declarations(tmp_path):
    assert declarations.GENERATED.read_text() == declarations.generate(tmp_path), (
        "run python -m penstock.backends.onednn.declarations"
    )
