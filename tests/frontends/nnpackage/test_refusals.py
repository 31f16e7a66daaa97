"""What packages must not be, and what the limits say of them."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.tflite_models import model, serialized, subgraph

X = {"x": ("float32", [2])}
WEIGHTS = np.arange(250_000, dtype=np.float32)


def negate(**more: Any) -> bytes:
    return model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])], **more)


def weighted() -> bytes:
    """A model with a megabyte of weights."""
    operator = ("ADD", ["x", "w"], ["y"], ("AddOptions", {}))
    return model([subgraph({"x": ("float32", [1])}, [operator], ["y"], {"w": WEIGHTS})])


def files(*models: bytes, **manifest: Any) -> dict[str, bytes]:
    """The files of a package by name."""
    names = [f"{i}.tflite" for i in range(len(models))]
    text = json.dumps({"models": names, **manifest}).encode()
    return {"metadata/MANIFEST": text, **dict(zip(names, models, strict=True))}


def folder(path: Path, contents: Mapping[str, bytes]) -> Path:
    for name, data in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def archive(path: Path, contents: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in contents.items():
            file.writestr(name, data)
    return path


def both(path: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """A package as a folder and as a zip file."""
    return [folder(path / "package", contents), archive(path / "package.zip", contents)]


# Files.


@pytest.mark.parametrize("name", ["metadata/MANIFEST", "0.tflite"])
@pytest.mark.parametrize("link", [os.symlink, os.link, lambda _, path: os.mkfifo(path)])
def test_file_that_is_a_link_or_a_fifo_is_refused(tmp_path: Path, name: str, link: Any) -> None:
    path = folder(tmp_path / "p", files(negate()))
    outside = tmp_path / "outside"
    (path / name).rename(outside)
    link(outside, path / name)
    with pytest.raises(ps.InvalidModel, match=r"link|not a regular file"):
        ps.load(path)


def test_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "p", files(negate()))
    (path / "metadata").rename(tmp_path / "outside")
    (path / "metadata").symlink_to(tmp_path / "outside")
    with pytest.raises(ps.InvalidModel):
        ps.load(path)


@pytest.mark.parametrize(
    "name", ["../0.tflite", "/0.tflite", "a/../0.tflite", "..\\0.tflite", "C:0.tflite", "", 7, None]
)
def test_name_that_leads_out_of_the_package_or_is_none_is_refused(tmp_path: Path, name) -> None:
    contents = files(negate(), models=[name])
    for path in both(tmp_path, contents):
        with pytest.raises(ps.InvalidModel, match="cannot be read"):
            ps.load(path)


def test_configuration_outside_of_the_package_is_refused(tmp_path: Path) -> None:
    for path in both(tmp_path, files(negate(), configs=["../../outside.cfg"])):
        with pytest.raises(ps.InvalidModel, match=r"outside\.cfg.*leads out"):
            ps.load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    for path in both(tmp_path, files(negate(), models=["0.tflite", "absent.tflite"])):
        with pytest.raises(ps.InvalidModel, match=r"'absent\.tflite', which cannot be read"):
            ps.load(path)
    for path in both(tmp_path / "cfg", files(negate(), configs=["absent.cfg"])):
        with pytest.raises(ps.InvalidModel, match=r"absent\.cfg', which cannot be read"):
            ps.load(path)


def test_folder_of_no_known_format_is_answered_by_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(8))
    with pytest.raises(ps.InvalidModel, match=r"saved_model\.pb.*nor metadata/MANIFEST"):
        ps.load(tmp_path)


# Zip files.


def test_zip_with_several_files_of_one_name_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "p.zip", files(negate()))
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("0.tflite", negate())
    with pytest.raises(ps.InvalidModel, match="several files of one name"):
        ps.load(path)


def test_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    contents = files(negate())
    del contents["0.tflite"]
    path = archive(tmp_path / "p.zip", contents)
    entry = zipfile.ZipInfo("0.tflite")
    entry.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(entry, "/etc/passwd")
    with pytest.raises(ps.InvalidModel, match="symbolic link"):
        ps.load(path)


def test_zip_of_another_compression_is_refused(tmp_path: Path) -> None:
    contents = files(negate())
    path = archive(tmp_path / "p.zip", {"metadata/MANIFEST": contents["metadata/MANIFEST"]})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_BZIP2) as file:
        file.writestr("0.tflite", contents["0.tflite"])
    with pytest.raises(ps.InvalidModel, match="another method than deflate"):
        ps.load(path)


def test_zip_that_expands_beyond_the_limit_is_read_no_further(tmp_path: Path) -> None:
    """The size that the entry claims is a lie: what counts is what comes out."""
    bomb = negate() + bytes(2**26)
    path = archive(tmp_path / "p.zip", files(bomb))
    data = bytearray(path.read_bytes())
    claimed = len(bomb).to_bytes(4, "little")
    assert data.count(claimed) == 2
    path.write_bytes(data.replace(claimed, (2**20).to_bytes(4, "little")))
    with pytest.raises(ps.InvalidModel, match="cannot be read"):
        ps.load(path)
    with pytest.raises(ps.InvalidModel, match="more bytes than its limit"):
        ps.load(archive(tmp_path / "q.zip", files(bomb)), limits=ps.Limits(max_bytes=2**20))


def test_zip_that_claims_to_expand_further_than_deflate_can_is_refused(tmp_path: Path) -> None:
    contents = files(negate())
    path = archive(tmp_path / "p.zip", contents)
    claimed = len(contents["0.tflite"]).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(claimed, (2**30).to_bytes(4, "little")))
    with pytest.raises(ps.InvalidModel, match="further than deflate can"):
        ps.load(path)


def test_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "p.zip", files(weighted()))
    data = bytearray(path.read_bytes())
    size = len(zlib.compress(weighted()))
    data[size // 2 : size // 2 + 200] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(ps.InvalidModel, match="cannot be read"):
        ps.load(path)


# Manifests.


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"models": []}, "lists 0 models"),
        ({"models": "0.tflite"}, "'models' that is not a list"),
        ({"model-types": ["tflite", "tflite"]}, "each model needs one"),
        ({"model-types": ["onnx"]}, "each model needs one"),
        ({"model-types": ["circle"]}, r"0\.tflite in package.* is a tflite file, not a circle"),
        ({"pkg-inputs": ["0:0:1"]}, "'0:0:1', which is no input"),
        ({"pkg-inputs": ["0:0"]}, "'0:0', which is no input"),
        ({"pkg-inputs": ["0:0:-1"]}, "which is no input"),
        ({"pkg-inputs": ["0:0:0", "0:0:0"]}, "a tensor twice in 'pkg-inputs'"),
        ({"pkg-outputs": ["1:0:0"]}, "'1:0:0', which is no output"),
        ({"model-connect": [["0:0:0", "0:0:0"]]}, "an edge that is not an object"),
        ({"model-connect": [{"from": "0:0:0", "to": "0:0:0"}]}, "an edge that is not an object"),
    ],
)
def test_manifest_that_breaks_a_rule_is_refused(tmp_path: Path, manifest: Any, reason: str) -> None:
    for path in both(tmp_path, files(negate(), **manifest)):
        with pytest.raises(ps.InvalidModel, match=reason):
            ps.load(path)


def test_model_type_says_the_format(tmp_path: Path) -> None:
    circle = serialized({"version": 0}, b"CIR0")
    with pytest.raises(ps.InvalidModel, match="is a circle file, not a tflite file"):
        ps.load(folder(tmp_path, files(circle, **{"model-types": ["tflite"]})))


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        ([("0:0:0", "1:0:0"), ("1:0:0", "0:0:0")], "cycle"),
        ([("0:0:0", "0:0:0"), ("0:0:0", "1:0:0")], "cycle"),
        ([("0:0:0", "1:0:0"), ("0:0:0", "1:0:0")], "feeds '1:0:0' by two edges"),
        ([("0:0:0", "2:0:0")], "'2:0:0', which is no input"),
    ],
)
def test_edges_that_form_a_cycle_or_meet_are_refused(
    tmp_path: Path, edges: list[tuple[str, str]], reason: str
) -> None:
    connect = [{"from": begin, "to": [end]} for begin, end in edges]
    manifest = {"model-connect": connect, "pkg-outputs": ["1:0:0"]}
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(folder(tmp_path, files(negate(), negate(), **manifest)))


def test_tensors_of_one_name_in_two_models_have_names_of_their_own(tmp_path: Path) -> None:
    session = ps.compile(folder(tmp_path, files(negate(), negate())))
    names = [port.name for port in (*session.inputs, *session.outputs)]
    assert len(set(names)) == 4
    x, y = np.ones(2, np.float32), np.zeros(2, np.float32)
    one, other = session(x, y)
    np.testing.assert_array_equal((one, other), (-x, -y))


# Limits.


def test_limits_count_the_files_of_a_package_together(tmp_path: Path) -> None:
    single, double = (
        ps.Limits(max_constant_bytes=1_500_000),
        ps.Limits(max_constant_bytes=2_000_000),
    )
    for path in both(tmp_path, files(weighted(), weighted())):
        with pytest.raises(ps.InvalidModel, match="the constants take 2000000 bytes, more than"):
            ps.load(path, limits=single)
        ps.load(path, limits=double)
    many = folder(tmp_path / "many", files(*[negate()] * 6))
    ps.load(many, limits=ps.Limits(max_nodes=20))
    with pytest.raises(ps.InvalidModel, match=r"more nodes than Limits\.max_nodes = 8"):
        ps.load(many, limits=ps.Limits(max_nodes=8))


def test_zip_is_read_up_to_the_limit_over_all_files(tmp_path: Path) -> None:
    path = archive(tmp_path / "p.zip", files(weighted(), weighted()))
    ps.load(path, limits=ps.Limits(max_bytes=2_100_000))
    with pytest.raises(ps.InvalidModel, match=r"'1\.tflite'.*more bytes than its limit"):
        ps.load(path, limits=ps.Limits(max_bytes=1_900_000))


def test_weights_of_a_folder_are_mapped_on_request_and_of_a_zip_read(tmp_path: Path) -> None:
    for path, mapped in zip(both(tmp_path, files(weighted())), (True, False), strict=True):
        node, *_ = (n for n in ps.load(path, map_weights=True).graph.nodes if n.op.name == "Add")
        base = node.inputs[1].const
        while isinstance(base.base, np.ndarray):
            base = base.base
        owner = getattr(base.base, "obj", base.base)
        assert isinstance(owner, bytes) != mapped
        session = ps.compile(path, map_weights=True)
        np.testing.assert_array_equal(session(np.ones(1, np.float32)), WEIGHTS + 1)
