"""Which engine serves which heads, how it is started, and what is lost there."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from ..base import HeadError

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "tgi", "llamacpp", "speculators", "medusa", "eagle"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""The last two are the layouts of the papers' own repositories, speculators that of the library of this name."""

SERVED: dict[str, tuple[EngineName, ...]] = {
    "medusa": ("vllm", "tgi", "tensorrt-llm", "medusa"),
    "eagle": ("vllm", "sglang", "eagle"),
    "eagle3": ("vllm", "sglang", "tensorrt-llm", "llamacpp", "speculators", "eagle"),
    "hydra": (),
}
CHAINS_ONLY = {"vllm", "tgi", "llamacpp", "speculators"}
DEFAULT_STEPS = 3
"""Drafted tokens of a chain, where the head sets no limit."""


def refusals(head: Any, engine: str) -> list[str]:
    """Why an engine cannot serve these heads as they were trained, in words; empty if it can."""
    config = head.config
    if engine not in SERVED[config.kind]:
        able = ", ".join(SERVED[config.kind]) or "no engine; they decode in treedraft alone"
        return [f"{engine} cannot serve {config.kind} heads (served by: {able})"]
    faults = []
    if head.output().bias is not None:
        faults.append(f"{engine} has no bias in the output layer, and the target's is part of these heads")
    if config.kind == "eagle" and config.fc_bias and engine == "vllm":
        faults.append("vllm drops fc.bias, with which these heads were trained")
    if config.kind == "eagle3":
        faults += _eagle3_refusals(config, engine)
    return faults


def _eagle3_refusals(config: Any, engine: str) -> list[str]:
    faults = []
    if engine not in ("vllm", "speculators", "tensorrt-llm"):
        flags = [name for name in ("fc_norm", "norm_output") if getattr(config, name)]
        faults += [f"{engine} does not apply {name}, with which these heads were trained" for name in flags]
    if engine == "llamacpp" and len(config.tapped_layers) != 3:
        faults.append(f"llamacpp taps 3 layers, these heads read {len(config.tapped_layers)}")
    if engine in ("sglang", "tensorrt-llm", "eagle") and config.tapped_layers[0] == 0:
        faults.append(f"{engine} counts the outputs of layers and cannot tap the embeddings (layer 0)")
    return faults


def losses(head: Any, engine: str) -> list[str]:
    """What these heads can do in treedraft and not in the engine, or what the engine does another way."""
    config, lost = head.config, []
    if engine in CHAINS_ONLY:
        lost.append(f"{engine} drafts chains: trees, and what they accept beyond a chain, are lost")
    if config.kind != "eagle3" and config.draft_vocab_size not in (None, config.vocab_size):
        lost.append(
            f"the draft vocabulary of {config.draft_vocab_size:,}: the engine ranks all {config.vocab_size:,} tokens, "
            "so drafting costs more, and it may pick tokens that training never scored"
        )
    return lost


def check_served(head: Any, engines: tuple[str, ...]) -> None:
    """Raises HeadError with all that the engines cannot serve, before anything is written."""
    faults = [f"{name}: unknown engine; known are {', '.join(ENGINES)}" for name in engines if name not in ENGINES]
    faults += [fault for name in engines if name in ENGINES for fault in refusals(head, name)]
    if faults:
        raise HeadError("cannot be exported: " + "; ".join(faults))


def steps_served(config: Any) -> int:
    """How many tokens a chain of these heads drafts by default."""
    return config.num_heads if config.kind == "medusa" else DEFAULT_STEPS


def launch(config: Any, engine: str, target: str) -> str:
    """The command that serves a target with heads from this folder (``DIR``)."""
    steps = steps_served(config)
    if engine in ("vllm", "speculators"):
        speculative = {"method": config.kind, "model": "DIR", "num_speculative_tokens": steps}
        return f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"
    if engine == "sglang":
        name = "EAGLE" if config.kind == "eagle" else "EAGLE3"
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {name} "
            f"--speculative-draft-model-path DIR --speculative-num-steps {steps} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {steps + 1}"
        )
    if engine == "tensorrt-llm":
        return _launch_tensorrt(config, target, steps)
    if engine == "tgi":
        return f"text-generation-launcher --model-id DIR --speculate {steps}"
    if engine == "llamacpp":
        return (
            f"python convert_hf_to_gguf.py DIR --target-model-dir {target} --outtype f16 --outfile heads.gguf\n"
            f"llama-server -m target.gguf -md heads.gguf --spec-type draft-eagle3 --spec-draft-n-max {steps}"
        )
    if engine == "medusa":
        return "python -m medusa.inference.cli --model DIR"
    return f"python -m eagle.evaluation.gen_ea_answer_llama3chat --base-model-path {target} --ea-model-path DIR"


def _launch_tensorrt(config: Any, target: str, steps: int) -> str:
    if config.kind == "medusa":
        return (
            "# the TensorRT engine path: convert_checkpoint.py of examples/medusa reads medusa_lm_head.pt\n"
            f"# MedusaDecodingConfig(num_medusa_heads={steps}, medusa_choices={[[0] * d for d in range(1, steps + 1)]})"
        )
    outputs = [layer - 1 for layer in config.tapped_layers]
    return (
        f"trtllm-serve {target} --extra_llm_api_options spec.yaml   # spec.yaml:\n"
        f"# speculative_config: {{decoding_type: Eagle3, max_draft_len: {steps}, speculative_model: DIR,\n"
        f"#   eagle3_one_model: true, eagle3_layers_to_capture: {outputs}}}"
    )
