"""Cases of ``tools.fuzz``: mutants of the models of the tests, by format, and drawn nodes."""

from __future__ import annotations

import io
import json
import random
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx
from bench.zoo.sample import samples
from google.protobuf import text_format
from google.protobuf.message import Message
from tests.support import differential, mutants, tf_cases, tflite_cases, weight_cases
from tests.support.kernel_draws import DRAWS
from tests.support.random_graphs import seeded
from tests.support.tokenizers import gpt2_metadata, llama_metadata, trained_tokenizer

from penstock.frontends.nnpackage.package import MANIFEST
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, SavedModel
from penstock.generation.gguf_vocabulary import gguf_tokenizer
from penstock.ir.graph import Model
from penstock.ops.registry import registered
from penstock.textual.printer import format_model
from tools.mutations import (
    change_message,
    changed_bytes,
    changed_json,
    changed_numbers,
    changed_text,
)

SAVED_MODELS = tf_cases.FOLDER.parent / "tf_saved"
MESSAGES: Mapping[str, type[Message]] = {"onnx": onnx.ModelProto, "pb": GraphDef}


@dataclass(frozen=True)
class Case:
    """A file, or the files of a folder: ``content`` by the path below ``name``, "" for a file."""

    name: str
    content: Mapping[str, bytes]

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        for below, data in self.content.items():
            file = path / below if below else path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return path


@cache
def words() -> Mapping[str, Sequence[str]]:
    """Values worth trying, by the field's name: operations that there are."""
    names = sorted({op.name for op in registered()})
    return {"op_type": names, "op": names, "method": names}


@cache
def graph_defs() -> Mapping[str, GraphDef]:
    return {case.name: read_graph(case.path) for case in tf_cases.cases()}


@cache
def saved_models() -> Mapping[str, Mapping[str, bytes]]:
    return files_of_folders(SAVED_MODELS)


def files_of_folders(parent: Path) -> Mapping[str, Mapping[str, bytes]]:
    """By the name of each folder in ``parent``, its files by their path below it."""
    return {
        folder.name: {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for folder in sorted(parent.iterdir())
        if folder.is_dir()
    }


@cache
def suite() -> Sequence[bytes]:
    """The models of the official ONNX suite, of which there is one or more for each operation."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case.model.SerializeToString() for case in load_model_tests(kind="node")]


@cache
def exported() -> Sequence[bytes]:
    """Small models as exporters wrote them, with the operations of classical models."""
    models = [model for _, model, _ in samples()]
    return [model for model in models if len(model) < 30_000]


def onnx_case(draw: random.Random, with_suite: bool) -> Case:
    seeds = [*mutants.models().values()] if draw.random() < 0.7 else exported()
    data = draw.choice(suite()) if with_suite and draw.random() < 0.6 else draw.choice(seeds)
    chance = draw.random()
    if chance < 0.4:
        return Case("model.onnx", {"": mutants.mutant(data, str(draw.random()))})
    if chance < 0.5:
        return Case("model.onnx", {"": changed_bytes(data, draw)})
    proto = onnx.ModelProto.FromString(data)
    change_message(proto, draw, words())
    return Case("model.onnx", {"": proto.SerializeToString()})


def graph_def_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(graph_defs()))
    graph = GraphDef()
    graph.CopyFrom(graph_defs()[name])
    chance = draw.random()
    if chance < 0.15:
        return Case(f"{name}.pb", {"": changed_bytes(graph.SerializeToString(), draw)})
    if chance < 0.3:
        text = text_format.MessageToString(graph)
        return Case(f"{name}.pbtxt", {"": changed_text(text, draw).encode(errors="replace")})
    change_message(graph, draw, words())
    return Case(f"{name}.pb", {"": graph.SerializeToString()})


def saved_model_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(saved_models()))
    files = dict(saved_models()[name])
    if draw.random() < 0.3:
        below = draw.choice(sorted(files))
        files[below] = changed_bytes(files[below], draw)
    else:
        proto = SavedModel.FromString(files["saved_model.pb"])
        change_message(proto, draw, words())
        files["saved_model.pb"] = proto.SerializeToString()
    return Case(name, files)


@cache
def flat_buffers() -> Sequence[bytes]:
    """The TFLite and Circle models of the corpus, those that must be refused left out."""
    folders = ("op", "control", "dynamic", "net", "circle")
    return [case.path.read_bytes() for case in tflite_cases.cases(*folders)]


def tflite_case(draw: random.Random, _: bool) -> Case:
    change = draw.choice([changed_bytes, changed_numbers, changed_numbers])
    return Case("model.tflite", {"": change(draw.choice(flat_buffers()), draw)})


@cache
def packages() -> Mapping[str, Mapping[str, bytes]]:
    return {
        name: files
        for name, files in files_of_folders(tflite_cases.FOLDER / "nnpkg").items()
        if "error" not in name
    }


# Values worth trying in a manifest: places of inputs and outputs, types and files.
_MANIFEST_WORDS = (
    *("0:0:0", "1:0:0", "0:0:1", "0:1:0", "9:0:0", "-1:0:0", "0:0", "00:00:00"),
    *("tflite", "circle", "a.tflite", "../a.tflite", "/dev/zero", MANIFEST, "metadata", "."),
    *([], {}, None, True, [["0:0:0"]], {"from": "0:0:0", "to": ["1:0:0"]}),
)


def package_case(draw: random.Random, _: bool) -> Case:
    name = draw.choice(sorted(packages()))
    files = dict(packages()[name])
    chance = draw.random()
    if chance < 0.5:
        files[MANIFEST] = changed_json(files[MANIFEST], draw, _MANIFEST_WORDS)
    elif chance < 0.6:
        files[MANIFEST] = changed_bytes(files[MANIFEST], draw)
    elif chance < 0.9:
        below = draw.choice(sorted(files.keys() - {MANIFEST}))
        files[below] = draw.choice([changed_bytes, changed_numbers])(files[below], draw)
    if draw.random() < 0.5:
        return Case(name, files)
    data = packed(files, draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    if chance >= 0.9 or draw.random() < 0.2:
        data = draw.choice([changed_bytes, changed_numbers])(data, draw)
    return Case("package.zip", {"": data})


@cache
def weights() -> Sequence[weight_cases.WeightCase]:
    return [case for _, case in sorted(weight_cases.cases().items())]


# Values worth trying in a configuration: sizes, numbers, and what the field's files have as text.
_WEIGHT_WORDS = (
    *(0, -1, 1, 2, 3, 5, 7, 64, 4096, 2**31, 2**40, 0.5, -1.0, 1e-30, 1e30, "inf"),
    *("llama", "gemma2", "gpt2", "bert", "qwen3_moe", "gelu", "silu", "relu2", "swish"),
    *("default", "linear", "dynamic", "yarn", "llama3", "longrope", "sliding_attention"),
    *([], {}, None, True, [0], [1e-9] * 4, {"rope_type": "linear", "factor": 0}),
)
_METADATA_WORDS = (0, 1, 2, 3, 5, 64, 4096, 2**31, 0.5, -1.0, 1e30, "llama", "bert", True, [1, 2])


def weights_case(draw: random.Random, _: bool) -> Case:
    """A checkpoint's folder or a GGUF file with another configuration, other tensors or bytes."""
    case = draw.choice(weights())
    changes, chance = draw.choice([1, 1, 2, 4]), draw.random()
    if case.model_type not in ("llama", "qwen2", "qwen3", "gemma2", "gpt2") or draw.random() < 0.5:
        with tempfile.TemporaryDirectory() as folder:
            case.write(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        if chance < 0.8:
            files["config.json"] = changed_json(files["config.json"], draw, _WEIGHT_WORDS)
        else:
            name = draw.choice(sorted(files))
            files[name] = draw.choice([changed_bytes, changed_numbers])(files[name], draw)
        return Case("checkpoint", files)
    writer = case.gguf()
    for _change in range(changes):
        key, name = draw.choice(sorted(writer.metadata)), draw.choice(sorted(writer.tensors))
        shape, kind, data = writer.tensors[name]
        if chance < 0.5:
            writer.metadata[key] = draw.choice(_METADATA_WORDS)
        elif chance < 0.55:
            writer.metadata.pop(key, None)
        elif chance < 0.7:
            kind = draw.choice(sorted(weight_cases.TYPES))
            writer.tensors[name] = tuple(draw.sample(shape, len(shape))), kind, data
        elif chance < 0.8 and len(writer.tensors) > 1:
            del writer.tensors[name]
    made = writer.bytes()
    return Case("model.gguf", {"": made if chance < 0.8 else changed_numbers(made, draw)})


def packed(files: Mapping[str, bytes], compression: int) -> bytes:
    """A zip file of ``files`` by name, of which each is written at a fixed date."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return memory.getvalue()


TOKENIZER, VOCABULARY = "tokenizer", "vocabulary.json"
"""names of a tokenizer's folder, and of a file with the metadata of a GGUF file"""
_TOKENIZER_SETTINGS = {
    "bos_token": "<|start|>",
    "eos_token": {"content": "<|end|>", "lstrip": False},
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{% endfor %}",
}
# Values worth trying in a tokenizer: numbers of tokens, parts of words, patterns and its types.
_TOKENIZER_WORDS = (
    *(0, -1, 1, 2, 2**31, 2**32, 2**63, 0.5, -1e300, "", "a", "é", "##", "<0x41>", "a b", "a é"),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "Sequence", "ByteLevel", "Metaspace", "Strip"),
    *("Replace", "Fuse", "ByteFallback", "Precompiled", "(a*)*b", "(?=", {"Regex": "(x+x+)+y"}),
    *([], {}, None, True, ["a", "b"], {"type": "Strip", "content": "a", "start": 9, "stop": 9}),
    *({"String": ""}, {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}),
    *("{{ 'a' * 10**9 }}", "{{ 1e400 }}", "{% for i in range(10**9) %}a{% endfor %}"),
)


def tokenizer_case(draw: random.Random, _: bool) -> Case:
    """A tokenizer's folder, or the vocabulary of a GGUF file, with other values or bytes."""
    if draw.random() < 0.3:
        metadata = json.dumps(draw.choice([gpt2_metadata, llama_metadata])()).encode()
        data = b"[]"
        while not data.startswith(b"{"):  # whatever a GGUF file has, its reader gives a mapping
            data = changed_json(metadata, draw, _TOKENIZER_WORDS)
        return Case(VOCABULARY, {"": data})
    tokenizer = draw.choice([gpt2_metadata, llama_metadata])
    text = trained_tokenizer() if draw.random() < 0.5 else gguf_tokenizer(tokenizer())
    settings = json.dumps(_TOKENIZER_SETTINGS)
    files = {"tokenizer.json": text.to_str().encode(), "tokenizer_config.json": settings.encode()}
    name = draw.choice(["tokenizer.json"] * 3 + ["tokenizer_config.json"])
    if draw.random() < 0.8:
        files[name] = changed_json(files[name], draw, _TOKENIZER_WORDS)
    else:
        files[name] = changed_bytes(files[name], draw)
    return Case(TOKENIZER, files)


def text_case(draw: random.Random, _: bool) -> Case:
    graph = seeded(draw.randrange(1000), 6)
    text = format_model(Model({graph.name: graph}, graph.name))
    return Case("model.txt", {"": changed_text(text, draw).encode(errors="replace")})


def kernel_case(draw: random.Random, _: bool) -> Case:
    operation = draw.choice([name for name in differential.operations() if name in DRAWS])
    number = draw.randrange(2**32)
    return Case("node.kernel", {"": json.dumps([operation, number]).encode()})


CASES = {
    "onnx": (onnx_case, 5),
    "graphdef": (graph_def_case, 4),
    "tflite": (tflite_case, 3),
    "package": (package_case, 2),
    "savedmodel": (saved_model_case, 1),
    "text": (text_case, 1),
    "weights": (weights_case, 1),
    "tokenizer": (tokenizer_case, 1),
    "kernel": (kernel_case, 4),
}
"""how cases of each format are drawn, and their part of all"""


def drawn(seed: str, number: int, with_suite: bool, only: str = "") -> Case:
    """A case of the format ``only``, or of any."""
    draw = random.Random(f"{seed} {number}")
    cases, weights = zip(*([CASES[only]] if only else CASES.values()), strict=True)
    (case,) = draw.choices(cases, weights)
    return case(draw, with_suite)
