"""Files of encoder-decoders, as optimum lays them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import penstock as ps
from tests.support.encoder_decoders import cases_of, folders, generator_of, tokens_of
from tests.support.onnx_text import model_from_text

__all__ = ["folders"]


def test_decoder_file_stands_for_its_folder(folders: Path, tmp_path: Path) -> None:
    """With an end that both files have, and settings in the folder around ``onnx``."""
    (tmp_path / "onnx").mkdir()
    for file in (folders / "t5").iterdir():
        place = tmp_path
        name = file.name
        if file.suffix == ".onnx":
            place, name = tmp_path / "onnx", file.name.replace(".onnx", "_q.onnx")
        shutil.copy(file, place / name)
    prompt, _, wanted = next(cases_of(folders, "t5"))
    with generator_of(tmp_path / "onnx" / "decoder_model_merged_q.onnx") as generator:
        assert tokens_of(generator, prompt) == wanted


def test_folder_onnx_in_a_folder_is_read(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for file in (folders / "bart").iterdir():
        shutil.copy(file, (tmp_path / "onnx" if file.suffix == ".onnx" else tmp_path) / file.name)
    prompt, _, wanted = next(cases_of(folders, "bart"))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt) == wanted


def test_further_steps_without_the_first_one_are_refused(folders: Path, tmp_path: Path) -> None:
    for name in ("encoder_model.onnx", "decoder_with_past_model.onnx"):
        shutil.copy(folders / "bart" / name, tmp_path / name)
    with pytest.raises(ps.InvalidInput, match=r"not beside it: decoder_model\.onnx"):
        generator_of(tmp_path)


def test_decoder_without_an_encoder_is_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copy(folders / "t5" / "decoder_model_merged.onnx", tmp_path / "d.onnx")
    with pytest.raises(ps.InvalidInput, match="which an encoder returns: give a folder"):
        generator_of(tmp_path / "d.onnx")


def test_first_step_alone_reads_all_tokens_each_time(folders: Path, tmp_path: Path) -> None:
    for file in (folders / "bart").iterdir():
        if file.name != "decoder_with_past_model.onnx":
            shutil.copy(file, tmp_path / file.name)
    prompt, _, wanted = next(cases_of(folders, "bart"))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt) == wanted


def test_encoder_may_return_what_cross_attention_reads(tmp_path: Path) -> None:
    """As onnxruntime-genai writes Whisper: caches of all keys come first, and tokens are int32."""
    names = "encoder.onnx", "decoder.onnx"
    encoder = """encoder (int64[b, s] tokens) => (float[b, s, 4] hidden_states,
        float[b, 1, s, 4] present_value_cross_0, float[b, 1, s, 4] present_key_cross_0)
        <int64[1] one = {1}> {
        hidden_states = Gather (table, tokens)
        present_key_cross_0 = Unsqueeze (hidden_states, one)
        present_value_cross_0 = Neg (present_key_cross_0) }"""
    decoder = """decoder (int32[b, t] input_ids, float[b, 1, p, 4] past_key_self_0,
        float[b, 1, p, 4] past_value_self_0, float[b, 1, s, 4] past_key_cross_0,
        float[b, 1, s, 4] past_value_cross_0)
        => (float[b, t, 20] logits, float[b, 1, q, 4] present_value_self_0,
        float[b, 1, q, 4] present_key_self_0) <int64[1] one = {1}, int64[1] two = {2}> {
        x = Gather (table, input_ids) r = Unsqueeze (x, one) n = Neg (r)
        present_key_self_0 = Concat <axis = 2> (past_key_self_0, r)
        present_value_self_0 = Concat <axis = 2> (past_value_self_0, n)
        all = Concat <axis = 2> (present_key_self_0, past_key_cross_0)
        values = Concat <axis = 2> (present_value_self_0, past_value_cross_0)
        turned = Transpose <perm = [0, 1, 3, 2]> (all) scores = MatMul (r, turned)
        weights = Softmax (scores) mixed = MatMul (weights, values) y = Squeeze (mixed, one)
        turned_table = Transpose (table) logits = MatMul (y, turned_table) }"""
    table = np.random.default_rng(5).standard_normal((20, 4)).astype(np.float32)
    for name, text in zip(names, (encoder, decoder), strict=True):
        model = model_from_text(text)
        model.graph.initializer.append(numpy_helper.from_array(table, "table"))
        onnx.save(model, tmp_path / name)
    prompt, tokens = [3, 1, 4], [2]
    for _ in range(6):  # each row sees the rows before it and the prompt
        keys = table[[*tokens, *prompt]]
        scores = np.exp(keys @ table[tokens[-1]])
        mixed = -(scores / scores.sum()) @ keys
        tokens.append(int((table @ mixed).argmax()))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt, decoder_prompt=[2], max_tokens=6) == tokens[1:]
