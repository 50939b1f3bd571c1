"""Hugging Face ``generate``: eager, with a compiled static cache, or with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache, StoppingCriteria, StoppingCriteriaList
from worker import Answer, Decode, serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watch(StoppingCriteria):
    """Stops nothing; notes when the first tokens were there, and how many."""

    def __init__(self) -> None:
        self.at = 0.0
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # type: ignore[override]
        if not self.at:
            self.at, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(settings: dict[str, Any]) -> Decode:
    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=DTYPES[settings["dtype"]]).eval()
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    options: dict[str, Any] = {
        "max_new_tokens": settings["max_new_tokens"],
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    cache = None
    if settings["mode"] == "lookup":
        options["prompt_lookup_num_tokens"] = settings["lookup_tokens"]
    if settings["mode"] == "compiled":
        cache = StaticCache(config=model.config, max_cache_len=settings["longest"] + settings["max_new_tokens"])
        everywhere: Any = CompileConfig(fullgraph=False)
        everywhere._compile_all_devices = True  # without it, generate compiles on accelerators only
        options["compile_config"] = everywhere
    else:
        model.register_forward_pre_hook(count)  # under a compiled model it would be traced

    def decode(ids: Sequence[int]) -> Answer:
        nonlocal forwards
        tokens = torch.tensor([list(ids)])
        watch = Watch()
        forwards = 0
        if cache is not None:
            cache.reset()
        kept = {} if cache is None else {"cache": cache}
        start = time.perf_counter()
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
            **kept,
        )
        seconds = time.perf_counter() - start
        answer = made[0, len(ids) :].tolist()
        first = watch.length - len(ids)
        rounds = len(answer) - first if cache is not None else forwards - 1
        return Answer(answer, seconds, watch.at - start, first, rounds)

    return decode


if __name__ == "__main__":
    serve(load, ("torch", "transformers"))
