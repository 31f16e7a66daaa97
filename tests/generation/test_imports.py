"""What a process imports to generate text: each module costs its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx

from tests.support.decoders import decoder_model
from tests.support.word_texts import word_tokenizer

OF_OTHERS = {
    *("generation.beams", "generation.chat", "generation.drafts", "generation.grammar"),
    *("generation.gguf_vocabulary", "generation.prompt_encoder", "generation.speech"),
    *("stepping.batched", "stepping.separate", "stepping.state_pairs"),
    *("frontends.onnx.generation", "frontends.onnx.microsoft_gates"),
    *("frontends.onnx.microsoft_quantized", "ops.internal.search", "frontends.tflite"),
}


def test_text_of_a_decoder_imports_nothing_that_others_need(tmp_path: Path) -> None:
    onnx.save(decoder_model("groups"), tmp_path / "model.onnx")
    word_tokenizer().tokenizer.save(str(tmp_path / "tokenizer.json"))
    program = f"""
import sys
from penstock.generation import Generator
assert Generator({str(tmp_path / "model.onnx")!r}).generate([1, 2], max_tokens=2).generated_tokens
print(*[name.removeprefix("penstock.") for name in sys.modules if name.startswith("penstock.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "stepping.joined" in modules
    assert not OF_OTHERS & {*modules}
