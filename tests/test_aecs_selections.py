"""Stage 2's tree of source 002, and the space that an exhaustive search walks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.models.core_clusters import CoreCluster, CoreKind, Selection
from harness.tuning.selections import (
    Tree,
    all_selections,
    candidates,
    growing,
    n_selections,
    selection_words,
)

KINDS: dict[str, CoreKind] = {"b": "prime", "m": "performance", "e": "efficiency"}


def clusters_of(sizes: tuple[int, ...], kinds: str) -> list[CoreCluster]:
    return [CoreCluster(f"c{i}", n, KINDS[kind]) for i, (n, kind) in enumerate(zip(sizes, kinds, strict=True))]


MATE_40_PRO = clusters_of((1, 3, 4), "bme")
V30_PRO = clusters_of((2, 2, 4), "bme")


@pytest.mark.parametrize(
    ("sizes", "kinds", "n"),
    [
        ((1, 3, 4), "bme", 39),
        ((2, 2, 4), "bme", 44),
        ((1, 3, 2, 2), "bmme", 71),
        ((2, 6), "bm", 20),
    ],
)
def test_the_space_is_as_large_as_the_source_says(sizes: tuple[int, ...], kinds: str, n: int) -> None:
    """Table 2's clusters; Table 11 has 20 to 71."""
    clusters = clusters_of(sizes, kinds)
    assert n_selections(clusters) == n
    assert len(set(all_selections(clusters))) == n


def test_figure_6_has_five_nodes() -> None:
    """{1 big, 2 middle}: one core less, two less, big for middle, and under the first big for middle again."""
    assert candidates(MATE_40_PRO, (1, 2, 0), "fig6") == ((1, 2, 0), (1, 1, 0), (1, 0, 0), (0, 3, 0), (0, 2, 0))


def test_a_whole_cluster_may_change_at_level_2_too() -> None:
    """The text's reading: one node more, {1 big} becomes {1 middle}."""
    six = candidates(MATE_40_PRO, (1, 2, 0), "depth2")
    assert set(six) - set(candidates(MATE_40_PRO, (1, 2, 0), "fig6")) == {(0, 1, 0)}
    assert len(six) == 6


def test_efficiency_cores_make_thirteen_nodes() -> None:
    """By hand: at level 1 big or middle ones go to efficiency cores, at level 2 from each of the five."""
    more = set(candidates(MATE_40_PRO, (1, 2, 0), "efficiency")) - set(candidates(MATE_40_PRO, (1, 2, 0), "depth2"))
    assert more == {(0, 2, 1), (1, 0, 2), (0, 1, 1), (1, 0, 1), (0, 0, 1), (0, 0, 3), (0, 1, 2)}


def test_only_the_deeper_tree_reaches_the_choice_of_the_v30_pro() -> None:
    """Table 7 has two middle cores; stage 1 that ended at {2 big, 1 middle}."""
    assert (0, 2, 0) not in candidates(V30_PRO, (2, 1, 0), "fig6")
    assert (0, 2, 0) in candidates(V30_PRO, (2, 1, 0), "depth2")


def test_a_larger_cluster_becomes_as_many_smaller_cores_as_there_are() -> None:
    """Three cores of a cluster for the two of the next, at level 1."""
    assert (0, 2) in candidates(clusters_of((3, 2), "bm"), (3, 0), "fig6")


def test_threads_only_get_fewer() -> None:
    threads = [CoreCluster("thread", 6, "prime")]
    assert candidates(threads, (4,), "threads") == ((4,), (3,))
    assert candidates(threads, (1,), "threads") == ((1,),)


def test_stage_1_grows_from_big_to_middle_and_leaves_efficiency_cores_out() -> None:
    assert list(growing(MATE_40_PRO)) == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0)]
    assert list(growing(V30_PRO, first_cores=2)) == [(2, 0, 0), (2, 1, 0), (2, 2, 0)]


def test_stage_1_uses_a_cpu_of_efficiency_cores_alone() -> None:
    assert list(growing(clusters_of((2,), "e"))) == [(1,), (2,)]


@pytest.mark.parametrize("root", [(0, 0, 0), (2, 0, 0), (1, 2), (1, -1, 0)])
def test_a_root_that_the_clusters_lack_is_refused(root: Selection) -> None:
    with pytest.raises(ValueError, match="clusters of"):
        candidates(MATE_40_PRO, root)


def test_a_selection_reads_as_table_7_writes_it() -> None:
    named = [CoreCluster("X4(3.3GHz)", 1, "prime"), CoreCluster("A720(2.96GHz)", 2, "performance")]
    assert selection_words(named, (1, 1)) == "1*X4(3.3GHz) + 1*A720(2.96GHz)"


@st.composite
def cpus(draw: st.DrawFn) -> tuple[list[CoreCluster], Selection]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    kinds = ["b"] + [draw(st.sampled_from("me")) for _ in sizes[1:]]
    clusters = clusters_of(tuple(sizes), "".join(sorted(kinds, key="bme".index)))
    root = draw(st.sampled_from(sorted(all_selections(clusters))))
    return clusters, root


@given(cpus(), st.sampled_from(["fig6", "depth2", "efficiency"]))
def test_the_tree_has_no_empty_and_no_duplicate_sets_and_fits(
    cpu: tuple[list[CoreCluster], Selection], tree: Tree
) -> None:
    clusters, root = cpu
    nodes = candidates(clusters, root, tree)
    assert nodes[0] == root
    assert len(set(nodes)) == len(nodes)
    assert set(nodes) <= set(all_selections(clusters))
    assert set(candidates(clusters, root, "fig6")) <= set(candidates(clusters, root, "depth2"))
    assert set(candidates(clusters, root, "depth2")) <= set(candidates(clusters, root, "efficiency"))


@given(cpus(), st.sampled_from(["fig6", "depth2", "efficiency"]))
def test_every_node_takes_no_more_cores_and_none_that_are_bigger(
    cpu: tuple[list[CoreCluster], Selection], tree: Tree
) -> None:
    """Cores counted from the biggest cluster down never exceed the root's."""
    clusters, root = cpu
    for node in candidates(clusters, root, tree):
        assert all(sum(node[: i + 1]) <= sum(root[: i + 1]) for i in range(len(root)))


@given(cpus())
def test_the_space_is_counted_and_walked_alike(cpu: tuple[list[CoreCluster], Selection]) -> None:
    clusters, _ = cpu
    by_hand = {each for each in product(*(range(c.n_cores + 1) for c in clusters)) if sum(each) > 0}
    assert set(all_selections(clusters)) == by_hand
    assert n_selections(clusters) == len(by_hand)
