from __future__ import annotations

import random
import time

import pytest

from treedraft.heads import HeadError, NGramConfig
from treedraft.heads.ngram import NGramTable
from treedraft.heads.source import grow_best_first
from treedraft.tree import Tree


def slow_lookup(text: list[int], max_n: int, length: int) -> list[int]:
    """The obvious form: search from the right, copy what followed, and go on with the copy where the text ends."""
    for n in range(max_n, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied = list(text)
                for i in range(length):
                    copied.append(copied[end + i])
                return copied[len(text) :]
    return []


def drafted(table: NGramTable, root: int, length: int) -> list[int]:
    trie = grow_best_first(table, root, length + 1, length, 8)
    assert trie.parents == list(range(-1, len(trie.tokens) - 1))  # a chain
    return trie.tokens[1:]


@pytest.mark.parametrize("max_n", [1, 2, 3, 5])
@pytest.mark.parametrize("words", [2, 4, 30])
def test_the_copy_is_that_of_a_search_from_the_right(max_n: int, words: int) -> None:
    numbers = random.Random(words)
    for _ in range(20):
        table, text = NGramTable(NGramConfig(max_n)), []
        while len(text) < 60:
            new = [numbers.randrange(words) for _ in range(numbers.randrange(1, 6))]
            table.read(new)
            text += new
            assert drafted(table, text[-1], 7) == slow_lookup(text, max_n, 7)


def test_the_longest_match_comes_before_the_latest() -> None:
    table = NGramTable(NGramConfig(max_n=2))
    table.read([1, 2, 7, 2, 8, 1, 2])
    assert drafted(table, 2, 2) == [7, 2]


def test_a_loop_is_drafted_beyond_the_end_of_the_text() -> None:
    table = NGramTable(NGramConfig())
    table.read([4, 5, 6, 4, 5])
    assert drafted(table, 5, 7) == [6, 4, 5, 6, 4, 5, 6]


def test_a_longer_agreement_is_believed_more() -> None:
    table = NGramTable(NGramConfig(max_n=2, belief=(0.25, 0.5)))
    table.read([1, 2, 3, 9, 2])
    place, shares = table.start, []
    for _ in range(3):
        [(_, share, place)] = table.children(place)
        shares.append(share)
    assert shares == [0.25, 0.5, 0.5]


def test_a_text_without_repeats_is_not_drafted_from() -> None:
    table = NGramTable(NGramConfig())
    assert table.start is None
    table.read([1, 2, 3])
    assert drafted(table, 3, 4) == []


def test_long_looping_text_stays_fast() -> None:
    table, begin = NGramTable(NGramConfig()), time.process_time()
    for _ in range(20_000):
        table.read([1, 1, 1])
        grow_best_first(table, 1, 11, 10, 8)
    assert time.process_time() - begin < 10.0


def test_settings_that_cannot_be_name_every_fault() -> None:
    with pytest.raises(HeadError) as error:
        NGramConfig(max_n=0, belief=(0.5, 1.0))
    assert "max_n must be at least 1, got 0" in str(error.value)
    assert "belief must be shares between 0 and 1" in str(error.value)


def test_chains_and_wide_trees_are_both_allowed() -> None:
    from treedraft.heads import NGram

    for tree in (Tree.chain(10), Tree.from_paths([[i] for i in range(12)])):
        tree.check_fits(NGram.depth, NGram.candidates)
