"""The operations of Penstock's own domain, by name."""

from __future__ import annotations

import pytest

from penstock.ops import internal
from penstock.ops.internal import internal_operation


@pytest.mark.parametrize("name", sorted(internal.INTERNAL))
def test_internal_operation_has_the_name_it_is_found_by(name: str) -> None:
    operation = internal_operation(name, "penstock")
    assert operation is not None
    assert (operation.name, operation.domain) == (name, "penstock")


@pytest.mark.parametrize(("name", "domain"), [("Fused", ""), ("Relu", "penstock")])
def test_other_names_and_domains_are_no_internal_operations(name: str, domain: str) -> None:
    assert internal_operation(name, domain) is None
