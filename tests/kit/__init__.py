"""The tiny-model kit: random and closed-form targets, word-level tokenizers and chat templates. No files, no downloads.

``pythonpath = ["tests"]`` in pyproject puts this folder's parent on the path: ``from kit import target, tokenizer``.
"""

from .compare import compare
from .families import MODELS, build
from .heads import KINDS, PlainScores, any_config, any_head, medusa_config, random_heads, ring_heads, trained_heads
from .targets import SIZES, TARGETS, markov_rand, markov_ring, target, zoo
from .words import TEMPLATES, VOCAB, WORD_ID, tokenizer

__all__ = [
    "KINDS",
    "MODELS",
    "SIZES",
    "TARGETS",
    "TEMPLATES",
    "VOCAB",
    "WORD_ID",
    "PlainScores",
    "any_config",
    "any_head",
    "build",
    "compare",
    "markov_rand",
    "markov_ring",
    "medusa_config",
    "random_heads",
    "ring_heads",
    "target",
    "tokenizer",
    "trained_heads",
    "zoo",
]
