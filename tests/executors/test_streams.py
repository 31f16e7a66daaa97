"""The executor of streams: as costs decide, and on as many streams as there can be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.host.threads import Workers
from penstock.session import stages
from tests.executors.conformance import ExecutorConformance


class TestStreams(ExecutorConformance):
    executor = "streams"


class OnManyStreams(ExecutorConformance):
    """Blocks have up to ``streams`` streams, whatever they cost, on ``threads`` threads."""

    executor = "streams"
    streams = 4
    threads = 4

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads_for_all(cls) -> Iterator[None]:
        workers = Workers("test", cls.threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "pool", lambda: workers)
            patch.setattr(stages.CompileContext, "workers", property(lambda self: cls.threads))
            yield
        workers.close()

    def compile(self, source, **options):
        return super().compile(source, max_streams=self.streams, **options)


class TestOnTwoStreams(OnManyStreams):
    streams = 2


class TestOnManyStreams(OnManyStreams):
    streams = 16


class TestOnManyStreamsAndOneThread(OnManyStreams):
    streams = 16
    threads = 1
