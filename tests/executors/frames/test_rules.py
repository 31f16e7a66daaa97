"""Rules of TensorFlow's control flow that are easy to get wrong, each on a graph that shows it.

In the drawings ``─>`` is a value and ``..>`` a control edge, T and F are the outputs of a Switch. An
``Enter*`` is a constant one. Counts are of living executions; what is not listed did not run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.executors.frames.rendezvous import Rendezvous
from tests.support.frame_runs import inputs, loop_counts, ran, refused
from tests.support.sweeps import scaled
from tests.support.tf_graphs import Type
from tests.support.timing import SOON


def test_merge_with_a_dead_control_input_stays_live() -> None:
    """
    x ─> switch ─T─> dead ..┐
    p ──────┘               v
    y ───────────────────> merge
    """
    g = inputs(x="int32", p="bool", y="int32")
    g.op("Identity", g.switch("x", "p", "switch") + ":1", name="dead")
    g.merge("y", "y", "^dead", name="merge")
    (value, index), counts = ran(g, {"x": 1, "p": False, "y": 7}, "merge", "merge:1")
    assert value == 7
    assert index in (0, 1)
    assert counts == {"switch": 1, "merge": 1}


@pytest.mark.parametrize("p", [True, False])
def test_control_edge_from_a_switch_is_live_and_from_its_dead_output_dead(p: bool) -> None:
    """
    x ─> switch ─T─> on ..> after_on
    p ──────┘ :
              :..> after_switch
    """
    g = inputs(x="int32", p="bool", y="int32")
    g.op("Identity", g.switch("x", "p", "switch") + ":1", name="on")
    g.op("Neg", "y", "^switch", name="after_switch")
    g.op("Neg", "y", "^on", name="after_on")
    feeds = {"x": 1, "p": p, "y": 5}
    values, counts = ran(g, feeds, "after_switch", targets=["after_on"])
    assert values == [-5]
    live = {"switch": 1, "after_switch": 1}
    assert counts == ({**live, "on": 1, "after_on": 1} if p else live)
    if not p:
        refused(g, feeds, "after_on", error=ps.DeadTensor, match="'after_on:0'")


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("p", [True, False])
def test_single_reader_of_a_switch_lives_if_its_output_was_chosen(p: bool, output: int) -> None:
    """
    x ─> switch ─F or T─> read ─> merge <── y
    p ──────┘
    """
    g = inputs(x="int32", p="bool", y="int32")
    read = g.op("Neg", f"{g.switch('x', 'p', 'switch')}:{output}", name="read")
    g.merge(read, "y", name="merge")
    feeds, live = {"x": 1, "p": p, "y": 5}, p == bool(output)
    _, counts = ran(g, feeds, "merge")
    assert counts == {"switch": 1, "merge": 1, **({"read": 1} if live else {})}
    if live:
        assert ran(g, feeds, "read")[0] == [-1]
    else:
        refused(g, feeds, "read", error=ps.DeadTensor, match=f"chose its output {1 - output}")


@pytest.mark.parametrize(("p", "n"), [(True, 4), (False, 4), (True, 0)])
def test_loop_in_an_untaken_branch_ends_dead(p: bool, n: int) -> None:
    """The dead Enter fires the loop's Merge, although its back edge never comes.

    x ─> switch ─T─> [ while i < n: i += 1 ] ─> merge
    p ──────┘ └─F──────────────────────────────> ┘
    """
    g = inputs(x="int32", p="bool", n="int32")
    switch = g.switch("x", "p", "switch")
    limit = g.switch("n", "p", "limit")
    left = g.loop("while", f"{switch}:1", f"{limit}:1")
    g.merge(switch, left, name="merge")
    (value, index), counts = ran(g, {"x": 0, "p": p, "n": n}, "merge", "merge:1")
    assert (value, index) == ((n, 1) if p else (0, 0))
    loop = loop_counts("while", n) if p else {}
    assert counts == {"switch": 1, "limit": 1, "merge": 1, **loop}


def test_dead_exits_of_earlier_iterations_do_not_leave_the_frame() -> None:
    """The Exit of a loop is dead in all iterations but the last. If a dead one left the loop, the
    Merge would only have dead inputs.

        [ while i < n: i += 1 ] ─> exit ─> merge
        x ─> switch ─T─> dead ──────────────> ┘
    """
    g = inputs(x="int32", p="bool", n="int32")
    g.op("Identity", g.switch("x", "p", "switch") + ":1", name="dead")
    g.merge("dead", g.loop("while", "x", "n"), name="merge")
    values, counts = ran(g, {"x": 0, "p": False, "n": 5}, "merge", "merge:1")
    assert values == [5, 1]
    assert counts == {"switch": 1, "merge": 1, **loop_counts("while", 5)}


def test_dead_control_edges_do_not_leave_their_iteration() -> None:
    """It leaves neither to the parent frame nor to the next iteration, although its value is live.

    body(y) ─> next(y)        dead ..> next(y)        last(y) ─> exit_1
    off ─> switch ─T─> dead                 dead ..> exit_1
    """
    g = inputs(zero="int32", n="int32", off="bool")
    left = g.loop("while", "zero", "n")
    off = g.enter("off", frame="while", constant=True, T="bool")
    switch = g.switch("while/i/merge", off, "switch")
    dead = g.op("Identity", f"{switch}:1", name="dead")
    y = g.merge(g.enter("zero", frame="while", name="y"), "y_next", name="y_merge")
    g.op("NextIteration", y, f"^{dead}", name="y_next")
    g.op("Exit", "while/i/switch", f"^{dead}", name="exit_1")
    g.merge(left, g.op("Neg", "exit_1", name="never"), name="join")
    feeds = {"zero": 0, "n": 3, "off": False}
    values, counts = ran(g, feeds, "join", "join:1", targets=["y_next"])
    assert values == [3, 0]
    assert counts["y_merge"] == 1
    assert counts["y_next"] == counts["exit_1"] == counts["never"] == counts["dead"] == 0
    assert counts["switch"] == 4


@pytest.mark.parametrize("which", [True, False])
def test_merge_of_a_dead_and_a_live_exit_takes_the_live_one(which: bool) -> None:
    """
    in the frame:   merge ─> switch(cond) ─F─> choice(which) ─F─> exit_0 ─> join
                                                    └─T─> negated ─> exit_1 ─┘
    """
    g = inputs(x="int32", n="int32", which="bool")
    g.loop("while", "x", "n")
    chosen = g.enter("which", frame="while", constant=True, name="which_in", T="bool")
    choice = g.switch("while/i/switch", chosen, "choice")
    g.op("Exit", choice, name="exit_0")
    g.op("Exit", g.op("Neg", f"{choice}:1", name="negated"), name="exit_1")
    g.merge("exit_0", "exit_1", name="join")
    values, counts = ran(g, {"x": 0, "n": 3, "which": which}, "join", "join:1")
    assert values == ([-3, 1] if which else [3, 0])
    loop = loop_counts("while", 3)
    del loop["while/i/exit"]  # it has no reader
    chain = {"negated": 1, "exit_1": 1} if which else {"exit_0": 1}
    assert counts == {"which_in": 1, "choice": 1, "join": 1, **loop, **chain}


def test_non_constant_enter_lives_in_the_first_iteration_only() -> None:
    """
    k ─> Enter ─────┐
                    v
    body(y) ─────> plus ─> next(y)
    """
    g = inputs(y="int32", k="int32", n="int32", zero="int32")
    g.loop("while", "zero", "n")
    once = g.enter("k", frame="while", name="once")
    left = g.carry("while", "y", "y", lambda y: g.op("AddV2", y, once, name="plus"))
    feeds = {"y": 10, "k": 5, "zero": 0}
    assert ran(g, {**feeds, "n": 0}, left)[0] == [10]
    values, counts = ran(g, {**feeds, "n": 1}, left)
    assert values == [15]
    del (loop := loop_counts("while", 1, "y"))["while/i/exit"]
    assert counts == {"once": 1, "plus": 1, **loop}
    refused(
        g, {**feeds, "n": 2}, left, error=ps.DeadTensor, match=r"'while/y/exit:0'.*never computed"
    )


def test_division_by_zero_in_an_untaken_branch_is_no_error() -> None:
    """
    x ─> switch ─T─> quotient (x / d) ─> merge
    p ──────┘ └─F─────────────────────> ┘
    """
    g = inputs(x="int32", d="int32", p="bool")
    switch = g.switch("x", "p", "switch")
    divisor = g.switch("d", "p", "divisor")
    g.merge(switch, g.op("FloorDiv", f"{switch}:1", f"{divisor}:1", name="quotient"), name="merge")
    values, counts = ran(g, {"x": 8, "d": 0, "p": False}, "merge")
    assert values == [8]
    assert counts == {"switch": 1, "divisor": 1, "merge": 1}
    assert ran(g, {"x": 8, "d": 3, "p": True}, "merge")[0] == [2]
    feeds = {"x": 8, "d": 0, "p": True}
    refused(g, feeds, "merge", error=ps.RunError, match="quotient")


def test_division_by_zero_in_a_loop_without_iterations_is_no_error() -> None:
    """
    y = x; while i < n: y = y / d
    """
    g = inputs(x="int32", d="int32", n="int32", zero="int32")
    g.loop("while", "zero", "n")
    divisor = g.enter("d", frame="while", constant=True, name="divisor")
    left = g.carry("while", "y", "x", lambda y: g.op("FloorDiv", y, divisor, name="quotient"))
    feeds = {"x": 8, "d": 0, "zero": 0}
    values, counts = ran(g, {**feeds, "n": 0}, left)
    assert values == [8]
    del (loop := loop_counts("while", 0, "y"))["while/i/exit"]
    assert counts == {"divisor": 1, **loop}
    refused(g, {**feeds, "n": 1}, left, error=ps.RunError, match="quotient")


def test_merge_behind_a_dead_merge_takes_its_other_input() -> None:
    """
    x ─> switch ─T─> a ─> first ─> second <── y
    p ──────┘ └─T─> b ──> ┘
    """
    g = inputs(x="int32", p="bool", y="int32")
    switch = g.switch("x", "p", "switch")
    a, b = (g.op("Identity", f"{switch}:1", name=name) for name in "ab")
    g.merge(g.merge(a, b, name="first"), "y", name="second")
    values, counts = ran(g, {"x": 1, "p": False, "y": 2}, "second", "second:1")
    assert values == [2, 1]
    assert counts == {"switch": 1, "second": 1}
    refused(
        g, {"x": 1, "p": False, "y": 2}, "first:1", error=ps.DeadTensor, match="'switch'|switch"
    )


def test_root_frame_has_iterations_one_after_another() -> None:
    """Values of the first, such as ``x``, are missing in the second.

    x ─> add ─> NextIteration ─> y ─> both <── x
    """
    g = inputs(x="int32")
    g.op("Neg", g.op("NextIteration", g.op("AddV2", "x", "x", name="add"), name="next"), name="y")
    values, counts = ran(g, {"x": 3}, "y")
    assert values == [-6]
    assert counts == {"add": 1, "next": 1, "y": 1}
    g.op("AddV2", "y", "x", name="both")
    refused(g, {"x": 3}, "both", error=ps.DeadTensor, match="'both:0' was never computed")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, *scaled(64, 20_000)])
@pytest.mark.parametrize("live", [True, False])
def test_merge_waits_for_any_number_of_control_inputs(count: int, live: bool) -> None:
    """Half of them are dead, which makes no difference.

    x ─> switch ─T─> c1, c3, ...  ..> merge <── y, switch:T
    p ──────┘ └─F─> c0, c2, ...   ..> ┘
    """
    g = inputs(x="int32", p="bool", y="int32")
    switch = g.switch("x", "p", "switch")
    for i in range(count):
        g.op("Identity", f"{switch}:{i % 2}", name=f"c{i}")
    data = "y" if live else f"{switch}:1"
    g.merge(data, f"{switch}:1", *[f"^c{i}" for i in range(count)], name="merge")
    feeds = {"x": 1, "p": False, "y": 9}
    if not live:
        refused(g, feeds, "merge", error=ps.DeadTensor, match="switch.*chose its output 0")
        return
    session = ps.compile(g.bytes(), executor="frames", backends=["numpy"])
    trace = ps.Trace()
    outputs = session.run(feeds, ["merge", "merge:1"], trace=trace)
    assert (outputs["merge"], outputs["merge:1"]) == (9, 0)
    living = {f"c{i}": 1 for i in range(0, count, 2)}
    assert trace.counts == {"switch": 1, "merge": 1, **living}


def test_merge_of_many_inputs_takes_the_live_one() -> None:
    """
    x ─> _SwitchN(i) ─0..299─> merge
    """
    g = inputs(x="int32", i="int32")
    g.node("_SwitchN", "x", "i", name="switch", num_outs=300, T=Type("int32"))
    g.merge(*[f"switch:{i}" for i in range(300)], name="merge")
    values, counts = ran(g, {"x": 4, "i": 257}, "merge", "merge:1")
    assert values == [4, 257]
    assert counts == {"switch": 1, "merge": 1}


@pytest.mark.parametrize("dead", [False, True])
def test_late_constant_enter_reaches_all_iterations(dead: bool) -> None:
    """The loop counts to n without k, which leaves another loop much later.

    [ while j < 200 ] ─> late ─> Enter* ─> seen <── while/i/body
    [ while i < n ] ─> exit
    """
    g = inputs(zero="int32", n="int32", far="int32", p="bool")
    late = g.switch(g.loop("other", "zero", "far"), "p", "late")
    entered = g.enter(f"{late}:1" if dead else late, frame="while", constant=True, name="k")
    g.loop("while", "zero", "n", parallel=32)
    g.op("AddV2", "while/i/body", entered, name="seen")
    feeds = {"zero": 0, "n": 7, "far": 200, "p": False}
    values, counts = ran(g, feeds, "while/i/exit", targets=["seen"])
    assert values == [7]
    loops = {**loop_counts("while", 7), **loop_counts("other", 200)}
    assert counts == {**loops, "late": 1, **({} if dead else {"k": 1, "seen": 7})}


def test_dead_next_iteration_begins_no_iteration() -> None:
    """Odd values of the variable y are not carried on: from the first odd one on there is none, and
    only i continues.

        body(y) ─> odd ─F─> next(y)
                    ^
        i % 2 ──────┘
    """
    g = inputs(zero="int32", n="int32")
    left = g.loop("while", "zero", "n")

    def step(y: str) -> str:
        two = g.const(np.int32(2), "two", f"^{y}")
        rest = g.op("FloorMod", "while/i/body", two, name="rest")
        return g.switch(y, g.node("Cast", rest, name="odd", SrcT=Type("int32"), DstT=Type("bool")))

    g.carry("while", "y", "zero", step)
    values, counts = ran(g, {"zero": 0, "n": 6}, left, targets=["while/y/next"])
    assert values == [6]
    # y exists in the iterations 0 and 1, and is carried from the first to the second
    assert counts["while/y/merge"] == counts["while/y/body"] == 2
    assert counts["while/y/next"] == 1
    assert {k: v for k, v in counts.items() if k in loop_counts("while", 6)} == loop_counts(
        "while", 6
    )


def test_dead_recv_still_consumes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two devices, in each iteration of a loop; odd values are sent there and back.

    cpu:0                    :     cpu:1
    i ─> switch ─T─> send ── : ──> recv ─> there
    i % 2 ─┘     ┌── recv <─ : ──────────── send
              merge ─> next(y)
    """
    sent: list[bool] = []
    left: list[int] = []
    send, close = Rendezvous.send, Rendezvous.close

    def watched(self: Rendezvous, key: Any, value: Any, dead: bool = False) -> None:
        if "switch:1" in str(key):
            sent.append(dead)
        send(self, key, value, dead)

    def closed(self: Rendezvous) -> None:
        left.append(len(self))
        close(self)

    monkeypatch.setattr(Rendezvous, "send", watched)
    monkeypatch.setattr(Rendezvous, "close", closed)
    g = inputs(zero="int32", n="int32")
    g.loop("while", "zero", "n")

    def step(y: str) -> str:
        two = g.const(np.int32(2), "two", "^while/i/body")
        rest = g.op("FloorMod", "while/i/body", two, name="rest")
        odd = g.node("Cast", rest, name="odd", SrcT=Type("int32"), DstT=Type("bool"))
        chosen = g.switch("while/i/body", odd, "switch")
        there = g.op("Identity", f"{chosen}:1", name="there")
        return g.merge(there, f"{chosen}:0", name="merge")

    g.carry("while", "y", "zero", step)
    for node in g.proto.node:
        node.device = "/device:CPU:1" if node.name == "there" else "/device:CPU:0"
    session = ps.compile(g.bytes(), "frames", backends=["numpy"], devices=2)
    trace = ps.Trace()
    outputs = session.run({"zero": 0, "n": 6}, ["while/y/exit"], timeout=SOON, trace=trace)
    assert outputs["while/y/exit"] == 5
    assert trace.counts["there"] == 3
    # Values that the predicate excludes are dead in the last iteration, too.
    assert Counter(sent) == {False: 3, True: 4}
    assert left == [0]


def test_dead_enter_kills_the_merge_of_its_loop_at_once() -> None:
    """The back edge depends on the loop alone, so that the Merge must not wait for it.

    x ─> switch ─T─> Enter ─> loop ─> Exit ─> merge <── y
    p ──────┘                  ^ │
                             next <┘
    """
    g = inputs(x="int32", p="bool", y="int32")
    switch = g.switch("x", "p", "switch")
    entered = g.enter(f"{switch}:1", frame="frame", name="enter")
    g.merge(entered, "next", name="loop")
    g.op("NextIteration", "loop", name="next")
    g.merge(g.op("Exit", "loop", name="exit"), "y", name="merge")
    values, counts = ran(g, {"x": 1, "p": False, "y": 2}, "merge", "merge:1")
    assert values == [2, 1]
    assert counts == {"switch": 1, "merge": 1}
    refused(g, {"x": 1, "p": False}, "exit", error=ps.DeadTensor, match="switch")
