"""Draft heads: the Protocol, the kinds, and strict files."""

from .automaton import Automaton, index_corpus
from .base import (
    Accepted,
    Drafter,
    DraftScores,
    Head,
    HeadError,
    Memory,
    Output,
    TargetFacts,
    TargetLayers,
    cat_padded,
)
from .card import model_card, tau_table, write_card
from .eagle import DEEPEST, Eagle, EagleConfig
from .eagle3 import Eagle3, Eagle3Config, default_taps
from .files import HEADS, HeadWarning, build_head, heads_hash, load_head, save_head, target_hash
from .fill import Steps, fill
from .hub import find_heads, is_hub_id, shipped_tree
from .hybrid import Hybrid, HybridConfig, only_dynamic
from .hydra import Hydra, HydraConfig
from .layer import LayerShape, Sight
from .linear import (
    PackedLinear,
    PackedPart,
    can_halve,
    can_pack,
    cpu_multiplies_bf16,
    int8_parts,
    pack_linears,
    pack_sides,
    stack_layers,
)
from .medusa import Medusa, MedusaConfig
from .ngram import NGram, NGramConfig
from .none import NoHead
from .recycling import Recycling, RecyclingConfig
from .suffix import Suffix, SuffixConfig

__all__ = [
    "DEEPEST",
    "HEADS",
    "Accepted",
    "Automaton",
    "DraftScores",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Eagle3Config",
    "EagleConfig",
    "Head",
    "HeadError",
    "HeadWarning",
    "Hybrid",
    "HybridConfig",
    "Hydra",
    "HydraConfig",
    "LayerShape",
    "Medusa",
    "MedusaConfig",
    "Memory",
    "NGram",
    "NGramConfig",
    "NoHead",
    "Output",
    "PackedLinear",
    "PackedPart",
    "Recycling",
    "RecyclingConfig",
    "Sight",
    "Steps",
    "Suffix",
    "SuffixConfig",
    "TargetFacts",
    "TargetLayers",
    "build_head",
    "can_halve",
    "can_pack",
    "cat_padded",
    "cpu_multiplies_bf16",
    "default_taps",
    "fill",
    "find_heads",
    "heads_hash",
    "index_corpus",
    "int8_parts",
    "is_hub_id",
    "load_head",
    "model_card",
    "only_dynamic",
    "pack_linears",
    "pack_sides",
    "save_head",
    "shipped_tree",
    "stack_layers",
    "target_hash",
    "tau_table",
    "write_card",
]
