"""A suffix automaton over token ids: all substrings of a text, each with its continuations and how often they occurred.

Built token by token in amortised constant time (Blumer et al. 1985, "The smallest automaton recognizing the subwords of
a text"). A state stands for substrings that end at the same places. Most states have one transition, which is kept in
two flat arrays; only the others have a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

NONE = -1
ROOT = 0

COUNTED_LINKS = 32
"""Up to how many suffix links the occurrence of a token is counted at once. Text that repeats itself makes chains of
links as long as the text, and counting along all of them would cost quadratic time; ordinary text has chains of a
handful. What goes uncounted are the shortest of many contexts, of which the longest decide."""


class Automaton:
    """Grows in place. States are numbers, ROOT the empty string.

    length: of the longest substring of a state   link: to the state of its longest suffix that is in another state
    count: occurrences of the state's substrings   latest: the index behind the most recent one
    """

    def __init__(self) -> None:
        self.length, self.link = array("i", [0]), array("i", [NONE])
        self.count, self.latest = array("i", [0]), array("i", [0])
        self._token, self._target = array("i", [NONE]), array("i", [NONE])  # a state's only transition
        self._branches: dict[int, dict[int, int]] = {}  # all transitions of states that have several
        self.last = ROOT
        """The state of the whole text."""
        self.size = 0
        """Tokens read."""

    def next(self, state: int, token: int) -> int:
        """The state after ``token``, or NONE."""
        branches = self._branches.get(state)
        if branches is not None:
            return branches.get(token, NONE)
        return self._target[state] if self._token[state] == token else NONE

    def transitions(self, state: int) -> Iterable[tuple[int, int]]:
        """(token, state after it) for all that followed."""
        branches = self._branches.get(state)
        if branches is not None:
            return branches.items()
        return ((self._token[state], self._target[state]),) if self._target[state] != NONE else ()

    def read(self, tokens: Iterable[int]) -> None:
        """Appends tokens and counts their occurrences, up to COUNTED_LINKS."""
        for token in tokens:
            self._extend(token)
            state = self.last
            for _ in range(COUNTED_LINKS):
                if state == ROOT:
                    break
                self.count[state] += 1
                self.latest[state] = self.size
                state = self.link[state]

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest suffix that occurred of ``matched`` tokens ending in ``state``, and ``token``: state, length."""
        while state != ROOT and self.next(state, token) == NONE:
            state = self.link[state]
            matched = self.length[state]
        following = self.next(state, token)
        return (ROOT, 0) if following == NONE else (following, matched + 1)

    def _extend(self, token: int) -> None:
        self.size += 1
        new = self._add(self.length[self.last] + 1)
        state = self.last
        self.last = new
        while state != NONE and self.next(state, token) == NONE:
            self._set(state, token, new)
            state = self.link[state]
        if state == NONE:
            self.link[new] = ROOT
            return
        found = self.next(state, token)
        if self.length[found] != self.length[state] + 1:
            found = self._split(found, state, token)
        self.link[new] = found

    def _split(self, found: int, state: int, token: int) -> int:
        """A state of their own for the shorter substrings of ``found``, which now occur where the others do not."""
        clone = self._add(self.length[state] + 1)
        self.link[clone], self.count[clone], self.latest[clone] = (
            self.link[found],
            self.count[found],
            self.latest[found],
        )
        self._token[clone], self._target[clone] = self._token[found], self._target[found]
        if found in self._branches:
            self._branches[clone] = dict(self._branches[found])
        self.link[found] = clone
        while state != NONE and self.next(state, token) == found:
            self._set(state, token, clone)
            state = self.link[state]
        return clone

    def _add(self, length: int) -> int:
        self.length.append(length)
        for column in (self.link, self._token, self._target):
            column.append(NONE)
        self.count.append(0)
        self.latest.append(0)
        return len(self.length) - 1

    def _set(self, state: int, token: int, target: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = target
        elif self._target[state] == NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._branches[state] = {self._token[state]: self._target[state], token: target}


def index_corpus(tokens: Iterable[int]) -> Automaton:
    """The automaton of a text that does not grow any more, with exact counts: added up once, longest states first."""
    automaton, prefixes = Automaton(), array("i")
    for token in tokens:
        automaton._extend(token)
        prefixes.append(automaton.last)
    for size, state in enumerate(prefixes, 1):
        automaton.count[state], automaton.latest[state] = 1, size
    for state in sorted(range(1, len(automaton.length)), key=automaton.length.__getitem__, reverse=True):
        up = automaton.link[state]
        automaton.count[up] += automaton.count[state]
        automaton.latest[up] = max(automaton.latest[up], automaton.latest[state])
    return automaton
