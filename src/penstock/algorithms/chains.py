"""Chains of nodes that depend on each other, without a table of which node reaches which.

``reduction`` leaves out the edges that other paths imply, and ``implied`` names them. ``fewest``
makes as few chains of all nodes as there can be: as many as the graph is wide. While chains grow,
``Ends`` finds those that a node can be put behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import topological_order

# Nodes whose descendants are followed at once, as the bits of one integer for each node.
_BATCH = 4096
# Nodes at which a search for the ends of chains looks, at most.
_SEARCH = 64

_NONE = -1


def reduction(dag: Dag) -> Dag:
    """``dag`` without the edges that other paths imply: its transitive reduction.

    That is the one graph with the fewest edges in which the same nodes reach each other (Aho, Garey
    and Ullman 1972, "The transitive reduction of a directed graph"). Time and memory as for
    ``implied``.
    """
    without = implied(topological_order(dag), dag.pred)
    return Dag(dag.n, (edge for edge in dag.edges if edge not in without)) if without else dag


def implied(order: Sequence[int], pred: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """The edges (p, i), p in ``pred[i]``, for which another path leads from p to i.

    ``order`` has all nodes, each after those of its ``pred``. Exact. Descendants are told for some
    thousand nodes at a time, only over that stretch of ``order`` in which their edges end: an
    integer for each node there, with a bit for each of these that it depends on. So memory is
    linear, and so is time for edges that are short in ``order``; for long ones it is quadratic, but
    with a very small factor: 100,000 nodes with 300,000 edges at random take seconds.
    """
    place = [0] * len(order)
    until: dict[int, int] = {}
    for k, i in enumerate(order):
        place[i] = k
        if len(pred[i]) > 1:
            until.update(dict.fromkeys(pred[i], k))
    asked = sorted(until, key=place.__getitem__)
    found: set[tuple[int, int]] = set()
    for begin in range(0, len(asked), _BATCH):
        batch = asked[begin : begin + _BATCH]
        stretch = order[place[batch[0]] + 1 : max(until[p] for p in batch) + 1]
        found |= _implied_by(stretch, pred, batch)
    return found


def _implied_by(
    stretch: Sequence[int], pred: Sequence[Sequence[int]], batch: Sequence[int]
) -> set[tuple[int, int]]:
    """The implied edges from nodes of ``batch`` to nodes of ``stretch``."""
    bit = {p: 1 << b for b, p in enumerate(batch)}
    reached_by: dict[int, int] = {}
    found: set[tuple[int, int]] = set()
    for i in stretch:
        direct = further = 0
        for p in pred[i]:
            if p in bit:
                direct |= bit[p]
            if p in reached_by:
                further |= reached_by[p]
        if direct & further:
            found.update((p, i) for p in pred[i] if p in bit and bit[p] & further)
        if direct or further:
            reached_by[i] = direct | further
    return found


def fewest(dag: Dag, order: Sequence[int], chain: Sequence[int]) -> list[int]:
    """Per node the chain that it is on, with as few chains as there can be; deterministic.

    ``chain`` says so to begin with, and as much of it is kept as can be; -1 is for nodes that are
    on none and stay so. Nodes of one chain depend on each other. Chains are numbered from 0, as
    they begin in ``order``, a topological one.

    The least number of chains is the greatest number of nodes none of which depends on another
    (Dilworth 1950), and it leaves the most nodes that follow one on their chain: a maximum
    bipartite matching between nodes and their descendants (Fulkerson 1956). It is reached by
    alternating paths from all last nodes of chains at once; each that gets to a first node makes
    one chain of two. Descendants are found by walking. Linear for each round of such paths; few
    rounds suffice in practice, and one does for chains that are as few as can be.
    """
    before, after = _links(order, chain)
    while _join(dag, order, chain, before, after):
        pass
    found = [_NONE] * dag.n
    count = 0
    for i in order:
        if chain[i] == _NONE:
            continue
        if before[i] == _NONE:
            found[i] = count
            count += 1
        else:
            found[i] = found[before[i]]
    return found


def _links(order: Sequence[int], chain: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per node that before it on its chain, and that after it."""
    before, after = [_NONE] * len(order), [_NONE] * len(order)
    last: dict[int, int] = {}
    for i in order:
        if chain[i] == _NONE:
            continue
        if chain[i] in last:
            before[i] = last[chain[i]]
            after[before[i]] = i
        last[chain[i]] = i
    return before, after


def _join(
    dag: Dag, order: Sequence[int], chain: Sequence[int], before: list[int], after: list[int]
) -> bool:
    """One round: make chains fewer; whether that was possible.

    Each search starts from the last node of a chain and spreads over what it reaches. Node j is
    reached from ``above[j]``, which it could follow; what j follows so far could then be followed
    by something else, and the search goes on from there. No two searches touch the same node, so
    all that succeed can be carried out.
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
    """Let node j follow ``above[j]``, what followed that so far something else, and so on."""
    while j != _NONE:
        i = above[j]
        before[j] = i
        after[i], j = j, after[i]


class Ends:
    """The last nodes of growing chains, found from the nodes that depend on them.

    Nodes enter in a topological order, each after all that are to be on its chain before it, and
    chains grow along that order. So behind a node that has entered, ends only become fewer, and a
    search need not come twice past nodes with nothing behind them: ``alias[i]`` stands for node i,
    having the same ends behind it, and is -1 if there are none. A node stands for itself if a chain
    ends there, or if there are several ways to go on from it: ``above[i]``, the first one last.
    Nodes with the same ways share one that stands for them: ``twins``, by these ways.
    """

    __slots__ = ("above", "alias", "chain", "twins")

    def __init__(self, n: int) -> None:
        self.chain: dict[int, int] = {}  # per last node
        self.alias = [_NONE] * n
        self.above: dict[int, list[int]] = {}
        self.twins: dict[tuple[int, ...], int] = {}

    def add(self, i: int, chain: int) -> None:
        """The chain ends at node i, which has not entered."""
        self.chain[i] = chain

    def remove(self, i: int) -> None:
        """The chain that ended at node i goes on."""
        del self.chain[i]
        self._shrink(i)

    def enter(self, i: int, pred: Iterable[int]) -> None:
        """Node i, with the nodes ``pred`` that it depends on, can be searched from now on."""
        above = self._standing(pred)
        if i not in self.chain:
            if len(above) < 2:
                self.alias[i] = above[0] if above else _NONE
                return
            twin = self.twins.setdefault(tuple(sorted(above)), i)
            if twin != i:
                self.alias[i] = twin
                return
        self.alias[i] = i
        self.above[i] = above[::-1]

    def behind(self, pred: Iterable[int]) -> list[int]:
        """Chains that end at nodes of ``pred`` or at nodes that these depend on, nearest first.

        All of them, unless there are so many that the search is ended early.
        """
        queue = self._standing(pred)[:_SEARCH]
        reached = set(queue)
        chains: list[int] = []
        for looked, i in enumerate(queue):
            if looked == _SEARCH:
                return chains
            if i in self.chain:
                chains.append(self.chain[i])
            if self.above[i]:
                further = [j for j in self._ways(i) if j not in reached]
                reached.update(further)
                queue += further
        if not chains:
            for i in queue:
                self.alias[i] = _NONE
                self.above.pop(i, None)
        return chains

    def _stands_for(self, i: int) -> int:
        alias = self.alias
        while (up := alias[i]) != i:
            if up == _NONE:
                return _NONE
            alias[i] = alias[up]
            i = up
        return i

    def _standing(self, nodes: Iterable[int]) -> list[int]:
        found = dict.fromkeys(map(self._stands_for, nodes))
        found.pop(_NONE, None)
        return list(found)

    def _ways(self, i: int) -> list[int]:
        """Ways to go on from node i; more than a search has room for, or all."""
        above = self.above[i]
        found: dict[int, None] = {}
        at = len(above) - 1
        while at >= 0 and len(found) <= _SEARCH:
            j = self._stands_for(above[at])
            if j == _NONE or j in found:
                del above[at]
            else:
                above[at] = j
                found[j] = None
            at -= 1
        self._shrink(i)
        return list(found)

    def _shrink(self, i: int) -> None:
        """Without an end there, and with one way left or none, node i stands for itself no more."""
        above = self.above.get(i)
        if above is not None and len(above) < 2 and i not in self.chain:
            self.alias[i] = above[0] if above else _NONE
            del self.above[i]
