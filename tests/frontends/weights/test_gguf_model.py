"""Models of GGUF files give what ``transformers`` gives for the checkpoints that they come from."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.weights.block_codes import FORMATS, decode
from tests.frontends.weights.test_decoder import CASES, logits
from tests.support.weight_cases import GgufWriter, random_blocks

# GGUF has no key for these: scalings that llama.cpp has tensors for, flags, other windows.
WITHOUT = {
    *("llama3", "mistral", "qwen2_windows", "phi3_long", "phi3_partial", "qwen3_moe_some"),
    # The converter writes no key that these need: they have tests of their own.
    *("llama_linear", "qwen2_yarn", "qwen2_yarn_betas", "gemma3_local"),
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT))
def test_decoder_of_a_gguf_file_gives_the_logits_of_transformers(name: str) -> None:
    session = ps.compile(ps.load(CASES[name].gguf().bytes()), precision="strict")
    result = logits(session, CASES[name], [8, 1, 3])
    np.testing.assert_allclose(result, CASES[name].expected, rtol=0, atol=1e-4)


def test_frequencies_of_llama_3_are_divided_by_a_tensor() -> None:
    case = CASES["llama3"]
    writer = case.gguf()
    from penstock.frontends.weights.rotary import rotary_of

    parameters = case.config["rope_parameters"]
    scaled = rotary_of(parameters, 8, 64).frequencies  # type: ignore[arg-type]
    plain = rotary_of({"rope_theta": parameters["rope_theta"]}, 8, 64)  # type: ignore[index]
    writer.add("rope_freqs.weight", plain.frequencies / scaled)
    session = ps.compile(ps.load(writer.bytes()), precision="strict")
    np.testing.assert_allclose(logits(session, case, [12]), case.expected, rtol=0, atol=1e-4)


def test_long_texts_of_phi_3_have_other_frequencies() -> None:
    case = CASES["phi3_long"]
    writer = case.gguf()
    writer.metadata["phi3.rope.scaling.original_context_length"] = 8
    parameters = case.config["rope_parameters"]
    for key in ("long", "short"):
        factors = parameters[f"{key}_factor"]  # type: ignore[index]
        writer.add(f"rope_factors_{key}.weight", np.array(factors, np.float32))
    session = ps.compile(ps.load(writer.bytes()), precision="strict")
    np.testing.assert_allclose(logits(session, case, [12]), case.expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama_linear", {"type": "linear", "factor": 2.0}),
        ("llama_linear", {"factor": 2.0}),
        ("qwen2_yarn", {"type": "yarn", "factor": 4.0, "original_context_length": 8}),
        (
            "qwen2_yarn_betas",
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 8,
                "yarn_beta_fast": 0.05,
                "yarn_beta_slow": 0.01,
            },
        ),
    ],
)
def test_keys_of_scalings_give_the_logits_of_transformers(
    name: str, keys: dict[str, object]
) -> None:
    writer = CASES[name].gguf()
    architecture = str(writer.metadata["general.architecture"])
    writer.metadata |= {f"{architecture}.rope.scaling.{key}": x for key, x in keys.items()}
    session = ps.compile(ps.load(writer.bytes()), precision="strict")
    expected = CASES[name].expected
    np.testing.assert_allclose(logits(session, CASES[name], [12]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pattern", [2, [True, False, True]])
def test_layers_with_windows_and_their_frequencies_are_those_of_the_metadata(
    pattern: object,
) -> None:
    case = CASES["gemma3_local"]
    writer = case.gguf()
    writer.metadata |= {
        "gemma3.attention.sliding_window_pattern": pattern,
        "gemma3.rope.freq_base_swa": 200.0,
    }
    session = ps.compile(ps.load(writer.bytes()), precision="strict")
    np.testing.assert_allclose(logits(session, case, [8, 4]), case.expected, rtol=0, atol=1e-4)


def test_equal_experts_of_mixtral_give_the_logits_of_the_dense_model() -> None:
    case = CASES["llama"]
    writer = case.gguf()
    writer.metadata |= {"llama.expert_count": 3, "llama.expert_used_count": 2}
    for i in range(2):
        for role in ("gate", "up", "down"):
            shape, _, data = writer.tensors.pop(f"blk.{i}.ffn_{role}.weight")
            expert = np.frombuffer(data, np.float32).reshape(shape)
            writer.add(f"blk.{i}.ffn_{role}_exps.weight", np.stack([expert] * 3))
        router = np.random.default_rng(i).standard_normal((3, 24))
        writer.add(f"blk.{i}.ffn_gate_inp.weight", router.astype(np.float32))
    session = ps.compile(ps.load(writer.bytes()), precision="strict")
    np.testing.assert_allclose(logits(session, case, [12]), case.expected, rtol=0, atol=1e-4)


def packed(kind: str, experts: bool) -> tuple[GgufWriter, GgufWriter]:
    """A model of blocks of one kind, and one of the same weights in float32."""
    case = CASES["qwen3_moe" if experts else "llama_tied"]
    width, wide = 256, 512
    sizes = {24: width, 40: wide, 16: width, 32: width}
    blocks, plain = case.gguf(), case.gguf()
    architecture = str(blocks.metadata["general.architecture"])
    for writer in (blocks, plain):
        writer.metadata |= {
            f"{architecture}.embedding_length": width,
            f"{architecture}.feed_forward_length": wide,
            f"{architecture}.attention.key_length": 64,
            f"{architecture}.expert_feed_forward_length": width,
        }
        for name, (shape, _, _) in [*writer.tensors.items()]:
            is_head = "q_norm" in name or "k_norm" in name
            if len(shape) == 1:
                size = 64 if is_head else sizes[shape[0]]
                writer.add(name, np.ones(size, np.float32))
                continue
            rows = {"attn_q.": 256, "attn_k.": 128, "attn_v.": 128}
            row = next((n for part, n in rows.items() if part in name), None)
            row = row or (40 if "token" in name or name == "output.weight" else 0)
            row = row or (4 if "inp" in name else sizes[shape[-2]])
            full = (*shape[:-2], row, 256 if "attn_output" in name else sizes[shape[-1]])
            count = int(np.prod(full[:-1]))
            data = random_blocks(kind, count, full[-1])
            if writer is blocks:
                writer.add_blocks(name, full, kind, data.tobytes())
            else:
                writer.add(name, decode(kind, data, full[-1]).dequantized().reshape(full))
    return blocks, plain


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_give_what_their_weights_give(kind: str, experts: bool) -> None:
    case = CASES["llama"]
    models = [ps.load(writer.bytes()) for writer in packed(kind, experts)]
    operations = {node.op.name for node in models[0].graph.nodes}
    assert {"MatMulNBits", "GatherBlockQuantized"} <= operations
    assert "MatMul" not in operations
    assert ("QMoE" in operations) == experts
    of_blocks, of_floats = (
        logits(ps.compile(model, precision="strict"), case, [7, 1]) for model in models
    )
    np.testing.assert_allclose(of_blocks, of_floats, rtol=1e-4, atol=1e-4 * of_floats.max())


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_weights_of_16_bits_are_cast_in_the_graph(kind: str) -> None:
    case = CASES["llama"]
    halves, plain = case.gguf(), case.gguf()
    for name, (shape, _, data) in [*plain.tensors.items()]:
        array = np.frombuffer(data, np.float32).reshape(shape)
        bits = array.view(np.uint32) & 0xFFFF0000  # bfloat16 in the upper half
        if kind == "F16":
            bits = array.astype(np.float16).astype(np.float32).view(np.uint32)
        plain.add(name, bits.view(np.float32))
        stored = bits.view(np.float32).astype(np.float16) if kind == "F16" else bits >> 16
        halves.add(name, stored.astype(np.float16 if kind == "F16" else np.uint16), kind)
    models = [ps.load(writer.bytes()) for writer in (halves, plain)]
    assert "Cast" in {node.op.name for node in models[0].graph.nodes}
    half, real = (logits(ps.compile(model), case, [12]) for model in models)
    np.testing.assert_allclose(half, real, rtol=0, atol=1e-5)


def test_metadata_of_the_tokenizer_are_those_of_the_model(tmp_path: Path) -> None:
    writer = CASES["llama"].gguf()
    writer.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "é"],
        "tokenizer.ggml.scores": [0.5, 1.5],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(writer.bytes())
    model = ps.load(path)
    assert model.path == str(path)
    assert model.metadata["tokenizer.ggml.model"] == "gpt2"
    assert json.loads(model.metadata["tokenizer.ggml.tokens"]) == ["<s>", "é"]
    assert json.loads(model.metadata["tokenizer.ggml.scores"]) == [0.5, 1.5]
    assert model.metadata["tokenizer.ggml.eos_token_id"] == "2"
    assert model.metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_mapped_file_gives_the_same_logits(tmp_path: Path) -> None:
    case = CASES["llama"]
    path = tmp_path / "m.gguf"
    path.write_bytes(case.gguf().bytes())
    session = ps.compile(ps.load(path, map_weights=True), precision="strict")
    result = logits(session, case, [12])
    np.testing.assert_allclose(result, case.expected, rtol=0, atol=1e-4)


def refusal(writer: GgufWriter) -> str:
    with pytest.raises((ps.InvalidModel, ps.Unsupported)) as caught:
        ps.load(writer.bytes())
    return str(caught.value)


def test_unknown_architecture_is_unsupported() -> None:
    writer = CASES["llama"].gguf()
    writer.metadata["general.architecture"] = "mamba"
    assert "architecture 'mamba'" in refusal(writer)


def test_missing_tensor_is_named() -> None:
    writer = CASES["llama"].gguf()
    del writer.tensors["blk.1.ffn_up.weight"]
    assert "no tensor 'blk.1.ffn_up.weight'" in refusal(writer)


def test_missing_key_is_named() -> None:
    writer = CASES["llama"].gguf()
    del writer.metadata["llama.block_count"]
    assert "'llama.block_count' of the GGUF file is missing" in refusal(writer)


def test_tensor_of_another_shape_than_the_metadata_say_is_refused() -> None:
    writer = CASES["llama"].gguf()
    writer.add("output_norm.weight", np.ones(23, np.float32))
    assert "has shape [23], but by the configuration it has [24]" in refusal(writer)


def test_tensor_that_the_graph_does_not_read_is_refused() -> None:
    writer = CASES["llama"].gguf()
    writer.add("blk.0.attn_sinks.weight", np.ones(4, np.float32))
    assert "a tensor 'blk.0.attn_sinks.weight'" in refusal(writer)


def test_one_of_several_files_is_refused() -> None:
    writer = CASES["llama"].gguf()
    writer.metadata["split.count"] = 3
    assert "llama-gguf-split --merge" in refusal(writer)


def test_tensor_of_an_unsupported_type_is_named() -> None:
    writer = CASES["llama"].gguf()
    data = writer.bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    changed = data[:at] + (20).to_bytes(4, "little") + data[at + 4 :]
    with pytest.raises(ps.Unsupported, match=r"type IQ4_NL.*output_norm"):
        ps.load(changed)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gpt2"])
def test_changed_bytes_give_a_model_or_a_refusal(name: str) -> None:
    data = CASES[name].gguf().bytes()
    rng, loaded = np.random.default_rng(4), 0
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(4, 6000, rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        with suppress(ps.InvalidModel, ps.Unsupported):
            ps.load(bytes(changed))
            loaded += 1
    assert 0 < loaded < 300
