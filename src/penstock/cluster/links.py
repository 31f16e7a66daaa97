"""One-way links between the processes of a cluster, each in memory that both ends share.

A link is a channel of Ray, as its compiled graphs have them: a message is written into a buffer
that the reader maps, or that Ray copies to the reader's machine; the next one waits until the
reader has taken it. Messages are pickled here: Ray would pack them three times, and unpack them
three times, which takes longer than copying a megabyte. A message for which the buffer is too small
goes by a new channel, which the old one brings. A thread that takes messages hands them on, or lets
another thread read meanwhile, so that no writer waits for a computation::

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
import ray
from ray import _raylet
from ray.exceptions import RayChannelError
from ray.experimental.channel.shared_memory_channel import Channel
from ray.experimental.channel.utils import get_self_actor

from penstock.cluster.doorbell import BellAddress, connect, rang
from penstock.core.records import NamedTuple
from penstock.host.threads import Workers, report_thread_exception

Message = tuple[Any, ...]
Failed = Callable[[Exception], object]

_ray: Any = _raylet  # compiled, with the names of a few of its classes alone

SMALL_BYTES = 64 << 10
"""Bytes of the buffer of a link at least; it grows with the messages."""
_HEAD_BYTES = 16 << 10
# Bytes of an array from which on it is not pickled with the rest of a message.
_BESIDE_BYTES = 1 << 10
# Mark that Ray stores beside a message, which tells it from objects of Ray's own.
_MARK = b"penstock"
# Answers that are read at once.
_MOST_ANSWERS = 64
# A new channel has room for messages that are larger by this factor.
_ROOM = 1.25


def report_failure(_: Exception) -> None:
    """Report the current exception, of a message whose sender does not wait for it."""
    report_thread_exception()


def ray_identity() -> tuple[str, str]:
    """The identity of this process to the Ray that it uses; another one after each start of Ray. A
    Ray that is started anew has another node, and gives its jobs the same numbers."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def has_ray(identity: tuple[str, str]) -> bool:
    """Whether the Ray to which this process has an identity is there: asked for anything after it
    was shut down, Ray would start another one."""
    return ray.is_initialized() and ray_identity() == identity


class LinkClosed(ConnectionError):  # noqa: N818
    """The other end of a link is gone."""


class Link:
    """The end of a link that is written to, by any thread. ``bell`` is a connection to the doorbell
    of the reader.

    Ray waits for the reader without an end, since its waits that do end keep a core busy: only
    ``close`` lets a writer go whose reader hangs. A thread that must not wait so long calls
    ``post``, which leaves that to a thread of the link.
    """

    def __init__(self, reader: Reader, nbytes: int, bell: socket.socket) -> None:
        self._reader = reader
        self._ray = ray_identity()
        self.channel = self._channel(nbytes)
        self._outgrown: list[Channel] = []  # which the reader may not have left yet
        self._bell = bell
        self._lock = threading.Lock()
        self._closed = False
        self._written = self._taken = 0  # messages
        self._poster: Workers | None = None
        self._posting = threading.Lock()
        self._posted = 0  # what it has not written yet

    def send(self, message: Message) -> None:
        """Write a message, once the reader has taken the one before. Raises ``LinkClosed``, and
        what pickling raises for a value that is no data."""
        packed = _packed(message)
        with self._lock:
            self._write(packed)

    def post(self, message: Message, failed: Failed = report_failure) -> None:
        """Write a message now if the reader has taken those before, else soon. A link that is
        closed drops it. ``failed`` is called if Ray cannot write it, with the reason. Raises what
        pickling raises for a value that is no data."""
        packed = _packed(message)
        if self._lock.acquire(blocking=False):
            try:
                if not self._posted and self._is_taken():
                    self._write_now(packed, failed)
                    return
            finally:
                self._lock.release()
        with self._posting:
            if self._closed:
                return
            if self._poster is None:
                self._poster = Workers("cluster-link", 1)
            self._posted += 1
            self._poster.submit(partial(self._post, packed, failed))

    def _post(self, packed: Any, failed: Failed) -> None:
        try:
            with self._lock:
                self._write_now(packed, failed)
        finally:
            with self._posting:
                self._posted -= 1

    def _write_now(self, packed: Any, failed: Failed) -> None:
        try:
            self._write(packed)
        except LinkClosed:
            pass
        except Exception as error:
            failed(error)

    def _is_taken(self) -> bool:
        """Whether the reader has taken all messages: it answers each with a byte."""
        with suppress(OSError):
            while self._taken < self._written:
                answers = self._bell.recv(_MOST_ANSWERS, socket.MSG_DONTWAIT)
                if not answers:  # the reader is gone
                    return False
                self._taken += len(answers)
        return self._taken == self._written

    def _channel(self, nbytes: int) -> Channel:
        """A channel to the reader for messages of up to ``nbytes``."""
        channel = Channel(get_self_actor(), [self._reader[:2]], nbytes + len(_MARK))
        self._room = nbytes  # now that Ray has had the memory
        return channel

    def _write(self, packed: Any) -> None:
        if self._closed:
            raise LinkClosed
        try:
            if packed.total_bytes > self._room:
                wider = self._channel(int(packed.total_bytes * _ROOM))
                outgrown, self.channel = self.channel, wider
                self._outgrown.append(outgrown)
                outgrown.write(self.channel)
            self._is_taken()  # so that answers never fill the memory of the socket
            self.channel.write(packed)
            self._bell.sendall(b"!")
            self._written += 1
        except (RayChannelError, OSError) as error:
            raise LinkClosed from error
        except Exception:
            if has_ray(self._ray):
                raise
            raise LinkClosed from None

    def close(self) -> None:
        """Let writers that wait, and later ones, fail; for when the reader is gone."""
        with self._posting:
            self._closed = True
            poster = self._poster
        for channel in (*self._outgrown, self.channel):
            close_channel(channel)
        _hang_up(self._bell)
        if poster is not None:  # what it has to write fails now
            poster.close(wait=False)


class Reader(NamedTuple):
    """The process that a link leads to: an actor that stands for it, the node of Ray that this is
    on, and its doorbell."""

    actor: Any
    node: str
    bell: BellAddress


def open_link(number: int, reader: Reader, nbytes: int) -> Link:
    """The link with this number, which no other has, from this process to a reader; its largest
    message is expected to have ``nbytes`` of arrays."""
    return Link(reader, max(SMALL_BYTES, nbytes + _HEAD_BYTES), connect(reader.bell, number))


def close_channel(channel: Channel) -> None:
    with suppress(Exception):  # the process at the other end may be gone, and Ray's store with it
        channel.close()


class LinkReader:
    """The end of a link that is read: a thread that calls ``take`` with each message, whenever the
    ``bell`` rings, until the link is closed. With ``then``, which may take long, it calls this
    after each one, and a second thread waits for the bell as well; each thread calls it before all
    others. The bell wakes one of them, and messages are taken in their order, whichever it is."""

    def __init__(
        self,
        channel: Channel,
        take: Callable[[Message], object],
        name: str,
        bell: socket.socket,
        then: Callable[[], object] | None = None,
    ) -> None:
        channel.ensure_registered_as_reader()
        self._channel = channel
        self._take = take
        self._then = then
        self._bell = bell
        self._turn = threading.Lock()  # to read, and to take
        for i in range(1 if then is None else 2):
            thread = f"penstock-link-{name}-{i}"
            threading.Thread(target=self._read, name=thread, daemon=True).start()

    def _read(self) -> None:
        goes_on = True
        while goes_on:
            if self._then is not None:
                self._then()
            goes_on = rang(self._bell) and self._take_next()

    def _take_next(self) -> bool:
        """Take the next message; False if there will be none."""
        with self._turn:
            try:
                packed = self._next()
            except RayChannelError:
                return False
            if packed is None:
                return False
            try:
                # The message refers to the buffer, which is freed when nothing else does.
                message = _unpacked(packed)
                del packed
                with suppress(OSError):  # the writer is gone
                    self._bell.send(b"!", socket.MSG_DONTWAIT)
                self._take(message)
            except Exception:
                report_thread_exception()
            return True

    def _next(self) -> Any:
        """The buffer of the next message; None if the store of Ray is gone."""
        while True:
            worker, ref = self._channel._worker, self._channel._local_reader_ref
            ((packed, mark, _),) = taken = worker.core_worker.get_objects([ref], -1)
            if mark == _MARK:
                return packed
            del packed
            (wider,) = worker.deserialize_objects(taken, [ref], {})
            del taken
            if not isinstance(wider, Channel):
                return None
            wider.ensure_registered_as_reader()
            self._channel = wider

    def close(self) -> None:
        close_channel(self._channel)
        _hang_up(self._bell)


def _hang_up(bell: socket.socket) -> None:
    with suppress(OSError):
        bell.shutdown(socket.SHUT_RDWR)
    bell.close()


def _packed(message: Message) -> Any:
    """A message, pickled, and beside that the memory of its larger arrays, which is not copied."""
    writer = _ray.Pickle5Writer()

    def beside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _BESIDE_BYTES:
            return True
        writer.buffer_callback(buffer)
        return False

    head = pickle.dumps(message, protocol=5, buffer_callback=beside)
    return _ray.Pickle5SerializedObject(_MARK, head, writer, [])


def _unpacked(packed: Any) -> Message:
    """A message in memory of its own."""
    head, buffers = _ray.unpack_pickle5_buffers(packed)
    # Ray gives the buffer to the next message as soon as nothing refers to it.
    own = [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]
    message: Message = pickle.loads(head, buffers=own)
    return message
