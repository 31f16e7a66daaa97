"""Modules in which a name means something else."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class ModuleWith:
    """A module with other attributes, for one that imports it: the module itself stays."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
