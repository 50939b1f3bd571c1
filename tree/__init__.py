"""Trees of candidates: topology, masks, growth, names and files. Knows no model."""

from .atomic import write_atomically
from .growth import TIE, DynamicTree, Shape, choose_nodes
from .spec import best_tree, default_tree, load_tree, parse_tree, save_tree
from .topology import Draft, Level, Tree, TreeError, ancestor_mask, make_draft, path_nodes, root_draft

__all__ = [
    "TIE",
    "Draft",
    "DynamicTree",
    "Level",
    "Shape",
    "Tree",
    "TreeError",
    "ancestor_mask",
    "best_tree",
    "choose_nodes",
    "default_tree",
    "load_tree",
    "make_draft",
    "parse_tree",
    "path_nodes",
    "root_draft",
    "save_tree",
    "write_atomically",
]
