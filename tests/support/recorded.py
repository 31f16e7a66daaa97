"""What ``tests/models/tf_ops/make*.py`` recorded of TensorFlow: arrays by name, in compressed files."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import penstock as ps


class Recorded:
    """The cases of some files. A case ``name`` has the arrays ``name/graph``, ``name/in/...`` and
    ``name/out/...``; text is stored as bytes."""

    def __init__(self, paths: Iterable[Path]) -> None:
        files = [np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) for path in paths]
        self._files = {key: file for file in files for key in file}
        self.names = sorted(
            key.removesuffix("/graph") for key in self._files if key.endswith("/graph")
        )

    def graph(self, name: str) -> bytes:
        return self._array(f"{name}/graph").tobytes()

    def part(self, name: str, role: str) -> dict[str, np.ndarray]:
        """The arrays of a case that have a role, such as "in"."""
        prefix = f"{name}/{role}/"
        keys = [key for key in self._files if key.startswith(prefix)]
        return {key.removeprefix(prefix): self._array(key) for key in keys}

    def saved(self, name: str, folder: Path) -> Path:
        """The files of a SavedModel, written to a folder."""
        for file, content in self.part(name, "file").items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.tobytes())
        return folder

    def check(self, name: str, session: ps.Session) -> None:
        """Compare the answers of a session, one after the other, with those recorded."""
        self._check_run(name, session, "")
        later = 1
        while self.part(name, f"in_{later}"):
            self._check_run(name, session, f"_{later}")
            later += 1

    def _check_run(self, name: str, session: ps.Session, end: str) -> None:
        out, wanted = session.run(self.part(name, f"in{end}")), self.part(name, f"out{end}")
        assert out.keys() == wanted.keys()
        for key, want in wanted.items():
            assert (out[key].dtype, out[key].shape) == (want.dtype, want.shape)
            if want.dtype.kind == "f":
                np.testing.assert_allclose(out[key], want, rtol=1e-5)
            else:
                np.testing.assert_array_equal(out[key], want)

    def _array(self, key: str) -> np.ndarray:
        array: np.ndarray = self._files[key][key]
        if array.dtype.kind != "S":
            return array
        texts = np.empty(array.size, object)
        texts[:] = [x.decode("utf-8", "surrogateescape") for x in array.reshape(-1).tolist()]
        return texts.reshape(array.shape)
