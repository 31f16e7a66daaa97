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
from penstock.testing import check_node
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


def test_operation_registered_twice_says_what_to_do():
    register(2)
    with pytest.raises(
        ValueError, match=r"'Twice' of the domain .* is registered already.*replace=True"
    ):
        register(3)
    np.testing.assert_array_equal(run(), 2 * X)
    register(3, replace=True)
    np.testing.assert_array_equal(run(), 3 * X)


def run() -> np.ndarray:
    from tests.support.onnx_text import model_from_text

    return ps.compile(model_from_text(TEXT, domains={DOMAIN: 1}))(X)


@pytest.mark.parametrize("types", [3, None, FLOAT32, [np.float32]])
def test_infer_that_gives_no_types_is_named(types):
    @operator("Twice", domain=DOMAIN, infer=lambda *_: types)
    def twice(node, inputs):
        return Kernel(lambda x: 2 * x)

    with pytest.raises(ps.InternalError, match="the infer of the operation 'Twice' returned"):
        run()


def test_error_in_code_of_a_user_is_not_one_to_report():
    @operator("Twice", domain=DOMAIN, infer=same_type)
    def twice(node):
        return Kernel(lambda x: 2 * x)

    class Failing(HostBackend):
        name = "failing"

        def kernel(self, node, types):
            raise RuntimeError("not today")

    with pytest.raises(ps.InternalError, match="Correct the function that was registered"):
        run()
    register(2, replace=True)
    with pytest.raises(ps.InternalError, match="Correct its kernel on the backend failing"):
        compile_text("g (float[2] x) => (float[2] y) { y = Neg(x) }", backends=[Failing()])(X)


def test_operation_of_onnx_is_replaced_only_on_request():
    before = registry.find("Celu")
    assert before is not None

    def own(node, types):
        return Kernel(lambda x: x)

    with pytest.raises(ValueError, match="'Celu' is registered already"):
        operator("Celu", since=12, infer=same_type)(own)
    assert registry.find("Celu") is before


def test_check_node_finds_what_is_wrong():
    register(2)
    check_node("Twice", [X], domain=DOMAIN, expected=[2 * X])
    with pytest.raises(AssertionError):
        check_node("Twice", [X], domain=DOMAIN, expected=[3 * X])
    with pytest.raises(LookupError, match="no operation 'Thrice'"):
        check_node("Thrice", [X], domain=DOMAIN, expected=[X])


def test_check_node_finds_kernels_that_write_inputs_or_hand_them_on():
    @operator("Twice", domain=DOMAIN, infer=same_type)
    def writes(node, types):
        return Kernel(lambda x: np.multiply(x, 2, x) + 0)

    with pytest.raises((AssertionError, ValueError)):
        check_node("Twice", [X.copy()], domain=DOMAIN, expected=[2 * X])

    @operator("Twice", domain=DOMAIN, infer=same_type, replace=True)
    def hands_on(node, types):
        return Kernel(lambda x: x)

    with pytest.raises(AssertionError, match="an output aliases an input"):
        check_node("Twice", [X.copy()], domain=DOMAIN, expected=[X])


def test_check_node_finds_wrong_types():
    def infer(types, attrs, consts):
        return (extend.TensorType(np.dtype(np.float64), (7,)),)

    @operator("Twice", domain=DOMAIN, infer=infer)
    def twice(node, types):
        return Kernel(lambda x: x * np.float32(2))

    with pytest.raises(AssertionError, match=r"float64\[7\]|TensorType"):
        check_node("Twice", [X], domain=DOMAIN, expected=[2 * X])


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


def test_operations_of_penstock_do_not_look_for_packages(monkeypatch):
    def refuse() -> None:
        raise AssertionError("looks for packages")

    monkeypatch.setattr(registry, "load_operations", refuse)
    compile_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")([1, 2])


def test_operation_registered_after_a_model_was_refused_is_found():
    with pytest.raises(ps.Unsupported):
        run()
    register(2)
    np.testing.assert_array_equal(run(), 2 * X)
