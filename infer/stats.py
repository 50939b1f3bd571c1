"""What a decode run did, as counts. Ratios are taken at the edge.

tau: the mean accepted length, tokens kept from decode rounds / decode rounds, summed over prompts, the bonus token
counted, the prefill and its own token not (plain decoding = 1.00).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

PHASES = ("prefill", "draft", "forward", "verify", "commit", "rest")


@dataclass
class Stats:
    """Counts over rounds; they add up.

    A round loops if the 4-gram ending at its first emitted token occurred before in that answer: text that repeats
    itself flatters every drafter, so the mean accepted length is also given without such rounds.
    """

    prompts: int = 0
    tokens: int = 0
    """New tokens in all, the prefill's own included."""
    rounds: int = 0
    kept: int = 0
    """Tokens kept from decode rounds."""
    accepted: Counter[int] = field(default_factory=Counter)
    """Rounds by the number of drafted tokens they kept."""
    loop_rounds: int = 0
    loop_kept: int = 0
    rounds_at: Counter[int] = field(default_factory=Counter)
    """Rounds by where their root stands: the lower end of its range (see ``length_range``)."""
    kept_at: Counter[int] = field(default_factory=Counter)
    phase_seconds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Stats) -> Stats:
        total = Stats()
        total.add(self)
        total.add(other)
        return total

    def add(self, other: Stats) -> None:
        """Adds the counts and times of ``other`` to this one."""
        for name in ("prompts", "tokens", "rounds", "kept", "loop_rounds", "loop_kept"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for counts in ("accepted", "rounds_at", "kept_at"):
            getattr(self, counts).update(getattr(other, counts))
        self.phase_seconds.update(other.phase_seconds)

    def count_round(self, kept: int, drafted: int, loops: bool, position: int) -> None:
        """One round of one row that kept ``kept`` tokens, ``drafted`` of them from the draft; its root's position."""
        self.rounds += 1
        self.kept += kept
        self.rounds_at[range_start(position)] += 1
        self.kept_at[range_start(position)] += kept
        self.accepted[drafted] += 1
        if loops:
            self.loop_rounds += 1
            self.loop_kept += kept

    @property
    def tau(self) -> float:
        return self.kept / self.rounds if self.rounds else float("nan")

    @property
    def tau_without_loops(self) -> float:
        rounds = self.rounds - self.loop_rounds
        return (self.kept - self.loop_kept) / rounds if rounds else float("nan")

    @property
    def tau_by_position(self) -> dict[str, float]:
        """tau of the rounds whose root stands in a range of positions: how far heads carry beyond their training."""
        return {length_range(start): self.kept_at[start] / n for start, n in sorted(self.rounds_at.items())}

    @property
    def accepted_by_depth(self) -> list[int]:
        """Rounds that accepted at least d drafted tokens, for d = 0, 1, ..."""
        deepest = max(self.accepted, default=-1)
        return [sum(n for d, n in self.accepted.items() if d >= depth) for depth in range(deepest + 1)]

    @property
    def accept_by_depth(self) -> list[float]:
        """The share of rounds that accepted at least d drafted tokens, for d = 0, 1, ..."""
        return [n / self.rounds for n in self.accepted_by_depth]

    def to_dict(self) -> dict[str, object]:
        """Counts and ratios for a JSON report; a ratio without rounds is null."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "kept": self.kept,
            "tau": self.tau if self.rounds else None,
            "tau_without_loops": self.tau_without_loops if self.rounds > self.loop_rounds else None,
            "accepted_by_depth": self.accepted_by_depth,
            "accept_by_depth": self.accept_by_depth,
            "tau_by_position": self.tau_by_position,
            "loop_rounds": self.loop_rounds,
            "loop_kept": self.loop_kept,
            "phase_seconds": {phase: self.phase_seconds[phase] for phase in PHASES},
        }


def range_start(length: int) -> int:
    """The lower end of the range that a length or position falls into: 0, then powers of two from 64 on.

    >>> range_start(0), range_start(63), range_start(64), range_start(1000)
    (0, 0, 64, 512)
    """
    return 0 if length < 64 else 1 << (length.bit_length() - 1)


def length_range(start: int) -> str:
    """The range that begins at ``start``, in words.

    >>> length_range(0), length_range(64), length_range(512)
    ('0-63', '64-127', '512-1023')
    """
    return f"{start}-{2 * start - 1 if start else 63}"


class LoopFinder:
    """Tells of one answer whether its last 4-gram occurred before."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()
        self._last: tuple[int, ...] = ()

    def repeats(self, token: int) -> bool:
        """Adds a token; whether the 4-gram it ends was there already."""
        self._last = (*self._last[-3:], token)
        known = self._last in self._seen
        if len(self._last) == 4:
            self._seen.add(self._last)
        return known


class Clock:
    """Splits a run's time into phases: ``lap(phase)`` credits the time since the last lap.

    On an accelerator work is only queued when a call returns, so laps are true there only with ``synchronize``.
    """

    def __init__(self, seconds: Counter[str], device: torch.device, synchronize: bool = False) -> None:
        self._seconds = seconds
        self._synchronize = synchronize and device.type == "cuda"
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds[phase] += now - self._last  # type: ignore[assignment]  # seconds, not occurrences
        self._last = now

    def restart(self) -> None:
        """Forgets the time since the last lap: what a caller did between two steps of a stream."""
        self._last = time.perf_counter()
