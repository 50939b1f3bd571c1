"""Tiny fp32 targets for the CPU: seven random ones (hidden 64, 96 words) and two whose next-token law is known exactly.

Built once in a process and handed out as fresh copies, so a test may train or break its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .words import SPECIALS, VOCAB

WORDS = len(VOCAB)
FIRST_WORD = len(SPECIALS)


def _options(**changes: object) -> dict[str, object]:
    shared = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "initializer_range": 0.35,
    }
    return {**shared, **changes}


SIZES: dict[str, Any] = _options(intermediate_size=96, max_position_embeddings=128, initializer_range=0.2)
"""For configurations of many families."""


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_options(**changes)))  # type: ignore[arg-type]


def _qwen2(**changes: object) -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**_options(**changes)))  # type: ignore[arg-type]
    with torch.no_grad():  # biases start at zero: make them matter
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
    return model


_ZOO: dict[str, Callable[[], PreTrainedModel]] = {
    "llama_gqa": lambda: _llama(tie_word_embeddings=False),
    "llama_mha_tied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama_pad128": lambda: _llama(vocab_size=128),  # 96 real ids
    "llama_3layers": lambda: _llama(num_hidden_layers=3),
    "qwen2_bias": lambda: _qwen2(rope_theta=1_000_000.0),
    "qwen3_headdim": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_options(head_dim=32, tie_word_embeddings=True))  # type: ignore[arg-type]
    ),
    "mistral_sw16": lambda: MistralForCausalLM(MistralConfig(**_options(sliding_window=16))),  # type: ignore[arg-type]
}
TARGETS = (*_ZOO, "markov_ring", "markov_rand")


def target(name: str) -> PreTrainedModel:
    """A fresh copy of the target called ``name``, one of TARGETS: fp32, eval mode."""
    return copy.deepcopy(_built(name))


def zoo() -> Iterator[tuple[str, PreTrainedModel]]:
    """The seven random targets by name."""
    return ((name, target(name)) for name in _ZOO)


def markov_ring() -> PreTrainedModel:
    """A target for which every word is followed by the next one: w0, w1, ... w82, w0."""
    return target("markov_ring")


def markov_rand() -> tuple[PreTrainedModel, Tensor]:
    """A target whose next-token law is row P[token], and P [96, 96]; only words have weight."""
    return target("markov_rand"), random_law().clone()


@lru_cache(maxsize=1)
def random_law() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    law = torch.softmax(2.0 * torch.randn(WORDS, WORDS, generator=generator), -1)
    law[:, :FIRST_WORD] = 0
    return law / law.sum(-1, keepdim=True)


def ring_law(slip: float = 1e-6) -> Tensor:
    """P [96, 96]: the next word has 1 - slip; what is not a word is followed by w0."""
    law = torch.full((WORDS, WORDS), slip / (WORDS - 1))
    words = WORDS - FIRST_WORD
    for i in range(WORDS):
        law[i, FIRST_WORD + (i - FIRST_WORD + 1) % words if i >= FIRST_WORD else FIRST_WORD] = 1 - slip
    return law


@lru_cache(maxsize=len(TARGETS))
def _built(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):  # a test's own random numbers do not depend on what was built before
        torch.manual_seed(7)
        if name in _ZOO:
            return _ZOO[name]().float().eval()
        return _markov_llama(ring_law() if name == "markov_ring" else random_law())


def _markov_llama(law: Tensor) -> PreTrainedModel:
    """A Llama whose law is row ``law[token]`` at any position, whatever came before.

    Attention and MLP add nothing, the embedding is one-hot, and the output layer carries log law.
    """
    size = law.shape[0]
    config = LlamaConfig(
        **_options(  # type: ignore[arg-type]
            hidden_size=size,
            intermediate_size=size,
            vocab_size=size,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            initializer_range=0.02,
        )
    )
    model = LlamaForCausalLM(config).float().eval()
    norm_of_one_hot = 1.0 / math.sqrt(1.0 / size + config.rms_norm_eps)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.log(law.clamp_min(1e-30)).T / norm_of_one_hot)
    return model
