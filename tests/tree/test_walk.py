"""Walks through synthetic records, searched trees against brute force, and records on disk."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from treedraft.tree import (
    NOT_THERE,
    PUBLISHED,
    Limits,
    Origin,
    Record,
    RecordError,
    Tree,
    best_tree,
    found_trees,
    greedy_product_tree,
    load_record,
    position_tree,
    published_tree,
    save_record,
    sequoia_tree,
    walk,
)


def record_of(ranks: list[list[list[int]]]) -> Record:
    """A record of answers given as the ranks of their tokens; those behind an answer's end are taken out."""
    depth = len(ranks[0][0])
    rows = []
    for answer in ranks:
        for i, row in enumerate(answer):
            rows.append([r if i + 1 + d < len(answer) else NOT_THERE for d, r in enumerate(row)])
    lengths = tuple(len(answer) for answer in ranks)
    names = tuple(map(str, range(len(ranks))))
    origin = Origin("h", "t", "fp32", "p", {}, 0, 64, depth)
    beliefs = torch.full((len(rows), depth, 2), float("-inf"))
    return Record(
        origin, lengths, (4,) * len(ranks), torch.tensor(rows, dtype=torch.int32), beliefs,
        torch.zeros(len(rows), dtype=torch.bool), names, ("all",) * len(ranks), len(ranks),
    )  # fmt: skip


@cache
def random_record(seed: int, answers: int = 8, length: int = 40, depth: int = 3) -> Record:
    """Ranks whose chances fall with the rank, and that depend on each other along the path."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(answers):
        rows = []
        for _ in range(length):
            row, easy = [], rng.random() < 0.5
            for _ in range(depth):
                weights = np.array([6.0, 2.0, 1.0, 1.0] if easy else [1.0, 1.5, 1.0, 4.0])
                row.append(int(rng.choice(4, p=weights / weights.sum())))
            rows.append(row)
        texts.append(rows)
    return record_of(texts)


def decoded_by_hand(record: Record, tree: Tree) -> tuple[int, int, Counter[int]]:
    """The walk as decoding does it, token by token: rounds, tokens kept, rounds by what they accepted."""
    paths = set(tree.paths)
    rounds, kept, accepted = 0, 0, Counter()
    for offset, length in zip(record.offsets, record.lengths, strict=True):
        at = 0
        while at < length - 1:
            path: tuple[int, ...] = ()
            for rank in record.ranks[offset + at].tolist():
                if (*path, rank) not in paths:
                    break
                path = (*path, rank)
            emitted = min(len(path) + 1, length - 1 - at)
            rounds, kept, at = rounds + 1, kept + emitted, at + emitted
            accepted[min(len(path), emitted)] += 1
    return rounds, kept, accepted


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_counts_what_decoding_by_hand_counts(seed: int):
    record = random_record(seed)
    for tree in (Tree.chain(0), Tree.chain(3), published_tree("medusa-63", 20, 3), Tree.from_paths([[3], [0], [3, 3]])):
        walked = walk(record, tree)
        assert (walked.rounds.sum(), walked.kept.sum(), walked.accepted_counts()) == decoded_by_hand(record, tree)


def test_the_average_over_positions_overstates_what_the_walk_keeps():
    easy, hard = [0, 0, 0], [5, 5, 5]
    record = record_of([[easy, hard, hard, hard] * 10 + [hard]])  # three of four tokens are skipped by each success
    tree = Tree.chain(3)
    average = 1 + walk(record, tree).depths.mean()
    assert walk(record, tree).tau == 4.0 != average


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [3, 4, 5])
def test_found_trees_are_as_good_as_brute_force(seed: int, size: int):
    record = random_record(seed)
    limits = Limits(3, 4)
    best = max(walk(record, tree).tau for tree in all_trees(size, limits))
    assert walk(record, found_trees(record, [size], limits)[size]).tau >= 0.995 * best


def test_the_walk_and_the_average_position_have_different_optima():
    better = 0
    for seed in range(6):
        record = random_record(seed)
        for size in (4, 6, 8):
            found = walk(record, found_trees(record, [size], Limits(3, 4))[size]).tau
            average = walk(record, position_tree(record, size, Limits(3, 4))).tau
            assert found >= average
            better += found > average
    assert better > 3


def all_trees(size: int, limits: Limits) -> list[Tree]:
    """Every tree of ``size`` nodes within the limits."""
    grown: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(size - 1):
        grown = {
            paths | {new}
            for paths in grown
            for parent in (*paths, ())
            for rank in range(limits.width)
            if len(parent) < limits.depth and (new := (*parent, rank)) not in paths
        }
    return [Tree.from_paths(sorted(paths)) for paths in grown]


def test_sequoia_finds_the_best_tree_for_chances_by_rank():
    record = random_record(1)
    limits = Limits(2, 3)
    ranks = record.ranks.numpy()[:, :2]
    within = np.stack([np.ones(len(ranks), dtype=bool), (ranks[:, 0] >= 0) & (ranks[:, 0] < 3)], 1)
    shares = [float(((ranks == r) & within).sum() / within.sum()) for r in range(3)]

    def expected(tree: Tree) -> float:
        return sum(float(np.prod([shares[r] for r in path])) for path in tree.paths)

    for size in (2, 4, 6):
        assert expected(sequoia_tree(record, size, limits)) == pytest.approx(
            max(map(expected, all_trees(size, limits)))
        )
    assert sequoia_tree(record, 9, Limits(1, 3)).size == 4  # no more fit one level of three


def test_the_greedy_product_is_the_heap_over_accuracies():
    record, limits = random_record(2), Limits(3, 4)
    ranks = record.ranks.numpy()
    table = [[float((ranks[:, d] == r).sum() / (ranks[:, d] >= 0).sum()) for r in range(4)] for d in range(3)]
    assert greedy_product_tree(record, 9, limits) == best_tree(table, 9)


def test_limits_hold_and_every_size_is_found():
    record = random_record(0)
    for size, tree in found_trees(record, range(2, 20), Limits(2, 3)).items():
        assert (tree.size, tree.depth <= 2, tree.width <= 3) == (min(size, 13), True, True)


def test_published_trees_are_trees_of_the_published_sizes():
    assert {name: published_tree(name).size for name in PUBLISHED} == {
        "medusa-63": 64,
        "medusa-stage2-63": 64,
        "eagle-25": 26,
    }
    assert published_tree("medusa-63", 10, 2).depth == 2


def test_intervals_hold_the_value_and_pair_answers():
    record = random_record(3)
    one, other = walk(record, Tree.chain(3)), walk(record, Tree.chain(1))
    low, high = one.interval()
    assert low < one.tau < high
    assert one.gain_interval(one) == (0.0, 0.0)
    low, high = one.gain_interval(other)
    assert low <= one.tau - other.tau <= high


def test_a_tree_deeper_than_the_record_is_refused():
    with pytest.raises(RecordError, match="4 deep, the record knows 3 depths"):
        walk(random_record(0), Tree.chain(4))


def test_a_record_comes_back_whole_and_a_torn_one_is_refused(tmp_path):
    record = random_record(0)
    file = tmp_path / "r.safetensors"
    save_record(record, file)
    again = load_record(file)
    assert again.ranks.equal(record.ranks)
    assert (again.lengths, again.names, again.origin) == (record.lengths, record.names, record.origin)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RecordError, match="is no rank record"):
        load_record(file)


def test_halves_are_every_other_answer():
    record = random_record(0)
    build, judge = record.halves()
    assert (build.names, judge.names) == (record.names[::2], record.names[1::2])
    whole, tree = walk(record, Tree.chain(2)), Tree.chain(2)
    assert walk(build, tree).kept.tolist() == whole.kept[::2].tolist()
