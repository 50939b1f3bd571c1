"""Decoding: target, cache, noise, acceptance rules, the decode step, and plain decoding as the reference."""

from .adapter import adapter_hash, merge_adapter
from .cache import KVCache
from .capability import TargetError
from .draft_model import DraftModel, DraftModelConfig, check_same_tokenizer, fit_draft_model
from .drafted import Drafted, DraftedOutput, FolderDrafting, drafted
from .generate import Completion, Run, complete, generate
from .load import SMOLLM2, load_model, load_target, load_tokenizer
from .machine import machine, versions
from .noise import gumbel, noise_bits, row_seed
from .path import Path
from .prefill import prefill
from .ranks import KEPT_BELIEFS, Answered, Ranks, check_levels, record_ranks
from .reference import autoregressive
from .rejection import Candidates, block_verification, chain_rejection, recursive_rejection, traversal
from .request import Chunk, Request
from .rules import RULES, NamedRule, Rule, find_rule, lossless, lossy_typical
from .sampling import Drafts, GenerationError, Sampler, Sampling
from .stats import PHASES, Clock, Stats
from .step import State, decode_step
from .tape import Choose, outcomes
from .target import Target, TargetOutput
from .text import Text
from .timing import Plan, measure_costs, spread_nodes
from .typical import typical

__all__ = [
    "KEPT_BELIEFS",
    "PHASES",
    "RULES",
    "SMOLLM2",
    "Answered",
    "Candidates",
    "Choose",
    "Chunk",
    "Clock",
    "Completion",
    "DraftModel",
    "DraftModelConfig",
    "Drafted",
    "DraftedOutput",
    "Drafts",
    "FolderDrafting",
    "GenerationError",
    "KVCache",
    "NamedRule",
    "Path",
    "Plan",
    "Ranks",
    "Request",
    "Rule",
    "Run",
    "Sampler",
    "Sampling",
    "State",
    "Stats",
    "Target",
    "TargetError",
    "TargetOutput",
    "Text",
    "adapter_hash",
    "autoregressive",
    "block_verification",
    "chain_rejection",
    "check_levels",
    "check_same_tokenizer",
    "complete",
    "decode_step",
    "drafted",
    "find_rule",
    "fit_draft_model",
    "generate",
    "gumbel",
    "load_model",
    "load_target",
    "load_tokenizer",
    "lossless",
    "lossy_typical",
    "machine",
    "measure_costs",
    "merge_adapter",
    "noise_bits",
    "outcomes",
    "prefill",
    "record_ranks",
    "recursive_rejection",
    "row_seed",
    "spread_nodes",
    "traversal",
    "typical",
    "versions",
]
