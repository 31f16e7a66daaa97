"""Doorbells: who may connect, and in which order."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from penstock.cluster.doorbell import BellAddress, Doorbell, connect
from tests.support.timing import SOON

FAMILIES = [socket.AF_INET, *([socket.AF_UNIX] if sys.platform == "linux" else [])]


def address_of(bell: Doorbell, family: socket.AddressFamily) -> BellAddress:
    """The address of a doorbell as a writer has it that connects by sockets of a family."""
    there = bell.address._replace(name=b"of another machine")
    return bell.address if family is not socket.AF_INET else there


@pytest.mark.parametrize("family", FAMILIES)
def test_connection_of_a_writer_that_died_is_not_taken_for_the_next_one(family):
    bell = Doorbell("127.0.0.1")
    connect(address_of(bell, family), 1).close()
    writer = connect(address_of(bell, family), 2)
    reader = bell.accept(2)
    assert writer.family is reader.family is family
    writer.sendall(b"!")
    assert reader.recv(1) == b"!"
    for connection in (writer, reader):
        connection.close()
    bell.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_strangers_are_turned_away_from_doorbells(family):
    bell = Doorbell("127.0.0.1")
    stranger = connect(address_of(bell, family)._replace(token=bytes(16)), 1)
    writer = connect(address_of(bell, family), 1)
    reader = bell.accept(1)
    assert stranger.recv(1) == b""
    writer.sendall(b"!")
    assert reader.recv(1) == b"!"
    for connection in (stranger, writer, reader):
        connection.close()
    bell.close()


def test_doorbell_takes_connections_of_links_in_any_order_on_many_threads():
    bell = Doorbell("127.0.0.1")
    addresses = [address_of(bell, family) for family in FAMILIES]
    writers = [connect(addresses[i % len(addresses)], i) for i in range(8)]
    taken: dict[int, socket.socket] = {}
    threads = [
        threading.Thread(target=lambda i=i: taken.update({i: bell.accept(i)})) for i in range(8)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(SOON)
    for i, writer in enumerate(writers):
        writer.sendall(bytes([i]))
        assert taken[i].recv(1) == bytes([i])
    for connection in (*writers, *taken.values()):
        connection.close()
    bell.close()
