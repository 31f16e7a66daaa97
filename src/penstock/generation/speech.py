"""Log-mel spectrograms, which encoders of speech read.

They are computed as in Whisper (Radford et al., https://arxiv.org/abs/2212.04356, section 2.2): the
power of Fourier transforms over Hann windows, summed in triangular bands as wide as in Slaney's
Auditory Toolbox (1998), and the logarithm, cut off 8 below the largest value.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.core.errors import InvalidInput, InvalidModel
from penstock.core.records import NamedTuple

_LINEAR_HZ, _HZ_OF_MEL = 1000.0, 200.0 / 3
"""the frequency up to which mels are linear, above which they are logarithmic; and Hz of a mel"""
_LOG_STEP = np.log(6.4) / 27
_FLOOR = 1e-10
_RANGE = 8.0
"""the range of decimal logarithms that is kept, below the largest one"""
_ROOM = 4.0
_LOWEST, _HIGHEST = 0.0, 8000.0


class MelSpectrogram(NamedTuple):
    """Parameters of log-mel features: ``bands`` of Fourier transforms of ``window`` samples every
    ``hop`` samples, of at most ``seconds`` at ``rate`` samples a second."""

    bands: int = 80
    window: int = 400
    hop: int = 160
    rate: int = 16_000
    seconds: int = 30

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> MelSpectrogram:
        """Return the features that a ``preprocessor_config.json`` describes. Raises
        ``InvalidModel`` for a wrong number."""
        names = "feature_size", "n_fft", "hop_length", "sampling_rate", "chunk_length"
        known = [settings.get(name, default) for name, default in zip(names, cls(), strict=True)]
        numbers = [n for n in known if isinstance(n, int) and 0 < n < 1 << 20]
        if len(numbers) < len(known):
            raise InvalidModel(
                f"preprocessor_config.json has {dict(zip(names, known, strict=True))}: numbers "
                "above 0 are needed"
            )
        return cls(*numbers)

    def features(self, sound: np.ndarray) -> np.ndarray:
        """Return the features [1, bands, frames] of a sound, as float32.

        Args:
            sound: Samples [n] of a float dtype between -1 and 1, at ``rate`` a second, of at most
                ``seconds``; silence follows it.
        """
        most = self.seconds * self.rate
        if sound.ndim != 1 or sound.dtype.kind != "f":
            raise InvalidInput(f"sound is [samples] of floats, not {sound.dtype} {sound.shape}")
        if not 0 < sound.size <= most:
            raise InvalidInput(
                f"a sound of {sound.size / self.rate:.1f} s: above 0 to {self.seconds} s, at "
                f"{self.rate} samples a second, are possible; give longer ones in pieces"
            )
        if not np.isfinite(sound).all():
            raise InvalidInput("a sound has numbers that are not finite")
        # Encoders read a fixed number of frames: silence pads shorter sounds, as in training.
        padded = np.zeros(most)
        padded[: sound.size] = sound
        around = np.pad(padded, self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, self.window)[:: self.hop]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        # The last frame begins where the sound ends.
        power = np.abs(np.fft.rfft(frames[:-1] * hann)) ** 2
        loudness = np.log10(np.maximum(power @ self._filters(), _FLOOR)).T
        # Relative to this sound's maximum, so that quiet and loud sounds look alike.
        cut = np.maximum(loudness, loudness.max() - _RANGE)
        return ((cut + _ROOM) / _ROOM).astype(np.float32)[None]

    def _filters(self) -> np.ndarray:
        """The share of each frequency in each band [frequencies, bands]."""
        frequencies = np.linspace(0, self.rate / 2, 1 + self.window // 2)
        ends = np.linspace(_mel_of(_LOWEST), _mel_of(_HIGHEST), self.bands + 2)
        hz = _hz_of(ends)
        slopes = hz[None] - frequencies[:, None]
        widths = np.diff(hz)
        rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
        area = 2 / (hz[2:] - hz[:-2])  # all bands have the same area
        return np.maximum(0, np.minimum(rising, falling)) * area


def _mel_of(hz: float) -> float:
    if hz < _LINEAR_HZ:
        return hz / _HZ_OF_MEL
    return _LINEAR_HZ / _HZ_OF_MEL + float(np.log(hz / _LINEAR_HZ) / _LOG_STEP)


def _hz_of(mels: np.ndarray) -> np.ndarray:
    bend = _LINEAR_HZ / _HZ_OF_MEL
    above = _LINEAR_HZ * np.exp(_LOG_STEP * np.maximum(mels - bend, 0))
    return np.where(mels < bend, mels * _HZ_OF_MEL, above)
