"""OpenVINO GenAI on the CPU, plain or with prompt lookup, of a model that optimum-intel exported."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import Answer, Decode, serve

HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


class Watch(genai.StreamerBase):
    """Notes when the first tokens were there and how many, and how often tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.counts: list[int] = []

    def write(self, token: int | Sequence[int]) -> genai.StreamingStatus:
        self.times.append(time.perf_counter())
        self.counts.append(1 if isinstance(token, int) else len(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(settings: dict[str, Any]) -> Decode:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # a prompt that comes again is to be read again
    scheduler.max_num_seqs = 1
    scheduler.max_num_batched_tokens = settings["longest"] + settings["max_new_tokens"]
    options: dict[str, Any] = {
        "scheduler_config": scheduler,
        "INFERENCE_PRECISION_HINT": HINTS[settings["dtype"]],
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    lookup = settings["mode"] == "lookup"
    if lookup:
        options["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(settings["export"], "CPU", **options)
    law = genai.GenerationConfig()
    law.max_new_tokens = settings["max_new_tokens"]
    law.ignore_eos = True
    law.do_sample = False
    if lookup:
        law.num_assistant_tokens = settings["lookup_tokens"]
        law.max_ngram_size = 3

    def decode(ids: Sequence[int]) -> Answer:
        tokens = np.array([list(ids)], dtype=np.int64)
        asked = genai.TokenizedInputs(ov.Tensor(tokens), ov.Tensor(np.ones_like(tokens)))
        watch = Watch()
        start = time.perf_counter()
        made = pipeline.generate(asked, law, watch)
        seconds = time.perf_counter() - start
        answer = list(made.tokens[0])
        first = watch.counts[0]
        rounds = _rounds(watch) if lookup else len(answer) - first
        return Answer(answer, seconds, watch.times[0] - start, first, rounds)

    return decode


def _rounds(watch: Watch) -> int | None:
    """Tokens of one round come as one list, or within microseconds of each other."""
    later = zip(watch.times, watch.times[1:], strict=False)
    return sum(after - before > 1e-3 for before, after in later)


if __name__ == "__main__":
    serve(load, ("openvino", "openvino-genai"))
