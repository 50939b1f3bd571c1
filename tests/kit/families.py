"""Small random models of every family whose forward is written out, with what their configurations can turn on."""

from typing import Any

import torch
import transformers as tf

from .targets import SIZES

MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "llama, all heads": lambda: tf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama, biases": lambda: tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama 3 rotations": lambda: tf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, yarn": lambda: tf.LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral, window": lambda: tf.MistralConfig(**SIZES, sliding_window=8),
    "qwen2": lambda: tf.Qwen2Config(**SIZES),
    "qwen2, mixed windows": lambda: tf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, layer_types=MIXED
    ),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=32),
}


def build(config: Any, attention: str = "sdpa") -> tf.PreTrainedModel:
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():  # biases and norms start alike: make them matter
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape))
    return model
