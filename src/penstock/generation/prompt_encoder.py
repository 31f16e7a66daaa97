"""The encoder of an encoder-decoder: computes once per prompt what each decoder step reads.

::

    tokens, or features of sound ──> encoder ──> hidden states ──> keys and values of each layer
                                                                   that cross attention reads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.compiler.options import CompileOptions, make
from penstock.core.errors import InvalidInput
from penstock.core.types import NamedValues, TensorType, Type
from penstock.executors.feeds import convert
from penstock.generation.decoder_start import DecoderStart
from penstock.generation.encoder_files import Halves
from penstock.generation.sources import context_of, folders_of
from penstock.generation.speech import MelSpectrogram
from penstock.generation.tokenizer import read_json
from penstock.ir.graph import Model
from penstock.passes.lowering.step_probes import is_of_encoder, present_of
from penstock.session.session import Session

if TYPE_CHECKING:
    from penstock.host.stop_condition import StopCondition

_PREPROCESSOR = "preprocessor_config.json"
_POSITIONS = ("max_source_positions", "max_position_embeddings")

_OF_TOKENS, _FEATURES = 2, 3
"""axes of tokens, and of features and hidden states"""
_FEATURE_TYPES = (np.float32, np.float16)


class PromptEncoder:
    """Computes the ``fixed`` inputs of a decoder's sequence. If one model contains both halves,
    these are the encoder's inputs, and ``halves`` is None. ``options`` are those of
    ``penstock.compile``; ``place`` is the path of files beside the model. Raises ``InvalidInput``
    for an input that cannot be computed."""

    def __init__(
        self,
        halves: Halves | None,
        fixed: Mapping[str, Type],
        options: dict[str, object],
        place: str | Path | None,
    ) -> None:
        self._fixed = {**fixed}
        self._encoder = self._cross = None
        lacking = [name for name in fixed if halves is None and is_of_encoder(name)]
        if lacking:
            raise InvalidInput(
                f"the decoder reads {lacking[0]!r}, which an encoder returns: give a folder, or a "
                "decoder's file, with the encoder's beside it, encoder_model.onnx or encoder.onnx"
            )
        if halves is not None:
            settings = make(CompileOptions, "penstock.generation.Generator", **options)
            self._encoder = Session(halves.encoder, settings)
            self._cross = None if halves.cross is None else Session(halves.cross, settings)
        self._folders = folders_of(place)
        metadata = {} if halves is None else halves.encoder.metadata
        self._limit = context_of(metadata, place, _POSITIONS)
        self.start = DecoderStart.of(self._folders)
        types = fixed if halves is None else _types_of(halves.encoder)
        self._inputs = {name: _shaped(name, type_) for name, type_ in types.items()}
        features = [name for name, type_ in self._inputs.items() if _is_of_features(type_)]
        if features and len(self._inputs) > 1:
            # A decoder after such an encoder divides mask lengths as that divides frames.
            raise InvalidInput(
                f"the encoder reads {[*self._inputs]}: one that reads more than the features of "
                "sound is not known; give tokens, or what it returns, to penstock.Stepper"
            )
        self.features = self._inputs[features[0]] if features else None
        """the type of the encoder's features [1, ...], or None if it reads tokens"""
        self._mel: MelSpectrogram | None = None

    def fixed_of(
        self, prompt: Sequence[int] | np.ndarray, stop: StopCondition | None
    ) -> dict[str, np.ndarray]:
        """Return the fixed inputs of a sequence for a prompt, by name. Raises ``InvalidInput`` for
        tokens where features are needed, and the reverse."""
        given = self._given(prompt)
        if self._encoder is None:
            return given
        encoded = _run(self._encoder, given, stop)
        if self._cross is None:
            return _matched(self._fixed, encoded)
        types = {port.name: port.type for port in self._cross.inputs}
        outputs = _run(self._cross, _matched(types, encoded), stop)
        return _matched(self._fixed, {**encoded, **outputs})

    def features_of(self, sound: np.ndarray) -> np.ndarray:
        """Return the encoder's features for samples [n] or features [bands, frames]."""
        wanted = self.features
        if wanted is None:
            raise InvalidInput("the model reads text, not sound")
        if sound.ndim == 1:
            if self._mel is None:
                settings = [read_json(folder / _PREPROCESSOR) for folder in self._folders]
                known = next(filter(None, settings), {})
                bands = (wanted.shape or (None, None))[1]
                own = {"feature_size": bands} if isinstance(bands, int) else {}
                self._mel = MelSpectrogram.of({**own, **known})
            sound = self._mel.features(sound)
        features = sound if sound.ndim == _FEATURES else sound[None]
        return convert("the prompt", features, wanted)

    def _given(self, prompt: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return the encoder's inputs for a prompt."""
        is_array = isinstance(prompt, np.ndarray)
        if is_array != (self.features is not None):
            wanted = "text or tokens" if self.features is None else "sound, or features of it"
            raise InvalidInput(f"the prompt of this model is {wanted}")
        feeds = {}
        for name, type_ in self._inputs.items():
            if _is_of_features(type_):
                feeds[name] = np.asarray(prompt, type_.dtype)
                continue
            count = len(prompt)
            if self._limit is not None and count > self._limit.most:
                raise InvalidInput(
                    f"a prompt of {count} tokens is too long: the encoder reads at most "
                    f"{self._limit.most}, as {self._limit.where} says"
                )
            if "mask" in name.lower():
                feeds[name] = np.ones((1, count), type_.dtype)
            elif "type" in name.lower():
                feeds[name] = np.zeros((1, count), type_.dtype)
            else:
                feeds[name] = np.array([prompt], type_.dtype)
        return feeds


def _types_of(model: Model) -> dict[str, Type]:
    return {value.name: value.type for value in model.graph.inputs}


def _shaped(name: str, type_: Type) -> TensorType:
    """Return the type of an encoder's input. Raises ``InvalidInput`` if it has neither the axes of
    tokens nor those of features."""
    if isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None:
        of_tokens = len(type_.shape) == _OF_TOKENS and type_.dtype.kind in "iub"
        if of_tokens or _is_of_features(type_):
            return type_
    raise InvalidInput(f"the encoder's input {name!r} {type_} is neither of tokens nor of features")


def _is_of_features(type_: TensorType) -> bool:
    return len(type_.shape or ()) == _FEATURES and type_.dtype in _FEATURE_TYPES


def _hidden_of(outputs: NamedValues) -> np.ndarray | None:
    """Return the hidden states [1, positions, size] among an encoder's outputs, or None."""
    # Encoders of onnxruntime-genai also return keys and values, which have four axes.
    arrays = [x for x in outputs.values() if isinstance(x, np.ndarray) and x.ndim == _FEATURES]
    return arrays[0] if arrays else None


def _matched(types: Mapping[str, Type], outputs: NamedValues) -> dict[str, np.ndarray]:
    """Return inputs of a decoder by name, matched with outputs of the encoder and its ``cross``."""
    hidden, feeds = _hidden_of(outputs), {}
    for name, type_ in types.items():
        source = outputs.get(name, outputs.get(present_of(name)))
        dtype = type_.dtype if isinstance(type_, TensorType) else None
        if source is not None:
            feeds[name] = np.asarray(source)
        # A prompt is encoded alone, without padding, so that no position is hidden.
        elif "mask" in name.lower() and hidden is not None:
            feeds[name] = np.ones((1, hidden.shape[1]), dtype)
        elif "hidden" in name.lower() and hidden is not None:
            feeds[name] = hidden
        elif dtype is not None and dtype.kind in "iu":
            feeds[name] = np.zeros((1, 1), dtype)  # what it computes for tokens is not read
        else:
            raise InvalidInput(
                f"the decoder's input {name!r} {type_} is not known how to be made of the "
                f"encoder's outputs {[*outputs]}"
            )
    return feeds


def _run(
    session: Session, feeds: Mapping[str, np.ndarray], stop: StopCondition | None
) -> NamedValues:
    if stop is None or not stop.limited:
        return session.run(feeds)
    stop.check()
    outputs = session.run(feeds, timeout=stop.seconds_left)
    stop.check()
    return outputs
