"""``penstock serve``: a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from penstock.serving.listener import Listener
from tests.support.decoders import decoder_model
from tests.support.onnx_text import model_from_text
from tests.support.streams import WIDTH, StreamAlone, stream_model
from tests.support.timing import SOON
from tests.support.word_texts import likeliest, word_tokenizer

LSTM = {"h0": "hn", "c0": "cn"}
COUNTING = """g (int64 n) => (int64 y) <bool yes = {1}, int64 zero = {0}> {
    y = Loop (n, yes, zero) <body = b (int64 i, bool c, int64 v) => (bool d, int64 w) {
        d = Identity (c) w = Add (v, i) }> }"""
MODEL = "affine (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "affine.onnx"
    onnx.save(model_from_text(MODEL), path)
    return path


def test_serve_answers_until_it_is_told_to_end(model, tmp_path):
    saved = tmp_path / "saved.penstock"
    ps.compile(model).save(saved)
    log = tmp_path / "access.log"
    options = ("--port", "0", "--replicas", "2", "--max-batch", "4", "--queue", "8")
    options += ("--access-log", str(log), "--cors", "https://example.com", "--warm-up")
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "serve",
        str(model),
        f"other={saved}",
        *options,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            names, _, url = process.stderr.readline().strip().rpartition(" at ")
            assert names == "serving affine, other"
            x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
            body = json.dumps({"inputs": [x]}).encode()
            for name in ("affine", "other"):
                with urllib.request.urlopen(
                    f"{url}/v2/models/{name}/infer", body, SOON
                ) as response:
                    (y,) = json.loads(response.read())["outputs"]
                np.testing.assert_array_equal(y["data"], [2, 5])
            page = urllib.request.Request(f"{url}/v2", headers={"Origin": "https://example.com"})
            with urllib.request.urlopen(page, timeout=SOON) as response:
                assert response.headers["access-control-allow-origin"] == "https://example.com"
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON) in (0, -signal.SIGTERM)
            assert [line.split('"')[1].split()[1] for line in log.read_text().splitlines()] == [
                "/v2/models/affine/infer",
                "/v2/models/other/infer",
                "/v2",
            ]
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.full
def test_server_on_a_cluster_answers_and_ends(model, monkeypatch):
    pytest.importorskip("ray", reason="needs penstock-runtime[ray]")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    options = ("--cluster", "--replicas", "2", "--retries", "3", "--port", "0")
    command = [sys.executable, "-m", "penstock.cli", "serve", str(model), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(line for line in lines if line.startswith("serving")).split(" at ")[1]
            x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
            body = json.dumps({"inputs": [x]}).encode()
            for _ in range(4):
                address = f"{url.strip()}/v2/models/affine/infer"
                with urllib.request.urlopen(address, body, SOON) as response:
                    (y,) = json.loads(response.read())["outputs"]
                np.testing.assert_array_equal(y["data"], [2, 5])
            process.send_signal(signal.SIGTERM)
            process.wait(SOON)
        finally:
            process.kill()


def test_options_of_serve_for_clusters_are_refused_without_one(model):
    runner = CliRunner()
    retries = runner.invoke(main, ["serve", str(model), "--retries", "2"])
    assert "--retries is for --cluster" in retries.output
    executor = runner.invoke(main, ["serve", str(model), "--cluster", "--executor", "linear"])
    assert "--executor is not for --cluster" in executor.output
    devices = runner.invoke(main, ["serve", str(model), "--cluster", "--devices", "2"])
    assert "--devices is not for --cluster" in devices.output


@pytest.fixture
def made(monkeypatch):
    """The replicas that servers make, which then end at once."""
    replicas = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)

    def make_one(repository, paths, make, own):
        name, path = next(iter(paths.items()))
        replicas.append(own.get(name, make)(path))

    monkeypatch.setattr("penstock.cli.serve.ModelRepository.__init__", make_one)
    monkeypatch.setattr("penstock.serving.app.Server.__init__", lambda *_, **__: None)
    for name in ("app", "direct"):
        monkeypatch.setattr(f"penstock.serving.app.Server.{name}", None, raising=False)
    return replicas


@pytest.mark.parametrize(
    ("cores", "given", "count"), [(1, (), 1), (2, (), 3), (8, (), 9), (2, ("--replicas", "2"), 2)]
)
def test_server_has_a_replica_more_than_cores_unless_replicas_are_given(
    model, monkeypatch, made, cores, given, count
):
    monkeypatch.setattr("penstock.cli.serve.core_budget", lambda: cores)
    CliRunner().invoke(main, ["serve", str(model), "--port", "0", *given])
    assert [replicas.count for replicas in made] == [count]


def test_serve_compiles_with_the_options_of_other_commands(model, made):
    given = ["--backends", "numpy", "--threads", "1", "--limits", "max_nodes=100"]
    done = CliRunner().invoke(main, ["serve", str(model), "--port", "0", *given])
    assert done.exit_code == 0, done.output
    (replicas,) = made
    options = replicas.session.options
    assert list(options.backends) == ["numpy"]
    assert options.threads == 1
    assert options.limits.max_nodes == 100


def test_served_connections_send_small_packets_at_once():
    """Else the end of a response waits for an acknowledgement of its beginning, for 40 ms."""

    async def main() -> int:
        accepted = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer)

        listener = Listener("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            other = await asyncio.wait_for(accepted, SOON)
            delay = other.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY
            )
            for each in (writer, other):
                each.close()
                await each.wait_closed()
        return delay

    assert asyncio.run(main()) != 0


def test_serve_refuses_what_it_cannot_serve(model, tmp_path, monkeypatch):
    fixed = tmp_path / "fixed.onnx"
    onnx.save(model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }"), fixed)
    runner = CliRunner()
    twice = runner.invoke(main, ["serve", str(model), str(model)])
    assert (twice.exit_code, "two models have the name 'affine'" in twice.output) == (2, True)
    batch = runner.invoke(main, ["serve", str(fixed), "--max-batch", "2"])
    assert (batch.exit_code, "must be dynamic" in batch.output) == (1, True)
    absent = runner.invoke(main, ["serve", str(tmp_path / "none.onnx")])
    assert absent.exit_code == 1
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    extra = runner.invoke(main, ["serve", str(model)])
    assert (extra.exit_code, "penstock-runtime[serve]" in extra.output) == (1, True)


def test_served_models_quantize_themselves(model, made, monkeypatch):
    called = []
    monkeypatch.setattr(ps.Session, "quantize_after", lambda self, *a, **k: called.append((a, k)))
    command = ["serve", str(model), "--port", "0", "--quantize-after", "500"]
    for more, bound in (((), 0.01), (("--max-error", "0.02"), 0.02)):
        done = CliRunner().invoke(main, [*command, *more])
        assert done.exit_code == 0, done.output
        assert called.pop() == ((500, bound), {})
    assert len(made) == 2 and not called


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--max-error", "0.1"), "--max-error is for --quantize-after"),
        (("--quantize-after", "9", "--cluster"), "not for --cluster"),
        (("--quantize-after", "9", "--reproducible"), "reproducible="),
    ],
)
def test_serve_refuses_to_quantize_what_it_cannot(model, given, message):
    done = CliRunner().invoke(main, ["serve", str(model), *given])
    assert done.exit_code in (1, 2) and message in done.output


OPEN = "g (float[N, M] x) => (float[N, M] y) { y = Sin(x) }"


def test_serve_compiles_and_runs_shapes_before_it_is_ready(tmp_path, made):
    path = tmp_path / "g.onnx"
    onnx.save(model_from_text(OPEN), path)
    command = ["serve", str(path), "--port", "0", "--shape", "M=4", "--shape", "M=7"]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert (made[-1].session.stats.plans_kept, made[-1].session.stats.runs) == (2, 0)
    warm = CliRunner().invoke(main, [*command, "--warm-up", "--max-batch", "3"])
    assert warm.exit_code == 0, warm.output
    session = made[-1].session
    before = session.stats.plans_made
    for rows in (1, 2, 3):
        for width in (4, 7):
            session.run({"x": np.ones((rows, width), np.float32)})
    assert session.stats.plans_made == before
    fixed = CliRunner().invoke(main, ["serve", str(path), "--shape", "x=1x3", "--warm-up"])
    assert fixed.exit_code == 0, fixed.output
    assert made[-1].session.stats.runs == 1


@pytest.mark.parametrize("options", [["--warm-up"], ["--max-batch", "2"]])
def test_open_dims_are_refused_with_the_option_that_says_them(tmp_path, made, options):
    path = tmp_path / "g.onnx"
    onnx.save(model_from_text(OPEN), path)
    done = CliRunner().invoke(main, ["serve", str(path), "--port", "0", *options])
    assert (done.exit_code, "--shape M=64" in done.output) == (1, True), done.output
    assert "sample=" not in done.output


def test_shapes_are_for_the_models_that_have_their_names(model, tmp_path):
    other = tmp_path / "other.onnx"
    onnx.save(model_from_text(OPEN), other)
    command = ["serve", str(model), str(other), "--port", "0", "--shape", "M=4"]
    wrong = CliRunner().invoke(main, [*command, "--shape", "K=4"])
    assert (wrong.exit_code, "no model has an input or dim" in wrong.output) == (1, True)


def test_wrong_origins_and_logs_are_refused(model, tmp_path, made):
    for origin in ("example.com", "https://example.com/page", ""):
        wrong = CliRunner().invoke(main, ["serve", str(model), "--cors", origin])
        assert (wrong.exit_code, "https://example.com or be *" in wrong.output) == (2, True)
    log = tmp_path / "no folder" / "access.log"
    wrong = CliRunner().invoke(main, ["serve", str(model), "--access-log", str(log)])
    assert (wrong.exit_code, "no folder" in wrong.output) == (1, True)
    assert not made


def test_serve_answers_for_texts_until_it_is_told_to_end(model, tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    onnx.save(decoder_model("spelled"), folder / "model.onnx")
    word_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    encoder = """e (int64[N, T] ids) => (float[N, T, 1] y) <int64[1] last = {2}> {
        x = Cast <to = 1> (ids) y = Unsqueeze (x, last) }"""
    onnx.save(model_from_text(encoder), folder / "encoder.onnx")
    options = [
        "--generate",
        f"words={folder / 'model.onnx'}",
        "--embed",
        str(folder / "encoder.onnx"),
    ]
    options += ["--max-rows", "64", "--max-sequences", "4", "--cache-bytes", "1MB", "--queue", "3"]
    options += ["--port", "0", "--draft", "prompt"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(model), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            names, _, url = process.stderr.readline().strip().rpartition(" at ")
            assert names == "serving affine, encoder, words"
            asked = {"prompt": [5, 3, 9], "model": "words", "max_tokens": 4, "temperature": 0}
            with urllib.request.urlopen(
                f"{url}/v1/completions", json.dumps(asked).encode(), SOON
            ) as response:
                (choice,) = json.loads(response.read())["choices"]
            assert choice["text"] == "".join(f" w{token}" for token in likeliest([5, 3, 9], 4))
            body = json.dumps({"input": "w3", "model": "encoder"}).encode()
            with urllib.request.urlopen(f"{url}/v1/embeddings", body, SOON) as response:
                assert json.loads(response.read())["data"][0]["embedding"] == [1.0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON) in (0, -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "a MODEL is needed, --generate, --embed, --share-loops or --st"),
        (["m.onnx", "--max-rows", "3"], "--max-rows is for --generate, --share-loops and --st"),
        (["--share-loops", "m.onnx", "--max-sequences", "3"], "--max-sequences is for --generate"),
        (["--share-loops", "m.onnx", "--max-batch", "2"], "--max-batch is not for models whose"),
        (["--share-loops", "m.onnx", "--warm-up"], "--warm-up is not for --share-loops"),
        (["m.onnx", "--draft", "prompt"], "--draft is for --generate"),
        (["m.onnx", "--tokenizer", "t"], "--tokenizer is for one model"),
        (["--generate", "m.onnx", "--replicas", "2"], "--replicas is not for --generate"),
        (["--generate", "m.onnx", "--shape", "x=1"], "--shape is not for --generate"),
        (["m.onnx", "--generate", "m.onnx"], "two models have the name 'm'"),
        (["m.onnx", "--state", "h=hn"], "--state is for --stateful"),
        (["m.onnx", "--max-idle", "3"], "--max-idle is for --stateful"),
        (["--stateful", "a", "--stateful", "b", "--state", "h=hn"], "--state is for one model"),
        (["--stateful", "m.onnx", "--state", "h"], "'h' must be NAME=VALUE"),
        (["--stateful", "m.onnx", "--replicas", "2"], "--replicas is not for --generate and --st"),
        (["--stateful", "m.onnx", "--queue", "2"], "--queue is not for --stateful"),
        (["--stateful", "m.onnx", "--draft", "prompt"], "--draft is for --generate"),
        (["m.onnx", "--stateful", "m.onnx"], "two models have the name 'm'"),
    ],
)
def test_serve_refuses_options_that_do_nothing(options, message):
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_serve_keeps_the_state_of_models(model, tmp_path):
    path = tmp_path / "lstm.onnx"
    onnx.save(stream_model("lstm"), path)
    options = ["--stateful", f"m={path}", "--state", "h0=hn", "--state", "c0=cn", "--port", "0"]
    options += ["--max-idle", "90", "--max-sequences", "1", "--max-rows", "8"]
    options += ["--cache-bytes", "1MB", "--warm-up"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(model), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            names, _, url = process.stderr.readline().strip().rpartition(" at ")
            assert names == "serving affine, m"
            frame, alone = np.ones((1, WIDTH), np.float32), StreamAlone("lstm", LSTM)
            x = {"name": "frame", "datatype": "FP32", "shape": [1, WIDTH], "data": [1.0] * WIDTH}
            for start in (True, False, False):
                parameters = {"sequence_id": "a", "sequence_start": start}
                body = json.dumps({"inputs": [x], "parameters": parameters}).encode()
                with urllib.request.urlopen(f"{url}/v2/models/m/infer", body, SOON) as response:
                    (y,) = json.loads(response.read())["outputs"]
                want = alone.step({"frame": frame})["output"]
                np.testing.assert_allclose(y["data"], want.reshape(-1), rtol=0, atol=1e-5)
            with urllib.request.urlopen(f"{url}/v2/models/m/config", timeout=SOON) as response:
                of = json.loads(response.read())["sequence_batching"]
            assert of["max_sequence_idle_microseconds"] == 90_000_000
            assert of["oldest"] == {"max_candidate_sequences": 1}
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON) in (0, -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_serve_shares_the_iterations_of_loops(tmp_path):
    path = tmp_path / "loop.onnx"
    onnx.save(model_from_text(COUNTING), path)
    options = [
        "--share-loops",
        f"m={path}",
        "--port",
        "0",
        "--max-rows",
        "8",
        "--cache-bytes",
        "1MB",
    ]
    command = [sys.executable, "-m", "penstock.cli", "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            _, _, url = process.stderr.readline().strip().rpartition(" at ")

            def answer(number):
                x = {"name": "n", "datatype": "INT64", "shape": [], "data": [number]}
                body = json.dumps({"inputs": [x]}).encode()
                with urllib.request.urlopen(f"{url}/v2/models/m/infer", body, SOON) as response:
                    return json.loads(response.read())["outputs"][0]["data"]

            with ThreadPoolExecutor(8) as threads:
                assert [*threads.map(answer, range(16))] == [[n * (n - 1) // 2] for n in range(16)]
            with urllib.request.urlopen(f"{url}/v2/models/m/config", timeout=SOON) as response:
                assert json.loads(response.read())["instance_group"][0]["count"] == 8
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON) in (0, -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_plans_of_models_with_state_are_compiled_before_the_server_is_ready(tmp_path, made):
    paths = {"stream": tmp_path / "stream.onnx", "words": tmp_path / "words.onnx"}
    onnx.save(stream_model("buffer"), paths["stream"])
    onnx.save(decoder_model("spelled"), paths["words"])
    options = ["--port", "0", "--max-rows", "4", "--no-compile-in-run"]
    for name, shape in (("stream", ["--shape", "t=3"]), ("words", [])):
        command = ["serve", "--stateful", str(paths[name]), *options, *shape, "--warm-up"]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        plans = made[-1].session.stats.plans_made
        for count in (1, 2, 3, 4):
            audio = np.ones((1, WIDTH, 3), np.float32)
            stream = {"audio": audio, "rate": np.array(1, np.float32)}
            made[-1]._step_together(stream if name == "stream" else {"ids": [[1]]}, count)
        assert made[-1].session.stats.plans_made == plans
        made[-1].close()
    open_ = CliRunner().invoke(main, ["serve", "--stateful", str(paths["stream"]), "--warm-up"])
    assert (open_.exit_code, "--shape t=64" in open_.output) == (1, True), open_.output


def test_models_whose_state_is_not_known_are_refused(model):
    done = CliRunner().invoke(main, ["serve", "--stateful", str(model)])
    assert (done.exit_code, "no state that is fed back" in done.output) == (1, True)
    done = CliRunner().invoke(main, ["serve", "--stateful", str(model), "--state", "x=z"])
    assert (done.exit_code, "the model has inputs ['x']" in done.output) == (1, True)


def test_serve_of_other_models_imports_nothing_for_texts(model):
    program = """
import sys
from penstock.cli import main
import uvicorn
uvicorn.Server.run = lambda *arguments: None
try:
    main(["serve", sys.argv[1], "--port", "0"])
except SystemExit:
    pass
print([name for name in ("tokenizers", "jinja2", "llguidance") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
