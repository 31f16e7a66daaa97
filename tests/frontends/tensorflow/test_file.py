"""Files of TensorFlow in protobuf's text form."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps


def test_text_is_parsed_up_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "g.pbtxt"
    path.write_text('zz: 1, yy { a: "b;c" d: [1, 2] } ' * 1000)
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        ps.load(path, cancel=token)
    with pytest.raises(ps.InvalidModel, match="has no nodes"):
        ps.load(path)


def test_text_that_is_no_message_names_file_and_place(tmp_path: Path) -> None:
    path = tmp_path / "g.pbtxt"
    path.write_text('node {\n  name: "a\n}\n')
    with pytest.raises(
        ps.InvalidModel, match=r"g\.pbtxt is no GraphDef: line 2, column 3: .*quote"
    ):
        ps.load(path)
