"""System shared memory, by tritonclient's own functions, and what wrong or hostile clients do."""

from __future__ import annotations

import gc
import json
import os
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import penstock as ps
from tests.serving.test_replicas import Held
from tests.support.timing import wait_until
from tests.support.triton import (
    AFFINE,
    MAX_BYTES,
    InferenceServerClient,
    InferenceServerException,
    InferInput,
    InferRequestedOutput,
    asked,
    save,
    serving,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException, shared_memory

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no POSIX segments in files")


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[tuple[InferenceServerClient, str]]:
    affine = save(tmp_path_factory.mktemp("models") / "affine.onnx", AFFINE)
    with serving({"affine": affine}, shared_memory=True) as (triton, url, _):
        yield triton, url


@pytest.fixture
def segment(client) -> Iterator[Any]:
    """A segment of 1024 bytes, registered as "r"."""
    triton, _ = client
    handle = shared_memory.create_shared_memory_region("r", f"/ps-{uuid.uuid4().hex}", 1024)
    triton.register_system_shared_memory("r", handle._shm_key, 1024)
    yield handle
    triton.unregister_system_shared_memory()
    shared_memory.destroy_shared_memory_region(handle)


def x_at(offset: int, rows: int = 2, size: int | None = None) -> InferInput:
    x = InferInput("x", [rows, 3], "FP32")
    x.set_shared_memory("r", 12 * rows if size is None else size, offset)
    return x


def y_at(offset: int, size: int = 24) -> InferRequestedOutput:
    y = InferRequestedOutput("y")
    y.set_shared_memory("r", size, offset)
    return y


def test_tensors_pass_by_shared_memory(client, segment):
    triton, _ = client
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    assert "system_shared_memory" in triton.get_server_metadata()["extensions"]
    for k in range(3):  # by the event loop, and then by a thread
        shared_memory.set_shared_memory_region(segment, [x + k], offset=8)
        outputs = [y_at(512), InferRequestedOutput("k")]
        result = triton.infer("affine", [x_at(8)], outputs=outputs)
        entry = result.get_output("y")
        assert entry["parameters"] == {
            "shared_memory_region": "r",
            "shared_memory_byte_size": 24,
            "shared_memory_offset": 512,
        }
        y = shared_memory.get_contents_as_numpy(segment, np.float32, [2, 3], offset=512)
        np.testing.assert_array_equal(y, 2 * (x + k))
        np.testing.assert_array_equal(result.as_numpy("k"), [7])


def test_strings_pass_by_shared_memory(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    texts = np.array([b"a", b"", "zwölf".encode()], object)
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    with serving({"g": path}, shared_memory=True) as (triton, _, _):
        handle = shared_memory.create_shared_memory_region("r", f"/ps-{uuid.uuid4().hex}", 256)
        try:
            triton.register_system_shared_memory("r", handle._shm_key, 256)
            shared_memory.set_shared_memory_region(handle, [np.frombuffer(data, np.uint8)])
            x = InferInput("x", [3], "BYTES")
            x.set_shared_memory("r", len(data))
            triton.infer("g", [x], outputs=[y_at(128, 128)])
            assert bytes(handle._mpsm_handle.buf[128 : 128 + len(data)]) == data
        finally:
            shared_memory.destroy_shared_memory_region(handle)


def test_regions_are_registered_listed_and_forgotten(client, segment):
    triton, _ = client
    key = segment._shm_key
    triton.register_system_shared_memory("s", key, 24, offset=1000)
    entries = triton.get_system_shared_memory_status()
    wanted = {"name": "s", "key": key, "offset": 1000, "byte_size": 24}
    assert entries == [{"name": "r", "key": key, "offset": 0, "byte_size": 1024}, wanted]
    assert triton.get_system_shared_memory_status("s") == [wanted]
    with pytest.raises(InferenceServerException, match="'s' is already registered"):
        triton.register_system_shared_memory("s", key, 24)
    triton.unregister_system_shared_memory("s")
    triton.unregister_system_shared_memory("s")  # as often as one likes
    with pytest.raises(InferenceServerException, match="'s' is not registered") as unknown:
        triton.get_system_shared_memory_status("s")
    assert unknown.value.status() == "404"
    triton.unregister_system_shared_memory()
    assert triton.get_system_shared_memory_status() == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "not a valid segment name"),
        ("/", "not a valid segment name"),
        ("..", "not a valid segment name"),
        ("//etc/passwd", "not a valid segment name"),
        ("/../../etc/passwd", "not a valid segment name"),
        ("a/b", "not a valid segment name"),
        ("a\0b", "not a valid segment name"),
        ("a" * 300, "not a valid segment name"),
        ("a\ud83d", "not a valid segment name"),
        ("/there-is-none", "No such file"),
        (7, "has no key"),
        (None, "has no key"),
    ],
)
def test_key_that_names_no_segment_is_refused(client, key, reason):
    _, url = client
    document = {"key": key, "offset": 0, "byte_size": 8}
    body = json.dumps(document).encode()
    status, answer = asked(f"{url}/v2/systemsharedmemory/region/q/register", body)
    assert status == 400
    assert reason in answer["error"]


def test_links_pipes_and_folders_are_no_segments(client, tmp_path):
    triton, _ = client
    name = f"ps-{uuid.uuid4().hex}"
    (tmp_path / "file").write_bytes(bytes(100))
    path = SHM / name
    for make, remove in (
        (lambda: path.symlink_to(tmp_path / "file"), path.unlink),
        (lambda: os.mkfifo(path), path.unlink),
        (path.mkdir, path.rmdir),
    ):
        make()
        try:
            with pytest.raises(InferenceServerException, match="shared memory key"):
                triton.register_system_shared_memory("q", f"/{name}", 8)
        finally:
            remove()


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1025), (1000, 25), (0, 0), (0, -1), (-1, 8), (0, 1 << 70), (1 << 60, 1), (0, True)],
)
def test_region_outside_of_its_segment_is_refused(client, segment, offset, size):
    _, url = client
    document = {"key": segment._shm_key, "offset": offset, "byte_size": size}
    body = json.dumps(document).encode()
    status, answer = asked(f"{url}/v2/systemsharedmemory/region/q/register", body)
    assert status == 400
    assert "'q'" in answer["error"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"shared_memory_region": "z"}, "'z' is not registered"),
        ({"shared_memory_region": 5}, "must be named"),
        ({"shared_memory_byte_size": 16}, "has 16 bytes"),
        ({"shared_memory_byte_size": -24}, "has 1024 bytes"),
        ({"shared_memory_byte_size": None}, "has 1024 bytes"),
        ({"shared_memory_byte_size": 1 << 80}, "has 1024 bytes"),
        ({"shared_memory_offset": 1001}, "has 1024 bytes"),
        ({"shared_memory_offset": -1}, "has 1024 bytes"),
        ({"shared_memory_offset": "0"}, "has 1024 bytes"),
        ({"binary_data_size": 24}, "both"),
    ],
)
def test_input_outside_of_its_region_is_refused(client, segment, place, reason):
    _, url = client
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 24, **place}
    x = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": parameters}
    body = json.dumps({"inputs": [x]}).encode()
    status, answer = asked(f"{url}/v2/models/affine/infer", body)
    assert status == 400
    assert reason in answer["error"]


def test_output_that_does_not_fit_is_refused(client, segment):
    triton, _ = client
    with pytest.raises(InferenceServerException, match="24 bytes exceeds the 20 bytes") as error:
        triton.infer("affine", [x_at(0)], outputs=[y_at(512, 20)])
    assert error.value.status() == "400"
    with pytest.raises(InferenceServerException, match="has 1024 bytes"):
        triton.infer("affine", [x_at(0)], outputs=[y_at(1020)])
    assert bytes(segment._mpsm_handle.buf[512:536]) == bytes(24)


def test_inputs_beyond_the_limit_of_a_request_are_refused(client):
    triton, url = client
    size = MAX_BYTES * 3 // 4
    handle = shared_memory.create_shared_memory_region("big", f"/ps-{uuid.uuid4().hex}", size)
    try:
        triton.register_system_shared_memory("big", handle._shm_key, size)
        parameters = {"shared_memory_region": "big", "shared_memory_byte_size": size}
        inputs = [
            {"name": name, "shape": [size], "datatype": "UINT8", "parameters": parameters}
            for name in ("x", "z")
        ]
        body = json.dumps({"inputs": inputs}).encode()
        status, answer = asked(f"{url}/v2/models/affine/infer", body)
        assert (status, "exceed the maximum size" in answer["error"]) == (400, True)
    finally:
        triton.unregister_system_shared_memory("big")
        shared_memory.destroy_shared_memory_region(handle)


def test_segment_that_shrinks_is_an_error_and_not_the_end_of_the_server(client, segment):
    triton, _ = client
    triton.infer("affine", [x_at(0)], outputs=[y_at(512)])
    os.truncate(SHM / segment._shm_key.removeprefix("/"), 100)
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="which has 100"):
            triton.infer("affine", [x_at(0)], outputs=[y_at(512)])
    os.truncate(SHM / segment._shm_key.removeprefix("/"), 1024)
    triton.infer("affine", [x_at(0)], outputs=[y_at(512)])


def test_region_that_is_forgotten_while_a_request_runs_gets_its_output(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    backend = Held()

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, backends=[backend])

    with serving({"g": path}, make, shared_memory=True) as (triton, _, _):
        handle = shared_memory.create_shared_memory_region("r", f"/ps-{uuid.uuid4().hex}", 64)
        try:
            triton.register_system_shared_memory("r", handle._shm_key, 64)
            x = InferInput("x", [2], "FP32")
            x.set_data_from_numpy(np.ones(2, np.float32))
            request = triton.async_infer("g", [x], outputs=[y_at(0, 8)])
            wait_until(lambda: backend.shapes)
            triton.unregister_system_shared_memory()
            backend.opened.set()
            request.get_result()
            y = shared_memory.get_contents_as_numpy(handle, np.float32, [2])
            np.testing.assert_allclose(y, np.sin([1, 1]), rtol=1e-6)
        finally:
            backend.opened.set()
            shared_memory.destroy_shared_memory_region(handle)


def test_shared_memory_is_off_by_default(tmp_path):
    with serving({"affine": save(tmp_path / "affine.onnx", AFFINE)}) as (triton, _, _):
        assert "system_shared_memory" not in triton.get_server_metadata()["extensions"]
        for ask in (
            triton.get_system_shared_memory_status,
            lambda: triton.register_system_shared_memory("r", "/k", 8),
            triton.unregister_system_shared_memory,
        ):
            with pytest.raises(InferenceServerException, match="--shared-memory") as refused:
                ask()
            assert refused.value.status() == "404"
        with pytest.raises(InferenceServerException, match="--shared-memory"):
            triton.infer("affine", [x_at(0)])


def descriptors(segment: Any) -> int:
    """How many file descriptors of the process have a segment."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(file.readlink()))
    return sum(segment._shm_key in link for link in links)


def test_regions_are_bounded_and_closed(client, segment):
    triton, _ = client
    before = descriptors(segment)
    for k in range(255):
        triton.register_system_shared_memory(f"r{k}", segment._shm_key, 8)
    with pytest.raises(InferenceServerException, match="256 shared memory regions"):
        triton.register_system_shared_memory("last", segment._shm_key, 8)

    gc.collect()  # of the region that was refused
    assert descriptors(segment) == before + 255
    triton.unregister_system_shared_memory()
    wait_until(lambda: descriptors(segment) == before - 1)


def in_region(name: str, offset: int, size: int) -> dict[str, Any]:
    place = {"shared_memory_region": name, "shared_memory_offset": offset}
    return {**place, "shared_memory_byte_size": size}


def asked_for(
    url: str, x: tuple[str, int], *outputs: tuple[str, str, int, int], rows: int = 2
) -> tuple[int, Any]:
    """Ask for the sums of x at a place: region, offset; outputs at names, regions, offsets and
    sizes."""
    tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP32"}
    tensor["parameters"] = in_region(*x, 12 * rows)
    wanted = [{"name": name, "parameters": in_region(*place)} for name, *place in outputs]
    body = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
    return asked(f"{url}/v2/models/affine/infer", body)


@pytest.mark.parametrize("offset", [0, 4, 12, 23, 24])
def test_output_may_lie_over_its_input(client, segment, offset):
    _, url = client
    x = np.arange(6, dtype=np.float32)
    before = np.random.default_rng(0).bytes(1024)
    memory = segment._mpsm_handle.buf
    memory[:1024] = before
    memory[16:40] = x.tobytes()
    status, _ = asked_for(url, ("r", 16), ("y", "r", 16 + offset, 24))
    assert status == 200
    wanted = bytearray(before)
    wanted[16:40] = x.tobytes()
    wanted[16 + offset : 40 + offset] = (x + x).tobytes()
    assert bytes(memory[:1024]) == bytes(wanted)


@pytest.mark.parametrize("names", ["yk", "ky"])
def test_outputs_over_one_another_are_written_in_the_order_of_the_request(client, segment, names):
    _, url = client
    x, memory = np.arange(6, dtype=np.float32), segment._mpsm_handle.buf
    memory[:24] = x.tobytes()
    places = {"y": ("y", "r", 100, 24), "k": ("k", "r", 108, 8)}
    status, document = asked_for(url, ("r", 0), *[places[name] for name in names])
    assert status == 200, document
    wanted = bytearray(124)
    written = {"y": (100, (x + x).tobytes()), "k": (108, np.array([7], np.int64).tobytes())}
    for name in names:
        at, data = written[name]
        wanted[at : at + len(data)] = data
    assert bytes(memory[100:124]) == bytes(wanted[100:])


def test_places_may_reach_to_the_end_of_a_region(client, segment):
    _, url = client
    x, memory = np.arange(6, dtype=np.float32), segment._mpsm_handle.buf
    memory[1000:1024] = x.tobytes()
    assert asked_for(url, ("r", 1000), ("y", "r", 1000, 24))[0] == 200
    np.testing.assert_array_equal(np.frombuffer(memory[1000:1024], np.float32), x + x)
    status, document = asked_for(url, ("r", 1024), ("y", "r", 1024, 0), rows=0)
    assert (status, document["outputs"][0]["shape"]) == (200, [0, 3])
    status, document = asked_for(url, ("r", 1025), ("y", "r", 0, 0), rows=0)
    assert (status, "has 1024 bytes" in document["error"]) == (400, True)


def test_region_that_is_registered_anew_is_another(client, segment):
    triton, url = client
    handle = shared_memory.create_shared_memory_region("r", f"/ps-{uuid.uuid4().hex}", 1024)
    try:
        segment._mpsm_handle.buf[:24] = np.full(6, 1, np.float32).tobytes()
        handle._mpsm_handle.buf[:24] = np.full(6, 2, np.float32).tobytes()
        for of, wanted in ((segment, 2), (handle, 4)):
            triton.unregister_system_shared_memory("r")
            triton.register_system_shared_memory("r", of._shm_key, 1024)
            assert asked_for(url, ("r", 0), ("y", "r", 64, 24))[0] == 200
            y = np.frombuffer(bytes(of._mpsm_handle.buf[64:88]), np.float32)
            np.testing.assert_array_equal(y, np.full(6, wanted, np.float32))
        triton.unregister_system_shared_memory("r")
        status, document = asked_for(url, ("r", 0), ("y", "r", 64, 24))
        assert (status, "not registered" in document["error"]) == (400, True)
    finally:
        shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("name", ["a b", "\u00e4\u20ac", "%41", "..", "r?x=1", "'\""])
def test_regions_may_have_any_names(client, segment, name):
    _, url = client
    path = f"{url}/v2/systemsharedmemory/region/{quote(name, safe='')}"
    body = json.dumps({"key": segment._shm_key, "byte_size": 64}).encode()
    assert asked(f"{path}/register", body)[0] == 200
    segment._mpsm_handle.buf[:24] = np.full(6, 3, np.float32).tobytes()
    assert asked_for(url, (name, 0), ("y", name, 24, 24))[0] == 200
    y = np.frombuffer(segment._mpsm_handle.buf[24:48], np.float32)
    np.testing.assert_array_equal(y, np.full(6, 6, np.float32))
    assert asked(f"{path}/unregister", b"")[0] == 200
    status, document = asked_for(url, (name, 0), ("y", name, 24, 24))
    assert (status, "not registered" in document["error"]) == (400, True)


def test_requests_of_many_threads_share_a_region(client, segment):
    _, url = client
    memory = segment._mpsm_handle.buf
    for k in range(8):
        memory[24 * k : 24 * k + 24] = np.full(6, k, np.float32).tobytes()

    def ask(k: int) -> None:
        for _ in range(5):
            status, document = asked_for(url, ("r", 24 * k), ("y", "r", 512 + 24 * k, 24))
            assert status == 200, document

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    y = np.frombuffer(memory[512 : 512 + 8 * 24], np.float32).reshape(8, 6)
    np.testing.assert_array_equal(y, np.repeat(2.0 * np.arange(8), 6).reshape(8, 6))
