"""Selections of cores by cluster: all of them, and the moves that stage 2 of source 002 makes among them.

A selection says how many cores of each cluster compute, the biggest cluster first: (1, 2, 0) is one prime core and two
middle ones. Cores of one cluster are alike, so nothing says which. Where threads cannot be bound to cores (iOS), the
one cluster stands for the threads, and a selection is their number: (2,).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from devices.models.core_clusters import CoreCluster, Selection

Tree = Literal["fig6", "depth2", "efficiency", "threads"]
"""What stage 2 may do, for the text of source 002 and its Figure 6 disagree (see `candidates`)."""


def n_selections(clusters: Sequence[CoreCluster]) -> int:
    """All that leave at least one core: prod(|C_i| + 1) - 1."""
    return prod(cluster.n_cores + 1 for cluster in clusters) - 1


def all_selections(clusters: Sequence[CoreCluster]) -> Iterator[Selection]:
    """Each once, none empty."""
    return (each for each in product(*(range(cluster.n_cores + 1) for cluster in clusters)) if any(each))


def whole_cluster(clusters: Sequence[CoreCluster]) -> Selection:
    """Every core."""
    return tuple(cluster.n_cores for cluster in clusters)


def selection_words(clusters: Sequence[CoreCluster], selection: Selection) -> str:
    """`1*X4 + 1*A720`, as Table 7 of source 002 writes them."""
    return " + ".join(f"{n}*{cluster.name}" for n, cluster in zip(selection, clusters, strict=True) if n)


def growing(clusters: Sequence[CoreCluster], first_cores: int = 1) -> Iterator[Selection]:
    """What stage 1 tries: `first_cores` of the biggest, then one more at a time, from big to middle.

    No efficiency core is added while there is another kind; a CPU of one kind alone is used whole.
    """
    order = [i for i, cluster in enumerate(clusters) if cluster.kind != "efficiency" for _ in range(cluster.n_cores)]
    if not order:
        order = [i for i, cluster in enumerate(clusters) for _ in range(cluster.n_cores)]
    for n in range(min(first_cores, len(order)), len(order) + 1):
        yield tuple(order[:n].count(i) for i in range(len(clusters)))


def candidates(clusters: Sequence[CoreCluster], root: Selection, tree: Tree = "depth2") -> tuple[Selection, ...]:
    """Stage 2's tree under `root`, breadth first, the root first, without empty or duplicate selections.

    Moves, each to fewer or smaller cores:
        a) one smallest core less            b) two smallest cores less           (both at level 1 only)
        c) one bigger core for a smaller one of another selected cluster that has one free
        d) a selected cluster for an unselected one of smaller cores, as many as it has

    fig6         d) at level 1 only, never to efficiency cores: {1 big, 2 middle} gives the five nodes of Figure 6
    depth2       d) at level 2 too, as the text has it (six nodes): from {2, 1} the five-node form cannot reach {0, 2}
    efficiency   depth2, and d) may choose efficiency cores (13 nodes)
    threads      one thread less, nothing else (iOS)

    Raises ValueError for a root that these clusters do not have.
    """
    return (root, *(link.selection for link in descent(clusters, root, tree)))


class Link(NamedTuple):
    """A selection of the tree, and the move that led to it."""

    selection: Selection
    parent: Selection
    move: str


def descent(clusters: Sequence[CoreCluster], root: Selection, tree: Tree = "depth2") -> tuple[Link, ...]:
    """`candidates` without the root, each with the parent that led to it first. Raises as `candidates`."""
    _check(clusters, root)
    found = {root}
    links: list[Link] = []
    level = [root]
    for depth in (1, 2):
        children: list[Selection] = []
        for parent in level:
            for child, move in _moves(clusters, parent, tree, depth):
                if any(child) and child not in found:
                    found.add(child)
                    links.append(Link(child, parent, move))
                    children.append(child)
        level = children
    return tuple(links)


def _check(clusters: Sequence[CoreCluster], selection: Selection) -> None:
    sizes = [cluster.n_cores for cluster in clusters]
    if len(selection) != len(sizes) or not any(selection):
        raise ValueError(f"{selection} selects nothing of clusters of {sizes} cores; give one number a cluster")
    if any(not 0 <= n <= size for n, size in zip(selection, sizes, strict=True)):
        raise ValueError(f"{selection} does not fit into clusters of {sizes} cores")


def _moves(
    clusters: Sequence[CoreCluster], parent: Selection, tree: Tree, depth: int
) -> Iterator[tuple[Selection, str]]:
    """(the selection that a move makes, which may be empty; the move in words)."""
    if tree == "threads":
        if depth == 1:
            yield _without_smallest(parent, 1), "one thread less"
        return
    if depth == 1:
        yield _without_smallest(parent, 1), "one core less"
        if sum(parent) > 1:
            yield _without_smallest(parent, 2), "two cores less"
    selected = [i for i, n in enumerate(parent) if n]
    for bigger in selected:
        for smaller in selected:
            if smaller > bigger and parent[smaller] < clusters[smaller].n_cores:
                yield _swapped(parent, bigger, smaller, 1), "a smaller core for a bigger"
    if depth == 2 and tree == "fig6":
        return
    for bigger in selected:
        for smaller in range(bigger + 1, len(clusters)):
            allowed = tree == "efficiency" or clusters[smaller].kind != "efficiency"
            if parent[smaller] == 0 and allowed:
                own = _swapped(parent, bigger, smaller, parent[bigger], clusters[smaller].n_cores)
                yield own, "a smaller cluster for a bigger"


def _without_smallest(selection: Selection, n: int) -> Selection:
    left = list(selection)
    for _ in range(n):
        last = max((i for i, cores in enumerate(left) if cores), default=None)
        if last is not None:
            left[last] -= 1
    return tuple(left)


def _swapped(selection: Selection, bigger: int, smaller: int, n: int, at_most: int | None = None) -> Selection:
    """`n` cores of one cluster less; as many more of the other, up to `at_most`."""
    left = list(selection)
    left[bigger] -= n
    left[smaller] += n if at_most is None else min(n, at_most)
    return tuple(left)
