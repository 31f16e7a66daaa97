"""External data are read from files in the model's folder, and from nowhere else."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import penstock
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.onnx.importer import load_onnx

VALUES = np.arange(6, dtype=np.float32)


def external(code: int = TensorProto.FLOAT, dims: Any = (2, 3), **entries: Any) -> TensorProto:
    proto = TensorProto(name="w", data_type=code, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def saved(folder: Path, tensor: TensorProto) -> Path:
    outs = [onnx.ValueInfoProto(name="w")]
    proto = helper.make_model(helper.make_graph([], "g", [], outs, [tensor]))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def weights(
    folder: Path, tensor: TensorProto, limits: Limits = DEFAULT_LIMITS, *, mapped: bool = False
) -> np.ndarray:
    const = load_onnx(saved(folder, tensor), limits, mapped).graph.outputs[0].const
    assert const is not None
    return const


def problem(folder: Path, tensor: TensorProto) -> str:
    with pytest.raises(InvalidModel) as caught:
        load_onnx(saved(folder, tensor))
    (only,) = caught.value.problems
    assert only.startswith("initializer 'w' in model.onnx: ")
    return only


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model's folder, with data in it, and around it what a model must not get hold of."""
    (tmp_path / "secret.bin").write_bytes(VALUES.tobytes())
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    for place in ("w.bin", "sub/w.bin", "..w"):
        (inside / place).write_bytes(b"head" + VALUES.tobytes())
    return inside


def mapping(array: np.ndarray) -> object:
    """What the memory of an array belongs to in the end."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


LOCATIONS = ["w.bin", "sub/w.bin", "./w.bin", "sub/./w.bin", "..w"]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("location", LOCATIONS)
def test_external_data_is_read_or_mapped(folder: Path, location: str, mapped: bool) -> None:
    tensor = external(location=location, offset=4, length=24)
    array = weights(folder, tensor, mapped=mapped)
    assert np.array_equal(array, VALUES.reshape(2, 3))
    assert isinstance(mapping(array), mmap.mmap) == mapped
    assert not array.flags.writeable


@pytest.mark.parametrize("size", [0, 10, 28])
def test_external_file_that_changes_in_place_changes_no_answer(folder: Path, size: int) -> None:
    path = saved(folder, external(location="w.bin", offset=4))
    with penstock.compile(path) as session:
        assert not isinstance(mapping(session.model.graph.outputs[0].const), mmap.mmap)
        (folder / "w.bin").write_bytes(b"\xff" * size)
        assert np.array_equal(session.run()["w"], VALUES.reshape(2, 3))


def test_session_with_map_weights_maps_external_data(folder: Path) -> None:
    path = saved(folder, external(location="w.bin", offset=4))
    with penstock.compile(path, map_weights=True) as session:
        assert isinstance(mapping(session.model.graph.outputs[0].const), mmap.mmap)
        assert np.array_equal(session.run()["w"], VALUES.reshape(2, 3))


def test_external_data_length_and_offset_are_optional(folder: Path) -> None:
    (folder / "w.bin").write_bytes(VALUES.tobytes())
    assert np.array_equal(weights(folder, external(location="w.bin")).reshape(-1), VALUES)


def test_tensors_with_the_same_external_data_share_memory(folder: Path) -> None:
    tensors = [external(location="w.bin", offset=4) for _ in range(3)]
    for i, tensor in enumerate(tensors):
        tensor.name = f"w{i}"
    outs = [onnx.ValueInfoProto(name=t.name) for t in tensors]
    proto = helper.make_model(helper.make_graph([], "g", [], outs, tensors))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    first, *others = [v.const for v in load_onnx(folder / "model.onnx").graph.outputs]
    assert all(np.may_share_memory(first, other) for other in others)


@pytest.mark.parametrize("mapped", [False, True])
def test_unaligned_external_data_is_aligned_in_memory(folder: Path, mapped: bool) -> None:
    (folder / "w.bin").write_bytes(b"abc" + VALUES.tobytes())
    array = weights(folder, external(location="w.bin", offset=3), mapped=mapped)
    assert array.flags.aligned
    assert np.array_equal(array.reshape(-1), VALUES)


def test_empty_tensor_reads_an_empty_file(folder: Path) -> None:
    (folder / "w.bin").write_bytes(b"")
    assert weights(folder, external(location="w.bin", dims=[0])).shape == (0,)


def test_packed_external_data_is_unpacked(folder: Path) -> None:
    (folder / "w.bin").write_bytes(bytes([0x21, 0xF8, 0x07]))
    array = weights(folder, external(TensorProto.INT4, [5], location="w.bin", length=3))
    assert array.dtype == ml_dtypes.int4
    assert array.astype(int).tolist() == [1, 2, -8, -1, 7]


def test_external_file_beyond_4_gb_is_read(folder: Path) -> None:
    with (folder / "w.bin").open("wb") as file:  # sparse on disk
        file.truncate(2**32 + 24)
        file.seek(2**32)
        file.write(VALUES.tobytes())
    array = weights(folder, external(location="w.bin", offset=2**32))
    assert np.array_equal(array.reshape(-1), VALUES)
    whole = weights(folder, external(dims=[2**30 + 6], location="w.bin"), mapped=True)
    assert whole.nbytes == 2**32 + 24
    assert whole[-1] == 5


def test_external_data_counts_against_max_constant_bytes(folder: Path) -> None:
    tensor = external(location="w.bin", offset=4)
    weights(folder, tensor, Limits(max_constant_bytes=24))
    with pytest.raises(InvalidModel, match="max_constant_bytes = 23"):
        weights(folder, tensor, Limits(max_constant_bytes=23))


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "sub/../../secret.bin", "sub/../w.bin", "..", "..\\secret.bin", "C:secret"],
)
def test_location_outside_the_folder_is_refused(folder: Path, location: str) -> None:
    assert "leads out of the model's folder" in problem(folder, external(location=location))


def test_absolute_location_is_refused(folder: Path) -> None:
    for place in (folder / "w.bin", folder.parent / "secret.bin", "\\\\host\\share"):
        assert "leads out of the model's folder" in problem(folder, external(location=place))


@pytest.mark.parametrize("location", ["", ".", "./", "/", "a\0b"])
def test_location_without_a_file_name_is_refused(folder: Path, location: str) -> None:
    message = problem(folder, external(location=location))
    assert "is not the name of a file" in message or "leads out" in message


def test_symbolic_link_is_refused(folder: Path) -> None:
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    (folder / "inside.bin").symlink_to(folder / "w.bin")
    (folder / "up").symlink_to(folder.parent)
    (folder / "dangling").symlink_to(folder / "nothing")
    for location in ("link.bin", "inside.bin", "up/secret.bin", "dangling"):
        assert "symbolic link" in problem(folder, external(location=location))


def test_model_path_through_links_is_accepted(folder: Path, tmp_path: Path) -> None:
    path = saved(folder, external(location="w.bin", offset=4))
    (tmp_path / "alias").symlink_to(folder)
    model = load_onnx(tmp_path / "alias" / path.name)
    assert np.array_equal(model.graph.outputs[0].const, VALUES.reshape(2, 3))


def test_links_of_a_download_cache_are_followed_to_where_the_model_is(
    folder: Path, tmp_path: Path
) -> None:
    """As huggingface_hub stores a model: snapshots/REVISION/onnx/model.onnx -> blobs/HASH."""
    (tmp_path / "blobs").mkdir()
    shown = tmp_path / "snapshots" / "onnx"
    shown.mkdir(parents=True)
    saved(folder, external(location="w.bin", offset=4)).rename(tmp_path / "blobs" / "12ab")
    (folder / "w.bin").rename(tmp_path / "blobs" / "34cd")
    (shown / "model.onnx").symlink_to("../../blobs/12ab")
    (shown / "w.bin").symlink_to("../../blobs/34cd")
    model = load_onnx(shown / "model.onnx")
    assert np.array_equal(model.graph.outputs[0].const, VALUES.reshape(2, 3))
    # Not of a model that is no link, nor to any other place.
    (shown / "own.onnx").write_bytes((tmp_path / "blobs" / "12ab").read_bytes())
    with pytest.raises(InvalidModel, match="symbolic link"):
        load_onnx(shown / "own.onnx")
    (shown / "w.bin").unlink()
    (shown / "w.bin").symlink_to("../../secret.bin")
    (tmp_path / "secret.bin").write_bytes(bytes(100))
    with pytest.raises(InvalidModel, match="symbolic link"):
        load_onnx(shown / "model.onnx")


def test_hard_link_is_refused(folder: Path) -> None:
    os.link(folder.parent / "secret.bin", folder / "hard.bin")
    assert "hard links" in problem(folder, external(location="hard.bin"))


def test_location_that_is_not_a_regular_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for location in ("pipe", "sub"):
        assert "that is not a regular file" in problem(folder, external(location=location))
    assert "No such file" in problem(folder, external(location="nothing"))
    assert "Not a directory" in problem(folder, external(location="w.bin/w.bin"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": 8}, "needs bytes 8 to 32 of 'w.bin', which has 28"),
        ({"offset": 2**40}, "which has 28"),
        ({"offset": -4}, "has '-4' as the offset of its external data, not a number"),
        ({"offset": "١"}, "not a number"),
        ({"offset": "9" * 5000}, "not a number"),
        ({"length": 20}, "has 20 bytes of external data, but its shape takes 24"),
        ({"length": 28}, "has 28 bytes of external data, but its shape takes 24"),
        ({"length": "many"}, "not a number"),
    ],
)
def test_offset_or_length_that_does_not_fit_is_refused(
    folder: Path, entries: Any, message: str
) -> None:
    assert message in problem(folder, external(location="w.bin", **entries))


def test_dims_beyond_the_file_are_refused(folder: Path) -> None:
    tensor = external(dims=[2**32], location="w.bin")
    assert "needs bytes 0 to 17179869184 of 'w.bin', which has 28" in problem(folder, tensor)


def test_external_strings_are_refused(folder: Path) -> None:
    tensor = external(TensorProto.STRING, [1], location="w.bin")
    assert "store strings in the model" in problem(folder, tensor)


def test_external_data_of_a_model_without_path_is_refused(folder: Path) -> None:
    data = saved(folder, external(location="w.bin", offset=4)).read_bytes()
    for source in (data, onnx.ModelProto.FromString(data)):
        with pytest.raises(InvalidModel, match="load the model from its path"):
            load_onnx(source)


def test_external_data_of_attributes_is_read(folder: Path) -> None:
    constant = helper.make_node("Constant", [], ["w"])
    tensor = external(location="w.bin", offset=4)
    constant.attribute.append(helper.make_attribute("value", tensor))
    outs = [onnx.ValueInfoProto(name="w")]
    proto = helper.make_model(helper.make_graph([constant], "g", [], outs))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    model = load_onnx(folder / "model.onnx")
    assert np.array_equal(model.graph.outputs[0].const, VALUES.reshape(2, 3))


@pytest.mark.parametrize("mapped", [True, pytest.param(False, marks=pytest.mark.full)])
def test_external_data_beyond_2_gb_is_read(tmp_path, mapped):
    count = 2**29 + 16  # float32: 2 GiB and a little; the file is sparse, and takes no room
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(count * 4)
        file.seek((count - 4) * 4)
        file.write(np.arange(4, dtype=np.float32).tobytes())
    large = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[count])
    large.data_location = onnx.TensorProto.EXTERNAL
    large.external_data.add(key="location", value="large.bin")
    node = onnx.helper.make_node("Gather", ["w", "i"], ["y"])
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [info("i", 7, ["N"])], [info("y", 1, ["N"])], [large]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    session = penstock.compile(path, map_weights=mapped)
    indices = np.array([0, count - 1, count - 2])
    assert session.run({"i": indices})["y"].tolist() == [0, 3, 2]
