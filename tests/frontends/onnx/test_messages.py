"""ONNX's messages without the onnx package, and those of a user who has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.frontends.onnx import messages

IMPLEMENTATIONS = ("upb", "python")


def descriptor(file: Any) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def facts(message: descriptor_pb2.DescriptorProto, prefix: str = "") -> dict[str, object]:
    """What an encoding depends on, by the names of fields and of the values of enumerations."""
    found: dict[str, object] = {}
    name = prefix + message.name
    for field in message.field:
        of_one = field.HasField("oneof_index")
        packed = field.options.packed
        found[f"{name}.{field.name}"] = field.number, field.type, field.label, of_one, packed
    for enum in message.enum_type:
        found |= {f"{name}.{enum.name}.{value.name}": value.number for value in enum.value}
    for nested in message.nested_type:
        found |= facts(nested, f"{name}.")
    return found


def facts_of(file: Any) -> dict[str, object]:
    found: dict[str, object] = {"syntax": descriptor(file).syntax}
    for message in descriptor(file).message_type:
        found |= facts(message)
    return found


def test_declaration_agrees_with_the_onnx_package() -> None:
    ours = facts_of(messages.ModelProto.DESCRIPTOR.file)
    theirs = facts_of(onnx.ModelProto.DESCRIPTOR.file)
    assert len(ours) > 100
    assert ours == {name: theirs.get(name) for name in ours}


def test_descriptor_is_that_of_the_declaration() -> None:
    text = (Path(messages.__file__).parent / "proto" / "onnx.proto").read_text()
    declared = re.findall(r"(\w+) = (\d+)", re.sub("//.*", "", text))
    generated = []
    for name, fact in facts_of(messages.ModelProto.DESCRIPTOR.file).items():
        number = fact[0] if isinstance(fact, tuple) else fact
        generated += [(name.rpartition(".")[2], str(number))] if name != "syntax" else []
    assert sorted(declared) == sorted(generated)


PROGRAM = """
import sys
import numpy as np
{imports}
session = penstock.compile({path!r}, threads=1)
assert ("onnx" in sys.modules) == {expected}, sorted(sys.modules)
x = np.arange(2, dtype=np.float32)
assert session.run({{"x": x}})["y"].tolist() == [1, 2]
import onnx
model = onnx.load({path!r})
onnx.checker.check_model(model)
assert penstock.compile(model, threads=1).run({{"x": x}})["y"].tolist() == [1, 2]
from penstock.frontends.onnx import messages
assert messages.ModelProto is not onnx.ModelProto
"""


@pytest.fixture
def model() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "one")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])], "g", [x], [y], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", ["onnx", "penstock"])
def test_messages_stand_beside_the_onnx_package_imported_before_or_later(
    model: onnx.ModelProto, tmp_path: Path, first: str, implementation: str
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    imports = "import onnx\nimport penstock" if first == "onnx" else "import penstock"
    program = PROGRAM.format(imports=imports, path=str(path), expected=first == "onnx")
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True, env=environment)


def test_files_are_read_without_the_onnx_package(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    program = (
        "import sys; sys.modules['onnx'] = None\n"
        f"import penstock; print(penstock.load({str(path)!r}).graph.nodes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=True
    )
    assert "Add" in done.stdout


def older_class(without: dict[str, tuple[str, ...]]) -> Any:
    """The class of models of an onnx package that lacks some messages and fields."""
    file = descriptor(onnx.ModelProto.DESCRIPTOR.file)
    for message in file.message_type:
        kept = [field for field in message.field if field.name not in without.get(message.name, ())]
        del message.field[:]
        message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))


def test_model_of_an_older_onnx_package_is_read(model: onnx.ModelProto) -> None:
    older = older_class({"NodeProto": ("overload", "metadata_props"), "ModelProto": ("functions",)})
    proto = older.FromString(model.SerializeToString())
    assert not hasattr(proto.graph.node[0], "overload")
    x = np.arange(2, dtype=np.float32)
    assert ps.compile(proto, threads=1).run({"x": x})["y"].tolist() == [1, 2]


def test_model_of_a_user_is_not_copied(model: onnx.ModelProto, monkeypatch: Any) -> None:
    """A model in memory may have more bytes than one message can be written to."""
    from penstock.frontends.onnx import file

    monkeypatch.setattr(file, "_parsed", None)
    with file.opened(model) as (proto, weights):
        assert proto is model
        assert weights == ()


def test_message_other_than_a_model_is_refused(model: onnx.ModelProto) -> None:
    with pytest.raises(TypeError, match=r"an onnx\.ModelProto"):
        ps.load(model.graph)
