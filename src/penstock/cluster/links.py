"""One-way links between the processes of a cluster, each in memory that both ends share.

A link is a channel of Ray, as its compiled graphs have them: a message is written into a buffer
that the reader maps, or that Ray copies to the reader's machine; the next one waits until the
reader has taken it. Readers take messages on a thread of their own, which only hands them on, so
that no writer waits for a computation::

    driver ──> worker 0 ──> worker 1 ──> driver      (and any other pair that exchanges values)
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from ray.exceptions import RayChannelError
from ray.experimental.channel.shared_memory_channel import Channel
from ray.experimental.channel.utils import get_self_actor

from penstock.algorithms.records import NamedTuple
from penstock.cluster.doorbell import BellAddress, connect, rang
from penstock.host.threads import Workers, report_thread_exception

Message = tuple[Any, ...]

SMALL_BYTES = 64 << 10
"""Bytes of the buffer of a link at least; it grows with the messages."""
_HEAD_BYTES = 16 << 10
# Bytes of an array from which on it is not pickled with the rest of a message.
_BESIDE_BYTES = 1 << 10


class LinkClosed(ConnectionError):  # noqa: N818
    """The other end of a link is gone."""


class Link:
    """The end of a link that is written to, by any thread. ``bell`` is a connection to the doorbell
    of the reader.

    Ray waits for the reader without an end, since its waits that do end keep a core busy: only
    ``close`` lets a writer go whose reader hangs. A thread that must not wait so long calls
    ``post``, which leaves that to a thread of the link.
    """

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        self.channel = channel
        self._bell = bell
        self._lock = threading.Lock()
        self._closed = False
        self._last: object = None
        self._taken = True
        self._poster: Workers | None = None

    def send(self, message: Message) -> None:
        """Write a message, once the reader has taken the one before. Raises ``LinkClosed``, and
        what pickling raises for a value that is no data."""
        packed = _packed(message)
        with self._lock:
            self._write(packed)

    def post(self, message: Message, tag: object = None) -> None:
        """Write a message now if it is known that the reader has taken those before, else soon. A
        link that is closed drops it. ``took`` is called when there is an answer to the ``tag``."""
        packed = _packed(message)
        if self._taken and self._lock.acquire(blocking=False):
            try:
                self._last, self._taken = tag, False
                self._write(packed)
            except LinkClosed:
                pass
            finally:
                self._lock.release()
            return
        if self._poster is None:
            self._poster = Workers("cluster-link", 1)
        self._poster.submit(partial(self._post, packed, tag))

    def _post(self, packed: object, tag: object) -> None:
        with suppress(LinkClosed), self._lock:
            self._last, self._taken = tag, False
            self._write(packed)

    def took(self, tag: object) -> None:
        """Note that the reader has answered a message, and so has taken it."""
        if tag == self._last:
            self._taken = True

    def _write(self, packed: object) -> None:
        if self._closed:
            raise LinkClosed
        try:
            self.channel.write(packed)
            self._bell.sendall(b"!")
        except (RayChannelError, OSError) as error:
            raise LinkClosed from error

    def close(self) -> None:
        """Let writers that wait, and later ones, fail; for when the reader is gone."""
        self._closed = True
        close_channel(self.channel)
        _hang_up(self._bell)


class Reader(NamedTuple):
    """The process that a link leads to: an actor that stands for it, the node of Ray that this is
    on, and its doorbell."""

    actor: Any
    node: str
    bell: BellAddress


def open_link(writer: int, reader: Reader, nbytes: int) -> Link:
    """A link from this process, which is the ``writer`` with this number; its largest message is
    expected to have ``nbytes`` of arrays."""
    size = max(SMALL_BYTES, nbytes + _HEAD_BYTES)
    channel = Channel(get_self_actor(), [(reader.actor, reader.node)], size)
    return Link(channel, connect(reader.bell, writer))


def close_channel(channel: Channel) -> None:
    with suppress(Exception):  # the process at the other end may be gone, and Ray's store with it
        channel.close()


class LinkReader:
    """The end of a link that is read: a thread that calls ``take`` with each message, whenever the
    ``bell`` rings, until the link is closed."""

    def __init__(
        self,
        channel: Channel,
        take: Callable[[Message], object],
        name: str,
        bell: socket.socket,
    ) -> None:
        channel.ensure_registered_as_reader()
        self._channel = channel
        self._take = take
        self._bell = bell
        threading.Thread(target=self._read, name=f"penstock-link-{name}", daemon=True).start()

    def _read(self) -> None:
        while rang(self._bell):
            try:
                packed = self._channel.read()
            except RayChannelError:
                return
            if isinstance(packed, Exception):  # the store of Ray is gone
                return
            try:
                # What is read refers to the buffer, which is free when nothing does.
                message = _unpacked(packed)
                del packed
                self._take(message)
                del message
            except Exception:
                report_thread_exception()

    def close(self) -> None:
        close_channel(self._channel)
        _hang_up(self._bell)


def _hang_up(bell: socket.socket) -> None:
    with suppress(OSError):
        bell.shutdown(socket.SHUT_RDWR)
    bell.close()


def _packed(message: Message) -> tuple[bytes, list[np.ndarray]]:
    """A message, pickled, and beside that the memory of its larger arrays, which is not copied."""
    buffers: list[np.ndarray] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _BESIDE_BYTES:
            return True
        buffers.append(np.frombuffer(raw, np.uint8))
        return False

    return pickle.dumps(message, protocol=5, buffer_callback=beside), buffers


def _unpacked(packed: tuple[bytes, list[np.ndarray]]) -> Message:
    """A message in memory of its own."""
    head, buffers = packed
    message: Message = pickle.loads(head, buffers=[buffer.copy() for buffer in buffers])
    return message
