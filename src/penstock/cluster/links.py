"""One-way links between the processes of a cluster, through shared memory.

A link is a Ray channel, as in Ray's compiled graphs: a message is written into a buffer that the
reader maps, or that Ray copies to the reader's machine; the next message waits until the reader has
taken it. Messages are pickled here: Ray would pack and unpack them three times, which takes longer
than to copy a megabyte. If the buffer is too small for a message, the channel transfers a new,
larger channel first. A reading thread passes messages on, or lets another thread read meanwhile, so
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

_ray: Any = _raylet  # a compiled module, whose stubs have only a few of its classes

SMALL_BYTES = 64 << 10
"""The minimum bytes of the buffer of a link, which grows with the messages."""
_HEAD_BYTES = 16 << 10
# Least bytes of an array that is sent out of band, not in the pickle of a message.
_BESIDE_BYTES = 1 << 10
# Metadata that Ray stores with a message, which distinguishes it from Ray's own objects.
_MARK = b"penstock"
# Maximum number of acknowledgements that are read in one call.
_MOST_ANSWERS = 64
# A new channel has a buffer that is larger than the message by this factor.
_ROOM = 1.25


def report_failure(_: Exception) -> None:
    """Report the current exception, for a message whose sender does not wait for the result."""
    report_thread_exception()


def ray_identity() -> tuple[str, str]:
    """Return the identity of this process in its Ray cluster, which changes with each start of Ray:
    a new start has the same job numbers, but another node."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def has_ray(identity: tuple[str, str]) -> bool:
    """Whether the Ray cluster in which this process has this identity still runs. Checked before
    other calls, since Ray would start another cluster on a call after a shutdown."""
    return ray.is_initialized() and ray_identity() == identity


class LinkClosed(ConnectionError):  # noqa: N818
    """The other end of a link is closed."""


class Link:
    """The writing end of a link, for any thread. ``bell`` is a connection to the reader's doorbell.

    A write waits for the reader without a timeout, since Ray's waits with one keep a core busy:
    only ``close`` releases a writer whose reader hangs. A thread that must not wait calls ``post``,
    which leaves the wait to a thread of the link.
    """

    def __init__(self, reader: Reader, nbytes: int, bell: socket.socket) -> None:
        self._reader = reader
        self._ray = ray_identity()
        self.channel = self._channel(nbytes)
        self._outgrown: list[Channel] = []  # the reader may still read from them
        self._bell = bell
        self._lock = threading.Lock()
        self._closed = False
        self._written = self._taken = 0  # numbers of messages
        self._poster: Workers | None = None
        self._posting = threading.Lock()
        self._posted = 0  # messages that the poster has not written yet

    def send(self, message: Message) -> None:
        """Write a message, once the reader has taken the previous one. Raises ``LinkClosed``, and
        pickling errors for values that are not data."""
        packed = _packed(message)
        with self._lock:
            self._write(packed)

    def post(self, message: Message, failed: Failed = report_failure) -> None:
        """Write a message now if the reader has taken all previous ones, else later on a thread of
        the link. A closed link drops the message. ``failed`` is called with the error if Ray cannot
        write the message. Raises pickling errors for values that are not data."""
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
        """Whether the reader has taken all messages, each of which it acknowledges by a byte."""
        with suppress(OSError):
            while self._taken < self._written:
                answers = self._bell.recv(_MOST_ANSWERS, socket.MSG_DONTWAIT)
                if not answers:  # the reader has closed the connection
                    return False
                self._taken += len(answers)
        return self._taken == self._written

    def _channel(self, nbytes: int) -> Channel:
        """Return a new channel to the reader, for messages of up to ``nbytes``."""
        channel = Channel(get_self_actor(), [self._reader[:2]], nbytes + len(_MARK))
        self._room = nbytes  # set only after Ray has allocated the memory
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
            self._is_taken()  # reads acknowledgements, which would fill the socket's buffer
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
        """Let waiting and later writers raise ``LinkClosed``."""
        with self._posting:
            self._closed = True
            poster = self._poster
        for channel in (*self._outgrown, self.channel):
            close_channel(channel)
        _hang_up(self._bell)
        if poster is not None:  # its pending messages now fail
            poster.close(wait=False)


class Reader(NamedTuple):
    """The process at the reading end of a link: its actor, its Ray node, and its doorbell."""

    actor: Any
    node: str
    bell: BellAddress


def open_link(number: int, reader: Reader, nbytes: int) -> Link:
    """Open a link with this unique number from this process to a reader. ``nbytes``: the expected
    bytes of arrays in its largest message. Raises ``OSError`` if the reader does not accept it."""
    return Link(reader, max(SMALL_BYTES, nbytes + _HEAD_BYTES), connect(reader.bell, number))


def close_channel(channel: Channel) -> None:
    with suppress(Exception):  # the other process, and Ray's object store, may have ended
        channel.close()


class LinkReader:
    """The reading end of a link: a thread that calls ``take`` with each message, whenever the
    ``bell`` rings, until the link is closed. If ``then`` is given, which may take long, the thread
    calls it once at its start and after each message, and a second thread waits for the bell as
    well. The bell wakes one of both threads, and messages are taken in order on either."""

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
        self._turn = threading.Lock()  # held while a message is read and taken
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
        """Take the next message. Return False if no more will come."""
        with self._turn:
            try:
                packed = self._next()
            except RayChannelError:
                return False
            if packed is None:
                return False
            try:
                # Ray frees the buffer when the last reference to it is dropped.
                message = _unpacked(packed)
                del packed
                with suppress(OSError):  # the writer has closed the connection
                    self._bell.send(b"!", socket.MSG_DONTWAIT)
                self._take(message)
            except Exception:
                report_thread_exception()
            return True

    def _next(self) -> Any:
        """Return the next message, still packed; None if Ray's object store has ended."""
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
    """Return a pickled message, with the memory of its larger arrays out of band, not copied."""
    writer = _ray.Pickle5Writer()

    def beside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _BESIDE_BYTES:
            return True
        writer.buffer_callback(buffer)
        return False

    head = pickle.dumps(message, protocol=5, buffer_callback=beside)
    return _ray.Pickle5SerializedObject(_MARK, head, writer, [])


def _unpacked(packed: Any) -> Message:
    """Return an unpickled message, whose arrays are copies."""
    head, buffers = _ray.unpack_pickle5_buffers(packed)
    # Ray reuses the buffer for the next message as soon as nothing refers to it.
    own = [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]
    message: Message = pickle.loads(head, buffers=own)
    return message
