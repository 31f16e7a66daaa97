"""Pages of caches: shared where sequences begin alike, kept, and given away."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import LimitExceeded
from penstock.stepping.pages import PagePool, digests

ELEMENTS = 6


def pool_of(pages: int) -> PagePool:
    return PagePool(ELEMENTS, pages * ELEMENTS * 4)


def test_digest_depends_on_all_pages_before() -> None:
    a, b = [*digests([b"x", b"y"])], [*digests([b"z", b"y"])]
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert [*digests([b"y"], a[0])] == a[1:]


def test_pool_without_pages_gives_none() -> None:
    pool = pool_of(2)
    pages = [pool.take(), pool.take()]
    assert sorted(pages) == [0, 1]
    assert pool.take() is None
    pool.drop(pages[0])
    assert pool.take() == pages[0]


def test_pool_has_one_page_at_least() -> None:
    assert pool_of(0).count == 1


def test_pool_of_more_than_all_memory_is_refused_or_costs_nothing() -> None:
    with pytest.raises(LimitExceeded, match="lower cache_bytes"):
        PagePool(ELEMENTS, 1 << 62)
    with suppress(LimitExceeded):  # where the system maps no such memory
        pool = PagePool(ELEMENTS, 1 << 40)
        assert pool.free == pool.count
        assert len(pool._holders) == 0


def test_kept_page_is_found_and_survives_its_sequence() -> None:
    pool = pool_of(2)
    page = pool.take()
    pool.keep(page, b"a", b"")
    pool.drop(page)
    assert pool.find(b"a") == page
    assert pool.is_shared(page)
    assert pool.find(b"b") is None


def test_pages_that_no_sequence_holds_are_given_away_by_last_use() -> None:
    pool = pool_of(3)
    pages = [pool.take() for _ in range(3)]
    for page, digest in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.keep(page, digest, b"")
        pool.drop(page)
    pool.drop(pool.find(b"a"))  # used last of all
    assert pool.take() == pages[1]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == pages[0]


def test_page_that_others_continue_is_given_away_behind_them() -> None:
    pool = pool_of(2)
    first, second = pool.take(), pool.take()
    pool.keep(first, b"a", b"")
    pool.keep(second, b"ab", b"a")
    pool.drop(first)
    pool.drop(second)
    pool.drop(pool.find(b"ab"))
    assert pool.take() == second
    assert pool.take() == first


def test_page_is_kept_only_behind_a_page_that_is() -> None:
    pool = pool_of(2)
    page = pool.take()
    pool.keep(page, b"ab", b"a")
    assert pool.kept == 0


def test_forget_frees_all_pages_that_no_sequence_holds() -> None:
    pool = pool_of(3)
    held, other = pool.take(), pool.take()
    pool.keep(held, b"a", b"")
    pool.keep(other, b"b", b"")
    pool.drop(other)
    pool.forget()
    assert (pool.kept, pool.free) == (1, 2)


@given(st.lists(st.tuples(st.sampled_from("tdkf"), st.integers(0, 9)), max_size=60))
def test_pages_are_free_or_held_whatever_is_done(actions: list[tuple[str, int]]) -> None:
    pool, held, kept = pool_of(5), [], 0
    for action, number in actions:
        if action == "t" and (page := pool.take()) is not None:
            assert page not in held
            held.append(page)
        elif action == "d" and held:
            pool.drop(held.pop(number % len(held)))
        elif action == "k" and held:
            kept += 1
            pool.keep(held[number % len(held)], b"%d" % number, b"")
        elif action == "f" and (page := pool.find(b"%d" % number)) is not None:
            held.append(page)
        own = {*held, *(prefix.page for prefix in pool._prefixes.values())}
        assert len(own) + pool.free == pool.count
        assert own.isdisjoint(pool._free)
