"""Commands of Penstock, called in the process of the tests."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from penstock.cli import main

MODEL = """affine (float[N, 3] x, float[3] scale) => (float[N, 3] y) <float[3] b = {1, 2, 3}> {
    product = Mul(x, scale)
    y = Add(product, b)
}"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def as_json(*arguments: str, code: int = 0) -> dict:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)
