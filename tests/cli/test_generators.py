"""Generators as the command line describes them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.generators import GeneratorOptions, refuse_given, text_options
from tests.support.triton import save


def test_model_that_is_no_decoder_is_refused(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[2] x) => (float[2] y) { y = Neg(x) }")
    made = GeneratorOptions(None, None, {})
    with pytest.raises(ps.PenstockError, match=r"no state that is fed back|generates no text"):
        made.read(path, {})


def test_limits_hold_for_the_model(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[2] x) => (float[2] y) { z = Neg(x) y = Sin(z) }")
    with pytest.raises(ps.InvalidModel, match="max_nodes"):
        GeneratorOptions(None, None, {}).read(path, {"limits": ps.Limits(max_nodes=1)})


def test_options_that_are_given_are_refused_by_their_flags():
    @click.command
    @click.option("--shape", "shapes")
    def command(shapes: str | None) -> None:
        refuse_given("shapes", "for others")

    assert CliRunner().invoke(command, []).exit_code == 0
    result = CliRunner().invoke(command, ["--shape", "1"])
    assert "--shape is for others" in result.output


def test_text_options_have_no_temperature_unless_it_is_given():
    """Files beside a model may have one, which a default here would replace."""

    @click.command
    @text_options
    def command(**options: object) -> None:
        click.echo(repr(options))

    output = CliRunner().invoke(command, ["--seed", "3"]).output
    assert "'temperature': None" in output and "'seed': 3" in output
    assert "'temperature': 0.2" in CliRunner().invoke(command, ["--temperature", "0.2"]).output
