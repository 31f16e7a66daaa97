"""One wait must outlast another, where the shorter one would give the better error."""

from __future__ import annotations

from penstock.cluster import waits
from penstock.core.checkpoints import LOOK_S, WAKE_S


def test_dead_worker_is_found_before_a_run_ends_for_doubt():
    assert waits.PING_S < waits.DOUBT_S


def test_worker_that_begins_has_time_for_its_links():
    assert waits.CONNECT_S + waits.ANSWER_S < waits.START_S


def test_waits_are_longer_than_the_looks_within_them():
    assert LOOK_S < waits.IDLE_S < WAKE_S < waits.END_S
