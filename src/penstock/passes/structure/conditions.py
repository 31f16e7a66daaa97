"""When the nodes of one frame run, and when they are dead: what Switches must have chosen for it.

A condition is a set of choices, all of which must have been made; the empty one always holds. A
node runs if all that it reads and waits for does; an output of a Switch lives if the Switch runs
and chooses it; and where a Merge reads one value for each choice of a predicate, it runs whichever
is made. Of another Merge it is known only that what comes behind it runs if it does: that is a
choice of its own. So conditions are exact, and nodes with equal ones run together or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.ir.graph import Node, Value, captures
from penstock.ir.op import Role
from penstock.ops.registry import TENSORFLOW
from penstock.passes.structure.relax_control_edges import effective

Choice = tuple[Value | Node, int]
"""a predicate, and which output a Switch chooses by it; or ``LIVES``, of what may be dead"""
Condition = frozenset[Choice]
LIVES = -1
SWITCHES = frozenset({"Switch"})  # those that choose by a truth
ALWAYS: Condition = frozenset()

# Conditions of more choices than any sensible graph nests are known by their node alone: they would
# take the square of the graph's size.
_MOST_CHOICES = 64


def is_tensorflow(node: Node, names: Collection[str]) -> bool:
    """Whether ``node`` is one of TensorFlow's own operations with these names."""
    return node.op.domain == TENSORFLOW and node.op.name in names


class Deadness:
    """Conditions of the nodes of one frame, in one iteration of it; ``nodes`` must be sorted.

    ``running`` are nodes that always run. What the frame is given (values of nodes that are not
    among its own) lives, but for what comes out of frames inside of it, and out of ``doubtful``
    nodes.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        running: Collection[Node] = (),
        doubtful: Collection[Node] = (),
    ) -> None:
        self._doubtful = doubtful
        self.conditions: dict[Node, Condition] = {}
        self.joined: dict[Node, tuple[Value, tuple[Value, Value]]] = {}
        """of Merges of both sides of a predicate: that, and what they read for each choice"""
        self.read: dict[Node, list[Value]] = {}
        """what each node reads that is no constant, its graphs included"""
        self.waits: dict[Node, list[Node]] = {}
        """the nodes with effects that each node waits for, as ``release`` has them"""
        self._behind: dict[Node, dict[Node, None]] = {}
        self._effective: dict[Node, bool] = {}
        for node in nodes:
            read = [v for v in node.inputs if v is not None and v.const is None]
            for _, inner in node.graphs:
                read += captures(inner)
            self.read[node] = read
            self.conditions[node] = ALWAYS if node in running else self._condition(node)
            self._order(node)

    def of(self, value: Value) -> Condition:
        """The condition under which ``value`` lives."""
        node = value.producer
        if node is None:
            return ALWAYS
        if is_tensorflow(node, SWITCHES) and node in self.conditions:
            chosen = (self.predicate(node), node.outputs.index(value))
            return self.conditions[node] | {chosen}
        return self._of_node(node)

    def predicate(self, switch: Node) -> Value:
        """What a Switch goes by, whatever hands it on unchanged."""
        value = switch.inputs[1]
        while value is not None and value.producer in self.conditions:
            node = value.producer
            if node is None or not (
                is_tensorflow(node, ("LoopCond",))
                or (node.op.name == "Identity" and not node.op.domain)
            ):
                break
            value = node.inputs[0]
        assert value is not None
        return value

    def _of_node(self, node: Node) -> Condition:
        found = self.conditions.get(node)
        if found is not None:
            return found
        if node in self._doubtful or node.op.role is Role.EXIT:
            return frozenset({(node, LIVES)})
        return ALWAYS

    def _condition(self, node: Node) -> Condition:
        if node.op.role is Role.MERGE:
            return self._merge(node)
        if is_tensorflow(node, ("ControlTrigger",)):
            return ALWAYS
        found = set[Choice]()
        for value in self.read[node]:
            found |= self.of(value)
        for source in node.control_inputs:
            found |= self._of_node(source)
        return frozenset(found if len(found) <= _MOST_CHOICES else {(node, LIVES)})

    def _merge(self, node: Node) -> Condition:
        read = [v for v in node.inputs if v is not None]
        if len(read) == 2:
            first, second = (self.of(v) for v in read)
            apart = sorted(first ^ second, key=lambda choice: choice[1])
            if [side for _, side in apart] == [0, 1] and apart[0][0] is apart[1][0]:
                predicate = apart[0][0]
                assert isinstance(predicate, Value)
                sides = (read[0], read[1]) if apart[0] in first else (read[1], read[0])
                self.joined[node] = (predicate, sides)
                return first & second
        return frozenset({(node, LIVES)})

    def _order(self, node: Node) -> None:
        """Note the nodes with effects that ``node`` comes after, as far as no other is between."""
        waits: dict[Node, None] = {}
        for source in node.control_inputs:
            waits.update(self._after(source))
        found = dict(waits)
        for value in self.read[node]:
            source_ = value.producer
            if source_ is None:
                continue
            found.update(self._after(source_))
            # A Switch goes, and who reads it then waits for what it has waited for.
            if is_tensorflow(source_, SWITCHES):
                waits.update(dict.fromkeys(self.waits.get(source_, ())))
        self.waits[node] = list(waits)
        self._behind[node] = found

    def _after(self, source: Node) -> dict[Node, None]:
        return {source: None} if self.effective(source) else self._behind.get(source, {})

    def effective(self, node: Node) -> bool:
        """Whether anybody can tell when ``node`` runs."""
        found = self._effective.get(node)
        if found is None:
            found = self._effective[node] = effective(node)
        return found
