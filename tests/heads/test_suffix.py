from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from treedraft.heads import Automaton, HeadError, SuffixConfig, index_corpus
from treedraft.heads.automaton import COUNTED_LINKS, NONE, ROOT
from treedraft.heads.source import grow_best_first
from treedraft.heads.suffix import KEPT, Known, SuffixTable, followers_of


def state_of(automaton: Automaton, substring: tuple[int, ...]) -> int:
    state = ROOT
    for token in substring:
        state = automaton.next(state, token)
        if state == NONE:
            return NONE
    return state


def substrings(text: list[int], longest: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, min(len(text), i + longest) + 1))


def random_text(seed: int, words: int, length: int = 60) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(words) for _ in range(length)]


def built(text: list[int], at_once: bool) -> Automaton:
    if at_once:
        return index_corpus(text)
    automaton = Automaton()
    automaton.read(text[:10])
    automaton.read(text[10:])
    return automaton


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("words", [2, 3, 8])
def test_counts_are_those_of_all_substrings(words: int, at_once: bool) -> None:
    for seed in range(4):
        text = random_text(seed, words, 40)
        automaton = built(text, at_once)
        counts = substrings(text, len(text))
        for substring, count in counts.items():
            state = state_of(automaton, substring)
            assert automaton.count[state] == count
            last = max(i for i in range(len(text)) if tuple(text[i : i + len(substring)]) == substring)
            assert automaton.latest[state] == last + len(substring)
        assert state_of(automaton, (*text[:3], words + 1)) == NONE
        longer = {(*substring, token) for substring in counts for token in range(words)} - set(counts)
        assert all(state_of(automaton, substring) == NONE for substring in longer)


@pytest.mark.parametrize("words", [2, 3, 8])
def test_the_link_of_the_whole_text_is_its_longest_suffix_that_occurred_before(words: int) -> None:
    text = random_text(1, words)
    automaton = Automaton()
    for end in range(1, len(text) + 1):
        automaton.read(text[end - 1 : end])
        earlier = substrings(text[: end - 1], end)
        before = [n for n in range(1, end) if any(text[i : i + n] == text[end - n : end] for i in range(end - n))]
        longest = max(before, default=0)
        assert automaton.length[automaton.link[automaton.last]] == longest
        assert longest == 0 or automaton.count[automaton.link[automaton.last]] >= 2 or not earlier


@pytest.mark.parametrize("words", [2, 5, 20])
def test_advancing_finds_the_longest_suffix_that_is_in_the_text(words: int) -> None:
    text, asked = random_text(2, words), random_text(3, words)
    automaton, match = index_corpus(text), (ROOT, 0)
    known = set(substrings(text, len(text)))
    for end in range(1, len(asked) + 1):
        match = automaton.advance(*match, asked[end - 1])
        longest = max((n for n in range(1, end + 1) if tuple(asked[end - n : end]) in known), default=0)
        assert match[1] == longest
        assert match[0] == state_of(automaton, tuple(asked[end - longest : end]))


def slow_share(text: list[int], context: list[int], token: int, config: SuffixConfig, prior: bool) -> float:
    """The formula of SuffixConfig with counts by search."""
    lengths = [n for n in range(len(context), 0, -1) if _followers(text, context[-n:])]
    ends = {n: [i for i in range(len(text) + 1) if i >= n and text[i - n : i] == context[-n:]] for n in lengths}
    distinct = [n for n in lengths if n == lengths[0] or ends[n] != ends[n + 1]]  # one length for each set of places
    chosen = [(n, context[-n:]) for n in distinct[: config.contexts]]
    shorter = 0.0
    for n, part in reversed([*chosen, *([(0, [])] if prior else [])]):
        followed = _followers(text, part)
        total, different = sum(followed.values()), len(followed)
        doubt = (config.doubt + different) / n if n else config.prior
        shorter = (followed[token] + doubt * shorter) / (total + doubt)
    return shorter


def _followers(text: list[int], part: list[int]) -> Counter[int]:
    n = len(part)
    return Counter(text[i] for i in range(n, len(text)) if text[i - n : i] == part)


@pytest.mark.parametrize("prior", [0.0, 50.0])
@pytest.mark.parametrize("words", [3, 6])
def test_probabilities_follow_the_counts_of_the_longest_contexts(words: int, prior: float) -> None:
    config = SuffixConfig(prior=prior, contexts=3)
    for seed in range(6):
        text = random_text(seed, words, 40)
        table = SuffixTable(config, None)
        table.read(text)
        _, matched = table.start[0]
        assert matched > 0
        for token, share, _ in table.children(table.start):
            assert share == pytest.approx(slow_share(text, text[-matched:], token, config, bool(prior)))
        shares = [share for _, share, _ in table.children(table.start)]
        assert shares == sorted(shares, reverse=True)
        assert 0.0 < sum(shares) < 1.0


def test_long_matches_are_believed_more_than_short_ones() -> None:
    shares = []
    for length in (1, 2, 4, 8):
        text = list(range(10, 10 + length))
        table = SuffixTable(SuffixConfig(prior=0.0), None)
        table.read([*text, 5, 99, *text])
        [(token, share, _)] = table.children(table.start)
        assert token == 5
        shares.append(share)
    assert shares == sorted(shares)
    assert shares[0] < 0.3
    assert shares[-1] > 0.6


def test_a_drafted_path_backs_off_to_what_follows_its_own_end() -> None:
    """8 followed 1, 2 and 3 followed 8: the path 8, 3 is in no part of the text after 1, 2."""
    table = SuffixTable(SuffixConfig(prior=0.0), None)
    table.read([8, 3, 4, 1, 2, 8, 7, 1, 2])
    trie = grow_best_first(table, 2, 12, 3, 8)
    paths = [(trie.tokens[trie.parents[i]], token) for i, token in enumerate(trie.tokens) if i]
    assert (2, 8) in paths
    assert (8, 3) in paths


def test_the_empty_context_fills_the_first_level_alone() -> None:
    table = SuffixTable(SuffixConfig(), None)
    table.read([1, 1, 1, 2, 2, 3, 9])  # 9 is new: nothing matches
    trie = grow_best_first(table, 9, 3, 3, 8)
    assert (trie.tokens, trie.parents) == ([9, 1, 2], [-1, 0, 0])
    assert table.children((table.start[0], table.start[1], 9)) == []


def test_a_corpus_drafts_what_the_text_does_not_know() -> None:
    config = SuffixConfig(prior=0.0)
    corpus = Known(index_corpus([5, 6, 7, 8, 9, 10]), config, grows=False)
    table = SuffixTable(config, corpus)
    table.read([1, 2, 5, 6])
    trie = grow_best_first(table, 6, 5, 4, 8)
    assert trie.tokens == [6, 7, 8, 9, 10]


def test_of_text_and_corpus_the_larger_probability_counts() -> None:
    config = SuffixConfig(prior=0.0)
    corpus = index_corpus([3, 4, 5] * 3 + [3, 4, 6])
    mine, theirs = [1, 3, 4, 7, 0, 1, 3, 4], Known(corpus, config, grows=False)
    both, own = SuffixTable(config, theirs), SuffixTable(config, None)
    both.read(mine)
    own.read(mine)
    found = {token: share for token, share, _ in both.children(both.start)}
    alone = {token: share for token, share, _ in own.children(own.start)}
    match = (ROOT, 0)
    for token in mine:
        match = corpus.advance(*match, token)
    known = theirs.shares(match, 0.0)
    assert set(found) == {5, 6, 7} == set(alone) | set(known)
    assert found == {token: max(alone.get(token, 0.0), known.get(token, 0.0)) for token in found}


def test_of_many_followers_the_most_frequent_are_kept_and_all_are_counted() -> None:
    text = [token for i in range(20) for token in [0, 1 + i] * (20 - i)]
    found = followers_of(index_corpus(text), state_of(index_corpus(text), (0,)))
    assert found.counts == [(1 + i, 20 - i) for i in range(KEPT)]
    assert (found.total, found.different) == (210, 20)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_looping_text_stays_fast_and_goes_on_looping(period: int) -> None:
    loop, times = list(range(10, 10 + period)), 20_000 // period
    table, begin = SuffixTable(SuffixConfig(), None), time.process_time()
    for i in range(times):
        table.read(loop)
        if i % 100 == 0 and i > 2:
            assert grow_best_first(table, loop[-1], 9, 8, 8).tokens[1:8] == (loop * 8)[:7]
    assert time.process_time() - begin < 10.0  # counted along whole chains of links it would be minutes
    automaton = Automaton()
    automaton.read(loop * 200)
    chain, state = 0, automaton.last
    while state != ROOT:
        chain, state = chain + 1, automaton.link[state]
    assert chain > COUNTED_LINKS  # the cap was needed


def test_settings_that_cannot_be_name_every_fault() -> None:
    with pytest.raises(HeadError) as error:
        SuffixConfig(doubt=0.0, contexts=0, prior=-1.0)
    for fault in ("doubt must be positive", "contexts must be at least 1", "prior must be 0 (off) or positive"):
        assert fault in str(error.value)
