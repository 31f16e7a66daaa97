"""The arenas of torch's devices: what is planned there, and that it is right."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.plan.plan import SlotKind
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON
from tests.support.torch_kernels import inference_modes, needs_torch

pytestmark = needs_torch


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


CHAIN = """g (float[4, 6] x) => (float[6, 4] y) {
    a = Sin(x) b = Transpose(a) c = Exp(b) d = Neg(c) e = Add(d, b) y = Cos(e) }"""


def planned(session: ps.Session) -> dict[str, str]:
    """The memory of each value in an arena."""
    slots = session.inspect.plan.slots
    return {s.name: s.memory for s in slots if s.kind is SlotKind.ARENA}


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_values_between_torch_kernels_are_planned_into_an_arena_of_the_device(executor):
    session = compile_text(CHAIN, backends=["torch"], executor=executor)
    a = np.sin(X).T
    for _ in range(2):
        np.testing.assert_allclose(session(X), np.cos(a - np.exp(a)), rtol=1e-5)
    assert planned(session) == dict.fromkeys("acdey", "torch cpu")
    assert session.inspect.plan.views == 1
    assert "arena 224 B in memory 'torch cpu'" in session.explain()
    arena_plan = session.inspect.executor.arena_plan
    assert arena_plan.size == 0
    # a, and what is computed from it, in place
    assert arena_plan.remote == {"torch cpu": 128 + X.nbytes}


def test_memory_of_a_session_counts_the_arenas_of_devices():
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    session(X)
    assert session.memory.arenas == sum(session.inspect.executor.arena_plan.remote.values()) > 0


def test_memory_of_a_session_counts_constants_on_devices():
    w = ", ".join(map(str, range(24)))
    text = f"g (float[4, 6] x) => (float[4, 6] y) <float[4, 6] w = {{{w}}}> {{ y = Mul(x, w) }}"
    session = compile_text(text, backends=["torch"], executor="linear")
    np.testing.assert_array_equal(session(X), X * np.arange(24, dtype=np.float32).reshape(4, 6))
    assert session.memory.weights == 2 * X.nbytes  # the file's, and the copy on the device


def test_limit_of_bytes_holds_for_arenas_of_devices():
    limits = ps.Limits(max_bytes=150)
    with pytest.raises(ps.LimitExceeded):
        compile_text(CHAIN, backends=["torch"], executor="linear", limits=limits)(X)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_views_of_an_arena_are_right_where_elements_are_narrower(dtype):
    from penstock.backends.torch.backend import TorchBackend

    text = """g (float[4, 6] x) => (float[2, 3] y) {
        k = Constant<value_ints = [1, 2]>() l = Constant<value_ints = [3, 5]>()
        a = Exp(x) s = Slice(a, k, l) b = Neg(s) y = Mul(b, s) }"""
    session = compile_text(text, backends=[TorchBackend("cpu", dtype)], executor="linear")
    s = np.exp(X)[1:3, 2:5]
    np.testing.assert_allclose(session(X), -s * s, rtol=3e-2)
    assert session.inspect.plan.views == 1


def test_value_that_a_loop_carries_on_the_device_is_not_overwritten():
    text = """g (float[4] x, int64 n) => (float[4] y, float[K, 4] all) {
        y, all = Loop (n, , x) <body = b (int64 i, bool c, float[4] v)
            => (bool d, float[4] w, float[4] r) {
            d = Identity(c) t = Sin(v) u = Neg(t) w = Sub(u, v) r = Exp(w) }>
    }"""
    session = compile_text(text, backends=["torch"], executor="linear")
    x = np.array([0.1, 0.5, -1, 2], np.float32)
    v, rows = x, []
    for _ in range(5):
        v = -np.sin(v) - v
        rows.append(np.exp(v))
    for _ in range(2):
        y, every = session.run({"x": x, "n": np.array(5)}).values()
        np.testing.assert_allclose(y, v, rtol=1e-4)
        np.testing.assert_allclose(every, np.stack(rows), rtol=1e-4)


def test_runs_at_the_same_time_have_arenas_of_their_own():
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    inputs = [X * i for i in range(12)]
    results = [session.submit({"x": x}) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        a = np.sin(x).T
        np.testing.assert_allclose(result.result(SOON)["y"], np.cos(a - np.exp(a)), rtol=1e-4)


def test_runs_are_in_inference_mode_and_leave_the_callers_as_it_was():
    import torch

    from penstock.backends.torch.backend import TorchBackend

    backend = TorchBackend("cpu")
    seen = inference_modes(backend)
    session = compile_text(CHAIN, backends=[backend], executor="linear")
    session(X)
    assert seen
    assert all(seen)
    assert not torch.is_inference_mode_enabled()


def test_interrupt_leaves_the_callers_mode_as_it_was():
    import torch

    from penstock.backends.torch.backend import TorchBackend

    call = TorchBackend.in_runs(lambda: None)

    def interrupted(frame, event, _):
        """Interrupts one event later each time, where Python looks for signals: whenever a
        function that ``call`` calls begins or ends."""
        if frame.f_code is not call.__code__ and event in ("call", "return"):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupted

    before = sys.gettrace()
    for last in itertools.count(1):
        left = last
        try:
            sys.settrace(interrupted)
            call()
        except KeyboardInterrupt:
            assert not torch.is_inference_mode_enabled()
        else:
            break
        finally:
            sys.settrace(before)
    assert last > 2  # the function of the run itself was interrupted


def test_limit_of_bytes_holds_for_each_memory_alone():
    text = """g (float[4, 6] x) => (float[4, 6] y) {
        a = Sin(x) b = Exp(a) h = Hardmax(b) i = Add(h, b) k = Hardmax(i) y = Mul(k, a) }"""
    session = compile_text(text, backends=["torch"], executor="linear")
    host, away = (
        session.inspect.executor.arena_plan.size,
        session.inspect.executor.arena_plan.remote["torch cpu"],
    )
    assert min(host, away) > 0
    most = max(host, away)
    limits = ps.Limits(max_bytes=most)
    compile_text(text, backends=["torch"], executor="linear", limits=limits).run({"x": X})
    with pytest.raises(ps.LimitExceeded, match=f"{most} bytes"):
        limits = ps.Limits(max_bytes=most - 1)
        compile_text(text, backends=["torch"], executor="linear", limits=limits).run({"x": X})
