"""Histograms count values by bucket, as Prometheus does."""

from __future__ import annotations

import math

from penstock.serving.histogram import ROWS, SECONDS, Histogram


def test_value_is_counted_in_the_first_bucket_that_it_does_not_exceed():
    histogram = Histogram((1.0, 2.0, math.inf))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    histogram.add(2.0, times=3)
    assert histogram.cumulative() == [2, 6, 7]
    assert (histogram.count, histogram.total) == (7, 16.0)


def test_copy_is_not_changed_by_later_values():
    histogram = Histogram()
    copy = histogram.copy()
    histogram.add(1.0)
    assert (copy.count, copy.total, histogram.count) == (0, 0.0, 1)


def test_buckets_begin_at_a_tenth_of_a_millisecond_and_end_at_infinity():
    for bounds in (SECONDS, ROWS):
        assert [*bounds] == sorted(set(bounds))
        assert bounds[-1] == math.inf
    assert SECONDS[0] == 0.0001
    assert sum(bound < 0.005 for bound in SECONDS) == 5
