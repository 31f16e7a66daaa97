"""Runs of one session at once: on threads of the caller, on the pool, in an event loop."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.host.threads import core_budget
from tests.executors.conformance.base import ENDLESS, ExecutorTests
from tests.support.onnx_text import model_from_text
from tests.support.sweeps import scaled
from tests.support.timing import SOON


class Concurrency(ExecutorTests):
    """Runs of one session at once: on threads of the caller, on the pool, in an event loop."""

    def test_concurrent_runs_stay_within_the_limit_of_bytes(self):
        text = ENDLESS.replace("y = Loop (n, , x)", "a = Neg(x) b = Exp(a) y = Loop (n, , b)")
        session = self.compile(model_from_text(text), limits=ps.Limits(max_bytes=1000))
        size = 4 * 64  # two buffers, a and b, or fewer
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})
        if self.executor != "dataflow":  # which has no arenas
            assert 0 < session.memory.arenas <= size
        token = ps.CancelToken()
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}

        def job(_) -> type[BaseException] | None:
            try:
                session.run(feeds, cancel=token)
            except ps.PenstockError as error:
                return type(error)
            return None

        with ThreadPoolExecutor(20) as pool:
            runs = pool.map(job, range(20))
            with pytest.raises(ps.DeadlineExceeded):
                session.run(feeds, timeout=0.1)
            assert session.memory.arenas <= 1000
            token.cancel()
            assert set(runs) == {ps.Cancelled}
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})

    def test_concurrent_runs_equal_runs_alone(self):
        session = self.compile(
            model_from_text("""g (float[N] x) => (float[N] y) {
                a = Sin(x) b = Mul(a, a) c = Add(b, x) d = Neg(c) e = Mul(d, a) y = Add(e, b)
            }""")
        )

        def job(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                x = rng.standard_normal(rng.integers(1, 5) * 1000).astype(np.float32)
                a = np.sin(x)
                want = -(a * a + x) * a + a * a
                self.assert_same(session.run({"x": x})["y"], want)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(job, range(8)))

    @pytest.mark.parametrize("rounds", scaled(20, 60))
    def test_concurrent_runs_of_all_kinds_equal_runs_alone(self, rounds):
        """Shapes, fetches, failures and trims in any mix, while plans are dropped and made again."""
        session = self.compile(
            model_from_text("""g (float[N] x, int64 n, int64[1] i) => (float[N] y, float[1] z, float[K, N] rows) {
                a = Sin(x) b = Mul(a, a)
                y, rows = Loop (n, , b) <body = l (int64 k, bool c, float[N] v) => (bool d, float[N] w, float[N] r)
                    { d = Identity(c) e = Neg(v) w = Add(e, a) r = Mul(w, v) }>
                z = Gather(b, i)
            }"""),
            limits=ps.Limits(max_plans_bytes=150_000),
        )

        def wanted(x: np.ndarray, n: int, i: int) -> dict[str, np.ndarray]:
            a = np.sin(x)
            v, rows = a * a, []
            for _ in range(n):
                w = -v + a
                rows.append(w * v)
                v = w
            stacked = np.array(rows, np.float32).reshape(n, len(x))
            return {"a": a, "z": (a * a)[i : i + 1], "y": v, "rows": stacked}

        def job(seed: int) -> int:
            choose = random.Random(seed)
            for _ in range(rounds):
                x = np.random.default_rng(seed).standard_normal(choose.randint(1, 9))
                x, n, fails = x.astype(np.float32), choose.randrange(5), choose.random() < 0.1
                i = len(x) if fails else choose.randrange(len(x))
                feeds = {"x": x, "n": np.array(n), "i": np.array([i])}
                fetches = choose.choice([None, ["y"], ["z", "a"], ["rows"], ["a"]])
                try:
                    outputs = session.run(feeds, fetches, timeout=choose.choice([None, 60]))
                except ps.RunError as error:
                    assert fails
                    assert "Gather" in str(error)
                    continue
                assert not (fails and "z" in outputs)
                for name, value in outputs.items():
                    self.assert_same(value, wanted(x, n, i)[name])
                if choose.random() < 0.05:
                    session.trim()
            return session.memory.arenas

        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(job, range(8))) <= 150_000

    def test_submitted_runs_equal_runs_alone(self):
        session = self.compile(
            model_from_text("""g (float[N] x, int64 n) => (float[N] y) {
                a = Sin(x) b = Mul(a, a)
                y = Loop (n, , b) <body = l (int64 k, bool c, float[N] v) => (bool d, float[N] w)
                    { d = Identity(c) e = Neg(v) w = Add(e, a) }>
            }""")
        )
        feeds = [
            {"x": np.arange(1 + i % 3, dtype=np.float32), "n": np.array(i % 4)} for i in range(60)
        ]
        futures = [session.submit(each) for each in feeds]
        for each, future in zip(feeds, futures, strict=True):
            self.assert_same(future.result(), session.run(each))

    def test_asynchronous_runs_leave_the_event_loop_free(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}

        async def main() -> list[np.ndarray]:
            endless = asyncio.ensure_future(session.arun(feeds))
            short = [session.arun(feeds | {"n": np.array(n)}) for n in range(3)]
            # The endless run may keep a thread, perhaps the only one, until it is cancelled.
            asyncio.get_running_loop().call_later(0.05, endless.cancel)
            outputs = await asyncio.gather(*short)
            with pytest.raises(asyncio.CancelledError):
                await endless
            return [each["y"] for each in outputs]

        assert [y.tolist() for y in asyncio.run(main())] == [[1] * 4, [2] * 4, [4] * 4]

    def test_queued_runs_end_at_deadlines_and_cancellation(self):
        if self.leaves_threads:
            pytest.skip("a run that waits for another backend leaves its thread to the next")
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}
        short = feeds | {"n": np.array(1)}
        session.run(short)
        token, other = ps.CancelToken(), ps.CancelToken()
        pool = session.options.expert.pool
        threads = core_budget() if pool is None else pool.size
        running = [session.submit(feeds, cancel=token) for _ in range(threads + 1)]
        late = session.submit(short, timeout=0.02)
        cancelled = session.submit(short, cancel=other)
        dropped = session.submit(short)
        kept = session.submit(short)
        with pytest.raises(ps.DeadlineExceeded):
            late.result(SOON)
        other.cancel()
        with pytest.raises(ps.Cancelled):
            cancelled.result(SOON)
        assert dropped.cancel()
        assert not any(each.done() for each in running)
        token.cancel()
        for each in running:
            with pytest.raises(ps.Cancelled):
                each.result(SOON)
        assert kept.result(SOON)["y"].tolist() == [2] * 4

    def test_close_lets_submitted_runs_end(self):
        session = self.compile(model_from_text(ENDLESS))
        futures = [
            session.submit({"x": np.ones(4, np.float32), "n": np.array(n)}) for n in range(20)
        ]
        session.close()
        for n, future in enumerate(futures):
            assert future.result(SOON)["y"].tolist() == [2.0**n] * 4
        with pytest.raises(ps.PenstockError, match="closed"):
            session.submit({"x": np.ones(4, np.float32), "n": np.array(1)})
        assert session.memory.arenas == 0

    def test_error_of_a_submitted_run_is_raised_by_its_future(self):
        session = self.compile(
            model_from_text("g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }")
        )
        x = np.zeros(3, np.float32)
        with pytest.raises(ps.RunError, match=r"Gather.*float32\[3\].*int64\[1\]"):
            session.submit({"x": x, "i": np.array([3])}).result(SOON)
        with pytest.raises(ps.InvalidInput, match="float64"):
            session.submit({"x": x.astype(float), "i": np.array([3])}).result(SOON)
        assert session.submit({"x": x, "i": np.array([2])}).result(SOON)["y"].tolist() == [0]
