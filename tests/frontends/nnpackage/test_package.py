"""What becomes of the edges of a package."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.frontends.nnpackage.test_refusals import archive, files, negate
from tests.support.tflite_models import TYPES, model, subgraph

X = np.array([-1.5, 0.25, 2.5, 7], np.float32)
EDGE = {"from": "0:0:0", "to": ["1:0:0"]}


def quantization(scale: float, zero_point: int) -> dict[str, Any]:
    return {"quantization": {"scale": [scale], "zero_point": [zero_point]}}


def rounded(x: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """The int8 codes of real numbers."""
    return np.clip(np.rint(x / np.float32(scale)) + zero_point, -128, 127).astype(np.int8)


def producer(dtype: str, **tensor: Any) -> bytes:
    """``x`` as ``dtype``, by a quantization or a cast."""
    operator = "QUANTIZE" if tensor else "CAST"
    return model(
        [
            subgraph(
                {"x": ("float32", [4])},
                [(operator, ["x"], ["y"], None)],
                ["y"],
                y={"shape": [4], "type": TYPES.index(dtype), **tensor},
            )
        ]
    )


def consumer(dtype: str, **tensor: Any) -> bytes:
    """The codes that arrive, in the order of the elements turned around."""
    axes = {"axis": np.array([0], np.int32)}
    fields = {"shape": [4], "type": TYPES.index(dtype), **tensor}
    graph = subgraph(
        {"x": (dtype, [4])},
        [("REVERSE_V2", ["x", "axis"], ["y"], None)],
        ["y"],
        axes,
        x=fields,
        y=fields,
    )
    return model([graph])


def package(folder: Path, *models: bytes, edges: tuple = (EDGE,)) -> Path:
    names = [f"{i}.tflite" for i in range(len(models))]
    for name, data in zip(names, models, strict=True):
        (folder / name).write_bytes(data)
    (folder / "metadata").mkdir()
    manifest = {"models": names, "model-types": ["tflite"] * len(names)}
    manifest |= {"model-connect": list(edges)}
    (folder / "metadata" / "MANIFEST").write_text(json.dumps(manifest))
    return folder


def operations(session: ps.Session) -> Counter:
    return Counter(node.op.name for node in session.model.graph.nodes)


def test_edge_between_equal_quantizations_has_no_conversion(tmp_path: Path) -> None:
    same = quantization(0.5, 3)
    session = ps.compile(package(tmp_path, producer("int8", **same), consumer("int8", **same)))
    np.testing.assert_array_equal(session(X), rounded(X, 0.5, 3)[::-1])
    assert operations(session)["DequantizeLinear"] == 0


def test_edge_between_different_scales_converts_the_codes(tmp_path: Path) -> None:
    models = producer("int8", **quantization(0.5, 3)), consumer("int8", **quantization(0.25, -7))
    session = ps.compile(package(tmp_path, *models))
    real = (rounded(X, 0.5, 3).astype(np.float32) - 3) * np.float32(0.5)
    np.testing.assert_array_equal(session(X), rounded(real, 0.25, -7)[::-1])


def test_edge_from_codes_to_real_numbers_dequantizes(tmp_path: Path) -> None:
    models = producer("int8", **quantization(0.5, 3)), consumer("float32")
    session = ps.compile(package(tmp_path, *models))
    real = (rounded(X, 0.5, 3).astype(np.float32) - 3) * np.float32(0.5)
    np.testing.assert_array_equal(session(X), real[::-1])


def test_edge_from_integers_to_codes_quantizes_their_numbers(tmp_path: Path) -> None:
    models = producer("int32"), consumer("int8", **quantization(0.5, 3))
    session = ps.compile(package(tmp_path, *models))
    np.testing.assert_array_equal(session(X), rounded(np.trunc(X), 0.5, 3)[::-1])


def test_edge_from_codes_to_integers_without_quantization_passes_them_on(tmp_path: Path) -> None:
    models = producer("int8", **quantization(0.5, 3)), consumer("int8")
    session = ps.compile(package(tmp_path, *models))
    np.testing.assert_array_equal(session(X), rounded(X, 0.5, 3)[::-1])


def test_edge_that_feeds_two_models_is_converted_for_the_one_that_differs(tmp_path: Path) -> None:
    models = producer("int32"), consumer("int32"), consumer("float32")
    edge = {"from": "0:0:0", "to": ["1:0:0", "2:0:0"]}
    session = ps.compile(package(tmp_path, *models, edges=(edge,)))
    whole, real = session.run({session.inputs[0].name: X}).values()
    assert (whole.dtype, real.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(whole, np.trunc(X)[::-1])
    np.testing.assert_array_equal(real, whole)


def test_edge_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    models = producer("int32"), consumer("object")
    with pytest.raises(ps.InvalidModel, match="from int32 to string, which cannot be converted"):
        ps.load(package(tmp_path, *models))


@pytest.mark.parametrize("top", ["", "package/"])
def test_zip_of_a_folder_or_of_its_files_is_read_from_a_path_and_from_bytes(
    tmp_path: Path, top: str
) -> None:
    contents = files(negate(), models=["./0.tflite"])
    path = archive(tmp_path / "p", {top + name: data for name, data in contents.items()})
    for source in (path, path.read_bytes()):
        np.testing.assert_array_equal(ps.compile(source)(np.ones(2, np.float32)), [-1, -1])


def test_zip_of_two_folders_is_no_package(tmp_path: Path) -> None:
    contents = {f"{top}/{name}": data for top in "ab" for name, data in files(negate()).items()}
    with pytest.raises(ps.InvalidModel, match="a zip file without metadata/MANIFEST"):
        ps.load(archive(tmp_path / "p", contents))
