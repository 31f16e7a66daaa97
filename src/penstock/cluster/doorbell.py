"""Doorbells: sockets by which the writer of a link notifies the reader of a message.

Ray waits for a channel in a loop that keeps a core busy. This suits a compiled graph, which runs
continuously, but not workers that wait for requests on a machine with few cores. So a reader waits
for a byte on a socket, which the writer sends after each message, and then reads without waiting;
it acknowledges the message in the same way. A writer on the same machine uses a Unix domain socket
on Linux, which takes half of the time of TCP. Its type is SOCK_SEQPACKET: of several threads that
wait for it, Linux wakes one, while it would wake all that wait for a stream socket.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import sys
import threading
from contextlib import suppress

from penstock.cluster.waits import CONNECT_S
from penstock.core.records import NamedTuple

_TOKEN_BYTES = 16
_LINK = struct.Struct("<q")


class BellAddress(NamedTuple):
    """The address of a doorbell, the secret that writers send, and the name of its local socket."""

    host: str
    port: int
    token: bytes
    name: bytes


class Doorbell:
    """The sockets on which a process accepts connections of its writers. Links are numbered, so
    that the connection of a dead writer is not mistaken for that of its replacement."""

    def __init__(self, host: str) -> None:
        self._servers = [socket.create_server((host, 0))]
        port, name = self._servers[0].getsockname()[1], b""
        if sys.platform == "linux":
            name = b"\0penstock-" + secrets.token_hex(_TOKEN_BYTES).encode()  # abstract: no file
            self._servers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._servers[1].bind(name)
            self._servers[1].listen()
        for server in self._servers:
            server.settimeout(CONNECT_S)
        self.address = BellAddress(host, port, secrets.token_bytes(_TOKEN_BYTES), name)
        self._early: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def accept(self, link: int) -> socket.socket:
        """Return the connection of a link, whose writer has connected or is about to. Raises
        ``OSError`` if it does not connect within ``CONNECT_S``."""
        with self._lock:
            while link not in self._early:
                connection, _ = self._ready().accept()
                # A timeout, since a foreign process that connects and sends nothing must not block
                # the writers.
                connection.settimeout(CONNECT_S)
                with suppress(OSError, struct.error):
                    shown = connection.recv(_TOKEN_BYTES + _LINK.size, socket.MSG_WAITALL)
                    # Compared in constant time, which reveals nothing about the secret.
                    if hmac.compare_digest(shown[:_TOKEN_BYTES], self.address.token):
                        (number,) = _LINK.unpack(shown[_TOKEN_BYTES:])
                        connection.settimeout(None)
                        self._early[number] = connection
                        continue
                connection.close()
            return self._early.pop(link)

    def _ready(self) -> socket.socket:
        """Return a socket with a pending connection. Raises ``TimeoutError``."""
        with selectors.DefaultSelector() as selector:
            for server in self._servers:
                selector.register(server, selectors.EVENT_READ, server)
            for key, _ in selector.select(CONNECT_S):
                ready: socket.socket = key.data
                return ready
        raise TimeoutError("the writer of a link has not connected")

    def close(self) -> None:
        for connection in (*self._servers, *self._early.values()):
            connection.close()


def connect(address: BellAddress, link: int) -> socket.socket:
    """Return a new connection of a link to its reader's doorbell. Raises ``OSError``."""
    connection = _connect_here(address.name)
    if connection is None:
        connection = socket.create_connection(address[:2], timeout=CONNECT_S)
        connection.settimeout(None)
        # TCP would delay a ring, which is a single byte, to combine it with more data.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(address.token + _LINK.pack(link))
    return connection


def _connect_here(name: bytes) -> socket.socket | None:
    """Connect to the local socket of a doorbell; return None if it is not on this machine."""
    if not name or sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(name)
    except OSError:  # on another machine
        connection.close()
        return None
    connection.settimeout(None)
    return connection


def rang(connection: socket.socket) -> bool:
    """Wait for the next ring. Return False if the other end is closed."""
    try:
        return bool(connection.recv(1))
    except OSError:
        return False
