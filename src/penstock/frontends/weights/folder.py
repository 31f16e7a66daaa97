"""Folders of Hugging Face's models: ``config.json``, and weights in files of safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from penstock.artifact.tensor_file import array_places
from penstock.core.errors import InvalidInput, InvalidModel, quoted
from penstock.core.limits import Limits
from penstock.core.types import dtype_name
from penstock.frontends.common.model_files import open_path
from penstock.frontends.common.weight_file import ConstantBudget, WeightFile
from penstock.frontends.weights.configuration import EXPORT, FAMILIES, decoder_configuration
from penstock.frontends.weights.decoder import write_decoder
from penstock.frontends.weights.encoder import ENCODERS, encoder_configuration, write_encoder
from penstock.frontends.weights.gpt2 import gpt2_configuration, write_gpt2
from penstock.frontends.weights.modern_encoder import (
    MODERN_ENCODER,
    modern_configuration,
    write_modern_encoder,
)
from penstock.frontends.weights.names import file_names
from penstock.frontends.weights.settings import Settings, unsupported
from penstock.frontends.weights.tensors import PLAIN, StoredTensor, TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Model

CONFIGURATION = "config.json"
_WEIGHTS = "model.safetensors"
_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_TEXT = 64 << 20  # bytes of a file in JSON
# Files that the graph does not need, but its caller does.
_BESIDE = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_FORMATS = {dtype: name for name, dtype in PLAIN.items()}


def is_weights_folder(folder: str) -> bool:
    """Whether a folder has a configuration and weights in files of safetensors."""
    names = os.listdir(folder)
    return CONFIGURATION in names and any(name.endswith(_SUFFIX) for name in names)


def load_folder(folder: Path, limits: Limits, map_weights: bool) -> Model:
    """Return the model of a folder. Raises ``InvalidModel``, ``Unsupported``."""
    text = _text(folder, CONFIGURATION)
    settings = Settings(CONFIGURATION, _parsed(text, CONFIGURATION))
    model_type = settings.text("model_type")
    if settings.get("quantization_config") is not None:
        raise unsupported(
            "quantization_config, of codes of another library,",
            "load the model's weights of 16 bits, or a GGUF file of it",
            CONFIGURATION,
        )
    inner = settings.inner("text_config") if model_type == "gemma3" else None
    if inner is not None:  # the decoder of a model that also reads images
        settings, model_type = inner, "gemma3_text"
    write = _writer(settings, model_type)
    tensors = _tensors(folder, map_weights)
    name_of = file_names(model_type, tensors)
    store = TensorStore(folder.name, tensors, ConstantBudget(limits), name_of)
    b = write(store)
    store.check_all_read()
    metadata = {CONFIGURATION: text}
    for name in _BESIDE:
        if (folder / name).is_file():
            metadata[name] = _text(folder, name)
    return b.model(str(folder), metadata)


def _writer(settings: Settings, model_type: str) -> Callable[[TensorStore], ModelWriter]:
    """Return the function that builds the graph of an architecture."""
    if model_type in FAMILIES:
        return partial(write_decoder, config=decoder_configuration(settings, model_type))
    if model_type == "gpt2":
        return partial(write_gpt2, config=gpt2_configuration(settings))
    if model_type in ENCODERS:
        return partial(write_encoder, config=encoder_configuration(settings, model_type))
    if model_type == MODERN_ENCODER:
        return partial(write_modern_encoder, config=modern_configuration(settings))
    known = ", ".join(sorted([*FAMILIES, "gpt2", *ENCODERS, MODERN_ENCODER]))
    advice = f"graphs of {known} are made from weights; {EXPORT}"
    raise unsupported(f"model_type {quoted(model_type)}", advice, settings.label)


def _tensors(folder: Path, mapped: bool) -> dict[str, StoredTensor]:
    """Return the tensors of all files of weights, by name."""
    names = os.listdir(folder)
    shards: Mapping[str, object] = {}
    if _INDEX in names:
        index = Settings(_INDEX, _parsed(_text(folder, _INDEX), _INDEX)).inner("weight_map")
        shards = {} if index is None else index.values
        files = sorted({str(name) for name in shards.values()})
    else:
        own = sorted(name for name in names if name.endswith(_SUFFIX))
        files = [_WEIGHTS] if _WEIGHTS in own else own
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        # A plain name: files of caches may be links, but no file is looked for elsewhere.
        if os.path.basename(name) != name or not name.endswith(_SUFFIX):
            raise InvalidModel(f"{_INDEX} names {quoted(name)}, which is no file of this folder")
        if name not in names:
            raise InvalidModel(
                f"{folder.name} has no {quoted(name)}, which {_INDEX} names: get all shards"
            )
        tensors |= _tensors_of_file(folder / name, mapped)
    missing = [name for name in shards if name not in tensors]
    if missing:
        raise InvalidModel(
            f"{_INDEX} says where {quoted(missing[0])} is, but it is not there: get all files of "
            "the model from one place"
        )
    return tensors


def _tensors_of_file(path: Path, mapped: bool) -> dict[str, StoredTensor]:
    try:
        source = WeightFile(partial(open_path, path), mapped)
        with open_path(path) as file:
            places, _ = array_places(path, file, source.size)
    except (InvalidInput, ValueError) as error:
        raise InvalidModel(f"{path.name} cannot be loaded: {error}") from error
    return {
        name: StoredTensor(
            name,
            place.shape,
            _FORMATS.get(dtype_name(place.dtype), dtype_name(place.dtype)),
            path.name,
            source,
            place.begin,
            place.nbytes,
        )
        for name, place in places.items()
    }


def _text(folder: Path, name: str) -> str:
    with open_path(folder / name) as file:
        data = file.read(_MOST_TEXT + 1)
    if len(data) > _MOST_TEXT:
        raise InvalidModel(f"{name} has more than {_MOST_TEXT >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{name} is not text in UTF-8: {error}") from error


def _parsed(text: str, name: str) -> Mapping[str, object]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{name} is not JSON: {error}; download it again") from error
    if not isinstance(values, dict):
        raise InvalidModel(f"{name} is not a JSON object; download it again")
    return values
