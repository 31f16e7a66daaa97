"""Names of devices: ``/job:worker/replica:0/task:1/device:CPU:0``, and parts of such names.

The grammar is TensorFlow's. A name says as much as it has parts; short forms (``cpu:0``,
``/gpu:*``) leave the word ``device`` away. What a name leaves open, or has ``*`` for, any device
may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from penstock.errors import InvalidModel

LOCAL = "/job:localhost/replica:0/task:0"
"""what the names of this process's devices begin with"""

_ANY = "*"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A full name or part of one; None stands for what it leaves open.

    ``kind`` is in capitals (``CPU``), ``index`` the device's number among those of its kind in one
    task.
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """The name that ``text`` is. Raises ``InvalidModel``."""
        found: dict[str, str | int | None] = {}
        for part in text.split("/"):
            if not part or part == _ANY:
                continue
            for key, value in _fields(part, text):
                if key in found:
                    raise InvalidModel(f"the device {text!r} says its {key} twice; say it once")
                found[key] = value
        return cls(**found)  # type: ignore[arg-type]

    @property
    def full(self) -> bool:
        """Whether it leaves nothing open, and so names one device."""
        return None not in astuple(self)

    def __str__(self) -> str:
        """The name in TensorFlow's order, without what it leaves open: "" if that is all."""
        text = ""
        for word, value in (("job", self.job), ("replica", self.replica), ("task", self.task)):
            if value is not None:
                text += f"/{word}:{value}"
        if self.kind is None and self.index is None:
            return text
        index = _ANY if self.index is None else self.index
        return f"{text}/device:{self.kind or _ANY}:{index}"

    def allows(self, other: DeviceName) -> bool:
        """Whether the two say nothing different: one device could have both names."""
        return not any(
            a is not None and b is not None and a != b
            for a, b in zip(astuple(self), astuple(other), strict=True)
        )

    def merge(self, other: DeviceName) -> DeviceName:
        """A name that says what either does. Raises ``InvalidModel`` where they differ."""
        if not self.allows(other):
            raise InvalidModel(
                f"no device is both {str(self)!r} and {str(other)!r}; change one of the two names"
            )
        both = zip(astuple(self), astuple(other), strict=True)
        return DeviceName(*[b if a is None else a for a, b in both])

    def over(self, other: DeviceName) -> DeviceName:
        """A name that says what this one does and, where it leaves something open, the other."""
        both = zip(astuple(self), astuple(other), strict=True)
        return DeviceName(*[b if a is None else a for a, b in both])


def _fields(part: str, text: str) -> Iterable[tuple[str, str | int | None]]:
    """What one part of a name says."""
    key, *rest = part.split(":")
    if key == "job" and len(rest) == 1 and rest[0]:
        yield key, _open(rest[0])
    elif key in ("replica", "task") and len(rest) == 1:
        yield key, _number(rest[0], text)
    elif key == "device" and len(rest) == 2 and rest[0]:
        yield "kind", _open(rest[0].upper())
        yield "index", _number(rest[1], text)
    elif key.upper() in _KINDS and len(rest) <= 1:
        yield "kind", key.upper()
        yield "index", _number(rest[0], text) if rest else None
    else:
        raise InvalidModel(
            f"{text!r} is no name of a device: {part!r} is none of its parts, as "
            '"/job:worker/replica:0/task:1/device:CPU:0" has them, or "cpu:0"'
        )


_KINDS = frozenset({"CPU", "GPU", "TPU"})


def _open(text: str) -> str | None:
    return None if text == _ANY else text


def _number(text: str, name: str) -> int | None:
    if text == _ANY:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidModel(f"{name!r} is no name of a device: {text!r} is no number")
    return int(text)


def local(devices: int | Sequence[str]) -> tuple[str, ...]:
    """The full names of virtual devices of this process: so many CPUs, or those named.

    Raises ``ValueError`` for none, for one that is named twice, and for what no name of one CPU of
    this process is.
    """
    if isinstance(devices, str) or (not isinstance(devices, int) and not len(devices)):
        raise ValueError(f'devices={devices!r}: give a number, or names such as ["cpu:0", "cpu:1"]')
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"devices={devices}: a session needs at least one device")
        devices = [f"cpu:{i}" for i in range(devices)]
    here = DeviceName.parse(f"{LOCAL}/device:CPU:*")
    found = []
    for each in devices:
        try:
            name = DeviceName.parse(each).merge(here)
        except InvalidModel as error:
            raise ValueError(f"devices= has {each!r}, which is no CPU here: {error}") from error
        if not name.full:
            raise ValueError(f"devices= has {each!r}, which names no one device: say its number")
        found.append(str(name))
    if len(set(found)) < len(found):
        raise ValueError(f"devices= has one device twice: {list(devices)}")
    return tuple(found)
