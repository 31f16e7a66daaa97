"""What extensions import, register and are found by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock import extend
from penstock.backends.registry import BACKENDS
from penstock.extend import FLOAT32, HostBackend, Kernel, operator, same_type
from penstock.ops import registry
from tests.support.onnx_text import compile_text

DOMAIN = "com.example.extend"


TEXT = f"g (float[2] x) => (float[2] y) {{ y = {DOMAIN}.Twice(x) }}"


X = np.array([1, 2], np.float32)


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    registry._REGISTRY.pop((DOMAIN, "Twice"), None)


def register(factor: float, **more: object) -> None:
    @operator("Twice", domain=DOMAIN, infer=same_type, **more)
    def twice(node, types):
        return Kernel(lambda x: x * np.float32(factor))


def test_all_names_are_there():
    assert [name for name in extend.__all__ if not hasattr(extend, name)] == []


def run() -> np.ndarray:
    from tests.support.onnx_text import model_from_text

    return ps.compile(model_from_text(TEXT, domains={DOMAIN: 1}))(X)


@pytest.mark.parametrize("types", [3, None, FLOAT32, [np.float32]])
def test_infer_that_gives_no_types_is_named(types):
    @operator("Twice", domain=DOMAIN, infer=lambda *_: types)
    def twice(node, inputs):
        return Kernel(lambda x: 2 * x)

    with pytest.raises(ps.ExtensionError, match="the infer of the operation 'Twice' returned"):
        run()


def test_error_in_code_of_a_user_is_not_one_to_report():
    @operator("Twice", domain=DOMAIN, infer=same_type)
    def twice(node):
        return Kernel(lambda x: 2 * x)

    class Failing(HostBackend):
        name = "failing"

        def kernel(self, node, types):
            raise RuntimeError("not today")

    with pytest.raises(ps.ExtensionError, match="Correct the function that was registered"):
        run()
    register(2, replace=True)
    with pytest.raises(ps.ExtensionError, match="Correct its kernel on the backend failing"):
        compile_text("g (float[2] x) => (float[2] y) { y = Neg(x) }", backends=[Failing()])(X)


PLUG_IN = """
import numpy as np
from penstock.extend import HostBackend, Kernel, operator, same_type

@operator("Twice", domain="com.plug", infer=same_type)
def twice(node, types):
    return Kernel(lambda x: x + x)

class PlugBackend(HostBackend):
    name = "plug"

    def kernel(self, node, types):
        return Kernel(np.negative) if node.op.name == "Neg" else None
"""


PROGRAM = """
import numpy as np, penstock as ps, sys
from penstock.build import GraphBuilder
import onnx
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 20, "com.plug" : 1]>
g (float[2] x) => (float[2] y) { a = com.plug.Twice(x) y = Neg(a) }''')
assert "plug_in" not in sys.modules
session = ps.compile(model, backends=["plug", "numpy"], place={"Neg": "plug"}, shapes={})
print(session([1, 2]), session.effective.backends)
try:
    ps.compile(model, backends=["plugs"])
except ValueError as error:
    print(error)
"""


def test_installed_packages_are_found_by_entry_points(tmp_path):
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    info = tmp_path / "plug_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.operations]\nplug = plug_in\n[penstock.backends]\nplug = plug_in:PlugBackend\n"
    )
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[-2. -4.] ('plug', 'numpy')",
        f"backend 'plugs' is not one of {', '.join(BACKENDS)}, plug",
    ]
