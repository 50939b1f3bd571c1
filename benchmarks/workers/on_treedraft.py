"""treedraft: plain decoding, or with heads and their tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from worker import Answer, Decode, serve

from treedraft.cli.parts import open_parts
from treedraft.infer import Run, Sampling, generate

ALWAYS = 10**9
"""Tokens enough to compile for: a later start would find the compiled part there."""


def load(settings: dict[str, Any]) -> Decode:
    torch.set_num_threads(settings["threads"])
    parts = open_parts(
        settings["model"],
        settings["heads"],
        settings["tree"],
        settings["dtype"],
        compile=settings.get("compile", "on"),
        work=ALWAYS,
    )

    def decode(ids: Sequence[int]) -> Answer:
        run = Run()
        first = 0.0
        start = time.perf_counter()
        for _ in generate(
            parts.target,
            [ids],
            head=parts.head,
            tree=parts.tree,
            sampling=Sampling(),
            max_new_tokens=settings["max_new_tokens"],
            end_ids=(),
            batch_size=1,
            run=run,
        ):
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
        return Answer(run.completions[0].ids, seconds, first, 1, run.stats.rounds)

    return decode


if __name__ == "__main__":
    serve(load, ("treedraft", "torch", "transformers"))
