"""Samples for ``bench.quantize``: pictures, speech and files that resemble what the models of
``bench.models`` are made for, drawn from a fixed seed. Networks with random weights get smooth
pictures and random words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import penstock as ps

Sample = dict[str, np.ndarray]
RATE = 16_000
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "that",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
    "had",
    "not",
    "are",
    "but",
    "from",
    "or",
    "have",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "her",
    "all",
    "she",
    "there",
    "would",
    "their",
    "we",
    "him",
    "been",
    "has",
    "when",
    "who",
    "will",
    "more",
    "no",
    "if",
    "out",
    "invoice",
    "total",
    "amount",
    "date",
    "table",
    "figure",
    "page",
    "2024",
    "1,250.00",
    "42",
    "price",
    "item",
    "number",
    "street",
]


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """[height, width, 3] of 0 to 1: a coloured ground with shapes, shadows and noise on it."""
    ground = rng.uniform(0, 255, (4, 4, 3)).astype(np.uint8)
    image = Image.fromarray(ground).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(3, 12)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        w, h = rng.uniform(0.05, 0.5, 2) * (width, height)
        colour = tuple(int(c) for c in rng.uniform(0, 255, 3))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), fill=colour)
    noise = rng.normal(0, 0.02, (height, width, 3))
    return np.clip(np.asarray(image, np.float32) / 255 + noise, 0, 1).astype(np.float32)


def document(rng: np.random.Generator, height: int, width: int, size: int = 0) -> np.ndarray:
    """[height, width, 3] of 0 to 1: lines of words on paper, some with rules of a table."""
    paper = int(rng.uniform(200, 255))
    image = Image.new("RGB", (width, height), (paper, paper, int(paper * rng.uniform(0.9, 1))))
    draw = ImageDraw.Draw(image)
    ink = tuple(int(c) for c in rng.uniform(0, 90, 3))
    size = size or int(rng.integers(10, 26))
    font = ImageFont.load_default(size)
    if rng.random() < 0.5:
        for y in range(0, height, size + 12):
            draw.line((0, y, width, y), fill=ink)
        for x in range(0, width, max(width // 4, 8)):
            draw.line((x, 0, x, height), fill=ink)
    for y in range(4, max(height - size // 2, 5), size + 12):
        words = " ".join(rng.choice(WORDS, rng.integers(2, 14)))
        draw.text((rng.integers(2, 20), y), words, fill=ink, font=font)
    noise = rng.normal(0, 0.015, (height, width, 3))
    return np.clip(np.asarray(image, np.float32) / 255 + noise, 0, 1).astype(np.float32)


def speech(rng: np.random.Generator, count: int) -> np.ndarray:
    """``count`` samples of a voice that is no words: harmonics of a gliding pitch through moving
    formants, in syllables, with noise behind."""
    t = np.arange(count) / RATE
    pitch = rng.uniform(90, 240) * (1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * t))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = rng.uniform((300, 900, 2200), (800, 2000, 3200))
    sound = np.zeros(count)
    for k in range(1, 30):
        gain = sum(np.exp(-(((k * pitch - f) / 150) ** 2)) for f in formants) + 0.02
        sound += gain * np.sin(k * phase) / k**0.5
    syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * t + rng.uniform(0, 6)), 0, 1)
    sound = sound * syllables / (np.abs(sound).max() + 1e-9) * rng.uniform(0.1, 0.8)
    return (sound + rng.normal(0, rng.uniform(0.001, 0.02), count)).astype(np.float32)


def notes(rng: np.random.Generator, count: int, rate: int = 22_050) -> np.ndarray:
    """Some notes with harmonics that fade."""
    t, sound = np.arange(count) / rate, np.zeros(count)
    for _ in range(rng.integers(2, 8)):
        start, pitch = rng.uniform(0, t[-1]), 55 * 2 ** (rng.integers(0, 48) / 12)
        fade = np.where(t > start, np.exp(-3 * (t - start)), 0)
        sound += sum(fade * np.sin(2 * np.pi * k * pitch * t) / k for k in range(1, 6))
    return (0.3 * sound / (np.abs(sound).max() + 1e-9)).astype(np.float32)


def power_spectrum(sound: np.ndarray, window: int, hop: int) -> np.ndarray:
    """[frames, window / 2 + 1]."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, window)[::hop]
    return np.abs(np.fft.rfft(frames * np.hanning(window))) ** 2


def mel_spectrum(power: np.ndarray, bands: int) -> np.ndarray:
    """Sums of triangles over bins, which are as wide as mels are."""
    bins = power.shape[1]
    mels = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1) / (RATE / 2) * (bins - 1)
    k = np.arange(bins)
    rising = (k - edges[:-2, None]) / (edges[1:-1, None] - edges[:-2, None])
    falling = (edges[2:, None] - k) / (edges[2:, None] - edges[1:-1, None])
    return power @ np.clip(np.minimum(rising, falling), 0, None).T


def _planes(image: np.ndarray, mean: float | tuple[float, ...], std: float | tuple[float, ...]):
    return (
        ((image - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)[None].astype(np.float32)
    )


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Draw = Callable[[np.random.Generator, Mapping[str, np.ndarray]], Sample]


def _photo(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    return {name: _planes(picture(rng, *like.shape[2:]), *IMAGENET)}


def _page(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    return {name: _planes(document(rng, *like.shape[2:]), *IMAGENET)}


def _line(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    return {name: _planes(document(rng, *like.shape[2:], size=30), 0.5, 0.5)}


def _channels_last(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    return {name: picture(rng, *like.shape[1:3])[None] * 2 - 1}


def _voice(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    name, like = next(iter(feeds.items()))
    return {**feeds, name: speech(rng, like.size).reshape(like.shape)}


def _notes(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    return {name: notes(rng, like.size).reshape(like.shape)}


def _mels_of_words(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    power = power_spectrum(speech(rng, RATE), 512, 160)[: like.shape[1]] * 32768**2
    mels = 10 * np.log10(np.maximum(mel_spectrum(power, 32), 1e-10))
    return {name: (mels / 10 + 2).astype(np.float32).reshape(like.shape)}


def _log_power(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    power = power_spectrum(speech(rng, 2 * RATE), 320, 160)[: like.shape[1]]
    return {name: np.log10(np.maximum(power, 1e-12)).astype(np.float32).reshape(like.shape)}


def _log_mels(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    power = power_spectrum(speech(rng, 30 * RATE + 400), 400, 160)[: like.shape[2]]
    log = np.log10(np.maximum(mel_spectrum(power, like.shape[1]), 1e-10))
    return {name: ((np.maximum(log, log.max() - 8) + 4) / 4).T[None].astype(np.float32)}


FILES = sorted(p for p in Path(__file__).parent.parent.glob("*/**/*.*") if p.is_file())


def _file(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    ((name, like),) = feeds.items()
    half = like.shape[1] // 2
    data = np.frombuffer(FILES[rng.integers(len(FILES))].read_bytes().strip(), np.uint8)
    begin, end = np.full(half, 256, np.int32), np.full(half, 256, np.int32)
    begin[: min(half, len(data))] = data[:half]
    if len(data):
        end[-min(half, len(data)) :] = data[-half:]
    return {name: np.concatenate([begin, end])[None]}


def _tokens(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    sample = dict(feeds)
    sample["input_ids"] = rng.integers(0, feeds["input_ids"].max() + 1, feeds["input_ids"].shape)
    return sample


def _smooth(rng: np.random.Generator, feeds: Mapping[str, np.ndarray]) -> Sample:
    """Numbers that neighbours have about the same of, along the last axes; random integers."""
    sample: Sample = {}
    for name, like in feeds.items():
        if like.dtype.kind in "iu":
            sample[name] = rng.integers(0, like.max() + 1, like.shape).astype(like.dtype)
            continue
        noise = rng.standard_normal(like.shape)
        for axis in range(max(like.ndim - 2, 0), like.ndim):
            noise = (noise + np.roll(noise, 1, axis) + np.roll(noise, 2, axis)) / 3**0.5
        sample[name] = noise.astype(np.float32)
    return sample


KINDS: Mapping[str, Draw] = {
    "silero": _voice,
    "swift-f0": _voice,
    "embedding_model": _mels_of_words,
    "magika": _file,
    "nmp": _notes,
    "_det_": _page,
    "_rec_": _line,
    "_cls_": _line,
    "table_cls": _page,
    "orientation": _page,
    "nsnet2": _log_power,
    "whisper": _log_mels,
    "resnet50": _photo,
    "mobilenetv2": _photo,
    "vit": _photo,
    "bert": _tokens,
    "minilm": _tokens,
    "gpt2": _tokens,
    "tflite": _channels_last,
}
"""What to draw, by a part of the model's name; of others smooth numbers"""

STATES: Mapping[str, Mapping[str, str]] = {
    "silero-vad": {"state": "stateN"},
    "openwakeword/silero": {"h": "hn", "c": "cn"},
}
"""Inputs that are fed outputs of the run before, by a part of the model's name"""


def samples(
    name: str, path: Path, feeds: Mapping[str, np.ndarray], count: int, seed: int = 0
) -> Iterator[Sample]:
    """``count`` samples for a model that takes ``feeds``."""
    rng = np.random.default_rng(seed)
    draw = next((own for part, own in KINDS.items() if part in name), _smooth)
    states = next((own for part, own in STATES.items() if part in name), {})
    session = ps.compile(str(path), cache=False) if states else None
    state = {key: np.zeros_like(feeds[key]) for key in states}
    for _ in range(count):
        sample = {**draw(rng, feeds), **state}
        if session is not None:
            outputs = session.run(sample)
            state = {key: outputs[output] for key, output in states.items()}
        yield sample
