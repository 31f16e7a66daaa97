"""Features of sound, compared with those of transformers' extractor."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.generation.speech import MelSpectrogram

ARCHIVE = Path(__file__).parents[1] / "models" / "encoder_decoders.zip"


@pytest.mark.parametrize("number", range(3))
def test_features_are_those_of_transformers(number: int) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        settings = json.loads(archive.read("whisper/preprocessor_config.json"))
        sound = np.frombuffer(archive.read(f"whisper/sound{number}.f2"), np.float16)
        wanted = np.frombuffer(archive.read(f"whisper/features{number}.f4"), np.float32)
    spectrogram = MelSpectrogram.of(settings)
    features = spectrogram.features(sound.astype(np.float32))
    assert features.shape == (1, 8, 100)
    np.testing.assert_allclose(features.ravel(), wanted, atol=1e-4)


def test_defaults_are_those_of_whisper() -> None:
    features = MelSpectrogram().features(np.zeros(16_000, np.float32))
    assert features.shape == (1, 80, 3000)
    assert (features == -1.5).all()  # the logarithm of 1e-10, plus 4, by 4


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ps.InvalidModel, match="numbers above 0"):
        MelSpectrogram.of({"hop_length": 0})


@pytest.mark.parametrize("sound", [np.zeros((2, 400), np.float32), np.zeros(400, np.int16)])
def test_sound_is_one_channel_of_floats(sound: np.ndarray) -> None:
    with pytest.raises(ps.InvalidInput, match="floats"):
        MelSpectrogram().features(sound)
