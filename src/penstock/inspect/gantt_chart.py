"""The streams of a block in a static schedule: a bar for each step."""

from __future__ import annotations

from penstock.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """A step on its stream. Times are simulated, in seconds from the beginning of the block.
    ``rank`` is the time of the longest chain of steps that follow. ``waits`` and ``emits`` are
    signals of the block."""

    number: int
    operation: str
    origin: str
    start: float
    finish: float
    rank: float
    waits: tuple[int, ...]
    emits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """The schedule of a block.

    ``streams`` has the steps of each stream, ``devices`` the device of each, "" for the host.
    ``begin`` are the streams that begin with stream 0, ``end`` the signals that stream 0 waits for
    at the end. ``serial`` is the time of the block on one stream, in seconds.
    """

    name: str
    streams: tuple[tuple[Bar, ...], ...]
    devices: tuple[str, ...]
    signals: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    makespan: float
    serial: float

    @property
    def title(self) -> str:
        """A heading for the chart."""
        streams, signals = len(self.streams), self.signals
        return (
            f"{self.name}: {streams} stream{'s' * (streams != 1)}, "
            f"{signals} signal{'s' * (signals != 1)}, {microseconds(self.makespan)} simulated, "
            f"{microseconds(self.serial)} on one stream"
        )


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
