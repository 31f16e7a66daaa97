"""Problems are collected, and raised together."""

from __future__ import annotations

import pytest

from penstock.core.errors import MAX_PROBLEMS, MOST_COUNTED, InvalidModel, Unsupported
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.common.diagnostics import (
    Diagnostics,
    InexpressibleError,
    NodeError,
    TensorError,
)


@pytest.fixture
def diagnostics() -> Diagnostics:
    return Diagnostics("net.json", DEFAULT_LIMITS)


def test_raise_collected_raises_from_the_first_problem_on(diagnostics: Diagnostics) -> None:
    diagnostics.raise_collected()
    diagnostics.problem("it is odd")
    with pytest.raises(InvalidModel, match="it is odd"):
        diagnostics.raise_collected()


def test_problems_are_raised_before_unsupported_operations(diagnostics: Diagnostics) -> None:
    diagnostics.record(InexpressibleError("it is odd"), "x.Odd", "a in net.json", "a in net.json")
    diagnostics.record(NodeError("has no inputs"), "x.Add", "b in net.json", "b (Add)")
    diagnostics.record(TensorError("is damaged"), "x.Const", "c in net.json", "c (Const)")
    with pytest.raises(InvalidModel) as caught:
        diagnostics.raise_collected()
    assert caught.value.problems == ("b (Add) has no inputs", "c (Const) is damaged")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (NodeError("has no inputs"), "b (Add) has no inputs"),
        (
            KeyError("axis"),
            "b (Add) has attributes or inputs that it cannot have: KeyError('axis')",
        ),
    ],
)
def test_errors_of_a_conversion_become_problems_of_its_node(
    diagnostics: Diagnostics, error: Exception, problem: str
) -> None:
    def rule() -> None:
        raise error

    diagnostics.convert(rule, "x.Add", "b in net.json", "b (Add)")
    with pytest.raises(InvalidModel) as caught:
        diagnostics.raise_collected()
    assert caught.value.problems[0].startswith(problem)


def test_unsupported_nodes_are_grouped_by_operation_and_reason(diagnostics: Diagnostics) -> None:
    for i in range(7):
        diagnostics.unsupported("x.Odd", "it is odd", f"n{i}")
    with pytest.raises(Unsupported, match=r"x\.Odd: it is odd \(used by n0, .*, n4 and 2 more\)"):
        diagnostics.raise_collected()


def test_unsupported_operations_beyond_the_maximum_are_counted_in_the_text_alone(
    diagnostics: Diagnostics,
) -> None:
    for i in range(MAX_PROBLEMS + 3):
        diagnostics.unsupported(f"x.Odd{i}", "it is odd", f"n{i}")
    with pytest.raises(Unsupported, match="23 unsupported") as caught:
        diagnostics.raise_collected()
    assert len(caught.value.operations) == MAX_PROBLEMS + 3
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_PROBLEMS + 2
    assert lines[-1] == "  and 3 more"


def test_shared_problem_is_reported_once_with_its_nodes(diagnostics: Diagnostics) -> None:
    for i in range(6):
        diagnostics.shared_problem("domain 'x' is undeclared", f"n{i}")
    with pytest.raises(InvalidModel) as caught:
        diagnostics.raise_collected()
    assert caught.value.problems == (
        "domain 'x' is undeclared (used by n0, n1, n2, n3, n4 and 1 more)",
    )


def test_problems_beyond_the_maximum_are_counted(diagnostics: Diagnostics) -> None:
    for i in range(MAX_PROBLEMS + 3):
        diagnostics.problem(f"problem {i}")
    with pytest.raises(InvalidModel) as caught:
        diagnostics.raise_collected()
    assert caught.value.problems[MAX_PROBLEMS - 1 :] == (
        f"problem {MAX_PROBLEMS - 1}",
        "and 3 more",
    )


def test_node_count_is_summed_over_graphs() -> None:
    diagnostics = Diagnostics("net.json", Limits(max_nodes=5))
    diagnostics.count_nodes(3)
    diagnostics.count_nodes(2)
    with pytest.raises(InvalidModel, match=r"net\.json has more nodes than Limits\.max_nodes = 5"):
        diagnostics.count_nodes(1)


def test_depth_beyond_the_limit_is_refused() -> None:
    diagnostics = Diagnostics("net.json", Limits(max_depth=2))
    diagnostics.check_depth(2, "the loop")
    with pytest.raises(InvalidModel, match=r"the loop nests deeper than Limits\.max_depth = 2"):
        diagnostics.check_depth(3, "the loop")


def test_import_ends_at_thousands_of_faults() -> None:
    diagnostics = Diagnostics("net.json", Limits())
    with pytest.raises(InvalidModel, match=f"and at least {MOST_COUNTED} more"):
        for i in range(MOST_COUNTED + MAX_PROBLEMS):
            diagnostics.problem(f"fault {i}")
    with pytest.raises(InvalidModel):
        diagnostics.raise_collected()


def test_import_ends_at_thousands_of_unsupported_nodes() -> None:
    diagnostics = Diagnostics("net.json", Limits())
    with pytest.raises(Unsupported):
        for i in range(10 * MOST_COUNTED):
            diagnostics.unsupported("Foo", "no kernel is available for it", f"node {i}")
