"""Files of TensorFlow in protobuf's text form."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

import penstock as ps
from penstock.frontends.tensorflow import file
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef

# A quote, a brace and a number sign in strings, and in a comment.
NODE = r"""node { name: "a#b {" op: 'Ne"g' input: "x\"y" "z" # comment, { " ;
    attr { key: "T" value { type: DT_FLOAT } }, attr: < key: 'U' value { i: 3 } >; } """
UNKNOWN = 'zz: 1, yy { a: "b;c" d: [1, 2] } '


@pytest.mark.parametrize("text", [NODE * 40, f"{UNKNOWN * 40}{NODE * 40}"])
@pytest.mark.parametrize("one_line", [False, True])
def test_text_of_long_lines_has_the_same_contents_in_short_ones(text: str, one_line: bool) -> None:
    expected = text_format.Parse(text, GraphDef(), allow_unknown_field=True)
    if one_line:
        text = text_format.MessageToString(expected, as_one_line=True) + UNKNOWN * 40
    lines = file._short_lines(text)
    assert text_format.ParseLines(lines, GraphDef(), allow_unknown_field=True) == expected


@pytest.mark.parametrize("unknown", ["zz: 1 ", "zz:1,", "zz{}", "zz:'a''b'", "zz:[1,2]", "zz<>;"])
def test_unknown_fields_on_one_line_are_parsed_in_short_lines(unknown: str) -> None:
    lines = file._short_lines(unknown * 10_000)
    assert max(map(len, lines)) < 20


def test_text_is_parsed_up_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "g.pbtxt"
    path.write_text(UNKNOWN * 1000)
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        ps.load(path, cancel=token)
    with pytest.raises(ps.InvalidModel, match="has no nodes"):
        ps.load(path)
