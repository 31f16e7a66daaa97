"""Voice activity detection: when a recording has speech.

``python examples/voice.py MODEL.onnx RECORDING.wav`` prints begin and end of each stretch of
speech, in seconds. The network is that of Silero VAD (``pip download silero-vad==6.2.3``, MIT:
``silero_vad.onnx``). It hears 32 ms at a time, and its memory is an input and an output: what one
run returns as state, the next one is fed.
"""

from __future__ import annotations

import sys
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import penstock

RATE = 16_000  # samples a second
STEP, CONTEXT = 512, 64  # samples that are new in a run, and those before them that it sees again
BEGINS, ENDS = 0.5, 0.35  # probabilities at which speech begins, and below which it ends
PAUSE, LEAST = 0.1, 0.25  # seconds: shorter pauses are part of speech, shorter speech is noise


def samples(path: str | Path) -> np.ndarray:
    """The sound of a WAV file of 16 bits, from -1 to 1: one channel, 16,000 samples a second."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(
                f"{path}: samples of 16 bits are needed, not {8 * file.getsampwidth()}"
            )
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15
        sound = data.reshape(-1, file.getnchannels()).mean(axis=1)
        if file.getframerate() != RATE:
            seconds = len(sound) / file.getframerate()
            times = np.arange(int(seconds * RATE)) / RATE
            sound = np.interp(times, np.arange(len(sound)) / file.getframerate(), sound)
        return sound.astype(np.float32)


class Listener:
    """The network with its memory, which is that of one recording."""

    def __init__(self, model: str | Path) -> None:
        # Small steps in a row: one thread is as fast, and leaves the others alone.
        self.session = penstock.compile(model, threads=1)
        self.reset()

    def reset(self) -> None:
        """Begin another recording."""
        self.state = np.zeros((2, 1, 128), np.float32)
        self.context = np.zeros((1, CONTEXT), np.float32)

    def hear(self, sound: np.ndarray) -> float:
        """The probability of speech in the next ``STEP`` samples."""
        heard = np.concatenate([self.context, sound[np.newaxis]], axis=1)
        feeds = {"input": heard, "state": self.state, "sr": np.array(RATE)}
        outputs = self.session.run(feeds)
        self.state, self.context = outputs["stateN"], heard[:, -CONTEXT:]
        return float(outputs["output"][0, 0])

    def probabilities(self, sound: np.ndarray) -> np.ndarray:
        """The probability of speech in each step; the last one is filled with silence."""
        self.reset()
        padded = np.pad(sound, (0, -len(sound) % STEP)).astype(np.float32)
        return np.array([self.hear(step) for step in padded.reshape(-1, STEP)])


def speech(probabilities: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Begin and end of each stretch of speech, in seconds."""
    step, begin, end = STEP / RATE, None, 0.0
    for i, probability in enumerate([*probabilities, *[0.0] * (int(PAUSE * RATE / STEP) + 2)]):
        if begin is None:
            if probability >= BEGINS:
                begin, end = i * step, (i + 1) * step
        elif probability >= ENDS:
            end = (i + 1) * step
        elif i * step - end >= PAUSE:
            if end - begin >= LEAST:
                yield begin, end
            begin = None


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python examples/voice.py MODEL.onnx RECORDING.wav")
    model, recording = arguments
    probabilities = Listener(model).probabilities(samples(recording))
    for begin, end in speech(probabilities.tolist()):
        print(f"{begin:8.2f} s to {end:8.2f} s")
    share, seconds = np.mean(probabilities >= BEGINS), len(probabilities) * STEP / RATE
    print(f"speech in {share:.0%} of {seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
