"""Directed acyclic graphs over plain integers, the input of all scheduling algorithms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, field

# Nodes of a long cycle that a message shows at either end.
_SHOWN = 8


class CycleError(ValueError):
    """Raised for edges that form a cycle. ``cycle`` has its nodes in the direction of the edges,
    the lowest first: ``[1, 4, 2]`` stands for 1 -> 4 -> 2 -> 1. The message omits the middle of a
    long cycle."""

    def __init__(self, cycle: list[int]) -> None:
        super().__init__(cycle)
        self.cycle = cycle

    def __str__(self) -> str:
        names = [str(node) for node in (*self.cycle, self.cycle[0])]
        hidden = len(names) - 2 * _SHOWN
        if hidden > 1:
            names[_SHOWN:-_SHOWN] = [f"... {hidden} more nodes ..."]
        return "the edges close a cycle: " + " -> ".join(names)


@dataclass(frozen=True, slots=True)
class Dag:
    """A directed acyclic graph with the nodes 0 to n - 1; immutable, compared by its edges.

    An edge (a, b) means that node b runs after node a. Duplicate edges count once, and the order
    of the given edges does not matter: ``edges`` and each ``succ[i]`` and ``pred[i]`` are sorted.
    Building it takes nearly linear time (Kahn 1962, "Topological sorting of large networks").

    Raises:
        CycleError: the edges close a cycle; an edge from a node to itself is one.
        ValueError: ``n`` is negative, or an edge names a node outside 0 to n - 1.
    """

    n: int
    edges: tuple[tuple[int, int], ...]
    succ: tuple[tuple[int, ...], ...] = field(repr=False, compare=False)
    pred: tuple[tuple[int, ...], ...] = field(repr=False, compare=False)

    def __init__(self, n: int, edges: Iterable[tuple[int, int]]) -> None:
        if n < 0:
            raise ValueError(f"a graph cannot have {n} nodes")
        outgoing: list[list[int]] = [[] for _ in range(n)]
        for a, b in with_checkpoints(edges):
            if not (0 <= a < n and 0 <= b < n):
                raise ValueError(f"edge {a} -> {b} leaves the graph, whose n is {n}")
            outgoing[a].append(b)
        # Sorted, so that results do not follow from the order in which edges were found.
        succ = tuple([tuple(sorted(set(after))) for after in outgoing])
        incoming: list[list[int]] = [[] for _ in range(n)]
        for a, after in enumerate(with_checkpoints(succ)):
            for b in after:
                incoming[b].append(a)
        pred = tuple(map(tuple, incoming))
        _refuse_cycles(succ, pred)
        ordered = tuple([(a, b) for a, after in enumerate(succ) for b in after])
        for name, value in (("n", n), ("edges", ordered), ("succ", succ), ("pred", pred)):
            object.__setattr__(self, name, value)  # the class is frozen


def _refuse_cycles(succ: tuple[tuple[int, ...], ...], pred: tuple[tuple[int, ...], ...]) -> None:
    waiting = [len(before) for before in pred]
    ready = [i for i, count in enumerate(waiting) if not count]
    for i in ready:
        for j in succ[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    if len(ready) == len(succ):
        return
    # Every node that never became ready has a predecessor that did not either, so a walk against
    # the edges must return to a node that it has visited.
    node = next(i for i, count in enumerate(waiting) if count)
    met: dict[int, int] = {}
    while node not in met:
        met[node] = len(met)
        node = next(i for i in pred[node] if waiting[i])
    cycle = list(met)[met[node] :][::-1]
    lowest = cycle.index(min(cycle))
    raise CycleError(cycle[lowest:] + cycle[:lowest])


def expect_one_per_node(dag: Dag, **arguments: Sequence[object]) -> None:
    """Raise ``ValueError`` for arguments that do not have one entry per node."""
    for name, entries in arguments.items():
        if len(entries) != dag.n:
            raise ValueError(f"{name} has {len(entries)} entries for {dag.n} nodes")


def strongly_connected_components(successors: Sequence[Iterable[int]]) -> list[list[int]]:
    """Partition the nodes 0 to n - 1 of a directed graph into strongly connected components.

    ``successors[i]`` are the nodes that edges from node i lead to. A component comes after those
    that it reaches (reverse topological order). Linear in nodes and edges, without recursion
    (Tarjan 1972, "Depth-first search and linear graph algorithms").

    >>> strongly_connected_components([[1], [2], [1, 3], []])
    [[3], [2, 1], [0]]
    """
    index = [-1] * len(successors)  # in the order of discovery
    low = list(index)  # the lowest index on the stack that a node's descendants reach
    on_stack = [False] * len(successors)
    stack: list[int] = []
    components: list[list[int]] = []
    discovered = 0
    for root in range(len(successors)):
        if index[root] >= 0:
            continue
        path = [(root, iter(successors[root]))]
        while path:
            node, rest = path[-1]
            if index[node] < 0:
                index[node] = low[node] = discovered
                discovered += 1
                stack.append(node)
                on_stack[node] = True
            for other in rest:
                if index[other] < 0:
                    path.append((other, iter(successors[other])))
                    break
                if on_stack[other]:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    parent = path[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    components.append([])
                    while not components[-1] or components[-1][-1] != node:
                        components[-1].append(stack.pop())
                        on_stack[components[-1][-1]] = False
    return components


def on_cycles(successors: Sequence[Collection[int]]) -> set[int]:
    """The nodes of a directed graph that edges lead back to.

    >>> on_cycles([[1], [2], [1, 3], [3], [0]])
    {1, 2, 3}
    """
    components = strongly_connected_components(successors)
    return {i for nodes in components for i in nodes if len(nodes) > 1 or i in successors[i]}
