"""``penstock.compare``: outputs of two models, and of two runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.peers.comparison import compare_outputs
from tests.support.onnx_text import model_from_text

FEEDS = {"x": np.float32([[1, 2, 3]]), "shift": np.float32([0, 1])}


def save(path: Path, text: str) -> str:
    onnx.save(model_from_text(text), path)
    return str(path)


def test_two_models_are_compared_by_their_outputs(dense: str, tmp_path: Path) -> None:
    other = save(
        tmp_path / "other.onnx",
        "g (float[N, 3] x, float[2] shift) => (float[N, 2] y)"
        "<float[3, 2] w = {1, 0, 0, 1, 1, 1.5}> { a = MatMul(x, w)  y = Add(a, shift) }",
    )
    compared = ps.compare(dense, other, feeds=FEEDS)
    (y,) = compared.outputs
    assert (y.name, y.other_name, y.type) == ("y", "y", "float32[1, 2]")
    assert y.difference is not None
    assert (y.difference.one, y.difference.other, y.difference.index) == (6, 7.5, (0, 1))
    assert compared.relative == pytest.approx(0.25)
    assert compared.within(0.3) and not compared.within(0.2)
    assert "0.25 of the largest element at most, 1.5 at [0, 1]: 6 and 7.5" in str(compared)
    assert "dense.onnx" in compared.labels[0] and "other.onnx" in compared.labels[1]


def test_names_that_differ_are_matched_by_position_and_floats_converted(
    dense: str, tmp_path: Path
) -> None:
    half = save(
        tmp_path / "half.onnx",
        "g (float16[N, 3] a, float16[2] b) => (float16[N, 2] c)"
        "<float[3, 2] w = {1, 0, 0, 1, 1, 1}> { h = Cast<to = 10>(w) d = MatMul(a, h) c = Add(d, b) }",
    )
    compared = ps.compare(ps.compile(dense), ps.load(half), feeds=FEEDS)
    (y,) = compared.outputs
    assert (y.name, y.other_name, y.other_type) == ("y", "c", "float16[1, 2]")
    assert compared.relative == 0
    assert "y and c: " in str(compared)


@pytest.mark.parametrize("against", [{"backends": ["numpy"]}, {"executor": "interpret"}])
def test_options_of_compiling_are_those_of_the_second(dense: str, against: dict) -> None:
    compared = ps.compare(dense, feeds=FEEDS, against=against)
    assert compared.within(1e-6)
    assert str(*against.values()).strip("[']") in compared.labels[1]


@pytest.mark.parametrize("source", [str, Path, ps.compile])
def test_another_runtime_reads_the_file(dense: str, source) -> None:
    pytest.importorskip("onnxruntime")
    compared = ps.compare(source(dense), feeds=FEEDS, against="onnxruntime")
    assert compared.within(1e-6)
    assert compared.labels[1].startswith("dense.onnx: onnxruntime 1.")


@pytest.mark.usefixtures("openvino")
def test_runtime_with_inputs_in_another_order_is_fed_by_name(dense: str) -> None:
    assert ps.compare(dense, feeds=FEEDS, against="openvino").relative == 0


@pytest.mark.usefixtures("without_peers")
def test_missing_runtime_is_an_error(dense: str) -> None:
    with pytest.raises(ps.PenstockError, match="openvino is not installed here"):
        ps.compare(dense, feeds=FEEDS, against="openvino")


def test_model_without_a_file_cannot_run_elsewhere(dense: str) -> None:
    data = Path(dense).read_bytes()
    with pytest.raises(ps.InvalidInput, match="give the path of the model"):
        ps.compare(data, feeds=FEEDS, against="onnxruntime")


def test_wrong_arguments_are_refused(dense: str) -> None:
    with pytest.raises(ValueError, match="a second model, or against="):
        ps.compare(dense, feeds=FEEDS)
    with pytest.raises(ValueError, match="'tensorrt' is not one of onnxruntime, openvino, litert"):
        ps.compare(dense, feeds=FEEDS, against="tensorrt")
    with pytest.raises(TypeError, match="against=3"):
        ps.compare(dense, feeds=FEEDS, against=3)  # type: ignore[arg-type]


def test_models_whose_inputs_or_outputs_do_not_match_are_refused(
    dense: str, tmp_path: Path
) -> None:
    one = save(tmp_path / "one.onnx", "g (float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }")
    two = save(
        tmp_path / "two.onnx",
        "g (float[N, 3] x, float[2] shift) => (float[N, 3] y, float[2] z) { y = Neg(x) z = Neg(shift) }",
    )
    with pytest.raises(ps.InvalidInput, match="takes x, shift, the second x"):
        ps.compare(dense, one, feeds=FEEDS)
    with pytest.raises(ps.InvalidInput, match="has outputs y, the second y, z"):
        ps.compare(dense, two, feeds=FEEDS)


@pytest.mark.parametrize(
    ("one", "other", "relative"),
    [
        (np.float32([1, 2]), np.float32([[1, 2]]), np.inf),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), 0),
        (np.float32([1, np.nan]), np.float32([1, 2]), np.inf),
        (np.array(["a"], object), np.array(["a"], object), 0),
        (np.array(["a"], object), np.array(["b"], object), np.inf),
        ([np.ones(2)], [np.ones(2)], 0),
        ([np.ones(2)], [np.zeros(2)], np.inf),
        ([np.ones(2)], [], np.inf),
        ({"a": 1.0}, {"a": 1.0}, 0),
        ({"a": 1.0}, {"a": 2.0}, np.inf),
    ],
)
def test_values_that_are_no_numbers_are_equal_or_not(one, other, relative) -> None:
    compared = ps.Comparison(("", ""), tuple(compare_outputs({"y": one}, {"y": other})))
    assert compared.relative == relative
    assert compared.within(1e-3) == (relative == 0)
    assert str(compared)
