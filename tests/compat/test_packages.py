"""Published packages that use ONNX Runtime, run unchanged on Penstock.

Each program runs in a process of its own, once with ``penstock.compat.install`` and once on ONNX
Runtime; the answers must agree. Packages that are not installed are put into a folder of
``.cache`` once, as the models of ``tests/models`` are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent.parent / ".cache" / "packages"

_BEGIN = """
import json, sys
import numpy as np
if sys.argv[1] == "penstock":
    import penstock.compat
    penstock.compat.install("onnxruntime")
"""
_END = """
import onnxruntime
print(json.dumps({"runtime": onnxruntime.InferenceSession.__module__, "answer": answer}))
"""

PROGRAMS = {
    "magika": """
from magika import Magika

magika = Magika()
texts = [b"import os\\ndef f(x):\\n    return x\\n" * 5, b"#include <stdio.h>\\nint main() {}\\n" * 4]
found = [magika.identify_bytes(text) for text in texts]
answer = [[one.output.label, round(one.score, 3)] for one in found]
""",
    "swift-f0==0.3.0": """
from swift_f0 import SwiftF0

seconds = np.arange(16000) / 16000
result = SwiftF0(threads=1).detect(np.sin(2 * np.pi * 220 * seconds).astype(np.float32), 16000)
answer = [[round(float(hz)) for hz in result.pitch_hz[5:-5]], len(result.confidence)]
""",
    "silero-vad==6.2.3": """
import torch
from silero_vad import get_speech_timestamps, load_silero_vad

torch.set_num_threads(1)
model = load_silero_vad(onnx=True)
seconds = np.arange(3 * 16000) / 16000
tone = sum(np.sin(2 * np.pi * 120 * k * seconds) / k for k in range(1, 12))  # as a voice from 1 s to 2 s
voice = tone * (1 + np.sin(2 * np.pi * 4 * seconds)) * ((seconds > 1) & (seconds < 2))
noise = np.random.default_rng(0).standard_normal(len(seconds)) / 500
sound = torch.tensor((voice / 8 + noise).astype(np.float32))
chances = [round(float(model(chunk, 16000)), 2) for chunk in sound.split(512)[:-1]]
model.reset_states()
answer = [chances, get_speech_timestamps(sound, model, threshold=0.3)]
assert max(chances) > 0.9 and len(answer[1]) == 1
""",
    "rapidocr==3.10.0": """
from PIL import Image, ImageDraw, ImageFont
from rapidocr import RapidOCR

image = Image.new("RGB", (640, 200), "white")
font = ImageFont.load_default(48)
ImageDraw.Draw(image).text((20, 60), "Hello Penstock 2026", fill="black", font=font)
result = RapidOCR()(np.array(image))
answer = [list(result.txts), [round(score, 2) for score in result.scores]]
""",
    "optimum-onnx==0.1.0 sentence-transformers==5.7.0": """
import torch
from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForFeatureExtraction, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, BertTokenizerFast, LlamaConfig, LlamaForCausalLM

words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat".split()
open("vocab.txt", "w").write("\\n".join(words))
tokenizer = BertTokenizerFast("vocab.txt")
small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
torch.manual_seed(0)
BertModel(BertConfig(vocab_size=len(words), **small)).save_pretrained("bert")
LlamaForCausalLM(LlamaConfig(vocab_size=64, **small)).save_pretrained("llama")
for folder in ("bert", "llama"):
    tokenizer.save_pretrained(folder)
tokens = tokenizer(["the cat sat", "on a mat and a mat"], padding=True, return_tensors="pt")

def sizes(folder, **options):
    model = ORTModelForFeatureExtraction.from_pretrained(folder, **options)
    if folder == "bert":
        model.save_pretrained("saved")
    return [round(float(x), 2) for x in model(**tokens).last_hidden_state.abs().sum((1, 2))]

answer = [sizes("bert", export=True), sizes("saved", use_io_binding=False)]
ORTQuantizer.from_pretrained("saved").quantize(
    save_dir="small", quantization_config=AutoQuantizationConfig.avx2(is_static=False)
)
answer.append([round(x, 1) for x in sizes("small", file_name="model_quantized.onnx")])
for bound in (False, True):
    model = ORTModelForCausalLM.from_pretrained("llama", export=True, use_io_binding=bound)
    answer.append(model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=8, do_sample=False).tolist())
modules = [models.Transformer("bert"), models.Pooling(32)]
SentenceTransformer(modules=modules).save("sentences")
model = SentenceTransformer("sentences", backend="onnx", device="cpu", model_kwargs={"export": True})
answer.append(np.abs(model.encode(["the cat sat", "on a mat"])).sum(1).round(2).tolist())
""",
}
_ALONE = {"swift-f0==0.3.0", "silero-vad==6.2.3"}  # need nothing that is not here


def folder_of(package: str) -> Path | None:
    """Where a package is; None for one that is installed. Skips where it cannot be had."""
    if "==" not in package:
        return None
    folder = CACHE / package.replace("==", "-").replace(" ", "_")
    if not (folder / "complete").exists():
        more = ["--no-deps"] if package in _ALONE else []
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *more]
        done = subprocess.run(
            [*command, *package.split()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot install {package}: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return folder


def answer(program: str, runtime: str, folder: Path | None, tmp_path: Path) -> dict:
    path = tmp_path / "program.py"
    path.write_text(_BEGIN + program + _END)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if folder is not None:
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(path), runtime],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


*QUICK, LONG, LARGE = PROGRAMS
_OF_FULL = [pytest.param(package, marks=pytest.mark.full) for package in (LONG, LARGE)]


@pytest.mark.costly
@pytest.mark.models
@pytest.mark.parametrize("package", [*QUICK, *_OF_FULL])
def test_package_gives_the_same_answers_on_penstock(package, tmp_path):
    folder = folder_of(package)
    program = PROGRAMS[package]
    ours = answer(program, "penstock", folder, tmp_path)
    theirs = answer(program, "onnxruntime", folder, tmp_path)
    assert ours["runtime"].startswith("penstock.compat")
    assert theirs["runtime"].startswith("onnxruntime")
    assert ours["answer"] == theirs["answer"]
