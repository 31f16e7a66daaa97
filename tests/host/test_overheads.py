"""The overheads of executors."""

from __future__ import annotations

from penstock.host.overheads import OVERHEADS


def test_overheads_are_in_order_of_their_size():
    assert 0 < OVERHEADS.python_s < OVERHEADS.dispatch_s < OVERHEADS.hand_over_s
    assert OVERHEADS.hand_over_s < OVERHEADS.worth_s < OVERHEADS.long_s
