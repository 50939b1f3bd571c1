"""The shape of a tree of candidates: parents, depths, ancestor masks and paths. Knows no model.

B batch rows   N tree nodes, root included (N = 1 is plain decoding)   D depth of the tree
A nodes on a path, root included   K heads   W draft vocabulary

Node 0 is the root: a token already emitted and not yet in the cache. ``parents[0] == -1`` and ``parents[i] < i``.
Padding nodes come last, have parent -1, see only themselves and never match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


class TreeError(ValueError):
    """A tree that cannot be: the message names every fault."""


@dataclass(frozen=True)
class Draft:
    """Candidates for the next tokens of every row, as a tree that one target forward can verify.

    tokens: [B, N] int64, ``tokens[:, 0]`` is the root
    parents: [B, N] int64, -1 for the root and for padding
    valid: [B, N] bool, False for padding
    depth: [B, N] int64, 0 for the root
    ancestors: [B, N, N] bool, ``ancestors[b, i, j]``: node j lies on the path from the root to node i, i included
    levels: at least 1 + the largest depth, known without asking the device: the width of an accepted path, A
    laws: [B, N, W] or None: the log of the law that a node's children were drawn from, in the order of their ranks,
    where drafts are sampled; only rules that weigh p against q read it. Rows of nodes without children are meaningless
    ids: [W] ascending target ids that the laws speak of, or None for all of V
    scores: [B, N] or None: the log of the confidence in each node's path, 0 for the root and -inf for padding
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    depth: Tensor
    ancestors: Tensor
    levels: int
    laws: Tensor | None = None
    ids: Tensor | None = None
    scores: Tensor | None = None

    @property
    def size(self) -> int:
        """Nodes per row, root and padding included."""
        return self.tokens.shape[1]


def make_draft(tokens: Tensor, parents: Tensor, valid: Tensor, levels: int) -> Draft:
    """A draft whose rows may have trees of their own; depths and ancestors follow from the parents, all [B, N]."""
    ancestors = ancestor_mask(parents)
    return Draft(tokens, parents, valid, ancestors.sum(-1) - 1, ancestors, levels)


def root_draft(root: Tensor) -> Draft:
    """The draft of plain decoding: the root [B] alone, N = 1."""
    return Tree.from_parents([-1]).draft(root[:, None])


def ancestor_mask(parents: Tensor) -> Tensor:
    """Which nodes lie on the path to which: ``parents`` [B, N] to [B, N, N] bool, every node its own ancestor.

    The parent relation is squared until paths of every length are covered, so there is no loop over nodes.

    >>> ancestor_mask(torch.tensor([[-1, 0, 1, 0]]))[0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 0, 0, 1]], dtype=torch.int32)
    """
    nodes = torch.arange(parents.shape[-1], device=parents.device)
    reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).float()
    covered = 1
    while covered < parents.shape[-1] - 1:
        reach = (reach @ reach).clamp_(max=1.0)
        covered *= 2
    return reach > 0


def path_nodes(ancestors: Tensor, node: Tensor, length: int) -> Tensor:
    """The path from the root to ``node`` [B] as node ids [B, length], ascending, the last id repeated at the end.

    ``length`` must be at least the longest path. Ids ascend because parents come before children.
    """
    row = ancestors[torch.arange(len(node), device=node.device), node]  # [B, N]
    ids = torch.arange(row.shape[-1], device=node.device)
    ordered = torch.where(row, ids, row.shape[-1]).sort(-1).values[:, :length]
    return torch.minimum(ordered, node[:, None])


@dataclass(frozen=True)
class Level:
    """The nodes of one depth of a static tree, n of them, e of which have children. All int64.

    nodes: [n] node ids
    parent: [n] which of the expanded nodes of the level above is its parent
    rank: [n] which of its parent's candidates it takes
    expanded: [e] which of the n have children
    expanded_parent: [e] ``parent`` of those
    width: candidates that must be ranked at the level above
    """

    nodes: Tensor
    parent: Tensor
    rank: Tensor
    expanded: Tensor
    expanded_parent: Tensor
    width: int


@dataclass(frozen=True)
class Tree:
    """A static shape shared by all rows: node i takes its parent's candidate number ``ranks[i]`` (0 is the best).

    >>> tree = Tree.from_paths([[0], [1], [0, 0]])
    >>> tree.parents, tree.ranks, tree.depths
    ((-1, 0, 1, 0), (0, 0, 0, 1), (0, 1, 2, 1))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        faults = _faults(self.parents, self.ranks)
        if faults:
            raise TreeError("not a tree: " + "; ".join(faults))

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
        """A tree from rank paths, root left out: ``[[0], [0, 0], [1]]``. Any order; nodes are laid out depth first.

        Depth first with the best child in front makes an accepted path a prefix of the nodes most of the time, and a
        prefix needs no copy in the cache. Raises TreeError naming duplicates, missing ancestors and bad ranks.
        """
        wanted = [tuple(p) for p in paths]
        faults = [f"path {list(p)} must be a list of ranks >= 0" for p in wanted if not _is_rank_path(p)]
        if not faults:
            present = set(wanted)
            faults += [
                f"path {list(p)} appears {wanted.count(p)} times" for p in sorted(present) if wanted.count(p) > 1
            ]
            faults += [
                f"path {list(p)} lacks its ancestor {list(p[:-1])}"
                for p in sorted(present)
                if len(p) > 1 and p[:-1] not in present
            ]
        if faults:
            raise TreeError("not a tree: " + "; ".join(faults))
        ordered = [(), *sorted(wanted)]
        index = {path: i for i, path in enumerate(ordered)}
        return Tree((-1, *(index[p[:-1]] for p in ordered[1:])), (0, *(p[-1] for p in ordered[1:])))

    @staticmethod
    def from_parents(parents: Sequence[int]) -> Tree:
        """A tree from parent ids, ``parents[0] == -1``; ranks count a node's elder siblings."""
        parents = tuple(parents)
        return Tree(parents, tuple(parents[:i].count(p) if i else 0 for i, p in enumerate(parents)))

    @staticmethod
    def chain(length: int) -> Tree:
        """A chain of ``length`` drafted nodes: N = length + 1."""
        if length < 0:
            raise TreeError(f"a chain needs a length >= 0, got {length}")
        return Tree.from_parents(range(-1, length))

    @property
    def size(self) -> int:
        """N, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """D, the longest path without the root: the number of heads or head steps that the tree needs."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """The number of candidates that must be ranked at a node."""
        return max(self.ranks) + 1

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Rank paths of the nodes in node order, the root's being ()."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    def to_dict(self) -> dict[str, object]:
        """For JSON reports."""
        return {"nodes": self.size, "depth": self.depth, "paths": [list(p) for p in self.paths[1:]]}

    def check_fits(self, heads: int, candidates: int) -> None:
        """Raises TreeError if a path is deeper than ``heads`` (K) or a rank not below ``candidates`` (W)."""
        faults = [
            f"path {list(path)} is {len(path)} deep, but there are {heads} heads"
            for path in self.paths
            if len(path) > heads
        ]
        if self.width > candidates:
            faults.append(f"rank {self.width - 1} needs {self.width} candidates, the draft vocabulary has {candidates}")
        if faults:
            raise TreeError(
                "the tree does not fit the heads: " + "; ".join(faults) + "; choose a shallower tree with --tree"
            )

    def draft(self, tokens: Tensor) -> Draft:
        """This shape filled with ``tokens`` [B, N] of every row."""
        parents, depth, ancestors = _constants(self, tokens.device)
        batch = tokens.shape[0]
        return Draft(
            tokens,
            parents.expand(batch, -1),
            torch.ones_like(tokens, dtype=torch.bool),
            depth.expand(batch, -1),
            ancestors.expand(batch, -1, -1),
            self.depth + 1,
        )

    def levels(self, device: torch.device) -> tuple[Level, ...]:
        """The nodes by depth 1, 2, ..., D, for filling the tree one level at a time."""
        return _levels(self, device)


def _is_rank_path(path: Sequence[int]) -> bool:
    return len(path) > 0 and all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in path)


def _faults(parents: tuple[int, ...], ranks: tuple[int, ...]) -> list[str]:
    if not parents or parents[0] != -1:
        return [f"node 0 is the root and must have parent -1, got {parents[:1]}"]
    faults = [
        f"node {i} has parent {p}, expected one of 0..{i - 1} (parents come before children)"
        for i, p in enumerate(parents[1:], 1)
        if not 0 <= p < i
    ]
    seen: dict[tuple[int, int], int] = {}
    for i, place in enumerate(zip(parents[1:], ranks[1:], strict=True), 1):
        if place in seen:
            faults.append(f"nodes {seen[place]} and {i} are both candidate {place[1]} of node {place[0]}")
        seen.setdefault(place, i)
    return faults


@lru_cache(maxsize=256)
def _constants(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    parents = torch.tensor([tree.parents], device=device)
    ancestors = ancestor_mask(parents)
    return parents, ancestors.sum(-1) - 1, ancestors


@lru_cache(maxsize=256)
def _levels(tree: Tree, device: torch.device) -> tuple[Level, ...]:
    above, levels = [0], []
    for depth in range(1, tree.depth + 1):
        nodes = [i for i, d in enumerate(tree.depths) if d == depth]
        parent = [above.index(tree.parents[i]) for i in nodes]
        ranks = [tree.ranks[i] for i in nodes]
        expanded = [at for at, i in enumerate(nodes) if i in tree.parents]
        columns = (nodes, parent, ranks, expanded, [parent[at] for at in expanded])
        indices = [torch.tensor(column, dtype=torch.int64, device=device) for column in columns]
        levels.append(Level(*indices, width=max(ranks) + 1))
        above = [nodes[at] for at in expanded]
    return tuple(levels)
