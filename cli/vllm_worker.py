"""Decodes token ids in vLLM and tells what every engine step gave. Run by the Python of vLLM's own environment.

Reads a JSON job from the file named first and writes JSON to the second. Imports nothing of this project: it is the
other side of a comparison.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm import __version__ as version  # pyright: ignore[reportMissingImports]

    options = {"speculative_config": job["speculative"]} if job["speculative"] else {}
    llm: Any = LLM(
        model=job["target"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        **options,
    )
    law = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["end_ids"], detokenize=False
    )
    rows = []
    for number, prompt in enumerate(job["prompts"]):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, law)
        steps, ids, start = [], [], time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                grown = list(output.outputs[0].token_ids)
                if len(grown) > len(ids):  # a part of a long prompt gives none
                    steps.append(len(grown) - len(ids))
                ids = grown
        rows.append({"ids": ids, "steps": steps, "seconds": time.perf_counter() - start})
    return {"version": version, "rows": rows}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a step is then one call in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with open(sys.argv[1]) as file:
        wanted = json.load(file)
    found = main(wanted)
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
