"""The size of a graph's compute buffer in llama.cpp, by ggml's own allocation rules (`ggml-alloc.c`).

Inputs are placed first; every node then takes its parent's bytes where its operation may write over them and
no other node needs them, else the smallest hole that holds it, else the end. A node without children left is
freed at once; a view keeps its source. Holes make the buffer up to half larger than all that lives at any
time, so no sum of sizes gives it.
"""

from dataclasses import dataclass, field
from typing import Final

from snugvl.planner.footprint.total import up

ALIGNMENT: Final = 128  # CUDA's; a CPU's is 32, of tensors of thousands of bytes


@dataclass(slots=True, eq=False)
class Node:
    """A tensor of a graph. `nbytes` 0: it is outside of the buffer (a weight, the cache).

    `inplace`: its operation may write over a parent of the same size. `view`: the node it is a view of.
    """

    nbytes: int
    parents: tuple["Node", ...] = ()
    inplace: bool = False
    view: "Node | None" = None
    output: bool = False
    children: int = 0
    views: int = 0
    place: int = -1  # in the buffer, while it holds bytes of it


@dataclass(slots=True)
class Graph:
    """A graph: nodes in the order in which they are computed, and the inputs before them."""

    inputs: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def input(self, nbytes: int) -> Node:
        """Add an input, which has its bytes before anything is computed."""
        self.inputs.append(Node(nbytes))
        return self.inputs[-1]

    def add(self, nbytes: int, *parents: Node, inplace: bool = False, output: bool = False) -> Node:
        """Add a node that is computed next."""
        self.nodes.append(Node(nbytes, parents, inplace, output=output))
        return self.nodes[-1]

    def view(self, of: Node, nbytes: int | None = None) -> Node:
        """Add a view: another shape of a node, or a part of it of `nbytes` bytes, with none of its own."""
        self.nodes.append(Node(of.nbytes if nbytes is None else nbytes, (of,), view=of.view or of))
        return self.nodes[-1]

    def over(self, parent: Node, *others: Node) -> Node:
        """Add a node that overwrites its parent where that has no other use: a sum, a product, a norm."""
        return self.add(parent.nbytes, parent, *others, inplace=True)


class _Buffer:
    """The buffer's layout: bytes 0 to `end`, with `holes`, free ranges (begin, end) in order."""

    def __init__(self) -> None:
        self.holes: list[tuple[int, int]] = []
        self.end = self.most = 0

    def take(self, nbytes: int) -> int:
        fitting = [(stop - start, -start) for start, stop in self.holes if stop - start >= nbytes]
        if not fitting:
            start, self.end = self.end, self.end + nbytes
            self.most = max(self.most, self.end)
            return start
        start = -min(fitting)[1]
        index = next(i for i, hole in enumerate(self.holes) if hole[0] == start)
        stop = self.holes[index][1]
        self.holes[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
        return start

    def give(self, start: int, nbytes: int) -> None:
        stop = start + nbytes
        before = next((hole for hole in self.holes if hole[1] == start), None)
        after = next((hole for hole in self.holes if hole[0] == stop), None)
        for hole in (before, after):
            if hole is not None:
                self.holes.remove(hole)
        start, stop = before[0] if before else start, after[1] if after else stop
        if stop == self.end:
            self.end = start
        else:
            self.holes.append((start, stop))
            self.holes.sort()


def compute_bytes(graph: Graph) -> int:
    """Bytes of the buffer in which a graph is computed. The graph can't be used again."""
    buffer = _Buffer()
    for node in graph.inputs:
        node.place = buffer.take(up(node.nbytes, ALIGNMENT))
    for node in graph.nodes:
        if node.view is not None:
            node.view.views += 1
        for parent in node.parents:
            parent.children += 1
    for node in graph.nodes:
        if node.view is None and node.nbytes:
            source = _reused(node)
            node.place = source.place if source else buffer.take(up(node.nbytes, ALIGNMENT))
            if source:
                source.place = -1
        for parent in node.parents:
            _leave(parent, buffer)
    return buffer.most


def _reused(node: Node) -> Node | None:
    """The parent whose bytes a node takes, or None."""
    for parent in node.parents if node.inplace else ():
        source = parent.view or parent
        alone = parent.children == 1 and parent.views == 0
        if parent.view is not None:
            alone = alone and source.views == 1 and source.children == 0
        if (
            alone
            and source.place >= 0
            and not source.output
            and parent.nbytes == source.nbytes == node.nbytes
        ):
            return source
    return None


def _leave(parent: Node, buffer: _Buffer) -> None:
    """Note that a parent has one child less to be read by; without any left it is freed."""
    parent.children -= 1
    if parent.children or parent.views:
        return
    source = parent.view or parent
    if parent.view is not None:
        source.views -= 1
    if not source.views and not source.children and source.place >= 0 and not source.output:
        buffer.give(source.place, up(source.nbytes, ALIGNMENT))
        source.place = -1
