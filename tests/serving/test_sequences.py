"""Sequences of requests over HTTP: each gets what ONNX Runtime answers to it alone, whose state is
fed back by hand."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.errors import RunError
from penstock.serving.app import Server
from penstock.serving.sequences import Sequences
from penstock.session.ahead import freeze
from tests.support.decoders import decoder_model, reference_logits
from tests.support.onnx_text import model_from_text
from tests.support.streams import PAST, UNITS, WIDTH, HeldSteps, StreamAlone, stream_model
from tests.support.timing import SOON, wait_until
from tests.support.triton import (
    InferenceServerClient,
    InferenceServerException,
    InferRequestedOutput,
    asked,
    fed,
    serving,
)
from tests.support.variable_models import MODELS, by_litert, frames_of

LSTM = {"h0": "hn", "c0": "cn"}
STATES = {
    **dict.fromkeys(("lstm", "static"), LSTM),
    "buffer": {"audio_cache_in": "audio_cache_out", "length": "new_length"},
    "dependent": {"state": "state_out"},
}
DATATYPES = {"float32": "FP32", "int64": "INT64"}
FRAME = {"frame": np.full((1, WIDTH), 0.5, np.float32)}
X = {"name": "frame", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.5] * WIDTH}


@contextmanager
def streaming(
    folder: Path,
    model: str | onnx.ModelProto = "lstm",
    options: Mapping[str, Any] | None = None,
    **of_stepper: Any,
) -> Iterator[tuple[InferenceServerClient, str, Server]]:
    """A client of a server with a model "m"; ``options`` are those of ``Sequences``."""
    path = folder / "model.onnx"
    onnx.save(stream_model(model) if isinstance(model, str) else model, path)

    def make(path: Path) -> Sequences:
        return Sequences(ps.Stepper(path, **of_stepper), **(options or {}))

    with serving({"m": path}, make) as of:  # type: ignore[arg-type]
        yield of


def sequences_of(server: Server) -> Sequences:
    sequences = server.repository.find("m").replicas
    assert isinstance(sequences, Sequences)
    return sequences


def infer(
    triton: InferenceServerClient,
    feeds: Mapping[str, np.ndarray],
    key: int | str,
    *,
    start: bool = False,
    end: bool = False,
    binary: bool = True,
    output: str = "output",
    **options: Any,
) -> np.ndarray:
    """An output of a request of a sequence."""
    inputs = [fed(n, x, DATATYPES[x.dtype.name], binary=binary) for n, x in feeds.items()]
    flags = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
    outputs = [InferRequestedOutput(output, binary_data=binary)]
    array: np.ndarray = triton.infer("m", inputs, outputs=outputs, **flags, **options).as_numpy(
        output
    )
    return array


def refused(triton: InferenceServerClient, *arguments: Any, **options: Any) -> tuple[str, str]:
    """The status and the message of a request that is refused."""
    with pytest.raises(InferenceServerException) as error:
        infer(triton, *arguments, **options)
    return error.value.status(), error.value.message()


def elsewhere(url: str, *arguments: Any, **options: Any) -> np.ndarray:
    """``infer`` by a client of its own: one is for the thread that it was made on."""
    with InferenceServerClient(url.removeprefix("http://"), network_timeout=SOON) as triton:
        return infer(triton, *arguments, **options)


def frame_of(kind: str, rng: np.random.Generator, count: int = 1) -> dict[str, np.ndarray]:
    if kind == "buffer":
        audio = rng.standard_normal((count, WIDTH, 3)).astype(np.float32)
        return {"audio": audio, "rate": np.array(2, np.float32)}
    return {"frame": rng.standard_normal((count, WIDTH)).astype(np.float32)}


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# What sequences are answered.


@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "json"])
@pytest.mark.parametrize("kind", STATES)
def test_each_sequence_is_answered_as_if_it_were_alone(tmp_path, kind, binary):
    rng = np.random.default_rng(0)
    output = "y" if kind in ("buffer", "dependent") else "output"
    with streaming(tmp_path, kind) as (triton, _, server):
        streams = {key: StreamAlone(kind, STATES[kind]) for key in (42, "42", 2**64 - 1)}
        for i in range(4):
            for key, alone in streams.items():
                frame = frame_of(kind, rng)
                got = infer(
                    triton, frame, key, start=i == 0, end=i == 3, binary=binary, output=output
                )
                check(got, alone.step(frame)[output])
        counts = sequences_of(server).table.counts
        assert (counts.open, counts.begun) == (0, 3)


def test_clients_at_once_are_answered_as_each_alone_in_common_steps(tmp_path):
    with streaming(tmp_path) as (_, url, server):
        sequences = sequences_of(server)

        def stream(key: int) -> None:
            rng, alone = np.random.default_rng(key), StreamAlone("lstm", LSTM)
            with InferenceServerClient(url.removeprefix("http://"), network_timeout=SOON) as triton:
                for i in range(12):
                    frame = frame_of("lstm", rng)
                    got = infer(triton, frame, key, start=i == 0, end=i == 11)
                    check(got, alone.step(frame)["output"])

        # Frames that came while the first step was held are computed in one.
        held = HeldSteps(sequences.stepper)
        with ThreadPoolExecutor(8) as threads:
            ends = [threads.submit(stream, key) for key in range(1, 9)]
            wait_until(lambda: sequences.counts.running == 8)
            held.opened.set()
            for end in ends:
                end.result(SOON)
        counts = sequences.counts
        assert (counts.succeeded, counts.failed, counts.rows) == (96, 0, 96)
        assert counts.batches < 96
        of = sequences.histograms.batch_rows
        assert (of.count, of.total) == (counts.batches, 96)


def test_several_frames_of_a_request_are_computed_one_by_one(tmp_path):
    rng, alone = np.random.default_rng(0), StreamAlone("lstm", LSTM)
    with streaming(tmp_path) as (triton, _, _):
        frames = frame_of("lstm", rng, 5)
        got = infer(triton, frames, 7, start=True)
        want = [alone.step({"frame": frames["frame"][i : i + 1]})["output"] for i in range(5)]
        check(got, np.concatenate(want))
        frames = frame_of("lstm", rng, 3)
        got = infer(triton, frames, 7, parameters={"wanted": 1})
        for i in range(3):
            last = alone.step({"frame": frames["frame"][i : i + 1]})["output"]
        check(got, last)
        status, why = refused(triton, frames, 7, parameters={"wanted": 4})
        assert (status, "wanted=4 of 3 rows" in why) == ("400", True)


def test_rows_of_a_decoder_are_answered_with_its_caches(tmp_path):
    model, ids = decoder_model("spelled"), np.random.default_rng(0).integers(0, 50, (2, 40))
    with streaming(tmp_path, model) as (triton, _, _):
        want = {f"s{k}": reference_logits(model, ids[k]) for k in range(2)}
        for k, key in enumerate(want):
            got = infer(triton, {"ids": ids[k : k + 1, :30]}, key, start=True, output="logits")
            check(got[0], want[key][:30])
        for i in range(30, 38):
            for k, key in enumerate(want):
                got = infer(triton, {"ids": ids[k : k + 1, i : i + 1]}, key, output="logits")
                check(got[0], want[key][i : i + 1])
        last = {"ids": ids[:1, 38:40]}
        got = infer(triton, last, "s0", output="logits", end=True, parameters={"wanted": 1})
        check(got[0], want["s0"][39:40])


def test_sequence_begins_with_the_states_among_its_inputs(tmp_path):
    rng = np.random.default_rng(0)
    first = {n: rng.standard_normal((1, 1, UNITS)).astype(np.float32) for n in LSTM}
    with streaming(tmp_path) as (triton, _, _):
        alone = StreamAlone("lstm", LSTM, **first)
        got = infer(triton, {**FRAME, **first}, 1, start=True)
        check(got, alone.step(FRAME)["output"])
        status, why = refused(triton, {**FRAME, **first}, 1)
        assert (status, "at the start of a sequence" in why) == ("400", True)
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])


def test_inputs_that_stay_as_they_are_come_with_the_first_request(tmp_path):
    text = """g (float[b, s, 4] x, float[b, 1, p, 4] past_self, float[b, e, 4] encoder_states)
        => (float[b, s, 4] y, float[b, 1, t, 4] present_self) <int64[1] one = {1}> {
        r = Unsqueeze (x, one) present_self = Concat <axis = 2> (past_self, r)
        m = ReduceMean <keepdims = 1> (present_self) e = ReduceMean <keepdims = 1> (encoder_states, one)
        s = ReduceSum <keepdims = 0> (present_self, one) c = ReduceMean <keepdims = 1> (s, one)
        a = Add (c, e) z = Sub (x, x) y = Add (z, a) }"""
    x, states = np.ones((2, 1, 4), np.float32), np.array([1, 5], np.float32)
    with streaming(tmp_path, model_from_text(text, opset=18)) as (triton, _, _):
        inputs = triton.get_model_metadata("m")["inputs"]
        assert [port["name"] for port in inputs] == ["x", "encoder_states"]
        for k in range(2):
            first = {"x": x[:1], "encoder_states": np.full((1, 3, 4), states[k])}
            check(infer(triton, first, k + 1, start=True, output="y"), x[:1] + states[k])
        for k in range(2):
            check(infer(triton, {"x": 3 * x[:1]}, k + 1, output="y"), 2 + states[k] * x[:1])
        status, why = refused(triton, first, 1, output="y")
        assert (status, "only be fed at the start of a sequence" in why) == ("400", True)
        status, why = refused(triton, {"x": x[:1]}, 3, start=True, output="y")
        assert (status, "begins with ['encoder_states']" in why) == ("400", True)


# Ids, and flags of requests.


def test_request_without_a_sequence_that_is_there_is_refused(tmp_path):
    with streaming(tmp_path) as (triton, url, server):
        status, why = refused(triton, FRAME, 5)
        assert status == "400"
        assert "sequence 5 does not exist" in why and '"sequence_start": true' in why
        status, why = refused(triton, FRAME, 0)
        assert (status, 'must have the parameter "sequence_id"' in why) == ("400", True)
        infer(triton, FRAME, 5, start=True, end=True)
        assert refused(triton, FRAME, 5)[0] == "400"
        document = json.dumps({"inputs": [X], "parameters": {"sequence_id": 5}}).encode()
        status, answer = asked(f"{url}/v2/models/m/infer_stream", document)
        assert (status, "not support streaming" in answer["error"]) == (400, True)
        assert sequences_of(server).table.counts.open == 0


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"sequence_id": True}, '"sequence_id" true must be an unsigned'),
        ({"sequence_id": -1}, '"sequence_id" -1 must be an unsigned'),
        ({"sequence_id": 2**64}, '"sequence_id" an integer of 65 bits must be an unsigned'),
        ({"sequence_id": 1.5}, '"sequence_id" 1.5 must be an unsigned'),
        ({"sequence_id": "x" * 129}, "at most 128 characters"),
        ({"sequence_id": 1, "sequence_start": 1}, "must be true or false"),
        ({"sequence_id": 1, "sequence_end": "yes"}, "must be true or false"),
        ({"sequence_id": 1, "sequence_start": True, "wanted": 0}, '"wanted" 0 must be'),
        ({"sequence_id": 1, "sequence_start": True, "wanted": 2.0}, '"wanted" 2.0 must be'),
    ],
)
def test_wrong_parameters_of_sequences_are_refused(tmp_path, parameters, why):
    with streaming(tmp_path) as (_, url, _):
        document = json.dumps({"inputs": [X], "parameters": parameters}).encode()
        status, answer = asked(f"{url}/v2/models/m/infer", document)
        assert (status, why in answer["error"]) == (400, True), answer


def test_model_without_state_refuses_sequences(client):
    triton, _ = client
    x = fed("x", np.ones((1, 3), np.float32), "FP32", binary=True)
    with pytest.raises(InferenceServerException, match="--stateful") as error:
        triton.infer("affine", [x], sequence_id=1, sequence_start=True)
    assert error.value.status() == "400"


def test_wrong_request_changes_no_sequence(tmp_path):
    alone = StreamAlone("lstm", LSTM)
    wrong = {"frame": np.ones((1, WIDTH + 1), np.float32)}
    with streaming(tmp_path) as (triton, _, server):
        check(infer(triton, FRAME, 1, start=True), alone.step(FRAME)["output"])
        for start in (False, True):
            status, why = refused(triton, wrong, 1, start=start)
            assert status == "400"
            assert f"the model expects [-1, {WIDTH}]" in why
        status, why = refused(triton, FRAME, 1, output="hn")
        assert (status, "'hn', but the model has" in why) == ("400", True)
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])
        assert refused(triton, wrong, 2, start=True)[0] == "400"
        assert refused(triton, FRAME, 2)[0] == "400"
        assert sequences_of(server).table.counts.open == 1


def test_sequence_that_is_begun_again_begins_anew(tmp_path):
    with streaming(tmp_path) as (triton, _, server):
        first = infer(triton, FRAME, 1, start=True)
        infer(triton, FRAME, 1)
        np.testing.assert_array_equal(infer(triton, FRAME, 1, start=True), first)
        counts = sequences_of(server).table.counts
        assert (counts.open, counts.begun) == (1, 2)


# Requests at once.


@contextmanager
def held_request(
    triton: InferenceServerClient, url: str, server: Server
) -> Iterator[tuple[HeldSteps, Future[np.ndarray]]]:
    """A second request of sequence 1, whose step is held until the block ends."""
    infer(triton, FRAME, 1, start=True)
    held = HeldSteps(sequences_of(server).stepper)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(elsewhere, url, FRAME, 1)
        try:
            assert held.reached.wait(SOON)
            yield held, answer
        finally:
            held.opened.set()


def test_second_request_of_a_sequence_is_refused_while_one_is_computed(tmp_path):
    alone = StreamAlone("lstm", LSTM)
    with streaming(tmp_path) as (triton, url, server):
        with held_request(triton, url, server) as (_, answer):
            status, why = refused(triton, FRAME, 1)
            assert (status, "wait for its response" in why) == ("409", True)
        alone.step(FRAME)
        check(answer.result(SOON), alone.step(FRAME)["output"])
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])


def test_sequence_that_is_begun_anew_ends_the_request_that_is_computed(tmp_path):
    alone = StreamAlone("lstm", LSTM)
    with streaming(tmp_path) as (triton, url, server):
        with held_request(triton, url, server) as (held, answer), ThreadPoolExecutor(1) as thread:
            again = thread.submit(elsewhere, url, FRAME, 1, start=True)
            with pytest.raises(InferenceServerException, match="restarted by another") as error:
                answer.result(SOON)
            assert error.value.status() == "409"
            held.opened.set()
            check(again.result(SOON), alone.step(FRAME)["output"])
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])
        assert sequences_of(server).table.counts.open == 1


def test_one_sequence_too_many_is_refused_until_one_ends(tmp_path):
    with streaming(tmp_path, options={"most": 2}) as (triton, url, _):
        for key in (1, 2):
            infer(triton, FRAME, key, start=True)
        status, why = refused(triton, FRAME, 3, start=True)
        assert (status, "2 sequences are open" in why) == ("429", True)
        infer(triton, FRAME, 1, start=True)  # in place of itself
        infer(triton, FRAME, 2, end=True)
        infer(triton, FRAME, 3, start=True)
        assert 'penstock_refused_total{model="m",version="1"} 1.0' in metrics(url)


def test_states_that_do_not_fit_are_too_many_sequences(tmp_path):
    with streaming(tmp_path, cache_bytes=2 * 2 * UNITS * 4) as (triton, _, server):
        for key in (1, 2):
            infer(triton, FRAME, key, start=True)
        status, why = refused(triton, FRAME, 3, start=True)
        assert (status, "raise cache_bytes" in why) == ("429", True)
        infer(triton, FRAME, 1, end=True)
        infer(triton, FRAME, 3, start=True)
        assert sequences_of(server).table.counts.open == 2


# Sequences that end by themselves.


def test_sequence_ends_if_no_request_comes_for_a_while(tmp_path):
    with streaming(tmp_path, options={"idle": 0.02}) as (triton, url, server):
        sequences = sequences_of(server)
        infer(triton, FRAME, 1, start=True)
        wait_until(lambda: sequences.table.counts.open == 0)
        assert refused(triton, FRAME, 1)[0] == "400"
        # The timer is set again for those that come later, and goes with the last one.
        infer(triton, FRAME, 2, start=True)
        wait_until(lambda: sequences.table.counts.open == 0)
        wait_until(lambda: sequences.table._timer is None)
        assert not sequences.stepper._engine.holding
        assert 'penstock_sequences_idle_total{model="m",version="1"} 2.0' in metrics(url)


def test_sequence_with_a_request_is_not_idle(tmp_path):
    with streaming(tmp_path, options={"idle": 0.01}) as (_, url, server):
        sequences = sequences_of(server)
        held = HeldSteps(sequences.stepper)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(elsewhere, url, FRAME, 1, start=True)
            assert held.reached.wait(SOON)
            for _ in range(3):  # the timer comes, and is set again
                timer = sequences.table._timer
                wait_until(lambda timer=timer: sequences.table._timer not in (timer, None))
            assert sequences.table.counts.open == 1
            held.opened.set()
            assert answer.result(SOON).shape == (1, UNITS)


@pytest.mark.parametrize("path", ["event loop", "thread"])
def test_client_that_hangs_up_ends_its_sequence(tmp_path, path):
    with streaming(tmp_path) as (triton, url, server):
        sequences = sequences_of(server)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), SOON) as client:
            client.sendall(request(sequence_id=1, sequence_start=True))
            assert b"200" in client.recv(1 << 16)
            if path == "thread":
                wait_until(lambda: server.direct._workers.threads == 1)
            else:
                server.direct.close()
            held = HeldSteps(sequences.stepper)
            # Another one's step is held, so that the frame waits.
            with ThreadPoolExecutor(1) as thread:
                other = thread.submit(elsewhere, url, FRAME, 2, start=True)
                assert held.reached.wait(SOON)
                client.sendall(request(sequence_id=1))
                wait_until(lambda: sequences.counts.running == 2)
                client.close()
                if path == "event loop":  # at once, not with the next step
                    wait_until(lambda: sequences.counts.running == 1)
                else:
                    stop = sequences.table._open[1].sequence._state.stop
                    assert stop is not None and stop.cancel is not None
                    wait_until(lambda: stop.cancel.cancelled)
                held.opened.set()
                other.result(SOON)
        wait_until(lambda: sequences.counts.running == 0)
        assert sequences.table.counts.open == 1
        assert refused(triton, FRAME, 1)[0] == "400"


def request(**parameters: object) -> bytes:
    body = json.dumps({"inputs": [X], "parameters": parameters})
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


# Requests that fail.


def fail_next(sequences: Sequences, after: int = 0) -> None:
    """Let a run fail, once, behind others."""
    runner = sequences.stepper._engine.runner
    run, left = runner.run, [after]

    def failing(pieces: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise RunError("a kernel has failed")
        return run(pieces)

    runner.run = failing  # type: ignore[method-assign]


def test_frame_that_fails_is_no_part_of_its_sequence(tmp_path):
    alone = StreamAlone("lstm", LSTM)
    with streaming(tmp_path) as (triton, _, server):
        check(infer(triton, FRAME, 1, start=True), alone.step(FRAME)["output"])
        fail_next(sequences_of(server))
        status, why = refused(triton, FRAME, 1)
        assert (status, "a kernel has failed" in why) == ("500", True)
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])
        fail_next(sequences_of(server))
        assert refused(triton, FRAME, 2, start=True)[0] == "500"
        assert refused(triton, FRAME, 2)[0] == "400"  # it has not begun


def test_sequence_ends_if_some_frames_of_a_request_were_computed(tmp_path):
    frames = frame_of("lstm", np.random.default_rng(0), 3)
    with streaming(tmp_path) as (triton, _, server):
        infer(triton, FRAME, 1, start=True)
        fail_next(sequences_of(server), after=1)
        assert refused(triton, frames, 1)[0] == "500"
        assert refused(triton, FRAME, 1)[0] == "400"


def test_rows_of_a_decoder_are_taken_back_if_a_request_fails(tmp_path):
    model, ids = decoder_model("spelled"), np.random.default_rng(0).integers(0, 50, (1, 90))
    with streaming(tmp_path, model, max_rows=32) as (triton, _, server):
        infer(triton, {"ids": ids[:, :10]}, 1, start=True, output="logits")
        fail_next(sequences_of(server), after=1)
        assert refused(triton, {"ids": ids[:, 10:]}, 1, output="logits")[0] == "500"
        got = infer(triton, {"ids": ids[:, 10:]}, 1, output="logits")
        check(got[0], reference_logits(model, ids[0])[10:])


@pytest.mark.parametrize("path", ["event loop", "thread"])
def test_request_ends_at_its_deadline_and_its_sequence_stays(tmp_path, path):
    alone = StreamAlone("lstm", LSTM)
    with streaming(tmp_path) as (triton, url, server):
        if path == "event loop":
            server.direct.close()
        infer(triton, FRAME, 2, start=True)
        check(infer(triton, FRAME, 1, start=True), alone.step(FRAME)["output"])
        if path == "thread":
            wait_until(lambda: server.direct._workers.threads == 1)
        sequences = sequences_of(server)
        held = HeldSteps(sequences.stepper)

        def open_behind_both() -> None:
            wait_until(lambda: sequences.counts.running == 2)
            held.opened.set()

        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(elsewhere, url, FRAME, 2)
            assert held.reached.wait(SOON)
            threads.submit(open_behind_both)
            status, why = refused(triton, FRAME, 1, timeout=1)
            assert (status, "within its timeout" in why) == ("504", True)
            assert first.result(SOON).shape == (1, UNITS)
        check(infer(triton, FRAME, 1), alone.step(FRAME)["output"])


# What the server says of models with state.


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=SOON) as response:
        return response.read().decode()


def test_server_describes_models_with_state(tmp_path):
    with streaming(tmp_path, "buffer", {"most": 9, "idle": 2.5}) as (triton, url, _):
        metadata = triton.get_model_metadata("m")
        assert [port["name"] for port in metadata["inputs"]] == ["audio", "rate"]
        assert [port["name"] for port in metadata["outputs"]] == ["y"]
        assert "sequence" in triton.get_server_metadata()["extensions"]
        of = triton.get_model_config("m")["sequence_batching"]
        assert of["max_sequence_idle_microseconds"] == 2_500_000
        assert of["oldest"] == {"max_candidate_sequences": 9}
        assert of["state"][0] == {
            "input_name": "audio_cache_in",
            "output_name": "audio_cache_out",
            "data_type": "TYPE_FP32",
            "dims": [-1, WIDTH, PAST],
        }
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=SOON) as response:
            paths = json.loads(response.read())["paths"]
        content = paths["/v2/models/m/infer"]["post"]["requestBody"]["content"]
        assert "example" not in content["application/json"]  # it has bytes behind it
        with urllib.request.urlopen(url, timeout=SOON) as response:
            assert "sequence_start" in response.read().decode()


def test_statistics_and_metrics_count_sequences_and_steps(tmp_path):
    with streaming(tmp_path) as (triton, url, _):
        infer(triton, FRAME, 1, start=True)
        infer(triton, frame_of("lstm", np.random.default_rng(0), 3), 1)
        infer(triton, FRAME, 2, start=True, end=True)
        text, of = metrics(url), 'model="m",version="1"'
        assert f"penstock_sequences_open{{{of}}} 1.0" in text
        assert f"penstock_sequences_begun_total{{{of}}} 2.0" in text
        assert f"penstock_batches_total{{{of}}} 5.0" in text
        assert f"penstock_batch_rows_sum{{{of}}} 5.0" in text
        assert f"penstock_compute_seconds_count{{{of}}} 3.0" in text
        (stats,) = triton.get_inference_statistics("m")["model_stats"]
        assert (stats["inference_count"], stats["execution_count"]) == (3, 5)


def test_answers_have_their_times(tmp_path):
    with streaming(tmp_path) as (_, url, _):
        for start in (True, False):  # by the event loop, and by a thread
            parameters = {"sequence_id": 1, "sequence_start": start}
            body = json.dumps({"inputs": [X], "parameters": parameters}).encode()
            with urllib.request.urlopen(f"{url}/v2/models/m/infer", body, SOON) as response:
                assert response.headers["server-timing"].startswith("queue;dur=")


def test_model_that_is_loaded_again_has_no_sequences(tmp_path):
    with streaming(tmp_path) as (triton, url, server):
        before = sequences_of(server)
        with held_request(triton, url, server) as (held, answer), ThreadPoolExecutor(1) as thread:
            loaded = thread.submit(asked, f"{url}/v2/repository/models/m/load", b"")
            wait_until(lambda: sequences_of(server) is not before)
            held.opened.set()
            assert answer.result(SOON).shape == (1, UNITS)  # what was begun ends
            assert loaded.result(SOON) == (200, {})
        assert refused(triton, FRAME, 1)[0] == "400"
        infer(triton, FRAME, 1, start=True)
        triton.unload_model("m")
        with pytest.raises(InferenceServerException, match="unknown model"):
            infer(triton, FRAME, 1)


def test_sequences_have_variables_of_their_own(tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(MODELS["summing"]())
    streams = {key: frames_of("summing", key, 4) for key in (1, 2)}
    wanted = {key: by_litert("summing", frames) for key, frames in streams.items()}
    make = lambda path: Sequences(ps.Stepper(path))  # noqa: E731
    with serving({"m": path}, make) as (triton, *_):  # type: ignore[arg-type]
        for i in range(4):
            for key, frames in streams.items():
                got = infer(triton, frames[i], key, start=i == 0, output="y")
                np.testing.assert_allclose(got, wanted[key][i], rtol=0, atol=1e-6)


def test_models_with_variables_that_are_no_states_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.serving.sequences.has_state", lambda model: True)
    with pytest.raises(ValueError, match="they would share its variables"):
        Sequences(ps.Stepper(ps.load(stream_model("lstm"))))


# Before the first request.


@pytest.mark.parametrize(("whole", "plans"), [(False, 0), (True, 5)])
def test_warm_up_compiles_the_plans_of_each_number_of_sequences(whole, plans):
    with ps.Stepper(ps.load(stream_model("lstm")), max_sequences=7) as stepper:
        sequences = Sequences(stepper)
        before = sequences.session.stats.plans_made
        sequences.warm_up([{"frame": (1, WIDTH)}], whole=whole)
        assert not stepper._engine.holding
        assert sequences.counts.batches == sequences.counts.rows == 0
        counts = {1, 2, 3, 4, 6, 8} if whole else {1}
        made = sequences.session.stats.plans_made
        freeze(sequences.session)
        for count in counts:
            sequences._step_together(FRAME, min(count, 7))
        assert sequences.session.stats.plans_made == made >= before


def test_warm_up_says_that_a_model_does_not_take_what_is_made_up():
    text = """g (float[b, 2] frame, float[b, 2] state) => (float[b, 2] y, float[b, 2] state_out)
        <int64[2] shape = {3, 3}> { y = Reshape (frame, shape) state_out = Add (state, frame) }"""
    sequences = Sequences(ps.Stepper(ps.load(model_from_text(text))))
    with pytest.raises(ValueError, match="cannot be warmed up"):
        sequences.warm_up([{"frame": (1, 2)}], whole=False)
