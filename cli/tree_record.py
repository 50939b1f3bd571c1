"""``treedraft tree record``: one pass over the target's own answers, for every static tree at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .console import note, out
from .options import (
    DEFAULT_TARGET,
    SMALL_TREE,
    Adapter,
    BatchSize,
    Compile,
    DType,
    Every,
    Heads,
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
)
from .parts import Parts, open_parts, prompt_ids, read_some_prompts

if TYPE_CHECKING:
    from ..data import Prompt
    from ..infer import Sampling
    from ..tree import Origin, Record

EXAMPLE = (
    "Example: treedraft tree record --heads runs/demo/train/best/heads --prompts runs/demo/choose.jsonl --out "
    "runs/demo/ranks.safetensors"
)
DEEPEST = 6


def command(
    prompts: Prompts,
    heads: Heads,
    out_file: Annotated[Path, Option("--out", help="The record, a safetensors file; an interrupted one is continued.")],
    target: Target = DEFAULT_TARGET,
    adapter: Adapter = None,
    depth: Annotated[
        int | None, Option(min=1, help="Depths to record; by default all of the heads', 6 for step-wise ones.")
    ] = None,
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
    limit: Limit = None,
    every: Every = 1,
) -> None:
    """Let the target answer prompts, and store at every position of its answers where the true token stood among the
    heads' candidates, at each depth. From the record the mean accepted length of any static tree follows exactly,
    without decoding again (treedraft tree search). An interrupted record is continued."""
    from ..infer import Sampling, check_levels
    from ..tree import Tree, walk

    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    read = read_some_prompts(prompts, "first", limit, every)
    heads_id = _heads_id(heads)
    parts = open_parts(target, heads, SMALL_TREE, dtype, adapter, compile, len(read) * max_new_tokens)
    assert parts.head is not None
    depth = depth or min(parts.head.depth, DEEPEST)
    check_levels(parts.head, depth)
    ids = prompt_ids(parts.target, read)
    origin = _origin(parts, heads_id, ids, law, seed, max_new_tokens, depth)
    record = record_answers(parts, heads, read, ids, law, origin, out_file, batch_size)
    chain = walk(record, Tree.chain(depth))
    out().print(
        f"{out_file}: {len(record.lengths)} answers, {sum(record.lengths):,} tokens, {depth} depths. τ of a chain as "
        f"deep: {chain.tau:.2f} ({chain.tau_without_loops:.2f} without loops).",
        soft_wrap=True,
    )


def record_answers(
    parts: Parts,
    heads: str,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    law: Sampling,
    origin: Origin,
    file: Path,
    batch_size: int,
) -> Record:
    """Records all prompts, ``batch_size`` at a time, each batch saved before the next; goes on from what ``file`` has.

    Raises RecordError if the file is of another origin.
    """
    import torch
    from tqdm import tqdm

    from ..infer import KEPT_BELIEFS, machine, versions
    from ..tree import Record, check_origin, load_record, save_record

    head = parts.head
    assert head is not None
    about = {
        "heads": heads,
        "kind": getattr(getattr(head, "config", None), "kind", type(head).__name__),
        "target": parts.target.facts.name,
        "forward": parts.target.forward_name,
        "machine": machine(),
        "versions": versions(),
    }
    wide = min(KEPT_BELIEFS, head.candidates)
    nothing = (
        torch.zeros(0, origin.depth, dtype=torch.int32),
        torch.zeros(0, origin.depth, wide),
        torch.zeros(0, dtype=torch.bool),
    )
    record = Record(origin, (), (), *nothing, (), (), len(prompts), about)
    if file.exists():
        record = load_record(file)
        check_origin(record.origin, origin, file)
        note(f"{file} has {len(record.lengths)} of {len(prompts)} answers already")
    with tqdm(total=len(prompts), initial=len(record.lengths), desc="record", unit="prompt", disable=None) as bar:
        while not record.whole:
            begin = len(record.lengths)
            span = slice(begin, begin + batch_size)
            part = _record_batch(parts, prompts[span], ids[span], begin, law, origin, about)
            record = record.joined(part)
            save_record(record, file)
            bar.update(len(part.lengths))
    return record


def _record_batch(
    parts: Parts,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    begin: int,
    law: Sampling,
    origin: Origin,
    about: dict[str, object],
) -> Record:
    """The answers are decoded with heads and tree, which under the coupled rule changes their speed alone."""
    from ..infer import Answered, complete, record_ranks, row_seed
    from ..tree import Record

    assert parts.head is not None
    seeds = [row_seed(origin.seed, begin + i) for i in range(len(ids))]
    done = complete(
        parts.target,
        ids,
        head=parts.head,
        tree=parts.tree,
        sampling=law,
        row_seeds=seeds,
        max_new_tokens=origin.max_new_tokens,
        batch_size=len(ids),
    )
    answers = [Answered(prompt, c.ids, seed) for prompt, c, seed in zip(ids, done, seeds, strict=True)]
    found = record_ranks(parts.target, parts.head, answers, law, origin.depth)
    return Record(
        origin,
        tuple(len(a.answer) for a in answers),
        tuple(len(prompt) for prompt in ids),
        found.ranks,
        found.beliefs,
        found.loops,
        tuple(str(prompt.id) for prompt in prompts),
        tuple(prompt.category or "all" for prompt in prompts),
        len(prompts),
        about,
    )


def _heads_id(heads: str) -> str:
    """The hash of a folder's heads; a record of anything else could not be told from others later."""
    from ..heads import HeadError, heads_hash

    if not Path(heads).is_dir():
        raise HeadError(f"a record is of a folder of trained heads, got {heads}")
    return heads_hash(heads)


def _origin(
    parts: Parts,
    heads: str,
    ids: Sequence[Sequence[int]],
    law: Sampling,
    seed: int,
    max_new_tokens: int,
    depth: int,
) -> Origin:
    from ..heads import target_hash
    from ..tree import Origin

    prompts = hashlib.sha256(json.dumps([list(row) for row in ids]).encode()).hexdigest()[:16]
    return Origin(
        heads, target_hash(parts.target.facts), parts.target.number_format, prompts, asdict(law), seed,
        max_new_tokens, depth,
    )  # fmt: skip
