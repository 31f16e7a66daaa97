"""The executor of streams: with streams chosen by cost, and with as many streams as possible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.host.threads import Workers
from tests.executors.conformance import ExecutorConformance


class TestStreams(ExecutorConformance):
    executor = "streams"


class OnManyStreams(ExecutorConformance):
    """Blocks have up to ``streams`` streams, whatever their cost, on ``threads`` threads."""

    executor = "streams"
    sampled = True
    streams = 4
    threads = 4
    pool: Workers

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads_for_all(cls) -> Iterator[None]:
        cls.pool = Workers("test", cls.threads)
        yield
        cls.pool.close()

    def compile(self, source, **options):
        return super().compile(source, max_streams=self.streams, pool=self.pool, **options)


class TestOnTwoStreams(OnManyStreams):
    streams = 2


class TestOnManyStreams(OnManyStreams):
    streams = 16


class TestOnManyStreamsAndOneThread(OnManyStreams):
    streams = 16
    threads = 1
