"""Rotary position embedding of a decoder: the angles by which features rotate at each position.

A pair of features rotates by ``position * frequency``. Frequencies are ``theta ** -(2 i / size)``,
and scaled if a model reads longer texts than those it was first trained on: "linear", "llama3",
"yarn" (https://arxiv.org/abs/2309.00071) and "longrope" (https://arxiv.org/abs/2402.13753), which
has different ones for texts beyond the original length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import FLOAT32

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
Parameters = Mapping[str, "float | str | Sequence[float] | None"]
"""parameters of a configuration: ``rope_type``, ``rope_theta``, ``factor`` and others"""


@dataclass(frozen=True, eq=False)
class Rotary:
    """``frequencies`` [pairs], float32; cosines and sines are multiplied by ``magnitude``. Texts of
    more positions than ``original`` rotate by ``long_frequencies``, if there are any."""

    frequencies: np.ndarray
    magnitude: float = 1.0
    long_frequencies: np.ndarray | None = None
    original: int = 0

    @property
    def size(self) -> int:
        """The number of features that rotate."""
        return 2 * len(self.frequencies)


def rotary_of(parameters: Parameters, size: int, longest: int) -> Rotary:
    """Return the rotation of ``size`` features of each head, for texts of up to ``longest``
    positions. Raises ``ValueError`` for parameters that are missing or wrong."""
    theta = _number(parameters, "rope_theta", 10_000.0)
    if size < 2 or size % 2 or not theta > 1:
        raise ValueError(f"{size} features cannot turn in pairs with rope_theta {theta}")
    with np.errstate(all="ignore"):
        powers = (theta ** (np.arange(0, size, 2, dtype=FLOAT32) / np.float32(size))).astype(
            FLOAT32
        )
        rotary = _scaled(parameters, powers, theta, longest)
    if not np.isfinite(rotary.frequencies).all() or not math.isfinite(rotary.magnitude):
        raise ValueError("its rotary embedding has frequencies that are no numbers")
    return rotary


def _scaled(parameters: Parameters, powers: np.ndarray, theta: float, longest: int) -> Rotary:
    """Return the rotation with scaled frequencies, given their reciprocals, ``powers``."""
    plain = 1 / powers
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rotary(plain)
    if kind == "linear":
        return Rotary(_single(plain / _number(parameters, "factor")))
    if kind == "llama3":
        return Rotary(_llama3(plain, parameters))
    if kind == "yarn":
        return _yarn(plain, parameters, theta)
    if kind in ("longrope", "su"):
        return _longrope(powers, parameters, longest)
    raise ValueError(f"its rope_type is {kind!r:.40}; {', '.join(SCALINGS)} are supported")


def _single(x: np.ndarray) -> np.ndarray:
    return x.astype(FLOAT32)


def _number(parameters: Parameters, key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 62:
        raise ValueError(f"{key} of its rotary embedding is {value!r:.40}, not a positive number")
    return float(value)


def _llama3(plain: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Slow rotations are slowed by the factor, fast ones are not, others are interpolated."""
    factor, low, high, original = (
        _number(parameters, key)
        for key in (
            *("factor", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        )
    )
    lengths = 2 * math.pi / plain
    smooth = np.clip((original / lengths - low) / max(high - low, 1e-9), 0, 1)
    return _single((1 - smooth) * plain / factor + smooth * plain)


def _yarn(plain: np.ndarray, parameters: Parameters, theta: float) -> Rotary:
    size = 2 * len(plain)
    factor = _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings")

    def pair_with(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return size * turns / (2 * math.log(theta))

    low = pair_with(_number(parameters, "beta_fast", 32.0))
    high = pair_with(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / ((high - low) or 0.001), 0, 1)
    magnitudes = [parameters.get("mscale"), parameters.get("mscale_all_dim")]
    if parameters.get("attention_factor") is not None:
        magnitude = _number(parameters, "attention_factor")
    elif all(magnitudes):
        of_mscale, of_all = (_number(parameters, key) for key in ("mscale", "mscale_all_dim"))
        magnitude = _yarn_magnitude(factor, of_mscale) / _yarn_magnitude(factor, of_all)
    else:
        magnitude = _yarn_magnitude(factor, 1.0)
    return Rotary(_single(plain / factor * ramp + plain * (1 - ramp)), magnitude)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(powers: np.ndarray, parameters: Parameters, longest: int) -> Rotary:
    original = _number(parameters, "original_max_position_embeddings", float(longest))
    factor = _number(parameters, "factor", longest / original)
    frequencies = []
    for key in ("short_factor", "long_factor"):
        factors = parameters.get(key)
        if isinstance(factors, str) or not isinstance(factors, Sequence):
            raise ValueError(f"its rotary embedding has no {key}")
        numbers = [x if isinstance(x, int | float) else math.nan for x in factors]
        divisors = np.array(numbers, FLOAT32)
        if divisors.shape != powers.shape or not (divisors > 0).all():
            raise ValueError(f"{key} are no {len(powers)} positive numbers")
        frequencies.append(1 / (divisors * powers))
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if parameters.get("attention_factor") is not None:
        magnitude = _number(parameters, "attention_factor")
    return Rotary(frequencies[0], magnitude, frequencies[1], int(original))
