"""Doorbells: how the writer of a link tells the reader that there is a message.

Ray waits for a channel in a loop that keeps a core busy. That is right for a compiled graph, which
is run again and again, but not for workers that wait for requests on a machine of few cores. So a
reader waits for a byte on a socket, which the writer sends behind each message, and then reads
without waiting; the same way it tells the writer what it has taken. A writer on the same machine
uses a local socket of Linux, which takes half of the time of one of TCP. It is one of packets: of
several threads that wait for one of these, Linux wakes one, where it wakes all that wait for a
stream.
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
    """The address of a doorbell, the secret that writers show, and its name on its own machine."""

    host: str
    port: int
    token: bytes
    name: bytes


class Doorbell:
    """The socket on which one process waits for connections of its writers. Links are numbered, so
    that the connection of a writer that has died meanwhile is not taken for that of the next."""

    def __init__(self, host: str) -> None:
        self._servers = [socket.create_server((host, 0))]
        port, name = self._servers[0].getsockname()[1], b""
        if sys.platform == "linux":
            name = b"\0penstock-" + secrets.token_hex(_TOKEN_BYTES).encode()  # of no file
            self._servers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._servers[1].bind(name)
            self._servers[1].listen()
        for server in self._servers:
            server.settimeout(CONNECT_S)
        self.address = BellAddress(host, port, secrets.token_bytes(_TOKEN_BYTES), name)
        self._early: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def accept(self, link: int) -> socket.socket:
        """The connection of a link, whose writer has connected or will do so now. Raises
        ``OSError`` if it does not."""
        with self._lock:
            while link not in self._early:
                connection, _ = self._ready().accept()
                # A stranger that connects and sends nothing must not keep the writers from being
                # heard.
                connection.settimeout(CONNECT_S)
                with suppress(OSError, struct.error):
                    shown = connection.recv(_TOKEN_BYTES + _LINK.size, socket.MSG_WAITALL)
                    # In a time that does not tell how much of a guess is right.
                    if hmac.compare_digest(shown[:_TOKEN_BYTES], self.address.token):
                        (number,) = _LINK.unpack(shown[_TOKEN_BYTES:])
                        connection.settimeout(None)
                        self._early[number] = connection
                        continue
                connection.close()
            return self._early.pop(link)

    def _ready(self) -> socket.socket:
        """The socket that somebody wants to connect to."""
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
    """The connection of a link to the doorbell of its reader. Raises ``OSError``."""
    connection = _connect_here(address.name)
    if connection is None:
        connection = socket.create_connection(address[:2], timeout=CONNECT_S)
        connection.settimeout(None)
        # A ring is one byte, which TCP would hold back for more.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(address.token + _LINK.pack(link))
    return connection


def _connect_here(name: bytes) -> socket.socket | None:
    """A connection to the doorbell with a name on this machine; None if there is none."""
    if not name or sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(name)
    except OSError:  # it is on another machine
        connection.close()
        return None
    connection.settimeout(None)
    return connection


def rang(connection: socket.socket) -> bool:
    """Wait for the next ring; False if the other end is gone."""
    try:
        return bool(connection.recv(1))
    except OSError:
        return False
