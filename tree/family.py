"""Trees of every size in one file, with what was measured of them: what ``tree search`` writes and heads carry.

``{"format": 1, "trees": {"2": {"paths": [[0]], "tau": 1.4, "interval": [1.3, 1.5]}, ...}, ...}``; ``FILE:4`` names the
tree of 4 nodes, the root included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .atomic import write_atomically
from .topology import Tree, TreeError

FORMAT = 1
FAMILY_FILE = "trees.json"
"""In a heads folder."""


@dataclass(frozen=True)
class Member:
    """A tree, its mean accepted length on prompts that it was not built on, and the bootstrap interval of that."""

    tree: Tree
    tau: float
    interval: tuple[float, float]
    accept_by_depth: tuple[float, ...] = ()


@dataclass(frozen=True)
class Family:
    """Trees by their size N, the root included.

    acceptance: [D][W] the chance that candidate r of a node at depth d is right where its parent was: what a dynamic
    tree expects of a level before it asks the head
    calibration: for each depth the pair a, b of p = sigmoid(a * logit(confidence) + b), see ``calibration``
    heads, target: hashes of what was recorded; about: settings, for reports
    """

    members: Mapping[int, Member]
    acceptance: tuple[tuple[float, ...], ...] = ()
    calibration: tuple[tuple[float, float], ...] = ()
    heads: str = ""
    target: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    def tree(self, size: int) -> Tree:
        """Raises TreeError with the sizes that there are."""
        if size == 1:
            return Tree.chain(0)
        if size not in self.members:
            raise TreeError(f"no tree of {size} nodes: there are {', '.join(map(str, sorted(self.members)))}")
        return self.members[size].tree


def save_family(family: Family, path: str | Path) -> None:
    """Writes atomically; folders are made."""
    trees = {
        str(size): {
            "paths": [list(p) for p in member.tree.paths[1:]],
            "tau": member.tau,
            "interval": list(member.interval),
            "accept_by_depth": list(member.accept_by_depth),
        }
        for size, member in sorted(family.members.items())
    }
    rest = {key: value for key, value in asdict(family).items() if key not in ("members", "about")}
    content = {"format": FORMAT, "trees": trees, **rest, "about": dict(family.about)}
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(json.dumps(content, indent=1) + "\n", file)


def load_family(path: str | Path) -> Family:
    """Reads a file of ``tree search``. Raises TreeError naming the file and what is wrong."""
    try:
        content = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TreeError(f"{path} is not JSON: {error}") from error
    if not is_family(content):
        raise TreeError(f"{path} has no trees by size: treedraft tree search writes such files")
    try:
        members = {}
        for size, row in content["trees"].items():
            tree = Tree.from_paths(row["paths"])
            if tree.size != int(size):
                raise TreeError(f"the tree called {size} has {tree.size} nodes, the root included")
            low, high = row["interval"]
            members[int(size)] = Member(tree, float(row["tau"]), (low, high), tuple(row.get("accept_by_depth", ())))
        return Family(
            members,
            tuple(tuple(row) for row in content["acceptance"]),
            tuple((float(a), float(b)) for a, b in content["calibration"]),
            content["heads"],
            content["target"],
            content["about"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TreeError(f"{path}: {error}") from error


def is_family(content: Any) -> bool:
    """Whether a JSON file's content claims to be trees by size."""
    return isinstance(content, dict) and content.get("format") == FORMAT and isinstance(content.get("trees"), dict)
