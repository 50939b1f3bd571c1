"""A batch of requests that is kept full: rows that end leave, and waiting requests take their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..heads import Drafter
from ..tree import Shape
from .cache import close_ranks
from .prefill import prefill
from .request import Chunk, Request
from .rules import MissingLaws, NamedRule
from .sampling import GenerationError, Sampler
from .stats import Clock
from .step import State, decode_step
from .target import Target


@dataclass(frozen=True)
class Decoder:
    """What all rounds of a call have in common. ``sampler`` makes the law and the noise of some requests."""

    target: Target
    head: Drafter
    tree: Shape
    rule: NamedRule
    sampler: Callable[[Sequence[Request]], Sampler]
    clock: Clock


@dataclass(frozen=True)
class Batch:
    """Requests that run, row i of the state being request i."""

    rows: list[Request]
    state: State

    def join(self, other: Batch) -> Batch:
        return Batch(self.rows + other.rows, self.state.join(other.state))


def serve(decoder: Decoder, requests: Sequence[Request], places: int) -> Iterator[list[Chunk]]:
    """All rounds of ``requests``, at most ``places`` of them running at a time: the chunks of each round."""
    done = [Chunk(r.index, [], "", 0, r.reason) for r in requests if r.reason is not None]
    if done:
        yield done
    waiting = deque(r for r in requests if r.reason is None)
    places = min(places, len(waiting))
    running: Batch | None = None
    while waiting or running:
        free = places - (len(running.rows) if running else 0)
        if not (waiting and free):
            assert running is not None
            running, chunks = step(decoder, running)
            yield chunks
            continue
        entering, chunks = enter(decoder, [waiting.popleft() for _ in range(min(free, len(waiting)))], places)
        yield chunks
        if running is None or entering is None:
            running = running or entering
            continue
        entering, chunks = step(decoder, entering)  # alone: their heads read a whole prompt, the others a few tokens
        yield chunks
        running = running.join(entering) if entering else running


def enter(decoder: Decoder, rows: list[Request], places: int) -> tuple[Batch | None, list[Chunk]]:
    """Reads the prompts of ``rows`` and gives each its first token; those that it ends are not in the batch."""
    prompts, budget = [row.prompt for row in rows], max(row.budget for row in rows)
    nodes, sampler = decoder.tree.size, decoder.sampler(rows)
    state, first = prefill(decoder.target, decoder.head, prompts, budget, nodes, sampler, places)
    decoder.clock.lap("prefill")
    chunks = [row.take_first(token) for row, token in zip(rows, first, strict=True)]
    return _running(decoder, rows, state), chunks


def step(decoder: Decoder, batch: Batch) -> tuple[Batch | None, list[Chunk]]:
    """One round of all rows; those that end leave the batch. Nothing is left of it when the last one has ended."""
    rule, head = decoder.rule, decoder.head
    try:
        state, path = decode_step(decoder.target, head, decoder.tree, rule.verify, batch.state, decoder.clock)
    except MissingLaws as fault:
        raise GenerationError(f"rule {rule.name} cannot be used with {type(head).__name__}: {fault}") from fault
    chunks = [row.take_round(emitted) for row, emitted in zip(batch.rows, path.host_tokens, strict=True)]
    return _running(decoder, batch.rows, state), chunks


def _running(decoder: Decoder, rows: list[Request], state: State) -> Batch | None:
    """The rows that have not ended."""
    keep = close_ranks([row.reason is None for row in rows])
    if keep and len(keep) < len(rows):
        state = state.select(keep)
    decoder.clock.lap("rest")
    return Batch([rows[i] for i in keep], state) if keep else None
