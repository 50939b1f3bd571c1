"""Acceptance rules by name: which drafted path the target confirms, and which token follows it.

B batch rows   N tree nodes   D depth of the tree   A accepted path length, root included   V target vocabulary

The default is the coupled rule, ``lossless``. At a node the next token is argmax(log p + G) (see ``sampling``). The
walk starts at the root and goes to the child that carries that token, until no child does; the token that no child
carried is the bonus. The text is therefore the one that plain decoding with the same seed writes, for every tree
however it was grown (Daliri et al. 2024, arXiv 2408.07978, for one draft; Rowan et al. 2025, arXiv 2506.05632, for
lists). Rows of logits that the walk does not reach are not processed.

The other rules are for study, see ``rejection`` and ``typical``. At temperature 0 all of them are the greedy match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..heads import native
from ..tree import Draft, DynamicTree, Shape, Tree, path_nodes
from .path import Path
from .rejection import Candidates, Law, Outcome, block_verification, chain_rejection, recursive_rejection, traversal
from .rows import RowRule, verify_rows
from .sampling import Drafts, GenerationError, Sampler
from .tape import Choose
from .text import Text
from .typical import DELTA, EPSILON, typical

Rule = Callable[[Draft, Tensor, Text, Sampler], Path]


def lossless(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
    """The coupled rule: the accepted path and the bonus token of every row.

    logits: [B, N, V], row i of a batch row being the target's after node i; ``text`` ends with the root.
    Logits that are not finite are reported by the path when it is read.
    """
    if sampler.is_argmax:
        return _match(draft, *_argmax(logits))
    return _walk(draft, logits, text, sampler)


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax over V, ties to the lowest id, and whether it can be trusted: NaN and +inf surface in the maximum."""
    if native.loaded() and logits.device.type == "cpu" and logits.dtype == torch.float32:
        values, indices = torch.ops.treedraft.largest(logits.contiguous())  # torch's takes 60 us a row
    else:
        values, indices = logits.max(-1)
    return indices, torch.isfinite(values)


def _match(draft: Draft, best: Tensor, finite: Tensor) -> Path:
    """Greedy: all nodes at once. best: [B, N] the target's token after each node, finite: [B, N]."""
    parents = draft.parents.clamp(min=0)
    matches = draft.valid & (draft.tokens == best.gather(1, parents))
    matches[:, 0] = True
    accepted = (matches[:, None, :] | ~draft.ancestors).all(-1) & draft.valid  # [B, N]
    last = torch.where(accepted, draft.depth, -1).argmax(-1)  # siblings differ, so the deepest one is unique
    return _path(draft, last, best, finite)


def _walk(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
    """Node after node, for the rows that still walk."""
    batch, device = logits.shape[0], logits.device
    walking = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    chosen = torch.zeros(batch, draft.size, dtype=torch.int64, device=device)
    finite = torch.ones(batch, draft.size, dtype=torch.bool, device=device)
    while len(walking):
        at = node[walking]
        contexts = text.with_path(draft, walking, at) if sampler.reads_context else ()
        positions = text.lengths[walking] + draft.depth[walking, at]
        scores = sampler.target_scores(logits[walking, at], walking, positions, contexts)
        chosen[walking, at], finite[walking, at] = _argmax(scores)
        takes = draft.tokens == chosen.gather(1, node[:, None])
        children = (draft.valid & (draft.parents == node[:, None]) & takes)[walking]
        found = children.any(-1)
        walking = walking[found]
        node[walking] = children[found].int().argmax(-1)
    return _path(draft, node, chosen, finite)


def _path(draft: Draft, last: Tensor, best: Tensor, finite: Tensor) -> Path:
    """The path that ends in ``last`` [B]; the tokens it emits are the target's own after each of its nodes."""
    rows = torch.arange(len(last), device=last.device)
    nodes = path_nodes(draft.ancestors, last, draft.levels)
    return Path(nodes, draft.depth[rows, last] + 1, best.gather(1, nodes), finite.gather(1, nodes).all(-1))


class MissingLaws(GenerationError):
    """A draft without the laws that a rule needs."""


@dataclass(frozen=True)
class NamedRule:
    """An acceptance rule and what it asks for.

    drafts: how candidates are taken where nothing else is said
    """

    name: str
    verify: Rule
    lossless: Literal["by seed", "in law", "not lossless"]
    drafts: Drafts
    chains_only: bool = False

    @property
    def weighs(self) -> bool:
        """Whether it weighs p against q: candidates must be drawn from q, and the draft must carry q."""
        return self.lossless == "in law"

    @property
    def caveat(self) -> str:
        """What a user must know of its text at temperature > 0; empty for the text of the seed."""
        return {
            "by seed": "",
            "in law": "exact in law, not by seed",
            "not lossless": "lossy, the text is NOT the target's own law",
        }[self.lossless]


def _weighing(rule: RowRule) -> Rule:
    """A rule on p and q for a batch. Raises MissingLaws for drafts that do not carry q."""

    def verify(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
        if sampler.sampling.greedy:
            return lossless(draft, logits, text, sampler)
        if draft.laws is None and draft.size > 1:
            raise MissingLaws(
                "its drafts carry no laws (Draft.laws), and this rule weighs p against the law of the draft"
            )
        return verify_rows(rule, draft, logits, text, sampler)

    return verify


def lossy_typical(epsilon: float = EPSILON, delta: float = DELTA) -> NamedRule:
    """Typical acceptance with other thresholds than the paper's, which its name then tells. LOSSY, see ``typical``.

    Raises GenerationError unless 0 < epsilon < 1 and delta > 0.

    >>> lossy_typical().name, lossy_typical(epsilon=0.2).name
    ('lossy-typical', 'lossy-typical(epsilon=0.2, delta=0.3)')
    """
    faults = [] if 0.0 < epsilon < 1.0 else [f"epsilon must lie in (0, 1), got {epsilon}"]
    faults += [] if 0.0 < delta < float("inf") else [f"delta must be positive, got {delta}"]
    if faults:
        raise GenerationError("; ".join(faults))

    def of_row(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
        return typical(tree, p, choose, epsilon, delta)

    def verify(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
        if sampler.sampling.greedy:
            return lossless(draft, logits, text, sampler)
        return verify_rows(of_row, draft, logits, text, sampler)

    usual = (epsilon, delta) == (EPSILON, DELTA)
    name = "lossy-typical" if usual else f"lossy-typical(epsilon={epsilon}, delta={delta})"
    return NamedRule(name, verify, "not lossless", "top-k")


_in_law = partial(NamedRule, lossless="in law", drafts="sampled")

RULES: dict[str, NamedRule] = {
    rule.name: rule
    for rule in (
        NamedRule("coupled", lossless, "by seed", "coupled"),
        _in_law("chain-rejection", _weighing(chain_rejection), chains_only=True),
        _in_law("block", _weighing(block_verification), chains_only=True),
        _in_law("recursive-rejection", _weighing(recursive_rejection)),
        _in_law("traversal", _weighing(traversal)),
        lossy_typical(),
    )
}


def find_rule(rule: str | NamedRule) -> NamedRule:
    """The rule of this name, or the one given. Raises GenerationError with the names there are."""
    if isinstance(rule, NamedRule):
        return rule
    if rule not in RULES:
        raise GenerationError(_unknown(rule))
    return RULES[rule]


def _unknown(name: str) -> str:
    return f"no rule called {name!r}: expected one of {', '.join(RULES)}"


def rule_faults(rule: str | NamedRule, drafts: str | None, tree: Shape | None) -> list[str]:
    """Why this rule cannot be used with these drafts (None: its own) and this tree (None: nothing is drafted)."""
    kinds = get_args(Drafts)
    faults = []
    if drafts is not None and drafts not in kinds:
        faults.append(f"no drafts called {drafts!r}: expected one of {', '.join(kinds)}")
    if isinstance(rule, str) and rule not in RULES:
        return [*faults, _unknown(rule)]
    rule = find_rule(rule)
    if rule.weighs and drafts in kinds and drafts != "sampled":
        faults.append(
            f"rule {rule.name} weighs p against q, so candidates must be drawn from q: it needs sampled drafts, "
            f"got {drafts}"
        )
    if isinstance(tree, DynamicTree) and rule.weighs:
        faults.append(
            f"rule {rule.name} cannot use a dynamic tree: growing by the drawn tokens' own probability would bias the "
            "law; use a static tree, or the coupled rule"
        )
    return faults + (_shape_faults(rule, tree) if isinstance(tree, Tree) else [])


def _shape_faults(rule: NamedRule, tree: Tree) -> list[str]:
    faults = []
    if rule.chains_only and tree.parents != Tree.chain(tree.size - 1).parents:
        faults.append(f"rule {rule.name} reads chains only, got a tree that branches; use chain:{tree.depth}")
    elif rule.weighs and tree.ranks != Tree.from_parents(tree.parents).ranks:
        faults.append(
            f"rule {rule.name} needs all of a node's draws in their order: its children must have the ranks 0, 1, 2, "
            "... in the order of the nodes"
        )
    return faults
