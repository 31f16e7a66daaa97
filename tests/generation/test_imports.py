"""What a process imports to generate text: each module costs its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx

from tests.support.decoders import decoder_model
from tests.support.word_texts import likeliest, word_tokenizer

OF_OTHERS = {
    *("generation.beams", "generation.chat", "generation.drafts", "generation.grammar"),
    *("generation.gguf_vocabulary", "generation.prompt_encoder", "generation.speech"),
    *("stepping.batched", "stepping.separate", "stepping.state_pairs"),
    *("frontends.onnx.generation", "frontends.onnx.microsoft_gates"),
    *("frontends.onnx.microsoft_quantized", "ops.internal.search", "frontends.tflite"),
}


MOST_MODULES = 172
"""of Penstock, in a process that finds the plans of its steps"""
OF_COMPILING = {
    *("analysis.interpreter", "artifact.encode", "compiler.lowering", "frontends.onnx"),
    *("frontends.onnx.importer", "ops.common.windows", "passes.context", "passes.pipeline"),
    *("passes.lowering.join_steps", "passes.lowering.page_attention"),
    *("passes.lowering.step_probes", "session.facts", "stepping.cache_branch"),
    *("tuning.cost_table", "tuning.placement"),
}
PROGRAM = """
import sys
from penstock.compiler import compiler
from penstock.session import compile_cache
compile_cache._SETTLED_NS = -10**12  # the file was written just now
compiled = []
compile = compiler.Compiler.compile
compiler.Compiler.compile = lambda *a, **o: compiled.append(a) or compile(*a, **o)
from penstock.generation import Generator
tokens = Generator({!r}).generate([1, 2, 3], max_tokens=40, ignore_end=True).tokens
print(len(compiled), *tokens, "|")
print(*[name.removeprefix("penstock.") for name in sys.modules if name.startswith("penstock.")])
print("|", *[name for name in ("sqlite3", "numpy.random", "google.protobuf") if name in sys.modules])
"""


def decoder(folder: Path) -> Path:
    onnx.save(decoder_model("groups"), folder / "model.onnx")
    word_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "model.onnx"


def test_text_of_a_decoder_imports_nothing_that_others_need(tmp_path: Path) -> None:
    path = decoder(tmp_path)
    program = f"""
import sys
from penstock.generation import Generator
assert Generator({str(path)!r}).generate([1, 2], max_tokens=2).generated_tokens
print(*[name.removeprefix("penstock.") for name in sys.modules if name.startswith("penstock.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "stepping.joined" in modules
    assert not OF_OTHERS & {*modules}


def test_second_process_compiles_no_plan_and_imports_nothing_of_compiling(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM.format(str(decoder(tmp_path)))]
    environment = {**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        head, modules, others = done.stdout.split("|")
        compiled, *tokens = map(int, head.split())
        runs.append((compiled, tokens, {*modules.split()}, others.split()))
    (first, tokens, _, _), (second, again, modules, others) = runs
    assert (first, second) == (2, 0)  # of the prompt and of a step
    assert tokens == again == likeliest([1, 2, 3], 40, "groups")
    assert modules & (OF_OTHERS | OF_COMPILING) == set()
    assert others == []
    assert len(modules) <= MOST_MODULES
