"""How many nodes pay: committed tokens a second, tau(N) / round time(N), on this machine or on paper.

B batch rows   N tree nodes, root included; N = 1 is plain decoding   γ drafted tokens of a chain   T(n) of n positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cost import CostTable
from .family import Family
from .topology import Tree

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Choice:
    """A tree as it would run. seconds: of a round of all rows; speed: tokens a second of all rows."""

    nodes: int
    tau: float
    interval: tuple[float, float]
    seconds: float
    speed: float
    gain: float
    """Speed over that of N = 1."""


def sized(family: Family, costs: CostTable, batch: int = 1, context: int = 256) -> list[Choice]:
    """Every tree of the family and N = 1, by size, as it runs with ``batch`` rows behind ``context`` tokens."""
    plain = costs.round_seconds(Tree.chain(0), batch, context)
    choices = [Choice(1, 1.0, (1.0, 1.0), plain, batch / plain, 1.0)]
    for _, member in sorted(family.members.items()):
        if member.tree.size > 1:
            seconds = costs.round_seconds(member.tree, batch, context)
            speed = batch * member.tau / seconds
            choices.append(Choice(member.tree.size, member.tau, member.interval, seconds, speed, speed * plain / batch))
    return choices


def best_choice(choices: Sequence[Choice]) -> Choice:
    """The fastest; of equals the smallest."""
    return max(choices, key=lambda choice: (choice.speed, -choice.nodes))


def explained(choices: Sequence[Choice]) -> str:
    """In words what was chosen, and why if it is not to draft."""
    best = best_choice(choices)
    if best.nodes > 1:
        return (
            f"{best.nodes} nodes pay best: τ {best.tau:.2f} in a round of {1e3 * best.seconds:.1f} ms, "
            f"{best.gain:.2f} times plain decoding"
        )
    plain = choices[0]
    drafting = [choice for choice in choices if choice.nodes > 1]
    if not drafting:
        return "drafting does not pay here, because there is no tree to draft with"
    nearest = best_choice(drafting)
    return (
        f"drafting does not pay here, because the best tree ({nearest.nodes} nodes) keeps τ {nearest.tau:.2f} tokens a "
        f"round, and its round takes {nearest.seconds / plain.seconds:.2f} times as long as a plain one"
    )


@dataclass(frozen=True)
class Roofline:
    """A machine and a model on paper: a forward reads all weights once, or multiplies all rows, whichever is longer.

    LLaMA-2-7B in FP16 on 3.35 TB/s:

    >>> paper = Roofline(6_738_415_616, 2.0, 3.35e12, 990e12)
    >>> round(1e3 * paper.forward(1), 1), round(1 / paper.forward(1))
    (4.0, 249)
    """

    parameters: float
    weight_bytes: float
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Operations a second."""

    def forward(self, nodes: int) -> float:
        """The least seconds of a forward over ``nodes`` positions."""
        return max(self.parameters * self.weight_bytes / self.bandwidth, 2 * self.parameters * nodes / self.flops)

    @property
    def free_nodes(self) -> int:
        """The most positions that cost what one does: there reading the weights takes as long as multiplying."""
        return max(1, int(self.weight_bytes * self.flops / (2 * self.bandwidth)))


def chain_tokens(acceptance: float, drafted: int) -> float:
    """Tokens a round of a chain whose drafts are each accepted with this chance (Leviathan et al. 2022, eq. 1).

    >>> round(chain_tokens(0.8, 4), 2)
    3.36
    """
    if acceptance == 1.0:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def chain_speedup(paper: Roofline, acceptance: float, drafted: int, draft_share: float) -> float:
    """Over plain decoding, if drafting a token takes ``draft_share`` of a plain forward.

    >>> round(chain_speedup(Roofline(7e9, 2.0, 3.35e12, 990e12), 0.8, 4, 0.05), 1)
    2.8
    """
    plain = paper.forward(1)
    spent = drafted * draft_share * plain + paper.forward(drafted + 1)
    return chain_tokens(acceptance, drafted) * plain / spent


def best_chain(paper: Roofline, acceptance: float, draft_share: float, longest: int = 64) -> tuple[int, float]:
    """The γ of the largest ideal speed-up, and that; γ = 0 where no draft pays.

    >>> best_chain(Roofline(7e9, 2.0, 3.35e12, 990e12), 0.04, 0.05)
    (0, 1.0)
    """
    speedups = [chain_speedup(paper, acceptance, drafted, draft_share) for drafted in range(longest + 1)]
    best = max(range(longest + 1), key=speedups.__getitem__)
    return best, speedups[best]
