"""The latency and the bandwidth of links, measured by messages."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.cluster import driver_state
from penstock.cluster.driver_state import LinkTimer


class Echo:
    """A link whose worker answers at once, after a time that the ``clock`` of the test shows."""

    def __init__(self, timer: LinkTimer, latency: float, bandwidth: float) -> None:
        self.timer, self.latency, self.bandwidth = timer, latency, bandwidth
        self.now, self.sent = 0.0, 0

    def send(self, message: tuple[Any, ...]) -> None:
        kind, number, payload = message
        assert kind == "echo"
        self.sent += 1
        self.now += 2 * (self.latency + payload.nbytes / self.bandwidth)
        self.timer.take_echo(number)


def test_cost_is_measured_once_by_small_and_large_messages(monkeypatch) -> None:
    timer = LinkTimer(None, None)
    link = Echo(timer, 1e-3, 1e9)
    monkeypatch.setattr(driver_state, "monotonic", lambda: link.now)
    cost = timer.cost(lambda: link, 1.0)
    assert cost.latency == pytest.approx(1e-3, rel=1e-3)
    assert cost.bandwidth == pytest.approx(1e9, rel=1e-3)
    sent = link.sent
    assert timer.cost(lambda: link, 1.0) == cost and link.sent == sent


def test_costs_that_are_given_need_no_link() -> None:
    cost = LinkTimer(1e9, 1e-4).cost(lambda: pytest.fail("there is nothing to measure"), 1.0)
    assert (cost.bandwidth, cost.latency) == (1e9, 1e-4)


def test_worker_without_an_answer_is_an_error() -> None:
    class Silent:
        def send(self, message: object) -> None:
            """Lose it."""

    with pytest.raises(
        ps.PenstockError, match=r"cannot be measured: a worker has not answered within 0\.0 s"
    ):
        LinkTimer(None, None).cost(Silent, 0.0)
