"""Decoding: target, cache, noise, the lossless rule, the decode step, and plain decoding as the reference."""

from .cache import KVCache
from .capability import TargetError
from .generate import Completion, Run, complete, generate, prefill
from .load import SMOLLM2, load_model, load_target, load_tokenizer
from .machine import machine, versions
from .noise import gumbel, noise_bits, row_seed
from .path import Path
from .reference import autoregressive
from .request import Chunk, Request
from .rules import Rule, lossless
from .sampling import GenerationError, Sampler, Sampling
from .stats import PHASES, Clock, Stats
from .step import State, decode_step
from .target import Target, TargetOutput
from .text import Text

__all__ = [
    "PHASES",
    "SMOLLM2",
    "Chunk",
    "Clock",
    "Completion",
    "GenerationError",
    "KVCache",
    "Path",
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
    "autoregressive",
    "complete",
    "decode_step",
    "generate",
    "gumbel",
    "load_model",
    "load_target",
    "load_tokenizer",
    "lossless",
    "machine",
    "noise_bits",
    "prefill",
    "row_seed",
    "versions",
]
