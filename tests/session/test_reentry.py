"""Sessions that are called in signal handlers, finalizers and callbacks, which interrupt others."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.observers.base import Observer
from tests.support.onnx_text import model_from_text
from tests.support.sweeps import drawn

ROOT = Path(__file__).parents[2]
MODEL = """g (float[N, 3] x) => (float[N, 3] y)
    <float[3, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}>
    { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) d = Sin(a) e = Add(c, d) y = Exp(e) }"""
PROGRAM = f"""
import gc, signal, sys, threading, time
import numpy as np
import penstock as ps
from tests.support.onnx_text import model_from_text

call, executor = sys.argv[1:]
limits = ps.Limits(max_plans_bytes=100_000)
model = model_from_text({MODEL!r})
session = ps.compile(model, executor=executor, limits=limits)
xs = [np.full((rows, 3), rows / 10, np.float32) for rows in range(1, 9)]
answers = [session(x) for x in xs]
inside, done, refused = False, 0, 0

def calls():
    if call == "run":
        return session.run({{"x": x}})["y"]
    if call == "submit":
        return session.submit({{"x": x}}).result()["y"]
    return ps.compile(model, executor=executor).run({{"x": x}})["y"]

def interrupt(*_):
    global inside, done, refused, x
    if inside:
        return
    inside = True
    number = (done + refused) % len(xs)
    x = xs[number]
    try:
        assert np.allclose(calls(), answers[number], rtol=1e-5)
        done += 1
    except ps.PenstockError as error:
        assert type(error) is ps.PenstockError, error
        refused += 1
    inside = False

class Finalized:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            interrupt()

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.001)
begin, runs = time.monotonic(), 0
while time.monotonic() < begin + (0.5 if min(runs, done) > 10 else 30):
    Finalized()
    if runs % 20 == 0:
        gc.collect(0)
    number = runs * 5 % len(xs)
    run = session.run if runs % 3 else lambda feeds: session.submit(feeds).result()
    assert np.allclose(run({{"x": xs[number]}})["y"], answers[number], rtol=1e-5)
    runs += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert gc.isenabled() and not inside
inside = True
assert np.allclose(session(xs[0]), answers[0], rtol=1e-5)
print(min(runs, done))
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("call", "executor"),
    drawn(product(["run", "submit", "compile"], ["linear", "parallel", "frames"]), 5),
)
def test_call_in_signal_handlers_and_finalizers_answers_or_is_refused(call, executor):
    command = [sys.executable, "-c", PROGRAM, call, executor]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) > 10


@pytest.mark.parametrize("call", ["run", "submit"])
def test_call_while_its_thread_compiles_is_refused(call):
    sessions: list[ps.Session] = []
    refusals = []

    def interrupt(*_: object) -> None:
        for session in sessions:
            with pytest.raises(ps.PenstockError, match="while this thread compiles") as caught:
                getattr(session, call)({"x": np.ones((2, 3), np.float32)})
            refusals.append(caught)

    session = ps.compile(model_from_text(MODEL), expert=ps.ExpertOptions(after_pass=interrupt))
    sessions.append(session)
    session.run({"x": np.ones((3, 3), np.float32)})
    assert refusals
    sessions.clear()
    assert session.run({"x": np.ones((2, 3), np.float32)})["y"].shape == (2, 3)


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_call_within_a_run_that_has_all_memory_is_refused(executor):
    class Calls(Observer):
        def step_begin(self, run, step, inputs):
            session.run({"x": x}, observers=[Observer()])

    x = np.ones((64, 3), np.float32)
    once = ps.compile(model_from_text(MODEL), executor=executor, shapes={"x": (64, 3)})
    limits = ps.Limits(max_bytes=once.memory.arenas * 3 // 2)
    session = ps.compile(model_from_text(MODEL), executor=executor, limits=limits)
    with pytest.raises(
        ps.PenstockError, match=r"all the memory that Limits\.max_bytes or memory= allows"
    ):
        session.run({"x": x}, observers=[Calls()])
    assert session.run({"x": x})["y"].shape == (64, 3)
