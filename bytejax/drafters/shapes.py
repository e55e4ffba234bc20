"""Shapes of static trees: which nodes a block has, whatever ids they carry.

A node is known by its *path*, the ranks of itself and its ancestors below the root among their siblings: (0, 2) is the
third child of the root's first child. The root has the empty path.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from bytejax.errors import InputError

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Nodes level by level, the root first; siblings by rank. Made by one of the functions below.

    parents, depths, ranks: one entry per node.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return self.depths[-1]

    @property
    def most_children(self) -> int:
        return max(self.ranks, default=0) + 1


def from_paths(paths: Iterable[Sequence[int]]) -> Shape:
    """The tree of these paths and the root. Raises InputError where it is not prefix-closed: a node lacks its parent
    or an elder sibling.
    """
    known = {tuple(path) for path in paths} - {()}
    index: dict[Path, int] = {(): 0}
    for path in sorted(known, key=lambda p: (len(p), p)):
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
            raise InputError(f"a node of a tree is a list of ranks from 0 on, got {list(path)}")
        if path[:-1] not in index:
            raise InputError(f"the tree is not prefix-closed: it has {list(path)} without {list(path[:-1])}")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index:
            raise InputError(f"the tree has {list(path)} without its sibling {[*path[:-1], path[-1] - 1]}")
        index[path] = len(index)
    if len(index) == 1:
        raise InputError("the tree is empty; give at least one node below the root")
    parents = tuple(index[path[:-1]] for path in index)
    return Shape(parents, tuple(map(len, index)), tuple(path[-1] if path else 0 for path in index))


def from_children(tree: Sequence[Sequence[int]]) -> Shape:
    """From child counts: for every depth, how many children each node of the depth before has.

    The first entry is the root's; missing counts are 0. Raises InputError for counts that make no tree.
    """
    try:
        children = tuple(tuple(counts) for counts in tree)
    except TypeError:
        raise InputError(f"a tree is a list of lists of child counts, got {tree!r}") from None
    paths: list[Path] = []
    level: list[Path] = [()]
    for depth, counts in enumerate(children, start=1):
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts) or sum(counts) == 0:
            raise InputError(f"depth {depth} of the tree has no nodes, or counts that are no whole numbers: {counts}")
        if len(counts) > len(level):
            raise InputError(f"depth {depth} of the tree has {len(counts)} counts for {len(level)} nodes above")
        level = [(*parent, rank) for parent, count in zip(level, counts, strict=False) for rank in range(count)]
        paths += level
    if not paths:
        raise InputError("the tree is empty; give at least one depth")
    return from_paths(paths)


def spine(widths: Sequence[int]) -> Shape:
    """A tree in which only the first node of every depth has children, `widths[i]` of them at depth i + 1 (ESP)."""
    return from_children([[width] for width in widths])


def likeliest(accuracies: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The tree of so many nodes, root included, with the largest expected accept length (Medusa, arXiv 2401.10774).

    accuracies: entry [d][r] is how often the candidate of rank r at depth d + 1 is right. Depths count as independent,
        so a node's worth is the product along its path, and the greedy choice is the best one where no candidate is
        right more often than one of a better rank. Where they make fewer nodes, the tree has all of them.

    Raises InputError for anything else.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 2:
        raise InputError(f"nodes = {nodes!r}: a tree has a root and at least one node more")
    try:
        accuracies = [[float(x) for x in depth] for depth in accuracies]
    except (TypeError, ValueError, OverflowError):
        raise InputError("accuracies are a list of numbers for every depth, such as [[0.5, 0.2], [0.3]]") from None
    if not accuracies or not all(depth and all(0 <= x <= 1 for x in depth) for depth in accuracies):
        raise InputError("a tree needs the accuracy of at least one candidate per depth, each from 0 to 1")
    value = lambda path: -float(_product(accuracies[d][rank] for d, rank in enumerate(path)))
    chosen: list[Path] = []
    frontier = [(value((0,)), 1, (0,))]
    while frontier and len(chosen) < nodes - 1:
        _, _, path = heapq.heappop(frontier)
        chosen.append(path)
        after = [(*path[:-1], path[-1] + 1), (*path, 0)]
        for node in after:
            if len(node) <= len(accuracies) and node[-1] < len(accuracies[len(node) - 1]):
                heapq.heappush(frontier, (value(node), len(node), node))
    return from_paths(chosen)


def _product(values: Iterable[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result
