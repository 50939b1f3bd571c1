"""Trees by name and in files: ``chain:4``, ``best:8``, ``dynamic:16``, or a JSON file of rank paths.

A tree file is ``{"paths": [[0], [0, 0], [1]]}``, the root left out, or a tree to grow,
``{"dynamic": {"nodes": 8, "depth": 4, "width": 3}}``. A file of ``tree search`` has trees of many sizes, of which
``FILE:8`` names one. ``medusa-63`` and the other names of ``PUBLISHED`` are trees that projects published.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

from .atomic import write_atomically
from .family import is_family, load_family
from .growth import DynamicTree, Shape
from .published import PUBLISHED, published_tree
from .shares import DEPTH_SHARE, RANK_SHARE
from .topology import Tree, TreeError

DYNAMIC_DEPTH, DYNAMIC_WIDTH = 6, 8
"""Of a dynamic tree: most levels, and least width where its nodes allow it."""


def best_tree(acceptance: Sequence[Sequence[float]], size: int) -> Tree:
    """The tree of ``size`` nodes (root included) with the largest expected acceptance under independent heads.

    ``acceptance[d][r]`` is the chance that candidate r of head d is the right token. Nodes are added best first by the
    product along their path (Cai et al. 2024, section 2.3.3). Gives fewer nodes if the table runs out.

    >>> best_tree([[0.6, 0.2], [0.5, 0.1]], 4).paths
    ((), (0,), (0, 0), (1,))
    """
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-acceptance[0][0], (0,))] if acceptance and acceptance[0] else []
    while heap and len(paths) < size - 1:
        _, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if depth < len(acceptance):
            heapq.heappush(heap, (-_product(acceptance, (*path, 0)), (*path, 0)))
        if rank + 1 < len(acceptance[depth - 1]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(heap, (-_product(acceptance, sibling), sibling))
    return Tree.from_paths(paths)


def default_tree(heads: int, size: int = 8) -> Tree:
    """A tree of ``size`` nodes no deeper than ``heads``, for heads whose acceptance was not measured yet."""
    table = [[share * DEPTH_SHARE[min(d, len(DEPTH_SHARE) - 1)] for share in RANK_SHARE] for d in range(heads)]
    return best_tree(table, size)


def parse_tree(spec: str, heads: int) -> Shape:
    """The tree that ``--tree`` names.

    ``chain:4``: 4 drafted nodes in a row. ``best:8``: 8 nodes with the root, in a fixed order of merit.
    ``dynamic:16`` or ``dynamic:16:5:8``: 16 nodes with the root, grown anew at each step, at most 5 deep, asking the 8
    best nodes of a level for 8 candidates each. ``medusa-63``: a published tree. ``FILE:8``: the tree of 8 nodes in a
    file of ``tree search``. Else a tree file.

    Raises TreeError with the accepted forms if the name is not one of them.
    """
    kind, *rest = spec.split(":")
    numbers = [int(part) for part in rest if part.isdigit()]
    if len(numbers) == len(rest):
        if kind == "chain" and len(numbers) == 1:
            return Tree.chain(numbers[0])
        if kind == "best" and len(numbers) == 1 and numbers[0] >= 1:
            return default_tree(heads, numbers[0])
        if kind == "dynamic" and 1 <= len(numbers) <= 3:
            return DynamicTree(numbers[0], *_dynamic_sizes(numbers, heads))
    if spec in PUBLISHED:
        return published_tree(spec)
    file, colon, size = spec.rpartition(":")
    if colon and size.isdigit() and Path(file).is_file():
        return load_family(file).tree(int(size))
    if not Path(spec).is_file():
        raise TreeError(
            f"no tree called {spec!r}: expected chain:LENGTH, best:NODES, dynamic:NODES[:DEPTH[:WIDTH]], "
            f"{', '.join(PUBLISHED)}, FILE:NODES (a file of treedraft tree search) or a JSON file with paths or dynamic"
        )
    return load_tree(spec)


def _dynamic_sizes(numbers: Sequence[int], heads: int) -> tuple[int, int]:
    """Depth and width: as given, else no deeper than the heads, and as wide as half the nodes, 8 if they suffice.

    32 nodes keep more of the text 16 wide than 8 wide, and hardly more beyond (docs/log.md).
    """
    depth = numbers[1] if len(numbers) > 1 else min(heads, DYNAMIC_DEPTH, max(1, numbers[0] - 1))
    wide = min(max(DYNAMIC_WIDTH, numbers[0] // 2), max(1, numbers[0] - 1))
    return depth, numbers[2] if len(numbers) > 2 else wide


def load_tree(path: str | Path) -> Shape:
    """Reads a tree file. Raises TreeError naming the file."""
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise TreeError(f"{path} is not JSON: {error}") from error
    if is_family(content):
        sizes = list(content["trees"])
        sizes = ", ".join(sizes) if len(sizes) <= 8 else f"{sizes[0]} to {sizes[-1]}"
        raise TreeError(
            f"{path} holds trees of {sizes} nodes: name one of them, as in {path}:{next(iter(content['trees']), 8)}"
        )
    try:
        match content:
            case {"paths": [*paths], **others} if not others:
                if not all(isinstance(p, list) for p in paths):
                    raise TreeError("every path must be a list of ranks")
                return Tree.from_paths(paths)
            case {"dynamic": {"nodes": int(nodes), "depth": int(depth), "width": int(width), **more}, **others} if not (
                more or others
            ):
                return DynamicTree(nodes, depth, width)
    except TreeError as error:
        raise TreeError(f"{path}: {error}") from error
    raise TreeError(
        f'{path} is not a tree file: expected {{"paths": [[0], [0, 0], ...]}} or '
        '{"dynamic": {"nodes": 8, "depth": 4, "width": 3}}'
    )


def save_tree(tree: Shape, path: str | Path) -> None:
    """Writes a tree file, atomically."""
    if isinstance(tree, DynamicTree):
        content: dict[str, object] = {"dynamic": {"nodes": tree.size, "depth": tree.depth, "width": tree.width}}
    else:
        content = {"paths": [list(p) for p in tree.paths[1:]]}
    write_atomically(json.dumps(content) + "\n", Path(path))


def _product(acceptance: Sequence[Sequence[float]], path: Sequence[int]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= acceptance[depth][rank]
    return product
