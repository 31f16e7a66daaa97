"""Variables that only the object graph of a checkpoint names."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import RunError
from penstock.frontends.tensorflow.proto.graphdef_pb2 import SavedModel, SavedObjectGraph
from penstock.frontends.tensorflow.saved_model import ObjectGraph
from tests.frontends.tensorflow.test_saved_model import FOLDER, X


def test_variables_that_only_objects_name_are_restored() -> None:
    """Those of Keras layers inside of a ``tf.Module``: TensorFlow's nodes restore copies."""
    out = ps.compile(FOLDER / "objects").run({"x": X / 4})["y"]
    answer = [[-0.139436051249504, -0.382434278726577], [-0.438409686088562, -0.330407708883286]]
    np.testing.assert_allclose(out, answer, rtol=1e-6)


@pytest.mark.parametrize("fault", ["bound", "missing", "outside", "negative", "circle", "renamed"])
def test_damaged_objects_leave_variables_without_values(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER / "objects", folder)
    file = folder / "saved_model.pb"
    proto = SavedModel.FromString(file.read_bytes())
    objects = proto.meta_graphs[0].object_graph_def
    for function in objects.concrete_functions.values():
        if fault == "bound":
            function.bound_inputs.extend([0, -1, 2**31 - 1] * 10)
    for item in objects.nodes:
        for child in item.children:
            numbers = {"outside": 2**31 - 1, "negative": -2, "circle": 0}
            child.node_id = numbers.get(fault, child.node_id)
            child.local_name = "x" * 100 if fault == "renamed" else child.local_name
    if fault == "missing":
        del objects.nodes[:]
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(RunError, match=r"variable 'a/kernel.*' is read before"):
        ps.compile(folder).run({"x": X})


def test_objects_in_a_long_chain_are_read_in_little_time() -> None:
    objects = SavedObjectGraph()
    for number in range(1, 20_001):
        objects.nodes.add().children.add(node_id=number, local_name="n")
    objects.nodes.add()
    graph = ObjectGraph(objects)
    assert graph.key(90, 1000) == "/".join("n" * 90) + "/.ATTRIBUTES/VARIABLE_VALUE"
    assert graph.key(90, 80) == graph.key(20_000, 10**6) == graph.key(20_001, 10**6) == ""
