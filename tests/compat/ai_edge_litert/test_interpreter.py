"""LiteRT's interface on top of Penstock, compared with LiteRT itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from penstock.compat.ai_edge_litert import interpreter as ours
from tests.cli.test_formats import two_signatures
from tests.support.tflite_cases import FOLDER, cases
from tests.support.tflite_models import model, subgraph

theirs = pytest.importorskip("ai_edge_litert.interpreter")


BOTH = pytest.mark.parametrize("runtime", [ours, theirs], ids=["penstock", "litert"])


FILES = sorted([*FOLDER.glob("net/*.tflite"), *FOLDER.glob("quant/*.tflite")])


def doubling() -> bytes:
    main = subgraph(
        {"x": ("float32", (2, 3))}, [("ADD", ["x", "x"], ["y"], ("AddOptions", {}))], ["y"]
    )
    return model([main])


def plain(details: dict) -> dict:
    """Details without arrays, to compare."""
    found = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in details.items()}
    parameters = found["quantization_parameters"]
    found["quantization_parameters"] = {
        k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in parameters.items()
    }
    return found


def ran(runtime: ModuleType, path: Path, resolver: str = "AUTO") -> tuple[list, list, list]:
    """The details of inputs and of outputs, and outputs."""
    kind = runtime.OpResolverType[resolver]
    interpreter = runtime.Interpreter(
        model_path=str(path), num_threads=1, experimental_op_resolver_type=kind
    )
    interpreter.allocate_tensors()
    rng = np.random.default_rng(0)
    for details in interpreter.get_input_details():
        kind = np.dtype(details["dtype"])
        shape = details["shape"]
        values = rng.integers(0, 9, shape) if kind.kind in "iu" else rng.standard_normal(shape)
        interpreter.set_tensor(details["index"], values.astype(kind))
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    values = [interpreter.get_tensor(details["index"]) for details in outputs]
    inputs = interpreter.get_input_details()
    return [plain(d) for d in inputs], [plain(d) for d in outputs], values


def assert_near_one(codes: np.ndarray, default: np.ndarray, reference: np.ndarray) -> None:
    """Each code is within one of what the default or the reference kernels of LiteRT give, which
    differ by more in networks."""
    apart = [abs(codes.astype(int) - other.astype(int)) for other in (default, reference)]
    assert np.minimum(*apart).max() <= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_details_and_answers_are_those_of_litert(path):
    own, real, reference = ran(ours, path), ran(theirs, path), ran(theirs, path, "BUILTIN_REF")
    assert own[0] == real[0]
    assert own[1] == real[1]
    for one, other, exact in zip(own[2], real[2], reference[2], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.kind in "iu":
            assert_near_one(one, other, exact)
        else:
            # LiteRT rounds operands beside 8-bit weights to 8 bits as well; Penstock does not.
            close = 0.02 if path.parent.name == "quant" else 1e-4
            np.testing.assert_allclose(one, other, rtol=0, atol=close * np.abs(other).max())


@BOTH
def test_wrong_calls_raise_the_same_errors(runtime):
    interpreter = runtime.Interpreter(model_content=doubling())
    (x,) = interpreter.get_input_details()
    with pytest.raises(RuntimeError):
        interpreter.invoke()
    interpreter.allocate_tensors()
    with pytest.raises(ValueError, match="Got value of type FLOAT64 but expected type FLOAT32"):
        interpreter.set_tensor(x["index"], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="Dimension mismatch"):
        interpreter.set_tensor(x["index"], np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="tensor"):
        interpreter.get_tensor(99)
    with pytest.raises(ValueError, match="out of range"):
        interpreter.get_tensor_details(3)
    with pytest.raises(ValueError, match="num_threads"):
        runtime.Interpreter(model_content=doubling(), num_threads=0)
    with pytest.raises(ValueError, match="model_path"):
        runtime.Interpreter()
    with pytest.raises(ValueError, match="ould not open"):
        runtime.Interpreter(model_path="/no/such/file.tflite")


@BOTH
def test_signatures_are_listed_and_run(runtime):
    interpreter = runtime.Interpreter(model_content=two_signatures())
    assert interpreter.get_signature_list() == {
        "negate": {"inputs": ["a"], "outputs": ["b"]},
        "absolute": {"inputs": ["c"], "outputs": ["d"]},
    }
    run = interpreter.get_signature_runner("absolute")
    np.testing.assert_array_equal(run(c=np.array([-1, 2], np.float32))["d"], [1, 2])
    assert run.get_input_details()["c"]["dtype"] is np.float32
    assert list(run.get_output_details()) == ["d"]
    with pytest.raises(ValueError, match="nvalid"):
        run(x=np.array([-1, 2], np.float32))
    with pytest.raises(ValueError, match="Invalid signature_key"):
        interpreter.get_signature_runner("other")
    with pytest.raises(ValueError, match="has 2 Signatures"):
        interpreter.get_signature_runner()


def test_delegates_and_preserved_tensors_are_refused():
    with pytest.raises(ValueError, match="no delegate"):
        ours.load_delegate("libedgetpu.so.1")
    with pytest.raises(ValueError, match="fetch what you want to see"):
        ours.Interpreter(model_content=doubling(), experimental_preserve_all_tensors=True)


def test_public_names_are_those_of_litert():
    for name in ("Interpreter", "SignatureRunner"):
        own = {n for n in dir(getattr(ours, name)) if not n.startswith("_")}
        assert own <= set(dir(getattr(theirs, name))), name
    compat = importlib.import_module("penstock.compat")
    with pytest.raises(RuntimeError, match="ai_edge_litert is imported already"):
        compat.install("ai_edge_litert")


HANDLE = ("VarHandleOptions", {"container": "", "shared_name": "sum"})


def with_a_variable() -> bytes:
    """Signatures "add", which adds x to a variable that is 10 at first, and "get"."""
    once = ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 3}))
    handle, resource = ("VAR_HANDLE", [], ["h"], HANDLE), {"type": 13}
    x = {"x": ("float32", [2])}
    add = [
        *(once, handle, ("READ_VARIABLE", ["h"], ["old"], None)),
        ("ADD", ["old", "x"], ["y"], ("AddOptions", {})),
        ("ASSIGN_VARIABLE", ["h", "y"], [], None),
    ]
    get = [once, handle, ("READ_VARIABLE", ["h"], ["y"], None)]
    first = [handle, ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    ten = {"c": np.array([10, 10], np.float32)}
    y = {"y": {"type": 0, "shape": [2]}}
    graphs = [
        subgraph(x, [("NEG", ["x"], ["y"], None)], ["y"]),
        subgraph(x, add, ["y"], h=resource, **y),
        subgraph({}, get, ["y"], h=resource, **y),
        subgraph({}, first, [], ten, h=resource),
    ]
    keys = {"add": (1, [("x", 0)]), "get": (2, [])}
    names = [graph["names"] for graph in graphs]
    signatures = [
        {
            "inputs": [{"name": n, "tensor_index": i} for n, i in inputs],
            "outputs": [{"name": "y", "tensor_index": names[index].index("y")}],
            "signature_key": key,
            "subgraph_index": index,
        }
        for key, (index, inputs) in keys.items()
    ]
    return model(graphs, signature_defs=signatures)


@BOTH
def test_signatures_share_the_variables_of_their_interpreter(runtime):
    interpreter = runtime.Interpreter(model_content=with_a_variable())
    add, get = (interpreter.get_signature_runner(key) for key in ("add", "get"))
    x = np.array([1, 2], np.float32)
    for times in (1, 2):
        np.testing.assert_array_equal(add(x=x)["y"], 10 + times * x)
        np.testing.assert_array_equal(get()["y"], 10 + times * x)
    other = runtime.Interpreter(model_content=with_a_variable())
    np.testing.assert_array_equal(other.get_signature_runner("get")()["y"], [10, 10])


@BOTH
def test_reset_clears_what_recurrent_layers_keep_and_no_variable_of_the_model(runtime):
    (case,) = [c for c in cases("op") if c.name == "unidirectional_sequence_lstm_state_kept"]
    interpreter = runtime.Interpreter(model_path=str(case.path))
    interpreter.allocate_tensors()

    def ran() -> np.ndarray:
        for details in interpreter.get_input_details():
            x = np.full(details["shape"], 0.3, details["dtype"])
            interpreter.set_tensor(details["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])

    first, second = ran(), ran()
    assert not np.allclose(first, second)
    interpreter.reset_all_variables()
    np.testing.assert_array_equal(ran(), first)
    other = runtime.Interpreter(model_content=with_a_variable())
    add, get = (other.get_signature_runner(key) for key in ("add", "get"))
    added = add(x=np.array([1, 2], np.float32))["y"]
    other.reset_all_variables()
    np.testing.assert_array_equal(get()["y"], added)


def test_tensor_of_another_subgraph_is_refused_rather_than_one_of_the_first():
    content = model([subgraph({"x": ("float32", [2])}, [("ABS", ["x"], ["y"], None)], ["y"])])
    interpreter = ours.Interpreter(model_content=content)
    interpreter.allocate_tensors()
    index = interpreter.get_input_details()[0]["index"]
    assert interpreter.get_tensor(index, 0).shape == (2,)
    with pytest.raises(ValueError, match="subgraph 1"):
        interpreter.get_tensor(index, 1)
