"""``treedraft bench``: Hugging Face ``generate``, treedraft without heads, and with the tree, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from .bench_table import show
from .options import (
    DEFAULT_TARGET,
    DEFAULT_TREE,
    NO_HEADS,
    Adapter,
    BatchSize,
    Compile,
    DType,
    Every,
    Heads,
    Json,
    Limit,
    MaxNewTokens,
    MinP,
    Prompts,
    RepetitionPenalty,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeName,
    Turns,
)
from .parts import Parts, in_turns, open_parts, prompt_ids, read_some_prompts
from .report import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..heads import Drafter
    from ..infer import Sampling
    from ..tree import Shape
    from .speed import Decode, Request, Timing

    Load = Callable[[], PreTrainedModel]

EXAMPLE = "Example: treedraft bench --heads runs/demo/train/best/heads --prompts runs/demo/bench.jsonl --repeats 5"


class Mode(StrEnum):
    """What is timed."""

    HF_GENERATE = "hf_generate"
    PLAIN = "plain"
    TREE = "tree"


MODES = list(Mode)


def command(
    prompts: Prompts,
    heads: Heads,
    target: Target = DEFAULT_TARGET,
    adapter: Adapter = None,
    tree: TreeName = DEFAULT_TREE,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    dtype: DType = "auto",
    compile: Compile = "auto",
    batch_size: BatchSize = 1,
    turns: Turns = "first",
    limit: Limit = None,
    every: Every = 1,
    repeats: Annotated[int, Option(min=1, help="Times that every prompt is decoded in every mode.")] = 3,
    modes: Annotated[list[Mode], Option(help="Modes to measure; repeat the option to name several.")] = MODES,
    profile: Annotated[
        bool, Option("--profile", help="Also say what the milliseconds of a round go to, beside the machine's limit.")
    ] = False,
    json: Json = None,
) -> None:
    """Measure what drafting gains. The modes take turns batch by batch (of one prompt, unless told otherwise), with the
    same settings and number format; a warm-up is left out. Prints tokens per second with and without the prefill, mean
    accepted length, where the time goes, and whether all modes wrote the same text."""
    from ..infer import Sampling
    from .speed import Request

    if heads == NO_HEADS and Mode.TREE in modes:
        raise BadParameter("the tree needs heads: name them with --heads, or leave it out with --modes plain")
    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    read = read_some_prompts(prompts, turns, limit, every)
    work = len(read) * max_new_tokens * repeats
    parts = open_parts(target, heads, tree, dtype, adapter, compile, work, batch_size)
    asked = in_turns(parts, read, law, max_new_tokens, seed, batch_size)
    ids = prompt_ids(parts.target, asked)
    result = bench(parts, target, ids, law, max_new_tokens, seed, repeats, modes, batch_size)
    result["settings"] |= {
        "adapter": None if adapter is None else str(adapter),
        "heads": heads,
        "tree": tree,
        "prompts": str(prompts),
        "turns": turns,
        "every": every,
    }
    if profile:
        request = Request(law, max_new_tokens, seed, parts.target.end_ids)
        result["profile"] = _profile(parts, ids[0], request, modes)
    show(result)
    if json:
        write_json(result, json)


def bench(
    parts: Parts,
    spec: str,
    prompts: Sequence[Sequence[int]],
    law: Sampling,
    max_new_tokens: int,
    seed: int,
    repeats: int,
    modes: Sequence[Mode],
    batch_size: int = 1,
) -> dict[str, Any]:
    """The bench JSON for ``prompts`` as ids. ``spec`` names the target: the baseline is a second, untouched copy of it.

    Raises GenerationError for prompts that cannot be served before anything is timed.
    """
    from tqdm import tqdm

    from ..infer import machine, versions
    from . import speed

    target = parts.target
    request = speed.Request(law, max_new_tokens, seed, target.end_ids)
    speed.check_prompts(target, prompts, request)
    untouched = cache(lambda: _untouched_model(spec, parts))
    wanted = [mode for mode in MODES if mode in modes]
    decoders = {mode.value: _decoder(mode, parts, request, untouched) for mode in wanted}
    with tqdm(total=repeats * len(prompts), desc="bench", unit="prompt", disable=None) as bar:
        timings = speed.measure(decoders, prompts, repeats, batch_size, bar.update)
    figures = {name: speed.summarise(repeats_of) for name, repeats_of in timings.items()}
    return {
        "modes": figures,
        "ratio": _ratios(figures),
        "identical": _identity(timings, prompts, law, seed, untouched),
        "settings": {
            **_settings(parts, request),
            "target": spec,
            "prompts_decoded": len(prompts),
            "repeats": repeats,
            "batch_size": batch_size,
        },
        "machine": machine(),
        "versions": versions(),
    }


def _profile(parts: Parts, prompt: Sequence[int], request: Request, modes: Sequence[Mode]) -> dict[str, Any]:
    """Milliseconds of a round and the least a forward could take, of treedraft's own modes; one prompt at a time."""
    from . import profile

    able = profile.measure_machine(parts.target.dtype, parts.target.device)
    found = {}
    for mode in (Mode.PLAIN, Mode.TREE):
        if mode in modes:
            head, tree = _drafting(mode, parts)
            spent = profile.profile_rounds(parts.target, head, tree, prompt, request)
            found[mode.value] = {**profile.roofline(parts.target, tree.size if tree else 1, able), "ms": spent}
    return found


def _settings(parts: Parts, request: Request) -> dict[str, Any]:
    return {
        "tree_nodes": parts.tree.size if parts.tree else 1,
        "max_new_tokens": request.max_new_tokens,
        "seed": request.seed,
        "end_ids": list(request.end_ids),
        "dtype": parts.target.number_format,
        "device": str(parts.target.device),
        "attention": _attention(parts),
        "forward": parts.target.forward_name,
        **asdict(request.sampling),
    }


def _untouched_model(spec: str, parts: Parts) -> PreTrainedModel:
    """The target as Hugging Face loads it: ours may hold packed weights."""
    from ..infer import load_model

    target = parts.target
    return load_model(spec, target.number_format, target.device.type, _attention(parts), parts.adapter)[0].eval()


def _attention(parts: Parts) -> str:
    return parts.target.model.config._attn_implementation or "sdpa"


def _decoder(mode: Mode, parts: Parts, request: Request, untouched: Load) -> Decode:
    from .speed import hf_decoder, tree_decoder

    if mode is Mode.HF_GENERATE:
        return hf_decoder(untouched(), request)
    return tree_decoder(parts.target, *_drafting(mode, parts), request)


def _drafting(mode: Mode, parts: Parts) -> tuple[Drafter | None, Shape | None]:
    """What a mode of treedraft's own drafts with."""
    return (parts.head, parts.tree) if mode is Mode.TREE else (None, None)


def _ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    speeds = {mode: f["tokens_per_second"] for mode, f in figures.items()}
    others = [mode for mode in speeds if mode != "tree"] if "tree" in speeds else []
    return {f"tree_vs_{mode}": speeds["tree"] / speeds[mode] for mode in others}


def _identity(
    timings: dict[str, list[list[Timing]]], prompts: Sequence[Sequence[int]], law: Sampling, seed: int, untouched: Load
) -> dict[str, Any]:
    """Compares the first repeat of all modes; Hugging Face draws its samples by another rule, so greedy only."""
    from .identity import compare, target_scores

    compared = {mode: [ids for t in repeats[0] for ids in t.answers] for mode, repeats in timings.items()}
    if not law.greedy:
        compared.pop("hf_generate", None)
    return {"modes": list(compared), **compare(compared, prompts, target_scores(untouched, law, seed))}
