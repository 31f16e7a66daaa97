"""Chains of dependent nodes, without a table of which node reaches which.

``transitive_reduction`` drops the edges that other paths imply, and ``implied_edges`` lists them.
``fewest_chains`` covers all nodes with the least number of chains, the width of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import topological_order
from penstock.core.checkpoints import with_checkpoints

# Nodes whose descendants are computed at once, as the bits of one integer for each node.
_BATCH = 4096

_NONE = -1


def transitive_reduction(dag: Dag) -> Dag:
    """``dag`` without the edges that other paths imply: its transitive reduction (Aho, Garey and
    Ullman 1972, "The transitive reduction of a directed graph"). Costs as of ``implied_edges``."""
    without = implied_edges(topological_order(dag), dag.pred)
    return Dag(dag.n, (edge for edge in dag.edges if edge not in without)) if without else dag


def implied_edges(order: Sequence[int], pred: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """The edges (p, i), p in ``pred[i]``, for which another path leads from p to i.

    ``order`` has all nodes, each after those of its ``pred``. Descendants are computed for some
    thousand nodes at a time, as the bits of one integer for each node of the stretch of ``order``
    in which their edges end. Memory is linear, and so is time for edges that are short in
    ``order``; for long ones it is quadratic with a very small factor: 100,000 nodes with 300,000
    random edges take seconds.
    """
    place = [0] * len(order)
    until: dict[int, int] = {}
    for k, i in enumerate(with_checkpoints(order)):
        place[i] = k
        # The only edge into a node is implied by no other path.
        if len(pred[i]) > 1:
            until.update(dict.fromkeys(pred[i], k))
    sources = sorted(until, key=place.__getitem__)
    edges: set[tuple[int, int]] = set()
    for begin in range(0, len(sources), _BATCH):
        batch = sources[begin : begin + _BATCH]
        stretch = order[place[batch[0]] + 1 : max(until[p] for p in batch) + 1]
        edges |= _implied_by(stretch, pred, batch)
    return edges


def _implied_by(
    stretch: Sequence[int], pred: Sequence[Sequence[int]], batch: Sequence[int]
) -> set[tuple[int, int]]:
    # Integers of any length: one operation joins the descendants of thousands of nodes.
    bit = {p: 1 << b for b, p in enumerate(batch)}
    reached_by: dict[int, int] = {}
    edges: set[tuple[int, int]] = set()
    for i in with_checkpoints(stretch):
        direct = further = 0
        for p in pred[i]:
            if p in bit:
                direct |= bit[p]
            if p in reached_by:
                further |= reached_by[p]
        if direct & further:
            edges.update((p, i) for p in pred[i] if p in bit and bit[p] & further)
        if direct or further:
            reached_by[i] = direct | further
    return edges


def fewest_chains(dag: Dag, order: Sequence[int], chain: Sequence[int]) -> list[int]:
    """The chain of each node, with the least number of chains; deterministic.

    ``chain`` is the assignment to begin with, of which as much as possible is kept; nodes with -1
    are on no chain and stay so. Nodes of one chain depend on each other. Chains are numbered from 0
    in the order of their first nodes in ``order``, a topological one.

    The least number of chains is the largest number of nodes none of which depends on another
    (Dilworth 1950). It corresponds to a maximum bipartite matching between nodes and descendants
    (Fulkerson 1956), computed by rounds of alternating paths from the last nodes of all chains at
    once. Each round is linear, and few suffice in practice.
    """
    before, after = _links(order, chain)
    while _join(dag, order, chain, before, after):
        pass
    numbered = [_NONE] * dag.n
    numbers = count()
    for i in with_checkpoints(order):
        if chain[i] != _NONE:
            numbered[i] = next(numbers) if before[i] == _NONE else numbered[before[i]]
    return numbered


def _links(order: Sequence[int], chain: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each node its predecessor and its successor on its chain."""
    before, after = [_NONE] * len(order), [_NONE] * len(order)
    last: dict[int, int] = {}
    for i in order:
        if chain[i] in last:
            before[i] = last[chain[i]]
            after[before[i]] = i
        if chain[i] != _NONE:
            last[chain[i]] = i
    return before, after


def _join(
    dag: Dag, order: Sequence[int], chain: Sequence[int], before: list[int], after: list[int]
) -> bool:
    """One round of joining chains; whether any were joined.

    Each search starts from the last node of a chain and spreads over its descendants. Node j is
    reached from ``above[j]``, which it could follow; the node that j follows so far could then be
    followed by another one, and the search continues from there. No two searches visit the same
    node, so that all successful ones can be applied.
    """
    above = [_NONE] * dag.n
    start = [_NONE] * dag.n
    open_ended = [i for i in order if chain[i] != _NONE and after[i] == _NONE]
    for i in open_ended:
        start[i] = i
    succeeded: set[int] = set()
    for i in open_ended:
        walk = [i]
        while walk and start[i] not in succeeded:
            for j in dag.succ[walk.pop()]:
                if above[j] != _NONE:
                    continue
                above[j] = i
                walk.append(j)
                if chain[j] == _NONE:
                    continue
                if before[j] == _NONE:
                    succeeded.add(start[i])
                    _relink(j, above, before, after)
                    break
                start[before[j]] = start[i]
                open_ended.append(before[j])
    return bool(succeeded)


def _relink(j: int, above: Sequence[int], before: list[int], after: list[int]) -> None:
    """Let node j follow ``above[j]``, the former successor of that another node, and so on."""
    while j != _NONE:
        i = above[j]
        before[j] = i
        after[i], j = j, after[i]
