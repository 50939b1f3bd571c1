"""Acceptance rules that weigh the target's law p against the law q that candidates were drawn from, for one row.

Each gives text of exactly the law p, if the children of every node were drawn from q, one after the other and without
replacement, and come in the order in which they were drawn. They are written against ``choose``, so that every outcome
can be enumerated (``tape.outcomes``). Derivations: docs/lossless.md.

V target vocabulary

    chain_rejection      chains  Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318
    block_verification   chains  Sun et al. 2024, arXiv 2403.10444
    recursive_rejection  trees   Jeon et al. 2024 (RSD), arXiv 2402.14160; Chen et al. 2024 (Sequoia), arXiv 2402.12374
    traversal            trees   Weng et al. 2025, arXiv 2505.12398

A child whose token q gives no weight was not drawn but filled in because q had run out of tokens; it and the siblings
after it are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise import COINS
from .tape import Choose

NO_MASS = 1e-8
"""A residual of less mass is rounding: the rejection that led to it had no probability. p takes its place."""

Law = Callable[[int], Tensor]
"""From a node id to probabilities [V] in fp64: the target's after the node, or those its children were drawn from."""

Outcome = tuple[list[int], int]
"""The accepted node ids, the root first, and the token that follows them."""


@dataclass(frozen=True)
class Candidates:
    """One row's tree. Node 0 is the root.

    tokens: the token of every node
    children: the children of every node, in the order in which they were drawn
    """

    tokens: Sequence[int]
    children: Sequence[Sequence[int]]

    @staticmethod
    def of(tokens: Sequence[int], parents: Sequence[int]) -> Candidates:
        """From parent ids, -1 for the root and for padding; siblings in the order of their ids.

        >>> Candidates.of([7, 3, 4, 5], [-1, 0, 1, 0]).children
        [[1, 3], [2], [], []]
        """
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        return Candidates(tokens, children)


def chain_rejection(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Accept x with probability min(1, p(x)/q(x)), else draw from the residual norm([p - q]+) and stop."""
    node, path = 0, [0]
    while tree.children[node]:
        (child,) = tree.children[node]
        token, target, draft = tree.tokens[child], p(node), q(node)
        if not draft[token] > 0.0:
            break
        if not _happens(target[token] / draft[token], choose):
            return path, choose(residual(target, draft))
        node = child
        path.append(child)
    return path, choose(p(node))


def block_verification(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Accept the longest prefix x_1..x_i whose own coin, of chance h_i, allows it (Sun et al.).

    P_i = min(1, P_(i-1) p(x_i)/q(x_i)), P_0 = 1: how far the joint law of the prefix supports it. The whole chain has
    h = P; a shorter prefix h_i = S_i / (S_i + 1 - P_i), where S_i is the mass of [P_i p - q]+ after x_i, and the token
    that follows it is drawn from that residual. Coins are thrown from the end, so the first success is the longest.
    """
    path, support = [0], [1.0]
    while tree.children[path[-1]]:
        (child,) = tree.children[path[-1]]
        token, draft = tree.tokens[child], q(path[-1])
        if not draft[token] > 0.0:
            break
        support.append(min(1.0, support[-1] * float(p(path[-1])[token] / draft[token])))
        path.append(child)
    if _happens(support[-1], choose):
        return path, choose(p(path[-1]))
    for i in range(len(path) - 2, -1, -1):
        target, draft = p(path[i]), q(path[i])
        if i == 0 or _happens(_chance(target, draft, support[i]), choose):
            return path[: i + 1], choose(residual(target, draft, support[i]))
    raise AssertionError("the empty prefix is always accepted")


def recursive_rejection(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Offer a node's children one after the other, each to what the ones before it left of p and of q.

    A rejected child's token is taken from q, which was drawn from without replacement, and p becomes the residual.
    Siblings must come in the order of their draw. On a chain this is ``chain_rejection``.
    """
    path = [0]
    while True:
        rest, draft = p(path[-1]), q(path[-1])
        for child in tree.children[path[-1]]:
            token = tree.tokens[child]
            if not draft[token] > 0.0:
                return path, choose(rest)
            if _happens(rest[token] / draft[token], choose):
                path.append(child)
                break
            rest, draft = residual(rest, draft), without(draft, token)
        else:
            return path, choose(rest)


def traversal(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Offer the leaves first (Weng et al.). On a chain this is ``block_verification``.

    A path is accepted as a whole; or its last node is dropped, and p, q and the chance of its parent become what the
    drop leaves of them. A node's children must be drawn independently of those of all nodes but its ancestors.
    """

    def visit(path: list[int], chance: float) -> Outcome | None:
        """The outcome, if it is this path or one below it. chance: how far the joint law supports the path."""
        rest, draft = p(path[-1]), q(path[-1])
        for child in tree.children[path[-1]]:
            token = tree.tokens[child]
            if not draft[token] > 0.0:
                break
            found = visit([*path, child], min(1.0, chance * float(rest[token] / draft[token])))
            if found is not None:
                return found
            left = _chance(rest, draft, chance)
            rest, draft, chance = residual(rest, draft, chance), without(draft, token), left
        return (path, choose(rest)) if _happens(chance, choose) else None

    outcome = visit([0], 1.0)
    assert outcome is not None  # the root's chance stays 1
    return outcome


def residual(target: Tensor, draft: Tensor, chance: float = 1.0) -> Tensor:
    """norm([chance p - q]+) [V]: what the target gives and the draft does not; p itself if that is nothing.

    >>> residual(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3]))
    tensor([1., 0., 0.])
    """
    more = (chance * target - draft).clamp(min=0.0)
    mass = more.sum()
    return more / mass if mass > NO_MASS else target


def without(draft: Tensor, token: int) -> Tensor:
    """q [V] after ``token`` was drawn, the next draw being from the others; all 0 if there are none.

    >>> without(torch.tensor([0.5, 0.25, 0.25]), 0)
    tensor([0.0000, 0.5000, 0.5000])
    """
    rest = draft.clone()
    rest[token] = 0.0
    mass = rest.sum()
    return rest / mass if mass > 0.0 else rest


def _chance(target: Tensor, draft: Tensor, chance: float) -> float:
    """S / (S + 1 - chance), S the mass of [chance p - q]+: the support of a prefix whose continuation was dropped."""
    mass = float((chance * target - draft).clamp(min=0.0).sum())
    missing = mass + (1.0 - chance)  # in this order, so that a chance of 1 stays 1 exactly
    return mass / missing if missing > 0.0 else 1.0


def _happens(probability: Tensor | float, choose: Choose) -> bool:
    """A coin: never at 0, always from 1 on."""
    heads = min(1.0, float(probability))
    return choose(torch.tensor([heads, 1.0 - heads], dtype=torch.float64), COINS) == 0
