"""Doorbells: how the writer of a link tells the reader that there is a message.

Ray waits for a channel in a loop that keeps a core busy. That is right for a compiled graph, which
is run again and again, but not for workers that wait for requests on a machine of few cores. So a
reader waits for a byte on a socket, which the writer sends behind each message, and then reads
without waiting.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from contextlib import suppress

from penstock.algorithms.records import NamedTuple

# Seconds that a writer has to connect, or a stranger to show that it is none.
_CONNECT_S = 20.0
_TOKEN_BYTES = 16
_WRITER = struct.Struct("<i")


class BellAddress(NamedTuple):
    """Where a doorbell is, and what those who ring it show."""

    host: str
    port: int
    token: bytes


class Doorbell:
    """Where one process waits for connections of those that write to it, by their numbers."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._server.settimeout(_CONNECT_S)
        port = self._server.getsockname()[1]
        self.address = BellAddress(host, port, secrets.token_bytes(_TOKEN_BYTES))
        self._early: dict[int, socket.socket] = {}

    def accept(self, writer: int) -> socket.socket:
        """The connection of a writer, which has connected or will do so now. Raises ``OSError`` if
        it does not."""
        while writer not in self._early:
            connection, _ = self._server.accept()
            connection.settimeout(_CONNECT_S)
            with suppress(OSError, struct.error):
                shown = connection.recv(_TOKEN_BYTES + _WRITER.size, socket.MSG_WAITALL)
                if hmac.compare_digest(shown[:_TOKEN_BYTES], self.address.token):
                    (number,) = _WRITER.unpack(shown[_TOKEN_BYTES:])
                    connection.settimeout(None)
                    self._early[number] = connection
                    continue
            connection.close()
        return self._early.pop(writer)

    def close(self) -> None:
        for connection in (self._server, *self._early.values()):
            connection.close()


def connect(address: BellAddress, writer: int) -> socket.socket:
    """A connection to the doorbell of a reader. Raises ``OSError``."""
    host, port, token = address
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token + _WRITER.pack(writer))
    return connection


def rang(connection: socket.socket) -> bool:
    """Wait for the next ring; False if the other end is gone."""
    try:
        return bool(connection.recv(1))
    except OSError:
        return False
