"""Properties that are computed once, on each object, without a lock."""

from __future__ import annotations

import threading

from penstock.core.records import cached_property
from tests.support.timing import SOON


class Square:
    def __init__(self, x: int, meet: threading.Barrier | None = None) -> None:
        self.x, self.calls, self.meet = x, 0, meet

    @cached_property
    def area(self) -> int:
        """The area."""
        self.calls += 1
        if self.meet is not None:
            self.meet.wait(SOON)
        return self.x * self.x


def test_it_is_computed_once_and_can_be_set_and_forgotten():
    square = Square(3)
    assert (square.area, square.area, square.calls) == (9, 9, 1)
    square.area = 4
    assert (square.area, square.calls) == (4, 1)
    del square.area
    assert (square.area, square.calls) == (9, 2)
    assert Square.area.__doc__ == "The area."


def test_threads_compute_those_of_several_objects_at_once():
    """With a lock of the class one would wait for the other without end."""
    meet = threading.Barrier(2)
    squares = [Square(2, meet), Square(3, meet)]
    threads = [threading.Thread(target=lambda s=s: s.area) for s in squares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert [square.__dict__.get("area") for square in squares] == [4, 9]


def test_threads_that_compute_the_same_get_one_object():
    class Made:
        meet = threading.Barrier(2)

        @cached_property
        def part(self) -> object:
            self.meet.wait(SOON)
            return object()

    made, got = Made(), []
    threads = [threading.Thread(target=lambda: got.append(made.part)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(got) == 2
    assert got[0] is got[1] is made.part
