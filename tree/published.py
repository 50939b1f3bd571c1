"""Trees that papers and projects published, as rank paths: what users copy, to compare with trees found by measurement.

``medusa-63``: ``mc_sim_7b_63`` of Medusa (Cai et al. 2024, arXiv 2401.10774), 63 drafted nodes, N = 64.
``medusa-stage2-63``: ``vicuna_7b_stage2`` of Medusa-2, 63 drafted nodes, N = 64.
``eagle-25``: the tree of EAGLE-1 (Li et al. 2024, arXiv 2401.15077), 25 drafted nodes, N = 26.

The paths stand in the order of the publication, digits being ranks.
"""

from __future__ import annotations

from .topology import Tree

_PATHS = {
    "medusa-63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 "
        "004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 "
        "16 070 "
    ),
    "medusa-stage2-63": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 "
        "7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 "
        "050 31 0020 70 14 "
    ),
    "eagle-25": ("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001 "),
}

PUBLISHED = tuple(_PATHS)


def published_tree(name: str, size: int | None = None, depth: int | None = None) -> Tree:
    """The published tree of this name: all of it, or its first nodes up to ``size`` with the root and ``depth`` levels.

    A publication orders its paths by merit where it says so (both of Medusa); EAGLE's go level by level.

    >>> published_tree("medusa-63").size, published_tree("eagle-25").depth, published_tree("medusa-63", 4).paths[1:]
    (64, 5, ((0,), (0, 0), (1,)))
    """
    paths = [tuple(int(rank) for rank in path) for path in _PATHS[name].split()]
    fitting = [path for path in paths if depth is None or len(path) <= depth]
    return Tree.from_paths(fitting[: None if size is None else size - 1])
