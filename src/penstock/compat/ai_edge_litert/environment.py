"""Process-wide settings of LiteRT: paths of its libraries, of which there are none here."""

from __future__ import annotations

from penstock.core import Closeable
from penstock.core.errors import warn
from penstock.core.records import dataclass


@dataclass(frozen=True)
class EnvironmentOptions:
    """Paths of LiteRT's libraries."""

    runtime_path: str | None = None
    compiler_plugin_path: str = ""
    dispatch_library_path: str = ""


class Environment(Closeable):
    """Nothing is shared: models need none.

    Args:
        options: Paths of libraries, which are not looked at.
    """

    def __init__(self, options: EnvironmentOptions) -> None:
        self.options = options

    @classmethod
    def create(cls, *, options: EnvironmentOptions | None = None, **paths: str) -> Environment:
        """A new environment. Warns of paths of plugins, which have no effect.

        Args:
            options: Paths of libraries.
            paths: The same by their names.
        """
        chosen = EnvironmentOptions(**paths) if options is None else options
        if chosen.compiler_plugin_path or chosen.dispatch_library_path:
            warn("plugins of LiteRT have no effect on Penstock: its kernels are its own")
        return cls(chosen)

    def close(self) -> None:
        """Nothing to close."""
