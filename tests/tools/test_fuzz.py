"""The fuzzer: its cases follow from the seed, and it finds what it looks for."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import warnings
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

import penstock as ps
from penstock.core.types import dtypes
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from tests.support import tf_cases
from tests.support.onnx_text import model_from_text
from tools.fuzz import Worker, tried
from tools.fuzz_answers import (
    ROUNDINGS,
    alike,
    are_finite,
    disagreements,
    integers_apart,
    is_of_last_bits,
    outcome,
)
from tools.fuzz_cases import (
    VOCABULARY,
    Case,
    drawn,
    graph_def_case,
    kernel_case,
    onnx_case,
    package_case,
    saved_model_case,
    text_case,
    tflite_case,
    tokenizer_case,
)
from tools.mutations import changed_bytes, changed_json, changed_text, shrunk


def test_drawn_case_follows_from_seed_and_number():
    cases = [drawn("seed", number, False) for number in range(20)]
    assert cases == [drawn("seed", number, False) for number in range(20)]
    assert len({str(case) for case in cases}) > 15


@pytest.mark.costly
@pytest.mark.parametrize(
    "draw",
    [
        *(onnx_case, graph_def_case, saved_model_case, text_case, tflite_case, package_case),
        tokenizer_case,
    ],
)
def test_worker_reports_on_cases_of_each_format(draw, tmp_path):
    with Worker() as worker:
        findings = worker.findings(draw(random.Random(1), False).write(tmp_path))
        assert all(category in ("disagreement", "foreign") for category, _ in findings)
        assert worker.process is not None and worker.process.poll() is None


def test_worker_compares_drawn_nodes_with_numpy(tmp_path, monkeypatch):
    case = kernel_case(random.Random(1), False)
    assert tried(case.write(tmp_path)) == []
    monkeypatch.setattr("tests.support.differential.difference", lambda *_: "apart")
    ((category, text),) = tried(case.write(tmp_path))
    assert category == "difference"
    assert "apart" in text
    assert {drawn("seed", number, False, "kernel").name for number in range(5)} == {case.name}


def test_worker_tries_tokenizers_and_vocabularies(tmp_path, monkeypatch):
    cases = [tokenizer_case(random.Random(seed), False) for seed in range(8)]
    paths = [case.write(tmp_path / str(number)) for number, case in enumerate(cases)]
    assert {path.name for path in paths} == {"tokenizer", "vocabulary.json"}
    assert [tried(path) for path in paths] == [[]] * len(paths)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.generation.tokenizer._read_tokenizer", fail)
    monkeypatch.setattr("penstock.generation.gguf_vocabulary.gguf_tokenizer", fail)
    for path in paths:
        ((category, text),) = tried(path)
        assert category == "foreign"
        assert text.startswith("tokenizer: ZeroDivisionError")


@pytest.mark.parametrize("seed", [769, 1675, 2580, 4946])
def test_changed_vocabulary_stays_a_mapping(seed):
    case = tokenizer_case(random.Random(seed), False)  # whose first change is of the whole
    assert case.name == VOCABULARY
    assert isinstance(json.loads(case.content[""]), dict)


def test_disagreements_are_other_answers_and_other_verdicts(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    one, same, other = ([{"y": np.array(x)}] for x in (1.0, 1.0 + 1e-9, 2.0))
    refused = ps.InvalidModel("no")
    assert disagreements(path, {"linear": one, "frames": same}) == []
    assert disagreements(path, {"linear": refused, "frames": refused}) == []
    assert disagreements(path, {"linear": one, "frames": ps.LimitExceeded("much")}) == []
    lack = ps.RunError("much")
    lack.__cause__ = MemoryError()
    assert disagreements(path, {"auto": one, "linear": lack, "frames": lack}) == []
    for pair in ((one, other), (one, refused)):
        ((category, _),) = disagreements(path, dict(zip(("linear", "frames"), pair, strict=True)))
        assert category == "disagreement"


def test_failing_node_that_only_a_call_by_name_runs_is_no_disagreement(tmp_path):
    path = tmp_path / "func_unneeded_assert.pb"
    graph = GraphDef.FromString((tf_cases.FOLDER / path.name).read_bytes())
    (check,) = [x for x in graph.library.function[0].node_def if x.op == "Assert"]
    check.op = "TensorListResize"  # which has no effects, and fails as x is no list
    del check.input[2:]
    check.attr.clear()
    path.write_bytes(graph.SerializeToString())
    answers = {executor: outcome(path, executor) for executor in ("linear", "frames")}
    assert isinstance(answers["frames"], ps.RunError)
    assert isinstance(answers["linear"], list)
    assert disagreements(path, answers) == []
    assert disagreements(path, {"linear": answers["frames"], "frames": answers["linear"]})


def test_overflow_in_16_bits_is_no_disagreement_if_rounding_each_value_gives_it_too(tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float16[2] x) => (float16[2] y)
        <float16 much = {31743}, float16 little = {1}>
        { a = Mul(x, much) b = Mul(a, much) c = Mul(b, little) y = Mul(c, little) }"""
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    answers = {executor: outcome(path, executor) for executor in ("linear", "interpret")}
    (linear,), (interpreted,) = answers.values()
    assert np.isfinite(linear["y"]).all() and not np.isfinite(interpreted["y"]).all()
    assert disagreements(path, answers) == []
    wrong = [{"y": np.array([np.nan, 1], np.float16)}]
    assert disagreements(path, {**answers, "interpret": wrong})


def test_other_codes_behind_a_sum_that_overflows_are_no_disagreement(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (int32[2] y)
        <float much = {{{}}}> {{ h = Mul(x, much) s = Mul(h, h) y = Cast <to = 6> (s) }}"""
    for much, is_wrong in (("3e38", False), ("3", True)):
        path = tmp_path / f"{much}.onnx"
        onnx.save(onnx.parser.parse_model(text.format(much)), path)
        answers = {executor: outcome(path, executor) for executor in ("linear", "dataflow")}
        other = [{"y": answers["linear"][0]["y"] + np.int32(1)}]
        assert disagreements(path, answers) == []
        assert bool(disagreements(path, {**answers, "dataflow": other})) == is_wrong


def test_rounding_in_16_bits_is_no_disagreement_if_the_last_bits_of_feeds_matter_as_much(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 20]> g (float16[8] x) => (float16[8] y)
        <float16 much = {{24752}}> {{ h = Mul(x, much) {} }}"""
    for nodes, is_steep in (("s = Sin(h) y = Neg(s)", True), ("y = Neg(h)", False)):
        path = tmp_path / f"{is_steep}.model.onnx"
        onnx.save(onnx.parser.parse_model(text.format(nodes)), path)
        answers = {executor: outcome(path, executor) for executor in ("linear", "interpret")}
        assert alike(*answers.values()) != is_steep
        assert disagreements(path, answers) == []
        (want,) = answers["interpret"]
        shifted = [{"y": want["y"] + np.float16(100)}]
        assert disagreements(path, {**answers, "interpret": shifted})


def test_integers_may_differ_where_the_last_bits_of_feeds_decide_them(tmp_path):
    text = "g (float[4000] x) => (uint8[4000] y) {{ h = Cast<to = 10>(x) {} y = Cast<to = 2>(s) }}"
    path = tmp_path / "codes.onnx"
    onnx.save(model_from_text(text.format("s = Mul(h, h)")), path)
    answer = outcome(path, "linear")
    assert integers_apart(answer, answer) == 0
    few = [{"y": outputs["y"].copy()} for outputs in answer]
    few[0]["y"][:1] += 1
    assert integers_apart(answer, few) == 1
    assert is_of_last_bits(path, "linear", answer, few)
    many = [{"y": outputs["y"] + np.uint8(1)} for outputs in answer]
    assert not is_of_last_bits(path, "linear", answer, many)
    floats = [{"y": outputs["y"].astype(np.float32)} for outputs in answer]
    assert integers_apart(answer, floats) is None
    assert integers_apart(answer, answer[:0] if answer else None) is None
    onnx.save(model_from_text(text.format("s = Sub(h, h)")), path)  # nothing depends on the feeds
    zeros = outcome(path, "linear")
    assert not is_of_last_bits(path, "linear", zeros, few)


def test_alike_values_have_equal_types_shapes_and_nans():
    x = np.array([1, np.nan], np.float32)
    assert alike({"y": [x]}, {"y": [x.copy()]})
    probabilities = [{0: 0.25, 1: float("nan")}]  # as a ZipMap gives them
    assert alike(probabilities, [{0: 0.25 + 1e-9, 1: float("nan")}])
    assert not alike(probabilities, [{0: 0.25, 1: 0.75}])
    assert not are_finite(probabilities)
    for y in (x[:1], x.astype(np.float64), np.array([1, 2], np.float32), None):
        assert not alike(x, y)
    rounded = dtypes()["bfloat16"].type(1.03)
    for dtype, same in ((x.dtype, False), (rounded.dtype, True)):
        assert alike(np.ones(1, dtype), np.full(1, rounded).astype(dtype)) is same


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_roundings_of_a_long_chain_take_half_of_the_tolerance(dtype: str, tmp_path) -> None:
    name = f"test_attention_4d_causal_{dtype}_expanded"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (case,) = [case for case in load_model_tests(kind="node") if case.name == name]
    path = tmp_path / "model.onnx"
    path.write_bytes(case.model.SerializeToString())
    once, each_time = outcome(path, "linear"), outcome(path, "interpret")
    assert alike(once, each_time, ROUNDINGS / 2)
    assert not alike(once, each_time, 2)


def test_worker_that_hangs_or_dies_is_a_finding(tmp_path, monkeypatch):
    def stopped(process):
        process.send_signal(signal.SIGSTOP)
        return process

    start = Worker.start
    path = Case("model.onnx", {"": b""}).write(tmp_path)
    with Worker() as worker:
        assert worker.findings(path) == []
        with monkeypatch.context() as patch:
            patch.setattr("tools.fuzz.HANG_S", 0.5)
            patch.setattr(Worker, "start", lambda worker: stopped(start(worker)))
            assert [category for category, _ in worker.findings(path)] == ["hang"]
        assert worker.findings(path) == []
        assert worker.process is not None
        threading.Timer(0.3, stopped(worker.process).kill).start()
        assert [category for category, _ in worker.findings(path)] == ["crash"]


def test_case_that_hangs_once_is_tried_again(tmp_path, monkeypatch):
    path = Case("model.onnx", {"": b""}).write(tmp_path)
    with Worker() as worker:
        answers = iter([[("hang", "linear: ")], []])
        monkeypatch.setattr(worker, "_tried", lambda path: next(answers))
        assert worker.findings(path) == []
        assert list(answers) == []


def test_shrunk_message_keeps_only_what_fails():
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 21]>
        g (float[2] x) => (float[2] y) { a = Neg(x) b = Abs(a) y = Exp(b) }""")
    small = shrunk(proto, lambda p: any(n.op_type == "Abs" for n in p.graph.node))
    assert small == onnx.ModelProto(graph=onnx.GraphProto(node=[onnx.NodeProto(op_type="Abs")]))


def test_changed_bytes_and_text_may_be_empty():
    for seed in range(50):
        draw = random.Random(seed)
        assert isinstance(changed_bytes(b"", draw), bytes)
        assert isinstance(changed_text("", draw), str)


def test_changed_json_is_json_of_other_values():
    data = b'{"models": ["a", "b"], "model-connect": [{"from": "0:0:0", "to": ["1:0:0"]}]}'
    results = {changed_json(data, random.Random(seed), ["word"]) for seed in range(200)}
    trees = [json.loads(result) for result in results]
    assert len(results) > 100
    assert any(isinstance(tree, dict) and "model-connect" not in tree for tree in trees)
    assert any(b"word" in result for result in results)


def test_changed_json_leaves_the_words_as_they_are():
    words = [{}, {"to": []}, [["word"]]]
    before = json.dumps(words)
    for seed in range(500):
        changed_json(b'{"a": [], "b": {}}', random.Random(seed), words)
    assert json.dumps(words) == before


def test_package_cases_are_folders_and_zip_files_that_mostly_load(tmp_path):
    counts = Counter[str]()
    for seed in range(60):
        case = package_case(random.Random(seed), False)
        form = "zip" if case.name.endswith(".zip") else "folder"
        with contextlib.suppress(ps.PenstockError):
            ps.load(case.write(tmp_path / str(seed)))
            counts[form] += 1
    assert min(counts["zip"], counts["folder"]) > 3
