"""The version is that of the metadata."""

from __future__ import annotations

import tomllib
from pathlib import Path

import penstock
from penstock.core.version import VERSION


def test_version_is_that_of_the_package():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION == penstock.__version__
