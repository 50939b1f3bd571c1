"""Draft heads: the Protocol, Medusa, and strict files."""

from .base import Accepted, Drafter, DraftScores, Head, HeadError, Memory, Output, TargetFacts
from .files import HEADS, HeadWarning, build_head, load_head, save_head
from .linear import PackedLinear, can_pack, pack_linears
from .medusa import Medusa, MedusaConfig
from .none import NoHead

__all__ = [
    "HEADS",
    "Accepted",
    "DraftScores",
    "Drafter",
    "Head",
    "HeadError",
    "HeadWarning",
    "Medusa",
    "MedusaConfig",
    "Memory",
    "NoHead",
    "Output",
    "PackedLinear",
    "TargetFacts",
    "build_head",
    "can_pack",
    "load_head",
    "pack_linears",
    "save_head",
]
