"""Names of devices: ``/job:worker/replica:0/task:1/device:CPU:0``, and parts of such names.

The grammar is TensorFlow's. Short forms (``cpu:0``, ``/gpu:*``) leave out the word ``device``. A
part that is missing, or ``*``, matches any device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.core.errors import InvalidModel, OptionError, check_count
from penstock.core.records import dataclass

LOCAL = "/job:localhost/replica:0/task:0"
"""prefix of the names of this process's devices"""

_ANY = "*"
_KINDS = frozenset({"CPU", "GPU", "TPU"})
_NUMBER = r"[0-9]{1,9}|\*"
_PART = re.compile(
    rf"job:(?P<job>[^:]+)|replica:(?P<replica>{_NUMBER})|task:(?P<task>{_NUMBER})"
    rf"|device:(?P<kind>[^:]+):(?P<index>{_NUMBER})|\*?"
)
_FIELDS: Mapping[str, Callable[[str], str | int]] = {
    "job": str,
    "replica": int,
    "task": int,
    "kind": str.upper,
    "index": int,
}


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A full or partial name, with None for unspecified parts. ``kind`` is in capitals (``CPU``),
    ``index`` the device's number among those of its kind in one task."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parse ``text``. Raises ``InvalidModel``."""
        fields: dict[str, Any] = {}
        for part in text.split("/"):
            if part.partition(":")[0].upper() in _KINDS:  # a short form
                part = f"device:{part}" if ":" in part else f"device:{part}:{_ANY}"
            match = _PART.fullmatch(part)
            if match is None:
                raise InvalidModel(
                    f"{text!r} is no name of a device: {part!r} is none of its parts, as "
                    '"/job:worker/replica:0/task:1/device:CPU:0" has them, or "cpu:0"'
                )
            for key, value in match.groupdict().items():
                if value is not None and key in fields:
                    raise InvalidModel(f"the device {text!r} says its {key} twice; say it once")
                if value is not None:
                    fields[key] = None if value == _ANY else _FIELDS[key](value)
        return cls(**fields)

    @property
    def parts(self) -> tuple[str | int | None, ...]:
        """The parts, in TensorFlow's order."""
        return self.job, self.replica, self.task, self.kind, self.index

    @property
    def full(self) -> bool:
        """Whether all parts are specified, so that it names one device."""
        return None not in self.parts

    def __str__(self) -> str:
        """Return the specified parts, in TensorFlow's order; "" if there are none."""
        text = ""
        for word, value in (("job", self.job), ("replica", self.replica), ("task", self.task)):
            if value is not None:
                text += f"/{word}:{value}"
        if self.kind is None and self.index is None:
            return text
        index = _ANY if self.index is None else self.index
        return f"{text}/device:{self.kind or _ANY}:{index}"

    def allows(self, other: DeviceName) -> bool:
        """Whether no parts differ, so that one device could have both names."""
        pairs = zip(self.parts, other.parts, strict=True)
        return all(a == b or None in (a, b) for a, b in pairs)

    def merge(self, other: DeviceName) -> DeviceName:
        """Return the name with the parts of both. Raises ``InvalidModel`` where they differ."""
        if not self.allows(other):
            raise InvalidModel(
                f"no device is both {str(self)!r} and {str(other)!r}; change one of the two names"
            )
        return self.over(other)

    def over(self, other: DeviceName) -> DeviceName:
        """Return this name, with its unspecified parts taken from ``other``."""
        pairs = zip(self.parts, other.parts, strict=True)
        merged: list[Any] = [b if a is None else a for a, b in pairs]
        return DeviceName(*merged)


_CPUS = DeviceName.parse(f"{LOCAL}/device:CPU:*")


def local(devices: int | Iterable[str], here: DeviceName = _CPUS) -> tuple[str, ...]:
    """Return the full names of virtual devices: a number of CPUs, or those named. Unspecified parts
    are those of ``here``, this process's CPUs. Raises ``ValueError`` for an empty list,
    a repeated name, and a name that does not identify one device."""
    if isinstance(devices, int):
        check_count("devices", devices, 10_000)
        devices = [f"cpu:{i}" for i in range(devices)]
    if isinstance(devices, str) or not [*devices]:
        raise OptionError(
            f'devices={devices!r}: give a number, or names such as ["cpu:0", "cpu:1"]'
        )
    names = []
    for device in devices:
        try:
            name = DeviceName.parse(device).over(here)
        except InvalidModel as error:
            raise OptionError(f"devices= has {device!r}, which is not a device: {error}") from error
        if not name.full:
            raise OptionError(f"devices= has {device!r}, which names no one device: say its number")
        names.append(str(name))
    if len(set(names)) < len(names):
        raise OptionError(f"devices= has one device twice: {list(devices)}")
    return tuple(names)
