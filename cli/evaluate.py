"""``treedraft evaluate``: mean accepted length of heads and tree on a prompts file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .console import out
from .options import (
    DEFAULT_TARGET,
    DEFAULT_TREE,
    Adapter,
    BatchSize,
    Compile,
    Drafts,
    DType,
    Every,
    Heads,
    Json,
    Limit,
    MaxNewTokens,
    MinP,
    Prompts,
    RepetitionPenalty,
    Rule,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeName,
    Turns,
)
from .parts import in_turns, open_parts, prompt_ids, read_some_prompts
from .report import write_json
from .rules import note_rule

EXAMPLE = "Example: treedraft evaluate --heads runs/demo/train/best/heads --prompts runs/demo/choose.jsonl"


def command(
    prompts: Prompts,
    heads: Heads,
    target: Target = DEFAULT_TARGET,
    adapter: Adapter = None,
    tree: TreeName = DEFAULT_TREE,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    dtype: DType = "auto",
    compile: Compile = "auto",
    batch_size: BatchSize = 8,
    turns: Turns = "first",
    limit: Limit = None,
    every: Every = 1,
    rule: Rule = "coupled",
    drafts: Drafts = None,
    json: Json = None,
) -> None:
    """Decode prompts with the tree and count: the mean accepted length τ (tokens for each round, plain decoding being
    1.00), also without rounds in which the text loops, the share of rounds that accept each depth, and τ by category
    and by length of the prompt. It is measured by decoding, not estimated from accuracies."""
    from ..infer import Sampling
    from ..train import evaluate

    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    read = read_some_prompts(prompts, turns, limit, every)
    parts = open_parts(
        target, heads, tree, dtype, adapter, compile, len(read) * max_new_tokens, min(batch_size, len(read))
    )
    note_rule(rule, law, parts.head)
    asked = in_turns(parts, read, law, max_new_tokens, seed, batch_size)
    evaluation = evaluate(
        parts.target,
        parts.head,
        parts.tree,
        prompt_ids(parts.target, asked),
        [prompt.category for prompt in asked],
        law,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        rule=rule,
        drafts=drafts,
    )
    result = evaluation.to_dict()
    result["settings"] |= {
        "target": target,
        "adapter": None if adapter is None else str(adapter),
        "heads": heads,
        "tree_name": tree,
        "prompts": str(prompts),
        "turns": turns,
        "every": every,
    }
    out().print(_table(result))
    if json:
        write_json(result, json)


def _table(result: Mapping[str, Any]) -> Table:
    from ..train.evaluate import UNNAMED

    table = Table(title="Mean accepted length")
    table.add_column("")
    table.add_column("τ", justify="right")
    table.add_column("without loops", justify="right")
    table.add_row("all prompts", *_both(result["tau"], result["tau_without_loops"]), style="bold", end_section=True)
    without = result["tau_without_loops_by_category"]
    for category, tau in result["tau_by_category"].items():
        table.add_row("no category" if category == UNNAMED else category, *_both(tau, without[category]))
    table.add_section()
    without = result["tau_without_loops_by_prompt_length"]
    for length, tau in result["tau_by_prompt_length"].items():
        table.add_row(f"prompts of {length} tokens", *_both(tau, without[length]))
    table.add_section()
    for depth, share in enumerate(result["accept_by_depth"][1:], 1):
        table.add_row(f"rounds that accept at least {depth}", f"{share:.0%}")
    table.caption = f"{result['prompts']:,} prompts, {result['tokens']:,} tokens, {result['rounds']:,} rounds"
    return table


def _both(*ratios: float | None) -> list[str]:
    return ["no rounds" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
