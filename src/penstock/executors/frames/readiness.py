"""How a run counts what a node still waits for: the encoding, and its five transitions.

Every iteration has a list of integers, ``waits``; each node has one place in it, a Merge two.

A node other than a Merge counts its inputs that are no constants and its control inputs, one each,
and adds ``DEATH`` once any of them was dead. A Merge counts ``MERGE_DATA`` until the first live
data input arrives, and ``MERGE_CONTROL`` for each control input; the place behind is the number of
dead data inputs so far.

===================== ================== ====================================== ====================
arrives               at                 new counts                             then the node
===================== ================== ====================================== ====================
live data or control  ordinary node      waits - 1                              runs if 0,
                                                                                dies if DEATH
dead data or control  ordinary node      (waits | DEATH) - 1                    dies if DEATH
live data             Merge, data bit    waits - MERGE_DATA                     runs if 0
live data             Merge, no data bit unchanged: the first one has won       waits on
dead data             Merge              dead + 1; waits = 0 if it dies         dies if all data are
                                                                                dead, no control is
                                                                                left [*]_
control, dead or live Merge              waits - MERGE_CONTROL; 0 if it dies    runs if 0, dies as
                                                                                above
===================== ================== ====================================== ====================

.. [*] A dead Enter kills the Merge of its loop at once: the back edge would never come.

For example, a node with two data inputs and one control input, of which the second is dead:

>>> waits, readiness = live_input(3)
>>> waits, readiness = dead_input(waits)
>>> waits == DEATH + 1, readiness
(True, <Readiness.WAITS: 0>)
>>> live_input(waits)[1]
<Readiness.DIES: 2>

``scheduler.TokenScheduler`` and the loop of ``run.FramesRun`` have these transitions inlined, since
a call for each token takes a third longer. The functions here are the reference, which tests hold
the inlined copies to.
"""

from __future__ import annotations

from enum import IntEnum

DEATH = 1 << 29
"""Set in what an ordinary node waits for once one of its inputs was dead."""
MERGE_DATA = 1
"""What a Merge waits for while none of its data inputs has arrived alive."""
MERGE_CONTROL = 2
"""What a Merge waits for for each of its control inputs."""


class Readiness(IntEnum):
    """What becomes of a node after a token has arrived."""

    WAITS = 0
    RUNS = 1
    DIES = 2


def live_input(waits: int) -> tuple[int, Readiness]:
    """A live data or control input of an ordinary node arrives."""
    waits -= 1
    if not waits:
        return waits, Readiness.RUNS
    return waits, Readiness.DIES if waits == DEATH else Readiness.WAITS


def dead_input(waits: int) -> tuple[int, Readiness]:
    """A dead data or control input of an ordinary node arrives."""
    waits = (waits | DEATH) - 1
    return waits, Readiness.DIES if waits == DEATH else Readiness.WAITS


def merge_live_input(waits: int) -> tuple[int, Readiness]:
    """A live data input of a Merge arrives; only the first one counts."""
    if not waits & MERGE_DATA:
        return waits, Readiness.WAITS
    waits -= MERGE_DATA
    return waits, Readiness.WAITS if waits else Readiness.RUNS


def merge_dead_input(
    waits: int, dead: int, data_inputs: int, entering: bool
) -> tuple[int, int, Readiness]:
    """A dead data input of a Merge arrives, from an Enter if ``entering``.

    Returns what the Merge waits for, and how many of its data inputs are dead.
    """
    dead += 1
    if waits == MERGE_DATA and (entering or dead == data_inputs):
        return 0, dead, Readiness.DIES
    return waits, dead, Readiness.WAITS


def merge_control_input(waits: int, dead: int, data_inputs: int) -> tuple[int, Readiness]:
    """A control input of a Merge arrives, which may be dead."""
    waits -= MERGE_CONTROL
    if not waits:
        return waits, Readiness.RUNS
    if waits == MERGE_DATA and dead == data_inputs:
        return 0, Readiness.DIES
    return waits, Readiness.WAITS
