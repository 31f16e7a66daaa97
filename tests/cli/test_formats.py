"""Commands on models of every format, and what only some formats have: parts, signatures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from tests.support.onnx_text import model_from_text
from tests.support.tflite_cases import FOLDER
from tests.support.tflite_models import model, subgraph

MODELS = FOLDER.parent
PACKAGES = FOLDER / "nnpkg"
STATEFUL = MODELS / "tf_saved" / "stateful"
X = {"x": ("float32", [2])}


def as_json(*arguments: object, code: int = 0) -> dict:
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text(*arguments: object) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(model_from_text("m (float[2] x) => (float[2] y) { y = Neg(x) }"), path)
    return path


FORMATS = {
    "tflite": FOLDER / "net" / "mini_mobilenet_v2.tflite",
    "circle": FOLDER / "circle" / "circle_add_broadcast_4d.circle",
    "package": PACKAGES / "pkg_fan_out_three",
    "zip": PACKAGES / "pkg_chain_zip.nnpkg.zip",
    "GraphDef": MODELS / "tf" / "model_mlp.pb",
    "SavedModel": STATEFUL,
}


@pytest.mark.parametrize("name", FORMATS)
def test_run_saves_outputs_that_equal_those_of_a_session(name: str, tmp_path: Path) -> None:
    session = ps.compile(FORMATS[name])
    rng = np.random.default_rng(0)
    feeds = {}
    for port in session.inputs:
        shape = [1 if dim is None else dim for dim in port.type.shape or ()]
        feeds[port.name] = rng.standard_normal(shape).astype(port.type.dtype)
    np.savez(tmp_path / "in.npz", **{name.replace("/", "_"): x for name, x in feeds.items()})
    out = tmp_path / "out.npz"
    as_json("run", FORMATS[name], "--load", tmp_path / "in.npz", "--dump", out)
    want = session.run(feeds)
    with np.load(out) as arrays:
        assert set(arrays.files) == set(want)
        for key, value in want.items():
            np.testing.assert_array_equal(arrays[key], value)


def test_run_dumps_names_that_are_parameters_and_strings(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    source = model_from_text(
        "m (string[2] words) => (string[2] file, float[1] allow_pickle) "
        "<float[1] c = {7}> { file = StringConcat(words, words)  allow_pickle = Identity(c) }"
    )
    onnx.save(source, path)
    np.savez(tmp_path / "in.npz", words=np.array(["a", "bc"]))
    as_json("run", path, "--load", tmp_path / "in.npz", "--dump", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["file"].tolist() == ["aa", "bcbc"]
        assert arrays["allow_pickle"].tolist() == [7]
    again = as_json("run", path, "-i", f"words={tmp_path}/out.npz", "-f", "file", code=1)
    assert "no array 'words'" in again["error"]["message"]


def test_run_says_which_output_a_file_of_arrays_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(
        model_from_text("m (float[2] x) => (seq(float) s) { s = SequenceConstruct(x) }"), path
    )
    error = as_json("run", path, "-i", "x=zeros", "--dump", tmp_path / "out.npz", code=1)["error"]
    assert error["type"] == "InvalidInput"
    assert "output 's'" in error["message"]


@pytest.mark.parametrize("option", ["--dump", "--trace", "--output"])
def test_file_that_cannot_be_written_is_a_usage_error(onnx_file: Path, option: str) -> None:
    error = as_json("run", onnx_file, "-i", "x=zeros", option, "/proc/none/f", code=2)["error"]
    assert "/proc/none" in error["message"]


def test_file_to_load_that_is_missing_is_named(onnx_file: Path) -> None:
    error = as_json("run", onnx_file, "--load", "none.npz", code=1)["error"]
    assert "cannot read none.npz" in error["message"]


def test_file_to_load_that_has_no_arrays_by_name_is_refused(
    onnx_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1, 3), np.float32))
    error = as_json("run", onnx_file, "--load", path, code=1)["error"]
    assert f"{path} has no names of inputs; use --input NAME={path}" in error["message"]
    path.write_bytes(path.read_bytes()[:100])
    error = as_json("run", onnx_file, "--input", f"x={path}", code=1)["error"]
    assert "save arrays of numbers or strings with numpy.save" in error["message"]


# Parts.


def test_info_shows_the_parts_of_a_package() -> None:
    structure = as_json("info", PACKAGES / "pkg_fan_out_three")["structure"]
    assert structure["models"] == ["0: a.tflite", "1: b.tflite", "2: c.tflite"]
    assert structure["pkg-inputs"] == ["0:0:0 x"]
    assert structure["pkg-outputs"] == ["2:0:1 e", "1:0:0 y", "2:0:0 n"]
    assert structure["connections"] == ["0:0:0 -> 1:0:0, 2:0:0"]
    assert structure["subgraphs of model 2"] == ["0: 'main', 1 inputs, 2 outputs, 3 operators"]
    shown = text("info", PACKAGES / "pkg_fan_out_three")
    assert "connections\n  0:0:0 -> 1:0:0, 2:0:0\n" in shown


def test_info_shows_subgraphs_and_signatures(tmp_path: Path) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(two_signatures())
    assert as_json("info", path)["structure"] == {
        "subgraphs": [
            "0: '', 1 inputs, 1 outputs, 1 operators",
            "1: '', 1 inputs, 1 outputs, 1 operators",
        ],
        "signatures": ["'negate' (a) -> (b), subgraph 0", "'absolute' (c) -> (d), subgraph 1"],
    }
    signatures = as_json("info", STATEFUL)["structure"]["signatures"]
    assert [line.partition(" ")[0] for line in signatures] == sorted(
        map(repr, ps.load(STATEFUL).graphs)
    )


def test_info_counts_parameters_of_nodes_and_variables() -> None:
    """The MLP has them in Const nodes (640 bytes, and an axis), the SavedModel in variables."""
    assert as_json("info", MODELS / "tf" / "model_mlp.pb")["parameter_bytes"] == 644
    assert as_json("info", STATEFUL)["parameters"] > 0


def test_info_refuses_a_wrong_shape_that_was_given(onnx_file: Path) -> None:
    error = as_json("info", onnx_file, "--shape", "y=3", code=1)["error"]
    assert "'y'" in error["message"]


# Signatures.


def two_signatures() -> bytes:
    graphs = [subgraph(X, [(op, ["x"], ["y"], None)], ["y"]) for op in ("NEG", "ABS")]
    signatures = [
        {
            "inputs": [{"name": inputs, "tensor_index": 0}],
            "outputs": [{"name": outputs, "tensor_index": 1}],
            "signature_key": key,
            "subgraph_index": index,
        }
        for index, (key, inputs, outputs) in enumerate([("negate", *"ab"), ("absolute", *"cd")])
    ]
    return model(graphs, signature_defs=signatures)


def test_commands_take_a_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(two_signatures())
    chosen = path, "--signature", "absolute"
    assert as_json("run", *chosen, "-i", "c=[-1, 2]")["outputs"]["d"]["first"] == [1, 2]
    assert as_json("info", *chosen)["inputs"] == {"c": "float32[2]"}
    assert "Abs" in text("plan", *chosen)
    assert as_json("bench", *chosen, "--seconds", "0")["inputs"] == {"c": "float32[2]"}
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    as_json("profile", *chosen, "--no-trace", "--runs", "1", "-i", "c=[1, 2]")
    error = as_json("info", path, "--signature", "other", code=1)["error"]
    assert "no signature 'other'; it has 'negate', 'absolute'" in error["message"]


def test_copy_of_a_saved_model_without_its_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(STATEFUL / "variables", tmp_path / "m" / "variables")
    message = as_json("info", tmp_path / "m", code=1)["error"]["message"]
    assert "saved_model.pb" in message and "metadata/MANIFEST" in message
