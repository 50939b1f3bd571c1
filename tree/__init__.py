"""Trees of candidates: topology, masks, growth, names and files. Knows no model."""

from .atomic import write_atomically
from .growth import TIE, DynamicTree, Shape, choose_nodes
from .record import NOT_THERE, Origin, Record, RecordError, check_heads, check_origin, load_record, save_record
from .spec import best_tree, default_tree, load_tree, parse_tree, save_tree
from .topology import Draft, Level, Tree, TreeError, ancestor_mask, make_draft, path_nodes, root_draft
from .walk import Walk, by_category, walk

__all__ = [
    "NOT_THERE",
    "TIE",
    "Draft",
    "DynamicTree",
    "Level",
    "Origin",
    "Record",
    "RecordError",
    "Shape",
    "Tree",
    "TreeError",
    "Walk",
    "ancestor_mask",
    "best_tree",
    "by_category",
    "check_heads",
    "check_origin",
    "choose_nodes",
    "default_tree",
    "load_record",
    "load_tree",
    "make_draft",
    "parse_tree",
    "path_nodes",
    "root_draft",
    "save_record",
    "save_tree",
    "walk",
    "write_atomically",
]
