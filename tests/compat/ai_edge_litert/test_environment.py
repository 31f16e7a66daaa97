"""Environments of models."""

from __future__ import annotations

import pytest

from penstock.compat.ai_edge_litert.environment import Environment, EnvironmentOptions
from tests.compat.ai_edge_litert.test_compiled_model import ours
from tests.compat.ai_edge_litert.test_interpreter import doubling


def test_environment_is_kept() -> None:
    with Environment.create(runtime_path="libraries") as environment:
        assert environment.options == EnvironmentOptions(runtime_path="libraries")
        model = ours.CompiledModel.from_buffer(doubling(), environment=environment)
        assert model.environment is environment


def test_plugins_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="plugins of LiteRT have no effect"):
        Environment.create(options=EnvironmentOptions(dispatch_library_path="folder"))
