"""Trees of candidates: topology, masks, names and files. Knows no model."""

from .atomic import write_atomically
from .spec import best_tree, default_tree, load_tree, parse_tree, save_tree
from .topology import Draft, Tree, TreeError, ancestor_mask, make_draft, path_nodes, root_draft

__all__ = [
    "Draft",
    "Tree",
    "TreeError",
    "ancestor_mask",
    "best_tree",
    "default_tree",
    "load_tree",
    "make_draft",
    "parse_tree",
    "path_nodes",
    "root_draft",
    "save_tree",
    "write_atomically",
]
