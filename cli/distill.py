"""``treedraft distill``: the target answers prompts, and its answers become training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .console import out
from .options import (
    DEFAULT_TARGET,
    NO_HEADS,
    Adapter,
    BatchSize,
    Compile,
    DType,
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
    from ..data import Answer, Distilled, Prompt
    from ..infer import Sampling

EXAMPLE = "Example: treedraft distill --prompts prompts.jsonl --out answers.jsonl --temperature 0.7"


def command(
    prompts: Prompts,
    out_file: Annotated[Path, Option("--out", help="JSONL file of answers; an unfinished one is gone on with.")],
    target: Target = DEFAULT_TARGET,
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    dtype: DType = "auto",
    compile: Compile = "auto",
    batch_size: BatchSize = 16,
    limit: Limit = None,
) -> None:
    """Let the target answer prompts, in a batch that is kept full, and append its answers to a file of conversations to
    train on. Heads learn what they will have to guess: the target's own words. The same command goes on where an
    interrupted one stopped; answers that loop are marked, and prepare and train leave them out."""
    from ..infer import Sampling

    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    read = read_some_prompts(prompts, "first", limit)
    parts = open_parts(target, NO_HEADS, "", dtype, adapter, compile, len(read) * max_new_tokens)
    done = distill_to(parts, read, out_file, law, max_new_tokens, seed, batch_size)
    out().print(account(done), markup=False, soft_wrap=True)


def distill_to(
    parts: Parts, prompts: Sequence[Prompt], file: Path, law: Sampling, max_new_tokens: int, seed: int, batch_size: int
) -> Distilled:
    """Answers the prompts that ``file`` has no answer to. A prompt's seed depends on its place among all prompts."""
    from ..data import distill
    from ..infer import row_seed

    seeds = {prompt.id: row_seed(seed, place) for place, prompt in enumerate(prompts)}
    answers = _answers(parts, law, max_new_tokens, seeds, batch_size)
    return distill(prompts, answers, file, temperature=law.temperature)


def account(done: Distilled) -> str:
    found = f" ({done.found:,} were there already)" if done.found else ""
    return (
        f"{done.answered:,} prompts answered{found} with {done.tokens:,} tokens; "
        f"{done.cut:,} answers reached the limit, {done.looping:,} loop and will be left out"
    )


def _answers(
    parts: Parts, law: Sampling, max_new_tokens: int, seeds: Mapping[str, int], batch_size: int
) -> Callable[[list[Prompt]], Iterator[tuple[Prompt, Answer]]]:
    from ..data import Answer
    from ..infer import Run, generate

    def answers(prompts: list[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        run = Run()
        stream = generate(
            parts.target,
            prompt_ids(parts.target, prompts),
            sampling=law,
            row_seeds=[seeds[prompt.id] for prompt in prompts],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            run=run,
        )
        for chunk in stream:
            if chunk.reason is not None:
                made = run.completions[chunk.row]
                reason = "length" if made.reason == "length" else "stop"
                yield prompts[chunk.row], Answer(made.text, reason, len(made.ids), made.seed)

    return answers
