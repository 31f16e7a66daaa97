"""``Session.quantize_after``: a session that quantizes its own model.

Most tests quantize the model here, where no time decides; the search in a separate process is
tested once for each kind of source.
"""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.executors.control import compile_run
from penstock.frontends.onnx.writer import onnx_bytes
from penstock.quantizing.samples import samples_of
from penstock.quantizing.search import Goal, Search
from penstock.quantizing.source import float_model
from penstock.serving.replicas import Replicas
from penstock.session import feed_recorder, quantize_after, quantize_process
from penstock.session.quantize_after import BackgroundQuantization
from tests.session.test_opening import calls_of
from tests.support import tflite_networks
from tests.support.modules import ModuleWith
from tests.support.native_kernels import needs_reproducible
from tests.support.onnx_text import compile_text
from tests.support.quantizable import convolutional, feed_forward, images, rows
from tests.support.timing import wait_until

RUNS = 16
BOUND = 0.02
WAIT = 60.0
X = images(RUNS)
compiled = partial(ps.compile, threads=1, cache=False)


@pytest.fixture(autouse=True)
def all_runs_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_recorder, "SHARE", float("inf"))


@cache
def in_codes() -> bytes:
    """The convolutional network with all layers in codes."""
    compile_ = partial(ps.compile, threads=1, cache=False)
    model = ps.load(convolutional())
    search = Search(
        compile_(model), float_model(model), samples_of([*X], ["x"]), Goal(BOUND), compile_
    )
    search.folded = compile_(search.model)
    search.reference_of_some = search.reference = quantized_reference(search)
    search.choose_ranges()
    return onnx_bytes(search.with_graph(search.form(search.uniform("static"))))


def quantized_reference(search: Search) -> Any:
    from penstock.quantizing.measuring import FloatReference

    return FloatReference.of(search.original, search.chosen_by)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bytes]], None]:
    """Let a search find the model that a function returns, and let that be faster."""

    def replace(model: Callable[[], bytes]) -> None:
        def searched(self: BackgroundQuantization, samples: Path, folder: Path) -> bytes:
            assert len([*samples.iterdir()]) == self.samples
            self.report = {"layers": [{"type": "static"}], "time": 0.5}
            return model()

        monkeypatch.setattr(BackgroundQuantization, "_searched", searched)
        monkeypatch.setattr(quantize_after, "faster", lambda new, old, *_: (new, old))

    replace(in_codes)
    return replace


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Let a search never end; return the processes that were started."""
    begun: list[subprocess.Popen[str]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        begun.append(subprocess.Popen(sleeping, **options))
        return begun[-1]

    monkeypatch.setattr(quantize_process, "subprocess", ModuleWith(subprocess, Popen=popen))
    yield begun
    for process in begun:
        process.kill()
        process.wait()


def recorded(session: ps.Session, **options: Any) -> BackgroundQuantization:
    """A session that has run often enough."""
    quantization = session.quantize_after(**{"runs": RUNS, "max_error": BOUND, **options})
    assert quantization.state == "recording"
    for x in X:
        session(x)
    assert quantization.state != "recording"
    return quantization


def swapped(session: ps.Session, **options: Any) -> BackgroundQuantization:
    quantization = recorded(session, **options)
    assert quantization.wait(WAIT)
    assert quantization.state == "swapped", quantization.reason
    return quantization


def float_answers(x: np.ndarray = X) -> np.ndarray:
    session = onnxruntime.InferenceSession(convolutional().SerializeToString())
    return np.stack([session.run(None, {"x": sample})[0] for sample in x])


def error_of(outputs: np.ndarray, wanted: np.ndarray) -> float:
    rms = np.sqrt(np.square(outputs - wanted).mean(axis=(1, 2)))
    return float(rms.max() / np.ptp(wanted))


def test_answers_are_within_the_error_of_float(finds: object) -> None:
    with compiled(convolutional()) as session:
        before = np.stack([session(x) for x in X])
        quantization = swapped(session)
        assert quantization.samples == RUNS and quantization.reason is None
        after = np.stack([session(x) for x in X])
        assert not np.array_equal(before, after)
        further = images(8, seed=5)
        assert error_of(np.stack([session(x) for x in further]), float_answers(further)) < 2 * BOUND
        assert error_of(after, float_answers()) <= BOUND
        assert session.stats.runs == 3 * RUNS + 8


def test_no_run_compiles_after_the_swap_for_shapes_that_were_met(finds: object) -> None:
    with compiled(convolutional()) as session:
        batch = np.concatenate([X[0], X[1]])
        session(batch)
        swapped(session)
        made = session.stats.plans_made
        both = session(batch)
        np.testing.assert_allclose(both[:1], session(X[0]), atol=1e-5)
        assert session.stats.plans_made == made
        # Other shapes are compiled from the quantized model, too.
        three = session(np.concatenate([X[0], X[1], X[2]]))
        np.testing.assert_allclose(three[:2], both, atol=1e-5)


def test_old_weights_are_freed(finds: object) -> None:
    with compiled(convolutional()) as session:
        node = weakref.ref(session.model.graph.nodes[0])
        main = weakref.ref(session._subgraphs.main)
        swapped(session)
        gc.collect()
        assert node() is None and main() is None
        assert session.stats.plans_kept == 1


def test_each_run_during_the_swap_has_one_of_both_answers(finds: object) -> None:
    with compiled(convolutional()) as session:
        inputs = [X[0], np.concatenate([X[1], X[2]])]
        before = [session(x) for x in inputs]
        answers: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(4)]
        stop, failed = threading.Event(), []

        def run(number: int) -> None:
            i = number
            try:
                while not stop.is_set():
                    i += 1
                    x = inputs[i % 2]
                    if number == 3:
                        output = session.submit({"x": x}).result()["y"]
                    else:
                        output = session.run({"x": x}, fetches=["y"] if number == 2 else None)["y"]
                    answers[number].append((i % 2, output))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        quantization = session.quantize_after(runs=RUNS, max_error=0.2)
        for thread in threads:
            thread.start()
        assert quantization.wait(WAIT)
        counts = [len(own) for own in answers]
        while not failed and min(len(own) - n for own, n in zip(answers, counts, strict=True)) < 8:
            stop.wait(0.001)
        stop.set()
        for thread in threads:
            thread.join()
        assert failed == [] and quantization.state == "swapped", quantization.reason
        after = [session(x) for x in inputs]
        for own in answers:
            is_new = [np.array_equal(output, after[i]) for i, output in own]
            is_old = [np.array_equal(output, before[i]) for i, output in own]
            assert all(new != old for new, old in zip(is_new, is_old, strict=True))
            # Once a thread has a new answer, it gets no old one any more.
            assert is_new == sorted(is_new) and is_new[-1]


@pytest.mark.costly
@pytest.mark.parametrize("source", ["model", "saved session"])
def test_a_process_of_its_own_finds_the_model(source: str, tmp_path: Path) -> None:
    if source == "model":
        session = compiled(convolutional())
    else:
        with compiled(convolutional()) as whole:
            whole.save(tmp_path / "model.penstock")
        session = ps.open(tmp_path / "model.penstock")
    with session:
        before = np.stack([session(x) for x in X])
        quantization = recorded(session, timeout=120.0)
        assert quantization.wait(WAIT)
        after = np.stack([session(x) for x in X])
        report = quantization.report
        assert report is not None, quantization.reason
        assert report["goal"]["max_error"] == BOUND and report["samples"]["held_out"] == RUNS // 4
        if quantization.state == "swapped":
            assert not np.array_equal(before, after)
            assert error_of(after[3::4], float_answers(X[3::4])) <= BOUND * 1.001
        else:  # which is faster depends on the machine, and on its other work
            assert "time" in str(quantization.reason) or "faster" in str(quantization.reason)
            np.testing.assert_array_equal(before, after)


def test_model_without_layers_to_quantize_is_kept() -> None:
    text = "g (float[N] x) => (float[N] y) { a = Sin(x) y = Neg(a) }"
    x = np.arange(8, dtype=np.float32)
    with compile_text(text, threads=1) as session:
        before = session(x)
        quantization = session.quantize_after(runs=RUNS)
        for _ in range(RUNS):
            session(x)
        assert quantization.wait(WAIT) and quantization.state == "kept"
        assert "saves time" in str(quantization.reason)
        np.testing.assert_array_equal(session(x), before)


def test_process_that_fails_leaves_the_session_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        failing = [sys.executable, "-S", "-c", "raise SystemExit('no way')"]
        return subprocess.Popen(failing, **options)

    monkeypatch.setattr(quantize_process, "subprocess", ModuleWith(subprocess, Popen=popen))
    with compiled(convolutional()) as session:
        before = session(X[0])
        quantization = recorded(session)
        assert quantization.wait(WAIT) and quantization.state == "kept"
        assert "penstock quantize ended with 1: no way" in str(quantization.reason)
        np.testing.assert_array_equal(session(X[0]), before)
        # It may be tried again.
        session.quantize_after().cancel()


def test_model_whose_error_is_too_large_here_is_not_taken(
    finds: Callable[[Callable[[], bytes]], None],
) -> None:
    other = ps.load(convolutional())
    for node in other.graph.nodes:
        if node.op.name == "Gemm":
            node.inputs[1].set_constant(node.inputs[1].const * 1.2)
    finds(lambda: onnx_bytes(other))
    with compiled(convolutional()) as session:
        before = session(X[0])
        quantization = recorded(session)
        assert quantization.wait(WAIT) and quantization.state == "kept"
        assert "its error in this process is" in str(quantization.reason)
        np.testing.assert_array_equal(session(X[0]), before)
        assert session.stats.plans_kept == 1


def test_model_that_is_no_faster_here_is_not_taken(
    finds: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_after, "faster", lambda new, old, *_: (old, new))
    with compiled(convolutional()) as session:
        quantization = recorded(session)
        assert quantization.wait(WAIT) and quantization.state == "kept"
        assert "no faster" in repr(quantization)


def test_model_with_other_ports_is_not_taken(finds: Callable[[Callable[[], bytes]], None]) -> None:
    other = ps.load(convolutional())
    other.graph.outputs[0].name = "z"
    finds(lambda: onnx_bytes(other))
    with compiled(convolutional()) as session:
        quantization = recorded(session)
        assert quantization.wait(WAIT) and "inputs or outputs" in str(quantization.reason)


def test_closing_ends_the_search(endless: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    session = compiled(convolutional())
    quantization = recorded(session)
    thread = quantization._thread
    session.close()
    assert quantization.wait(WAIT) and quantization.state == "kept"
    assert quantization.reason == "it was cancelled"
    assert thread is None or not thread.is_alive()
    assert all(process.poll() is not None for process in endless)
    with pytest.raises(ps.PenstockError, match="closed"):
        session.quantize_after()


def test_dropped_session_ends_the_search(endless: list[subprocess.Popen[str]]) -> None:
    session = compiled(convolutional())
    quantization = recorded(session)
    thread = quantization._thread
    del session
    gc.collect()
    assert quantization.wait(WAIT) and quantization.state == "kept"
    assert thread is not None
    thread.join(WAIT)
    assert all(process.poll() is not None for process in endless)


def test_cancelling_keeps_the_model(endless: list[subprocess.Popen[str]]) -> None:
    with compiled(convolutional()) as session:
        first = session.quantize_after(runs=1000)
        session(X[0])
        first.cancel()
        assert (first.state, first.reason) == ("kept", "it was cancelled")
        second = recorded(session)
        with pytest.raises(ps.PenstockError, match="called before, and is searching"):
            session.quantize_after()
        second.cancel()
        assert second.state == "kept" and session._sampled is None
        assert session(X[0]).shape == (1, 10)


def test_forked_child_leaves_the_search_to_its_parent(endless: list[subprocess.Popen[str]]) -> None:
    with compiled(convolutional()) as session:
        quantization = recorded(session)
        wait_until(lambda: quantization._process is not None)
        quantization.forked()  # as in a child
        assert quantization.state == "kept" and "forked" in str(quantization.reason)
        quantization.cancel()
        assert endless[0].poll() is None


def test_only_ports_are_fed_and_fetched(finds: object) -> None:
    with compiled(convolutional()) as session:
        session.run({"x": X[0]}, fetches=["c0"])
        quantization = session.quantize_after(runs=1000)
        assert len(session._subgraphs) == 0
        for run in (
            partial(session.run, {"x": X[0]}, fetches=["c0"]),
            partial(session.run, {"r3": np.zeros((1, 32, 12, 12), np.float32)}),
            partial(session.stream, {"x": X[0]}, ["c0"]),
        ):
            with pytest.raises(ps.InvalidInput, match="after quantize_after"):
                run()
        quantization.cancel()
        session.run({"x": X[0]}, fetches=["c0"])


def test_some_of_several_outputs_are_of_the_quantized_model(
    finds: Callable[[Callable[[], bytes]], None],
) -> None:
    def with_two(model: ps.Model | Any) -> Any:
        graph = model.graph
        pooled = next(n for n in graph.nodes if n.op.name == "GlobalAveragePool").outputs[0]
        graph.outputs.append(pooled)
        return model

    finds(lambda: onnx_bytes(with_two(ps.load(in_codes()))))
    with compiled(with_two(ps.load(convolutional()))) as session:
        before = session.run({"x": X[0]}, fetches=["g"])["g"]
        quantization = session.quantize_after(runs=RUNS, max_error=BOUND)
        for x in X:
            session.run({"x": x})
        session.run({"x": X[0]}, fetches=["g"])
        quantization.wait(WAIT)
        assert quantization.state == "swapped", quantization.reason
        made = session.stats.plans_made
        after = session.run({"x": X[0]}, fetches=["g"])["g"]
        assert not np.array_equal(before, after)
        np.testing.assert_array_equal(after, session.run({"x": X[0]})["g"])
        assert session.stats.plans_made <= made + 1


def test_saved_and_pickled_sessions_are_of_the_quantized_model(
    finds: object, tmp_path: Path
) -> None:
    with compiled(convolutional()) as session:
        swapped(session)
        wanted = session(X[0])
        session.save(tmp_path / "session.penstock")
        np.testing.assert_array_equal(ps.open(tmp_path / "session.penstock")(X[0]), wanted)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(session))(X[0]), wanted)


def test_cache_keeps_the_model_of_the_file(finds: object, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(convolutional().SerializeToString())
    options: dict[str, Any] = {"threads": 1, "cache": tmp_path / "cache"}
    with ps.compile(path, **options) as session:
        before = session(X[0])
        swapped(session)
        assert not np.array_equal(session(X[0]), before)
    with ps.compile(path, **options) as session:
        np.testing.assert_array_equal(session(X[0]), before)
        assert session.stats.plans_opened == 1


def test_sessions_that_compile_in_no_run_have_their_plans(finds: object) -> None:
    with compiled(
        convolutional(), compile_in_run=False, shapes=[{"x": [1, 3, 24, 24]}, {"x": [2, 3, 24, 24]}]
    ) as session:
        swapped(session)
        session(X[0])
        session(np.concatenate([X[0], X[1]]))
        with pytest.raises(ps.InvalidInput, match="compile_in_run"):
            session(np.concatenate([X[0], X[1], X[2]]))


def test_runs_of_other_sessions_call_nothing_more(finds: object) -> None:
    with compiled(convolutional()) as session:
        feeds = {"x": X[0]}
        for _ in range(50):  # trials of the plan, whose runs make more calls, end meanwhile
            session.run(feeds)
        before = calls_of(session.run, feeds)
        assert session._controlled is None and calls_of(session.run, feeds) == before
        quantization = session.quantize_after(runs=10_000, samples=1)
        recorder = quantization._recorder
        assert recorder is not None
        while recorder._gap < 10:
            session.run(feeds)
        assert calls_of(session.run, feeds) == before  # the recorder makes no Python call
        quantization.cancel()
        assert session._controlled is None and session._sampled is None
        assert calls_of(session.run, feeds) == before


@pytest.mark.parametrize("name", ["_controlled", "_sampled"])
def test_run_reads_once_what_another_thread_may_take_away(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with compiled(convolutional()) as session:
        session(X[0])
        quantization = session.quantize_after(runs=1000)
        values = [getattr(session, name)]

        def read(_: ps.Session) -> Any:
            return values.pop() if values else None

        monkeypatch.setattr(ps.Session, name, property(read, lambda *_: None), raising=False)
        with compile_run(WAIT) as control:
            if name == "_controlled":
                session.run({"x": X[0]})
            else:
                session._run_under(control, {"x": X[0]})
        assert values == []
        monkeypatch.undo()
        quantization.cancel()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reproducible": ({"reproducible": True}, "reproducible="),
    "memory": ({"memory": "1GB"}, "memory="),
    "precision": ({"precision": "strict"}, "precision="),
    "place": ({"place": {"MatMul": "numpy"}}, "place="),
    "backends": ({"backends": ["numpy"]}, "'native'"),
    "interpret": ({"executor": "interpret"}, "'interpret'"),
    "frames": ({"executor": "frames"}, "'frames'"),
    "devices": ({"executor": "frames", "devices": 2}, "devices="),
}


@pytest.mark.parametrize(
    "name", [pytest.param("reproducible", marks=needs_reproducible), *[*REFUSED][1:]]
)
def test_options_that_it_cannot_keep_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    with ps.compile(feed_forward(), cache=False, **options) as session:
        with pytest.raises(ValueError, match=message):
            session.quantize_after()
        assert session._sampled is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"runs": 0}, ValueError),
        ({"runs": 1.5}, TypeError),
        ({"samples": 0}, ValueError),
        ({"max_error": 0}, ValueError),
        ({"max_error": float("nan")}, ValueError),
        ({"max_error": "1%"}, TypeError),
        ({"timeout": -1.0}, ValueError),
        ({"timeout": True}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with compiled(feed_forward()) as session, pytest.raises(error, match=next(iter(options))):
        session.quantize_after(**options)


def test_models_that_cannot_be_exchanged_are_refused() -> None:
    text = "g (string[N] x) => (string[N] y) { y = Identity(x) }"
    with compile_text(text) as session, pytest.raises(ps.Unsupported, match="input 'x'"):
        session.quantize_after()
    with (
        compiled(tflite_networks.convolutional()) as session,
        pytest.raises(ps.Unsupported, match="load the model from its path"),
    ):
        session.quantize_after()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of searches, which fail at once."""
    begun: list[list[str]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        begun.append(command)
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"], **options)

    monkeypatch.setattr(quantize_process, "subprocess", ModuleWith(subprocess, Popen=popen))
    return begun


def test_tflite_files_are_quantized_as_such(
    tmp_path: Path, finds: Callable[[Callable[[], bytes]], None]
) -> None:
    path, x = tmp_path / "m.tflite", tflite_networks.images(RUNS)
    path.write_bytes(tflite_networks.convolutional())
    quantized = ps.quantize(
        path, [*x], max_error=BOUND, output=tmp_path / "q.tflite", threads=1, timeout=60
    )
    finds(lambda: quantized.tflite)
    with compiled(path) as session:
        before = [session(own) for own in x]
        quantization = session.quantize_after(runs=RUNS, max_error=BOUND)
        for own in x:
            session(own)
        assert quantization.wait(WAIT) and quantization.state == "swapped", quantization.reason
        after = [session(own) for own in x]
        assert not np.array_equal(before, after)
        spread = max(map(np.max, before)) - min(map(np.min, before))
        for one, other in zip(before, after, strict=True):
            assert np.sqrt(np.square(one - other).mean()) <= BOUND * spread
        # Inputs can be resized, as in any TFLite model.
        both = session(np.concatenate([x[0], x[1]]))
        assert both.shape[0] == 2
        # Sums in another order may round to another code where the search left float32 layers.
        for one, other in zip(before[:2], both, strict=True):
            assert np.sqrt(np.square(one - other).mean()) <= BOUND * spread


def test_search_for_a_tflite_file_writes_one(tmp_path: Path, commands: list[list[str]]) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(tflite_networks.convolutional())
    with compiled(path) as session:
        quantization = session.quantize_after(runs=8)
        for x in tflite_networks.images(8):
            session(x)
        assert not quantization.wait(WAIT) or quantization.state == "kept"
    (command,) = commands
    assert command[command.index("quantize") + 1] == str(path)
    assert command[command.index("--output") + 1].endswith(".tflite")
    assert "--independent-rows" not in command


def test_search_for_joined_requests_leaves_out_layers_in_which_rows_act_on_one_another(
    commands: list[list[str]],
) -> None:
    with compiled(feed_forward()) as session, Replicas(session, 1, max_batch=4) as replicas:
        quantization = session.quantize_after(runs=8)
        for x in rows(8):
            replicas.submit({"x": x[:1]}).result(WAIT)
        assert not quantization.wait(WAIT) or quantization.state == "kept"
    (command,) = commands
    assert "--independent-rows" in command


def test_sessions_that_quantize_themselves_join_no_requests() -> None:
    with compiled(feed_forward()) as session:
        session.quantize_after()
        with pytest.raises(ps.PenstockError, match="affect one another"):
            Replicas(session, 1, max_batch=4)
