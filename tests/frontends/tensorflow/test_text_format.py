"""Protobuf's text format, compared with protobuf's own reader of it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from google.protobuf import text_format

from penstock.core.checkpoints import CHECK_EVERY, cancelled_by
from penstock.frontends.tensorflow import text_format as ours
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, SavedModel

# Quotes, braces and number signs in strings and comments, all kinds of fields, and unknown ones.
GRAPH = r"""node { name: "a#b {" op: 'Ne"g' input: "x\"y" # it's a "comment", { [
    "z" 'q' attr { key: "T" value { type: DT_FLOAT } }, attr: < key: 'U' value { i: 3 } >;
    attr { key: "L" value { list { i: [1, -2, 0x3, 017] f: [1.5, inf, -2f, nan, 1e5] b: [true, f]
      type: [DT_INT8, 3] shape: [{dim: [{size: -1}, {}]}, <>] s: ["a\x41\n" 'b', "\303\274\1012"] } } }
    attr: [{ key: "m" value { func { name: "g" attr { key: "z" value { placeholder: "q" } } } } }] }
  zz: 1, yy { a: "b;c" d: [1, 2] [x.y.z/Q] { q: -1.5 } } xx <> ww: [{}, <a: b>] 5: 6
  versions { producer: 27 bad_consumers: [1, 2] bad_consumers: 3 bad_consumers: [] }
  library { function { ret { key: "a" value: "b" } signature { name: "f\u00fc" is_stateful: 1 } } }
"""
TENSOR = 'node { attr { key: "v" value { tensor { %s } } } }'


def parsed(text: str, message: Any) -> Any:
    ours.parse_text(text, message)
    return message


@pytest.mark.parametrize(
    "text",
    [
        GRAPH,
        GRAPH.replace("\n", "\r\n"),
        GRAPH.replace("} ", "} # {\n "),
        "",
        " # nothing",
        "versions: { producer: 1 }",
        "node [ { name: 'a' }, < > ]",
        'node { name: "" name: "b" }',
        'node { attr { key: "a" value { i: 1 } } attr { key: "a" value { f: 2 } } attr {} }',
        TENSOR
        % "dtype: 3 int_val: +1 int_val: 1_0 float_val: .5 float_val: 2.5F double_val: -0.0 bool_val: t",
        TENSOR % r"string_val: '\a\b\f\r\t\v\\\'\"\0\x1g' string_val: 'é' tensor_content: '\377'",
    ],
)
def test_text_is_read_as_protobuf_reads_it(text: str) -> None:
    expected = text_format.Parse(text, GraphDef(), allow_unknown_field=True)
    assert str(parsed(text, GraphDef())) == str(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node { name: 3 }", "line 1, column 8: '3' is no value of name: it must be in quotes"),
        ('\n\n node { op: "a\n" }', "line 3, column 9: .* missing quote"),
        (r"node { name: '\xff' }", "no value of name: .*codec can't decode"),
        ("node { name: 'a' name: 'b' }", "column 18: .*has name already"),
        ("node { name: ['a'] }", "name must be one value, not a list"),
        ("node { name { } }", "name must be one value"),
        ("versions: [{}]", "versions must be one message"),
        ("versions {} versions {}", "column 13: versions .* already"),
        ("node: 3", "'3' is no value of node: it has fields"),
        ("node { attr { value { i: 1 f: 2 } } }", "f is given, but the message has i already"),
        ("versions { producer: 2147483648 }", "column 12: .*[Oo]ut of range"),
        ("versions { bad_consumers: [1, 'a'] }", "is no value of bad_consumers"),
        ("versions { bad_consumers: [1,] }", "column 12: .* is no field or '}'"),
        (TENSOR % "dtype: DT_NONE", "no value of dtype"),
        (TENSOR % "bool_val: yes", "neither true nor false"),
        (TENSOR % "float_val: 01.5", "must not begin with 0"),
        (TENSOR % f"float_val: {'x' * 500}", r"'x{20}\.\.\.\[460 characters\]"),
        ("node { [a.b]: 1 }", "column 8: write the file without the extension"),
        ("node { [a.b] { c: 1 } }", "column 8: write the file without the extension"),
        ("zz [{}]", "column 1: a colon must precede the list"),
        ("node { >", "column 8: '>' is no field or '}'"),
        ("node [{} {}]", "a comma and a message, or ']', must follow"),
        ("node {\n", "line 2, column 1: the text ends, but '}' must follow"),
        ("zz { a: }", "column 6: .* is no field"),
        ("}", "column 1: '}' is no field;"),
        ("a b", "is no field"),
    ],
)
def test_text_that_protobuf_refuses_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises((text_format.ParseError, ValueError)):
        text_format.Parse(text, GraphDef(), allow_unknown_field=True)
    with pytest.raises(ValueError, match=message):
        ours.parse_text(text, GraphDef())


def test_differences_from_protobuf_are_those_listed() -> None:
    for refused in (
        r"node{op:'\q'}",
        r"node{op:'\N{DASH}'}",
        r"node{op:'\400'}",
        "é: 1",
        "zz: [1, {}]",
        "a{" * 101,
    ):
        with pytest.raises(ValueError, match="column"):
            ours.parse_text(refused + "}" * 101 * refused.startswith("a"), GraphDef())
    for accepted in ("zz: 1x", "zz: -", r"zz: '\q'", "zz { [.y-]: 1 }", r"node { op: '\?' }"):
        ours.parse_text(accepted, GraphDef())


def test_damaged_text_is_read_or_refused_as_by_protobuf() -> None:
    pieces = [
        *"{}<>[]:,;\"'#\n 1",
        "-1",
        "0x1F",
        "017",
        "inf",
        '"a"',
        "name",
        "zz: 2",
        "[]",
        "node {",
    ]
    draw = random.Random(7)
    outcomes = []
    for _ in range(400):
        at, end = sorted(draw.choices(range(len(GRAPH)), k=2))
        text = GRAPH[:at] + draw.choice([*pieces, ""]) + GRAPH[min(end, at + draw.randrange(9)) :]
        theirs, problem = GraphDef(), ""
        try:
            text_format.Parse(text, theirs, allow_unknown_field=True)
        except DeprecationWarning:  # an escape that there is not
            continue
        except (text_format.ParseError, ValueError) as error:
            problem = str(error)
        if "Invalid field value" in problem or "Expected identifier." in problem:
            continue  # in fields that are skipped
        try:
            mine = parsed(text, GraphDef())
        except ValueError:
            assert problem, text
        else:
            assert not problem, text
            assert str(mine) == str(theirs), text
        outcomes.append(bool(problem))
    assert outcomes.count(True) > 100
    assert outcomes.count(False) > 40


class Checks:
    """Work that counts its checkpoints."""

    budget = None
    limited = True
    count = 0

    def check(self) -> None:
        self.count += 1


class Spans:
    """A regular expression that counts its matches and their characters."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.matches = self.characters = 0

    def match(self, text: str, position: int) -> re.Match[str] | None:
        match = self.pattern.match(text, position)
        self.matches += 1
        self.characters += match.end() - match.start() if match else 0
        return match


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("a:1," * 3000, 3000),
        ("a{}" * 3000, 6000),
        ("node{name:''}" * 1000, 3000),
        ("node{input:" + "''" * 5000 + "}", 3),
        ("#\n" * 5000 + "a: 1", 1),
        ("zz: [" + "1, " * 5000 + "1]", 1),
        ("node: [" + "{}, " * 3000 + "{}]", 3002),
    ],
)
def test_each_statement_is_looked_at_once_and_checkpoints_follow(
    text: str, statements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, work = Spans(ours._STATEMENT), Checks()
    monkeypatch.setattr(ours, "_STATEMENT", spans)
    with cancelled_by(work):
        ours.parse_text(text, GraphDef())
    assert statements <= spans.matches <= statements + 1
    assert spans.characters <= len(text) + statements
    assert work.count >= statements // CHECK_EVERY


@pytest.mark.parametrize(
    ("value", "checks"), [(r"'\1'" * 900, 900), (r"'" + r"\\" * 900 + "'", 900)]
)
def test_escapes_are_read_once_with_checkpoints(value: str, checks: int) -> None:
    work = Checks()
    with cancelled_by(work):
        ours.parse_text(f"node {{ attr {{ value {{ s: {value} }} }} }}", GraphDef())
    assert checks <= work.count <= 2 * checks + 10


def test_saved_model_in_text_skips_what_is_not_declared() -> None:
    text = """saved_model_schema_version: 1 meta_graphs { meta_info_def { tags: "serve" any_info {
        [type.googleapis.com/a.B] { c: 1 } } } collection_def { key: "v" value { bytes_list {
        value: "\\n\\001" } } } signature_def { key: "s" value { method_name: "m" } } }"""
    expected = text_format.Parse(text, SavedModel(), allow_unknown_field=True)
    assert parsed(text, SavedModel()) == expected
