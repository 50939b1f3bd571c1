"""Trees of candidates: topology, masks, growth, names and files. Knows no model."""

from .atomic import write_atomically
from .calibration import Logistic, Reliability, expected_acceptance, fit_logistic, fit_record
from .cost import CostError, CostTable, DraftCost, ForwardCost, Place, check_place, load_costs, save_costs
from .family import FAMILY_FILE, Family, Member, is_family, load_family, save_family
from .growth import TIE, DynamicTree, Shape, choose_nodes
from .prices import Prices, best_size
from .published import PUBLISHED, published_tree
from .record import NOT_THERE, Origin, Record, RecordError, check_heads, check_origin, load_record, save_record
from .schedule import Row, Schedule
from .search import Limits, compared, found_trees, greedy_product_tree, path_shares, position_tree, sequoia_tree
from .size import BYTES, Choice, Roofline, best_chain, best_choice, chain_speedup, chain_tokens, explained, sized
from .spec import best_tree, default_tree, load_tree, parse_tree, save_tree
from .topology import Draft, Level, Tree, TreeError, ancestor_mask, make_draft, path_nodes, root_draft
from .walk import Walk, by_category, walk

__all__ = [
    "BYTES",
    "FAMILY_FILE",
    "NOT_THERE",
    "PUBLISHED",
    "TIE",
    "Choice",
    "CostError",
    "CostTable",
    "Draft",
    "DraftCost",
    "DynamicTree",
    "Family",
    "ForwardCost",
    "Level",
    "Limits",
    "Logistic",
    "Member",
    "Origin",
    "Place",
    "Prices",
    "Record",
    "RecordError",
    "Reliability",
    "Roofline",
    "Row",
    "Schedule",
    "Shape",
    "Tree",
    "TreeError",
    "Walk",
    "ancestor_mask",
    "best_chain",
    "best_choice",
    "best_size",
    "best_tree",
    "by_category",
    "chain_speedup",
    "chain_tokens",
    "check_heads",
    "check_origin",
    "check_place",
    "choose_nodes",
    "compared",
    "default_tree",
    "expected_acceptance",
    "explained",
    "fit_logistic",
    "fit_record",
    "found_trees",
    "greedy_product_tree",
    "is_family",
    "load_costs",
    "load_family",
    "load_record",
    "load_tree",
    "make_draft",
    "parse_tree",
    "path_nodes",
    "path_shares",
    "position_tree",
    "published_tree",
    "root_draft",
    "save_costs",
    "save_family",
    "save_record",
    "save_tree",
    "sequoia_tree",
    "sized",
    "walk",
    "write_atomically",
]
