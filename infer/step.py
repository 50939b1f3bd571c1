"""One decode step, and the state that it takes and gives back.

B batch rows   T text positions   N tree nodes, root included   D depth of the tree
A accepted path length, root included   F feature width   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..heads import Accepted, Drafter, Memory
from ..tree import DynamicTree, Shape, root_draft
from .cache import KVCache
from .path import Path
from .rules import Rule
from .sampling import Sampler
from .stats import Clock
from .target import Target, TargetOutput
from .text import Text


@dataclass(frozen=True)
class State:
    """A batch between two steps. Row b's cache holds the positions [0, T_b), its root stands at T_b.

    The cache and the text's buffer are this batch's own and are written in place; everything else is replaced.
    """

    cache: KVCache
    text: Text
    accepted: Accepted
    memory: Memory | None
    sampler: Sampler

    def advance(self, path: Path, out: TargetOutput, memory: Memory | None, unread: bool = False) -> State:
        """The state after the accepted path: its features, and its tokens with the bonus as the new root.

        unread: the head was not asked in this round, and reads what it has missed when it is.
        """
        if unread:
            accepted = self.accepted.followed_by(out.features, path.tokens)
            return State(self.cache, self.text.extend(path), accepted, memory, self.sampler)
        rows = torch.arange(len(path.counts), device=path.counts.device)[:, None]
        features = out.features[rows, path.nodes]  # [B, A, F]
        reach = self.accepted.reach + max(path.host_counts)
        accepted = Accepted(features, path.tokens, path.counts, self.accepted.root_position, reach)
        return State(self.cache, self.text.extend(path), accepted, memory, self.sampler)

    def select(self, rows: list[int]) -> State:
        """The state of some rows, row i being the old row ``rows[i]`` >= i; the old state is used up."""
        chosen = torch.tensor(rows, device=self.accepted.count.device)
        memory = None if self.memory is None else self.memory.select(chosen)
        accepted, text = self.accepted.select(chosen), self.text.select(chosen)
        return State(self.cache.select(rows), text, accepted, memory, self.sampler.select(chosen))

    def join(self, other: State) -> State:
        """These rows and behind them those of ``other``; both old states are used up.

        Either none of them has taken a step or all have: a head reads prompts and what follows in different ways.
        """
        memory = None
        if self.memory is not None and other.memory is not None:
            memory = self.memory.join(other.memory)
        assert (memory is None) == (self.memory is None) == (other.memory is None)
        cache, text = self.cache.join(other.cache), self.text.join(other.text)
        return State(cache, text, self.accepted.join(other.accepted), memory, self.sampler.join(other.sampler))


def decode_step(
    target: Target, head: Drafter, tree: Shape, rule: Rule, state: State, clock: Clock
) -> tuple[State, Path]:
    """Drafts a tree for every row, verifies it in one forward, commits the accepted path.

    A row emits the accepted tokens after its root and one bonus token, between 1 and D + 1, and the bonus is its next
    root. Without noise in the sampler this is greedy decoding; the text never depends on the head or the tree.
    """
    cache, text, sampler = state.cache, state.text, state.sampler
    schedule = tree.schedule if isinstance(tree, DynamicTree) else None
    drafts = schedule is None or schedule.drafts(first=state.accepted.first is not None)
    if drafts:
        texts = text.rows() if sampler.reads_context else ()
        scores = sampler.draft_scores(texts, target.vocab_size, state.accepted.root_position)
        draft, memory = head.propose(state.accepted, state.memory, tree, scores)  # tokens, parents [B, N]
    else:
        draft, memory = root_draft(state.accepted.root), state.memory  # a plain round: N = 1
    clock.lap("draft")
    positions = cache.lengths[:, None] + draft.depth  # [B, N]
    out = target.forward(draft.tokens, positions, draft.ancestors, cache, head.taps)  # logits [B, N, V]; T -> T + N
    clock.lap("forward")
    path = rule(draft, out.logits, text, sampler)  # nodes, tokens [B, A]
    path.read()  # the step's one wait for the device
    clock.lap("verify")
    cache.commit(path)  # T + N -> T + A
    state = state.advance(path, out, memory, unread=not drafts)
    if schedule is not None and drafts:
        schedule.learn([row[:count] for row, count in zip(path.host_nodes, path.host_counts, strict=True)])
    clock.lap("commit")
    return state, path
