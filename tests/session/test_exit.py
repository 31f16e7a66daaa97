"""The exit of a process with submitted runs that have not ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.processes import end_of

BEGIN = """
import atexit
import numpy as np
import penstock as ps
from tests.support.onnx_text import compile_text

session = compile_text('''
    g (float[4] x, int64 n) => (float[4] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
            d = Identity (c) w = Add (v, v) }>
    }''')
def feeds(n):
    return {"x": np.ones(4, np.float32), "n": np.array(n)}
session.run(feeds(1))
def ended(future):
    print(type(future.exception()).__name__, flush=True)
"""


def test_exit_waits_for_a_submitted_run_until_its_deadline():
    program = "session.submit(feeds(2**62), timeout=0.2).add_done_callback(ended)"
    assert end_of(BEGIN + program) == "DeadlineExceeded\n"


def test_exit_waits_for_what_is_queued_on_a_stream():
    program = """
stream = ps.Stream()
stream.run(session, feeds(2**62), timeout=0.2).add_done_callback(ended)
for n in (1, 2):
    stream.run(session, feeds(n)).add_done_callback(lambda future: print(future.result()["y"][0]))
"""
    assert end_of(BEGIN + program) == "DeadlineExceeded\n2.0\n4.0\n"


def test_token_cancelled_at_exit_ends_a_run_without_end():
    program = """
token = ps.CancelToken()
atexit.register(token.cancel)  # what was registered last is called first
session.submit(feeds(2**62), cancel=token).add_done_callback(ended)
"""
    assert end_of(BEGIN + program) == "Cancelled\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals of POSIX")
def test_interrupt_at_exit_ends_a_process_with_a_run_without_end():
    # A shell may have started the tests with interrupts ignored, as it does in the background.
    program = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
session.submit(feeds(2**62)); atexit.register(print, 'ending', flush=True)
"""
    command = [sys.executable, "-c", BEGIN + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ending\n"
        while process.poll() is None:  # the first may come before the process waits for the run
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert process.stderr is not None
        assert b"KeyboardInterrupt" in process.stderr.read()
