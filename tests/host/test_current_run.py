"""The run that a thread works for, and the bytes that a run may allocate."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.checkpoints import THREAD, checkpoint, with_checkpoints
from penstock.executors.control import CancelToken, begin_run
from penstock.host.current_run import (
    Budget,
    BudgetError,
    copy_within_budget,
    keep,
    reserve,
    working_for,
)


def test_budget_counts_arrays_until_they_are_freed():
    budget = Budget(20_000, taken=5_000)
    kept = [np.zeros(1000) for _ in range(1)]
    budget.keep(kept[0])
    with pytest.raises(BudgetError, match=r"10000 bytes more.*Limits.max_bytes = 20000 only 6744"):
        budget.reserve(10_000)
    kept.clear()
    budget.reserve(15_000)
    with pytest.raises(BudgetError):
        budget.reserve(15_001)


def test_budget_counts_an_array_and_its_views_once():
    budget, array = Budget(10_000), np.zeros(1000)
    for part in (array, array[:5], array.reshape(10, 100)[2:]):
        budget.keep(part)
    budget.reserve(1_500)
    with pytest.raises(BudgetError):
        budget.reserve(2_500)


def test_budget_forgets_freed_arrays_as_it_goes():
    budget = Budget(2**40)
    for _ in range(10_000):
        budget.keep(np.zeros(1))
    assert len(budget._arrays) < 2_000


def test_kernel_asks_the_run_that_its_thread_works_for():
    control = begin_run(None, None)
    control.budget = Budget(1000)
    reserve(10**9)  # of no run
    array = np.zeros(50)
    assert working_for(control, keep, array) is array
    with pytest.raises(BudgetError):
        working_for(control, copy_within_budget, array)
    with pytest.raises(BudgetError):
        working_for(control, reserve, 500)
    assert THREAD.run is None


def test_checkpoint_raises_what_the_run_was_stopped_with():
    token = CancelToken()
    control = begin_run(None, token)

    def kernel() -> None:
        checkpoint()
        for i in with_checkpoints(range(10**9)):
            if i == 100:
                token.cancel()

    with pytest.raises(Exception, match="cancelled"):
        working_for(control, kernel)
    checkpoint()  # outside of a run
