"""Clustering of nodes into groups that are large enough to hand to a worker.

Sarkar 1989, "Partitioning and scheduling parallel programs for multiprocessors", calls the problem
internalisation. Here it is solved without a schedule, by local rules that never create a cycle
between two groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.algorithms.dag import Dag, expect_one_per_node
from penstock.algorithms.ordering import topological_order
from penstock.core.checkpoints import with_checkpoints

# Maximum rounds of merging; each makes the graph several times smaller.
_ROUNDS = 8
# Grains of small nodes that a chain may absorb in total.
_MOST_TAKEN = 4


def cluster(
    dag: Dag, cost: Sequence[float], grain: float, kinds: Sequence[int] | None = None
) -> list[list[int]]:
    """The nodes of ``dag`` in groups; deterministic, nearly linear in nodes and edges.

    ``cost[i]`` is the cost of node i, ``grain`` the least cost of a group in the same unit. A chain
    is one group, whatever it costs. Of the other nodes, those below ``grain`` join their only
    successor, their only predecessor, or nodes with the same predecessors. No group grows by more
    than a few grains through nodes outside of its chain, so that a wide graph of small nodes stays
    wide. Nodes of different ``kinds[i]`` never share a group.

    The nodes of each group are in topological order, groups are in the order of their first nodes,
    and the graph of groups has no cycle. Raises ``ValueError`` for arguments of other lengths.
    """
    kinds = [0] * dag.n if kinds is None else kinds
    expect_one_per_node(dag, cost=cost, kinds=kinds)
    clusters = _Clusters(dag, cost, grain, kinds)
    for _ in range(_ROUNDS):
        before = len(clusters.alive)
        clusters.join_chains()
        clusters.join_small()
        clusters.join_siblings()
        if len(clusters.alive) == before:
            break
    groups: dict[int, list[int]] = {}
    for i in topological_order(dag):
        groups.setdefault(clusters.find(i), []).append(i)
    return list(groups.values())


class _Clusters:
    """Groups, each named by one of its nodes, and the edges between them."""

    def __init__(self, dag: Dag, cost: Sequence[float], grain: float, kinds: Sequence[int]) -> None:
        self.grain = grain
        self.kinds = kinds
        self.leader = list(range(dag.n))
        self.cost = list(cost)
        # The cost that each group has absorbed beside its chain.
        self.taken = [0.0] * dag.n
        self.succ: list[set[int]] = [set(after) for after in dag.succ]
        self.pred: list[set[int]] = [set(before) for before in dag.pred]
        self.alive = dict.fromkeys(topological_order(dag))

    def find(self, i: int) -> int:
        while self.leader[i] != i:
            # Halving the path on the way keeps the look nearly constant (union-find).
            self.leader[i] = self.leader[self.leader[i]]
            i = self.leader[i]
        return i

    def merge(self, a: int, b: int) -> int:
        """Merge two groups; between them there must be no path other than an edge."""
        # The one with fewer edges goes: each edge then moves a logarithmic number of times.
        a, b = sorted((a, b), key=lambda x: -len(self.succ[x]) - len(self.pred[x]))
        for forward, backward in ((self.succ, self.pred), (self.pred, self.succ)):
            for other in forward[b]:
                backward[other].discard(b)
                if other != a:
                    backward[other].add(a)
                    forward[a].add(other)
        self.succ[b] = self.pred[b] = set()
        self.leader[b] = a
        self.cost[a] += self.cost[b]
        self.taken[a] += self.taken[b]
        del self.alive[b]
        return a

    def join_chains(self) -> None:
        """Merge each node with its only successor, if that has no other predecessor."""
        for i in with_checkpoints(list(self.alive)):
            if i not in self.alive:
                continue
            while len(self.succ[i]) == 1:
                (after,) = self.succ[i]
                same_kind = self.kinds[after] == self.kinds[i]
                taken = self.taken[i] + self.taken[after]
                if len(self.pred[after]) > 1 or not same_kind or taken > _MOST_TAKEN * self.grain:
                    break
                i = self.merge(i, after)

    def join_small(self) -> None:
        """Merge each small group into its only successor, else into its only predecessor."""
        for i in with_checkpoints(list(self.alive)):
            if i not in self.alive or self.cost[i] >= self.grain:
                continue
            for near in (self.succ[i], self.pred[i]):
                if len(near) != 1:
                    continue
                (other,) = near
                small = self.cost[i]
                # Bounded, or a node with many small neighbours would take in what could run beside
                # it.
                if self.kinds[other] == self.kinds[i] and self.taken[other] + small <= self.grain:
                    self.taken[other] += small
                    self.merge(other, i)
                    break

    def join_siblings(self) -> None:
        """Merge small groups with the same predecessors, as long as the result is small. This
        creates no cycle: a path from one of them to another would lead through a predecessor that
        they share, back to itself."""
        open_groups: dict[tuple[int, frozenset[int]], list[int]] = {}
        for i in with_checkpoints(list(self.alive)):
            if self.cost[i] < self.grain:
                key = (self.kinds[i], frozenset(self.pred[i]))
                open_groups.setdefault(key, []).append(i)
        for members in open_groups.values():
            group = members[0]
            for i in members[1:]:
                group = i if self.cost[group] >= self.grain else self.merge(group, i)
