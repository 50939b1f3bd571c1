"""The confidence schedule: which nodes a dynamic tree admits, when it stops growing, and whether to draft at all.

B batch rows   N tree nodes, root included   D depth   e nodes of a level that are asked
π chance that a node is accepted

A candidate's confidence is calibrated to the chance that it is right if its parent is; π is the product along its path.
Nodes of all rows are admitted best first while the tokens that they bring are worth their time, at the rate of tokens a
second that the run has had so far, or that of plain rounds if it is higher: tokens - rate * seconds is what makes the
average rate largest, while each round's own rate would grow poor rounds too far and good ones not far enough. One
forward takes B x N positions, padding included, so the budget that rows compete for is its width: a node of one row
makes room for one of every other. A further level is asked for while the nodes that it may bring, as
often right as nodes of that level were so far, pay for the head call too. Where even the best tree does not pay,
rounds are plain ones, with a few drafted ones now and then to see whether that has changed.

What is drafted never decides what is emitted under the coupled rule, so a schedule may look at anything. Rules that
weigh p against q would be biased by it, and refuse dynamic trees (``rule_faults``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .calibration import Logistic, Reliability, logit
from .cost import CostTable
from .prices import Prices, best_size
from .shares import DEPTH_SHARE, RANK_SHARE

LEARNING = 0.02
"""How far a round moves what is expected of a level."""
FADING = 0.97
"""By which drafted rounds lose weight in what drafting is seen to gain, one after the other."""
PROBES = 8
"""Drafted rounds that decide, after a rest, whether drafting pays again."""
REST, LONGEST_REST = 32, 128
"""Plain rounds of a first rest, doubled each time up to the second."""
CONTEXT_STEP = 128
"""Costs are looked up anew each time that texts have grown by so many tokens."""


@dataclass
class Row:
    """The candidates of one row so far, as lists; parents: 0 for the root, else 1 + the parent's place in the lists."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """π."""
    raw: list[float] = field(default_factory=list)
    """The log of the product of confidences along the path."""


@dataclass
class Gain:
    """Tokens and seconds of drafted rounds, faded, and how many they were; plain: tokens a second of plain ones."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    plain: float = 0.0


@dataclass
class Schedule:
    """The schedule of one run: what it learns is written in place. ``fresh`` gives a run its own.

    acceptance: [D][W] expected share of rounds in which candidate r of depth d is right if its parent is
    calibration: for each depth the pair a, b (``calibration``); the last ones serve deeper levels too
    """

    costs: CostTable
    acceptance: Sequence[Sequence[float]] = ()
    calibration: Sequence[tuple[float, float]] = ()
    before: Reliability = field(default_factory=Reliability)
    """The heads' own confidences in the nodes of drafted trees, against what was accepted."""
    after: Reliability = field(default_factory=Reliability)
    """The same after calibration, each claim made before its round."""
    drafted_rounds: int = 0
    plain_rounds: int = 0

    def __post_init__(self) -> None:
        table = self.acceptance or [
            [share * DEPTH_SHARE[min(d, len(DEPTH_SHARE) - 1)] for share in RANK_SHARE] for d in range(4)
        ]
        self._expected = [list(row) for row in table]
        self._fits = [Logistic(a, b) for a, b in self.calibration] or [Logistic()]
        self._prices: dict[tuple[int, int, int, int], Prices] = {}
        self._rows: list[Row] = []
        self._nodes: list[list[int]] = []
        self._gains: dict[int, Gain] = {}  # by batch size, since rows come and go
        self._resting, self._rest = 0, REST

    def fresh(self) -> Schedule:
        """A schedule that has learnt nothing yet from rounds."""
        return Schedule(self.costs, self.acceptance, self.calibration)

    def prices(self, batch: int, context: int, size: int, width: int) -> Prices:
        """What the parts of a round cost for trees up to ``size`` nodes and levels up to ``width``; kept."""
        key = (batch, context // CONTEXT_STEP, size, width)
        if key not in self._prices:
            middle = (key[1] + 0.5) * CONTEXT_STEP
            forward = self.costs.forward_seconds(range(1, size + 1), batch, int(middle)).tolist()
            steps = [self.costs.step_seconds(e, batch) for e in range(1, width + 1)]
            begin, overhead = self.costs.begin_seconds(batch), self.costs.overhead_seconds(batch)
            self._prices[key] = Prices((math.inf, *forward), begin, (0.0, *steps), overhead)
        return self._prices[key]

    def expected(self, depth: int, rank: int) -> float:
        """How often candidate ``rank`` of depth ``depth`` >= 1 is right if its parent is."""
        row = self._expected[min(depth, len(self._expected)) - 1]
        return row[rank] if rank < len(row) else 0.0

    def pays(self, batch: int, context: int, size: int, depth: int, width: int) -> bool:
        """Whether a round with a tree is expected to be faster than plain ones, before anything was drafted."""
        prices = self.prices(batch, context, size, width)
        chances, level, drafting, plain = [], [1.0], prices.begin, batch / prices.plain
        for at in range(1, depth + 1):
            level = [p * self.expected(at, rank) for p in level for rank in range(width)]
            level = sorted(level, reverse=True)[:width]
            chances = sorted([*chances, *level], reverse=True)
            if best_size([chances] * batch, prices, drafting, size, plain)[1] > 0:
                return True
            drafting += prices.step[min(len(level), width)]
        return False

    def drafts(self, first: bool) -> bool:
        """Whether the coming round drafts; ``first``: prompts are still to be read by the head, which is done there."""
        if first or not self._resting:
            return True
        self._resting -= 1
        self.plain_rounds += 1
        return False

    def begin(self, batch: int) -> None:
        """A drafted round of ``batch`` rows."""
        self._rows = [Row() for _ in range(batch)]
        self._nodes = []

    def offer(self, depth: int, asked: Sequence[Sequence[int]], beliefs: Sequence, tokens: Sequence) -> None:
        """The candidates of a level: of each row, for each asked node, the log confidences and tokens, best first.

        asked: for each row the nodes, 0 for the root, else 1 + their place among the row's candidates; a head that
        does not look at drafted tokens answers once for all of them.
        """
        fit = self._fits[min(depth, len(self._fits)) - 1]
        for row, parents, all_beliefs, all_tokens in zip(self._rows, asked, beliefs, tokens, strict=True):
            for at, parent in enumerate(parents):
                same = at if len(all_beliefs) > 1 else 0
                chance, raw = (1.0, 0.0) if parent == 0 else (row.chances[parent - 1], row.raw[parent - 1])
                for rank, (belief, token) in enumerate(zip(all_beliefs[same], all_tokens[same], strict=True)):
                    z = logit(belief)
                    row.tokens.append(token)
                    row.parents.append(parent)
                    row.ranks.append(rank)
                    row.depths.append(depth)
                    row.logits.append(z)
                    row.chances.append(chance * fit.chance(z))
                    row.raw.append(raw + belief)

    def next_level(self, depth: int, prices: Prices, drafting: float, size: int, width: int) -> list[list[int]]:
        """The candidates of level ``depth``, of each row equally many, that the head is asked of next; none to stop.

        drafting: seconds that the draft has taken so far. The candidates are given by their places in the row.
        """
        own = [sorted(row.chances, reverse=True) for row in self._rows]
        rate = self._rate(prices)
        now = best_size(own, prices, drafting, size, rate)[1]
        fronts, hoped = [], []
        for row, chances in zip(self._rows, own, strict=True):
            front = sorted((i for i, d in enumerate(row.depths) if d == depth), key=lambda i: -row.chances[i])[:width]
            fronts.append(front)
            children = [row.chances[i] * self.expected(depth + 1, rank) for i in front for rank in range(width)]
            hoped.append(sorted([*chances, *children], reverse=True))
        nodes, then = best_size(hoped, prices, drafting + prices.step[1], size, rate)
        if then <= now:
            return []
        asked = 1
        for row, front, chances in zip(self._rows, fronts, hoped, strict=True):
            least = chances[min(nodes - 1, len(chances)) - 1] if nodes > 1 else 1.0
            worth = sum(row.chances[i] * self.expected(depth + 1, 0) >= least for i in front)
            asked = max(asked, worth)
        asked = min(asked, *(len(front) for front in fronts))
        return [sorted(front[:asked]) for front in fronts]

    def admit(self, prices: Prices, drafting: float, size: int) -> list[list[int]]:
        """The candidates of each row that become nodes, by their places, parents first."""
        own = [sorted(row.chances, reverse=True) for row in self._rows]
        nodes, _ = best_size(own, prices, drafting, size, self._rate(prices))
        self._nodes = []
        for row in self._rows:
            ranked = sorted(range(len(row.chances)), key=lambda i: (-row.chances[i], i))
            self._nodes.append(sorted(ranked[: nodes - 1]))
        gain = self._gains.setdefault(len(self._rows), Gain())
        gain.seconds = gain.seconds * FADING + drafting + prices.forward[nodes] + prices.overhead
        gain.plain = len(self._rows) / prices.plain
        return self._nodes

    def rows(self) -> Sequence[Row]:
        return self._rows

    def learn(self, paths: Sequence[Sequence[int]]) -> None:
        """After a drafted round: the nodes that each row accepted, the root (node 0) first."""
        if not self._nodes:
            return
        for row, chosen, path in zip(self._rows, self._nodes, paths, strict=True):
            accepted = set(path)
            places = {0: 0} | {1 + place: node for node, place in enumerate(chosen, 1)}
            for node, place in enumerate(chosen, 1):
                right = node in accepted
                self.before.add(math.exp(row.raw[place]), right)
                self.after.add(row.chances[place], right)
                if places[row.parents[place]] in accepted:
                    depth = row.depths[place]
                    self._fit(depth).learn(row.logits[place], right)
                    self._expect(depth, row.ranks[place], right)
        self.drafted_rounds += 1
        self._judge(sum(len(path) for path in paths), len(paths))

    def _rate(self, prices: Prices) -> float:
        """Tokens a second of all rows: what the run has had so far, at least what plain rounds have."""
        gain, plain = self._gains.get(len(self._rows)), len(self._rows) / prices.plain
        return plain if gain is None or gain.rounds < PROBES else max(plain, gain.tokens / gain.seconds)

    def _fit(self, depth: int) -> Logistic:
        while len(self._fits) < depth:
            last = self._fits[-1]
            self._fits.append(Logistic(last.a, last.b))
        return self._fits[depth - 1]

    def _expect(self, depth: int, rank: int, right: bool) -> None:
        while len(self._expected) < depth:
            self._expected.append(list(self._expected[-1]))
        row = self._expected[depth - 1]
        if rank < len(row):
            row[rank] += LEARNING * (right - row[rank])

    def _judge(self, kept: int, batch: int) -> None:
        """Whether drafting gained; if it did not over a few rounds, plain ones follow."""
        gain = self._gains[batch]
        gain.tokens = gain.tokens * FADING + kept
        gain.rounds += 1
        if gain.rounds < PROBES:
            return
        if gain.tokens / gain.seconds >= gain.plain:
            self._rest = REST
            return
        self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        del self._gains[batch]
