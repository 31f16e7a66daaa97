"""Tests of capabilities and closeable objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from penstock.core import Closeable, capability


class HasBoth(Protocol):
    @property
    def first(self) -> Any: ...

    def second(self) -> int: ...


def test_owner_with_all_members_has_the_capability() -> None:
    owner = SimpleNamespace(first=0, second=int)
    assert capability(owner, HasBoth) is owner


def test_owner_that_lacks_a_member_does_not_have_it() -> None:
    assert capability(SimpleNamespace(first=0), HasBoth) is None


def test_member_that_is_none_counts_as_missing() -> None:
    assert capability(SimpleNamespace(first=None, second=int), HasBoth) is None


def test_closeable_object_closes_after_an_error() -> None:
    class Resource(Closeable):
        is_open = True

        def close(self) -> None:
            self.is_open = False

    with pytest.raises(KeyError), Resource() as resource:
        assert resource.is_open
        raise KeyError
    assert not resource.is_open
