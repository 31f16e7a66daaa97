"""``--shape``: shapes of inputs, and sizes of dims by their names in the model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.support.command_line import as_json, call
from tests.support.onnx_text import model_from_text

# As exporters write encoders of text.
TEXT = """text (int64[batch, length] ids, int64[batch, length] kinds) => (float[batch, length, 2] y)
    <float[9, 2] words = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17},
     float[2, 2] of_kinds = {0, 1, 2, 3}> {
    a = Gather(words, ids)
    b = Gather(of_kinds, kinds)
    y = Add(a, b)
}"""


@pytest.fixture
def text_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    onnx.save(model_from_text(TEXT), "text.onnx")
    return "text.onnx"


MEASURING = [
    ["bench", "--seconds", "0"],
    ["profile", "--no-trace", "--runs", "1"],
    ["report"],
    ["compare", "--against", "backends=numpy"],
    ["run", "-i", "ids=random", "-i", "kinds=zeros"],
]


@pytest.mark.parametrize("command", MEASURING, ids=lambda command: command[0])
def test_one_size_of_a_dim_serves_all_inputs_that_have_it(command, text_model):
    name, *rest = command
    done = as_json(name, text_model, *rest, "--shape", "length=5")
    assert done["inputs"] == {"ids": "int64[1, 5]", "kinds": "int64[1, 5]"}
    assert done["assumed"]["kinds"] == "dim 0 of int64[batch, 5] is taken for 1"
    done = as_json(name, text_model, *rest, "--shape", "length=5", "--shape", "batch=2")
    assert done["inputs"] == {"ids": "int64[2, 5]", "kinds": "int64[2, 5]"}
    assert done["assumed"] == {}


@pytest.mark.parametrize("command", [["plan"], ["info", "--plan"]], ids=" ".join)
def test_plans_take_sizes_of_dims(command, text_model):
    name, *rest = command
    done = as_json(name, text_model, *rest, "--shape", "length=5", "--shape", "kinds=1x5")
    assert "ids" in str(done)
    assert "[1, 5" in str(done)


def test_message_about_open_dims_names_the_dims_of_all_inputs_at_once(text_model):
    message = as_json("bench", text_model, code=1)["error"]["message"]
    assert "'ids' of type int64[batch, length], 'kinds' of type int64[batch, length]" in message
    assert (
        "as in --shape length=64, or whole shapes, as in --shape ids=1x64 --shape kinds=1x64"
        in (message)
    )


def test_message_about_dims_without_names_gives_whole_shapes(tmp_path):
    path = str(tmp_path / "m.onnx")
    onnx.save(model_from_text("m (float[N, ?] x) => (float[N, ?] y) { y = Neg(x) }"), path)
    message = as_json("bench", path, code=1)["error"]["message"]
    assert message.endswith("name them, as in --shape x=1x64")


@pytest.mark.parametrize(
    ("shape", "code", "message"),
    [
        ("lenght=5", 1, "did you mean 'length'"),
        ("length=5x5", 2, "'length' is one dim"),
        ("length=many", 2, "dims must look like"),
        ("length", 2, "must be NAME=DIMS"),
    ],
)
def test_wrong_shape_is_refused_with_a_hint(shape, code, message, text_model):
    assert message in as_json("bench", text_model, "--shape", shape, code=code)["error"]["message"]


def test_size_that_a_given_value_does_not_have_is_refused(text_model):
    feeds = ["-i", "ids=[[1, 2]]", "-i", "kinds=[[0, 1]]"]
    error = as_json("run", text_model, *feeds, "--shape", "length=3", code=1)["error"]
    assert "--shape length=3: input 'ids' of type int64[batch, length]" in error["message"]
    assert "[1, 2]" in error["message"]
    as_json("run", text_model, *feeds, "--shape", "length=2")


def test_input_of_the_name_of_a_dim_comes_first(tmp_path):
    path = str(tmp_path / "m.onnx")
    text = "m (float[K, N] N, float[K] K) => (float[K, N] y, float[K] z) { y = Neg(N) z = Neg(K) }"
    onnx.save(model_from_text(text), path)
    done = as_json("bench", path, "--seconds", "0", "--shape", "N=2x3", "--shape", "K=2")
    assert done["inputs"] == {"N": "float32[2, 3]", "K": "float32[2]"}


# Random integers.


def test_random_integers_are_indices_that_small_tables_have(text_model):
    for seed in range(5):
        as_json("bench", text_model, "--seconds", "0", "--shape", "length=64", "--seed", str(seed))


ONE_KIND = TEXT.replace("float[2, 2] of_kinds = {0, 1, 2, 3}", "float[1, 2] of_kinds = {0, 1}")


@pytest.mark.parametrize("command", MEASURING[:4], ids=lambda command: command[0])
def test_error_on_random_integers_says_how_to_feed_others(command, text_model):
    onnx.save(model_from_text(ONE_KIND), text_model)
    name, *rest = command
    arguments = [text_model, *rest, "--shape", "length=64"]
    error = as_json(name, *arguments, "-i", "ids=zeros", code=1)["error"]
    assert error["type"] == "RunError"
    assert "index 1 is out of bounds" in error["message"]
    assert (
        "integers that are not given are random, 0 or 1; for others: --input kinds=zeros"
        in (error["message"])
    )
    assert "--input kinds=zeros" in call(name, *arguments).stderr
    as_json(name, *arguments, "-i", "kinds=zeros")


def test_error_on_given_integers_says_nothing_of_random_ones(text_model):
    feeds = ["-i", "ids=[[1]]", "-i", "kinds=[[7]]"]
    error = as_json("bench", text_model, "--seconds", "0", *feeds, code=1)["error"]
    assert "out of bounds" in error["message"] and "random" not in error["message"]
