"""The variables of sessions: listed, read, set, saved, shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock as ps
from penstock.core.types import FLOAT32, TensorType
from tests.models import test_zoo
from tests.support.tf_graphs import Builder, Shape, Type

FOLDER = Path(test_zoo.__file__).parent / "tf_saved"
STATEFUL, FROZEN, VERSION_1 = FOLDER / "stateful", FOLDER / "frozen", FOLDER / "v1"


def counter(**options: Any) -> ps.Session:
    """A session that adds to the variable "n"."""
    return ps.compile(STATEFUL, signature="count", **options)


def add(session: ps.Session, by: int) -> int:
    return int(session.run({"by": np.int64(by)})["n"])


def unset() -> bytes:
    """A graph of version 1 that reads "v" and has an initializer for it."""
    g = Builder()
    g.node("VariableV2", name="v", dtype=Type("float32"), shape=Shape([2]))
    g.const(np.array([1, 2], np.float32), "first")
    g.node("Assign", "v", "first", name="init", T=Type("float32"))
    g.node("Identity", "v", name="y", T=Type("float32"))
    return g.bytes()


def test_variables_are_listed_with_their_types() -> None:
    variables = counter().variables
    assert list(variables) == ["b", "k", "n", "w"]
    assert variables.types["w"] == TensorType(FLOAT32, (3, 4))
    assert "n" in variables
    assert "m" not in variables
    assert variables.get("m") is None
    assert "4 variables" in variables._repr_html_()
    assert repr(variables).startswith("Variables('b': float32[4]")


def test_variables_of_a_model_without_any_are_none() -> None:
    g = Builder()
    g.const(np.zeros(2, np.float32), "c")
    variables = ps.compile(g.bytes()).variables
    assert len(variables) == 0
    with pytest.raises(ps.InvalidInput, match="no variable 'v'; it has none"):
        variables["v"]


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_value_that_is_set_is_what_the_next_run_reads(executor: str) -> None:
    session = counter(executor=executor)
    assert add(session, 3) == 3
    assert session.variables["n"] == 3
    session.variables["n"] = 10
    assert add(session, 1) == 11
    session.variables["n"] -= 1
    assert add(session, 0) == 10


def test_variables_that_are_reset_have_their_first_values() -> None:
    session = counter()
    add(session, 3)
    session.variables["b"] = np.full(4, 9, np.float32)
    session.variables.reset(["n"])
    assert add(session, 1) == 1
    assert session.variables["b"][0] == 9
    session.variables.reset()
    np.testing.assert_array_equal(session.variables["b"], [0, 1, 2, 3])
    assert add(session, 2) == 2
    with pytest.raises(ps.InvalidInput, match="no variable 'm'"):
        session.variables.reset(["m"])


def test_value_that_is_read_is_a_copy() -> None:
    variables = counter().variables
    variables["b"][:] = 7
    np.testing.assert_array_equal(variables["b"], [0, 1, 2, 3])
    given = np.ones(4, np.float32)
    variables["b"] = given
    given[:] = 7
    np.testing.assert_array_equal(variables["b"], np.ones(4))


def test_sessions_of_one_model_have_variables_of_their_own() -> None:
    model = ps.load(STATEFUL, signature="count")
    first, second = ps.compile(model), ps.compile(model)
    add(first, 3)
    assert second.variables["n"] == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("m", 1, "no variable 'm'; it has 'b', 'k', 'n', 'w'"),
        ("n", 1.5, "variable 'n' of int64.* cannot be converted from a float"),
        ("n", 2**70, "variable 'n' of int64.* cannot be converted from a int"),
        ("n", np.float32(1), r"variable 'n' is int64\[\], not float32\[\]"),
        ("n", [1], r"variable 'n' is int64\[\], not int64\[1\]"),
        ("b", ["a"], "variable 'b' of float32.* cannot be converted from a list"),
        ("b", np.zeros(3, np.float32), r"variable 'b' is float32\[4\], not float32\[3\]"),
    ],
)
def test_value_that_does_not_fit_changes_no_variable(name: str, value: Any, message: str) -> None:
    variables = counter().variables
    with pytest.raises(ps.InvalidInput, match=message):
        variables.update({"k": variables["k"] + 1, name: value})
    np.testing.assert_array_equal(variables["k"], counter().variables["k"])


def test_variable_without_a_value_says_so_until_it_has_one() -> None:
    session = ps.compile(unset())
    with pytest.raises(ps.InvalidInput, match="variable 'v' has no value yet: set it, or run its"):
        session.variables["v"]
    assert session.variables.get("v") is None
    session.run({}, [], targets=["init"])
    np.testing.assert_array_equal(session.variables["v"], [1, 2])
    other = ps.compile(unset())
    other.variables["v"] = [3, 4]
    np.testing.assert_array_equal(other.run({}, ["y"])["y"], [3, 4])


def test_variables_that_nothing_assigns_to_can_be_read_but_not_set() -> None:
    for session in (ps.compile(FROZEN), ps.compile(VERSION_1)):
        variables = session.variables
        assert variables.constant
        name = next(iter(variables))
        assert variables[name].size
        with pytest.raises(ps.InvalidInput, match="cannot be set: nothing in the model assigns"):
            variables[name] = variables[name]


# Files.


def test_saved_values_are_restored(tmp_path: Path) -> None:
    first = counter()
    add(first, 3)
    first.variables.save(tmp_path / "v")
    add(first, 1)
    first.variables.restore(tmp_path / "v")
    assert add(first, 0) == 3
    second = counter()
    second.variables.restore(str(tmp_path / "v"))
    assert add(second, 2) == 5


def test_other_programs_read_and_write_saved_values(tmp_path: Path) -> None:
    session = counter()
    add(session, 3)
    session.variables.save(tmp_path / "v")
    arrays = load_file(tmp_path / "v")
    assert arrays.keys() == {"b", "k", "n", "w"}
    assert arrays["n"] == 3
    save_file({**arrays, "n": np.array(7)}, tmp_path / "other")
    session.variables.restore(tmp_path / "other")
    assert add(session, 0) == 7


def test_variables_without_a_value_have_none_when_they_are_restored(tmp_path: Path) -> None:
    session = ps.compile(unset())
    session.variables.save(tmp_path / "v")
    session.variables["v"] = [3, 4]
    session.variables.restore(tmp_path / "v")
    assert session.variables.get("v") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("n"), "for another model: it lacks 'n'; to set some"),
        (lambda arrays: arrays.update(m=arrays["n"]), "it has further 'm'"),
        (lambda arrays: arrays.update(n=arrays["b"]), r"'n' is int64\[\], not float32\[4\]"),
    ],
)
def test_file_of_another_model_changes_nothing(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    session = counter()
    arrays = {name: np.array(value + 1) for name, value in session.variables.items()}
    change(arrays)
    save_file(arrays, tmp_path / "v")
    with pytest.raises(ps.InvalidInput, match=message):
        session.variables.restore(tmp_path / "v")
    assert session.variables["b"][0] == session.variables["n"] == 0


@pytest.mark.parametrize("text", ["1", "[1]", "{"])
def test_file_whose_names_of_unset_variables_are_none_is_refused(tmp_path: Path, text: str) -> None:
    save_file({}, tmp_path / "v", {"penstock.unset": text})
    with pytest.raises(ps.InvalidInput, match=r"'penstock\.unset' is not a list of names"):
        ps.compile(unset()).variables.restore(tmp_path / "v")


def test_wrong_path_is_refused(tmp_path: Path) -> None:
    for function in (counter().variables.save, counter().variables.restore):
        with pytest.raises(TypeError, match="path=3: a path is needed"):
            function(3)
    with pytest.raises(FileNotFoundError):
        counter().variables.restore(tmp_path / "none")


def test_saved_session_starts_with_the_first_values_and_lists_variables(tmp_path: Path) -> None:
    for path in (STATEFUL, FROZEN):
        session = ps.compile(path, executor="linear")
        session.save(tmp_path / "s")
        with ps.open(tmp_path / "s") as opened:
            assert list(opened.variables) == list(session.variables)
            assert opened.variables.constant == session.variables.constant
            np.testing.assert_array_equal(opened.variables["w"], session.variables["w"])


# Shared.


@pytest.mark.parametrize("executor", ["linear", "frames"])
def test_sessions_share_variables_that_are_given(executor: str) -> None:
    first = ps.compile(STATEFUL, executor=executor)
    second = counter(variables=first.variables, executor=executor)
    third = ps.compile(ps.load(STATEFUL, signature="count"), variables=second.variables)
    assert [add(second, 3), add(third, 1), int(first.variables["n"])] == [3, 4, 4]
    x = {"x": np.zeros((1, 3), np.float32)}
    np.testing.assert_array_equal(first.run(x)["y"], [[0, 1, 2, 3]])
    third.variables["b"] = np.ones(4, np.float32)
    np.testing.assert_array_equal(first.run(x)["y"], [[1, 1, 1, 1]])


def test_graphs_that_name_a_variable_share_it() -> None:
    """As with the graphs for training and inference in TensorFlow 1."""
    g = Builder()
    g.node("Placeholder", name="x", dtype=Type("float32"), shape=Shape([2]))
    for name in ("v", "other"):
        g.node("VarHandleOp", name=name, dtype=Type("float32"), shape=Shape([2]), shared_name=name)
        g.node("AssignVariableOp", name, "x", name=f"{name}/set", dtype=Type("float32"))
    first = ps.compile(unset())
    second = ps.compile(g.bytes(), variables=first.variables)
    x = np.array([5, 6], np.float32)
    second.run({"x": x}, [], targets=["v/set", "other/set"])
    np.testing.assert_array_equal(first.run({}, ["y"])["y"], x)
    assert list(first.variables) == ["v"]
    assert list(second.variables) == ["other", "v"]


def test_variables_of_another_model_are_refused() -> None:
    variables = counter().variables
    for path in (VERSION_1, FROZEN):
        with pytest.raises(ps.InvalidInput, match="only one of the two models assigns to its var"):
            ps.compile(path, variables=variables)
    g = Builder()
    g.node("VarHandleOp", name="n", dtype=Type("float32"), shape=Shape([2]), shared_name="n")
    g.const(np.zeros(2, np.float32), "c")
    g.node("AssignVariableOp", "n", "c", name="set", dtype=Type("float32"))
    with pytest.raises(
        ps.InvalidInput, match=r"variable 'n' is declared as .*: these are variables of"
    ):
        ps.compile(g.bytes(), variables=variables)
    with pytest.raises(TypeError, match=r"variables=\{\}"):
        ps.compile(STATEFUL, variables={})
