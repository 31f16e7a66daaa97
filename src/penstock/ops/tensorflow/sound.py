"""Sound in files."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from io import BytesIO

import numpy as np

from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.tensorflow.text import array_operator, encoded, texts


def _infer_wav(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = [attrs.get(f"desired_{name}", -1) for name in ("samples", "channels")]
    samples = TensorType(FLOAT32, tuple([None if dim < 0 else dim for dim in dims]))
    return samples, TensorType(INT32, ())


@array_operator("DecodeWav", infer=_infer_wav)
def decode_wav(
    contents: np.ndarray, *, desired_channels: int = -1, desired_samples: int = -1
) -> tuple[np.ndarray, ...]:
    """Samples [samples, channels] from -1 to below 1 of a WAV file of 16 bits, and its rate.
    Missing samples are 0, missing channels as the last one."""
    if contents.size != 1:
        raise ShapeError(f"one file is decoded, not {contents.size}")
    (text,) = texts(contents)
    try:
        with wave.open(BytesIO(encoded(text))) as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            if width != 2:
                raise ShapeError(f"a WAV file has samples of {8 * width} bits; 16 are needed")
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ShapeError(f"the contents are no WAV file of 16-bit samples: {error}") from error
    frames = np.frombuffer(data[: len(data) // (2 * channels) * 2 * channels], "<i2")
    frames = frames.reshape(-1, channels)
    count = len(frames) if desired_samples < 0 else desired_samples
    wanted = channels if desired_channels < 0 else desired_channels
    reserve(4 * count * wanted)
    result = np.zeros((count, wanted), np.float32)
    places = np.minimum(np.arange(wanted), channels - 1)
    result[: len(frames)] = frames[:count, places] / np.float32(2**15)
    return result, np.array(rate, np.int32)
