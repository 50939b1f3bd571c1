"""Times decoders on the same prompts, a batch at a time, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ..infer import GenerationError, Run, Sampling, Stats, generate, row_seed
from ..infer.timing import now

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..heads import Drafter
    from ..infer import Target
    from ..tree import Shape


@dataclass(frozen=True)
class Request:
    """What every decoder is asked to do, all settings spelt out."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """One batch of prompts decoded once; times in seconds."""

    answers: list[list[int]]
    seconds: float
    first_seconds: float
    """Time to the first token: the prefill, which gives every prompt one."""
    stats: Stats | None = None

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.answers)

    @property
    def first_tokens(self) -> int:
        return sum(len(ids) > 0 for ids in self.answers)


Decode = Callable[[int, Sequence[Sequence[int]]], Timing]
"""(number of the batch's first prompt, the ids of its prompts) -> timing."""


def check_prompts(target: Target, prompts: Sequence[Sequence[int]], request: Request) -> None:
    """Raises GenerationError or TargetError if any of the prompts cannot be served to its whole budget.

    treedraft ends at the context, Hugging Face ``generate`` goes on: the two would not do the same work.
    """
    longest = max(len(prompt) for prompt in prompts) + request.max_new_tokens
    if longest > target.context:
        room = target.context - longest + request.max_new_tokens
        raise GenerationError(
            f"the longest prompt and {request.max_new_tokens} new tokens need {longest} positions, the context has "
            f"{target.context}: lower --max-new-tokens to {room} or less"
        )
    stream = generate(target, prompts, sampling=request.sampling, max_new_tokens=request.max_new_tokens, batch_size=1)
    next(stream, None)  # all prompts are checked before the first chunk


def tree_decoder(target: Target, head: Drafter | None, tree: Shape | None, request: Request) -> Decode:
    """treedraft, with heads or (None) without."""

    def decode(row: int, prompts: Sequence[Sequence[int]]) -> Timing:
        run = Run()
        first: float | None = None
        start = now(target.device)
        for _ in generate(
            target,
            prompts,
            head=head,
            tree=tree,
            sampling=request.sampling,
            row_seeds=[row_seed(request.seed, row + i) for i in range(len(prompts))],
            max_new_tokens=request.max_new_tokens,
            end_ids=request.end_ids,
            batch_size=len(prompts),
            run=run,
            synchronize=True,
        ):
            first = first or now(target.device) - start
        seconds = now(target.device) - start
        answers = [run.completions[i].ids for i in range(len(prompts))]
        return Timing(answers, seconds, first or seconds, run.stats)

    return decode


def hf_decoder(model: PreTrainedModel, request: Request) -> Decode:
    """Hugging Face ``generate`` on an untouched model, with every setting passed: its defaults are not ours.

    Batches are padded on the left, as ``generate`` wants them.
    """
    settings = _hf_settings(request)

    def decode(row: int, prompts: Sequence[Sequence[int]]) -> Timing:
        tokens, seen = padded_left(prompts, settings["pad_token_id"], model.device)
        clock = _FirstToken()
        with torch.random.fork_rng():
            torch.manual_seed(row_seed(request.seed, row))
            start = now(model.device)
            made: Tensor = cast(Any, model).generate(
                tokens,
                attention_mask=seen,
                stopping_criteria=StoppingCriteriaList([clock]),
                **settings,
            )
            seconds = now(model.device) - start
        answers = [until_end(ids, request.end_ids) for ids in made[:, tokens.shape[1] :].tolist()]
        return Timing(answers, seconds, clock.at - start)

    return decode


def padded_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as [B, T] and which positions are real."""
    longest = max(len(prompt) for prompt in prompts)
    gaps = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[pad_id] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)])
    seen = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
    return tokens.to(device), seen.to(device)


def until_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    """An answer without what ``generate`` pads it with behind its end token."""
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids))
    return ids[: end + 1]


def measure(
    decoders: Mapping[str, Decode],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    batch_size: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, list[list[Timing]]]:
    """Timings [repeat][batch] of every decoder, taken in turns batch by batch, each turn begun by another decoder.

    One run of each decoder on the first batch is left out as warm-up.
    """
    batches = [(row, prompts[row : row + batch_size]) for row in range(0, len(prompts), batch_size)]
    names = list(decoders)
    timings: dict[str, list[list[Timing]]] = {name: [[] for _ in range(repeats)] for name in names}
    for name in names:
        decoders[name](*batches[0])
    for repeat in range(repeats):
        for number, (row, batch) in enumerate(batches):
            turn = (repeat + number) % len(names)
            for name in names[turn:] + names[:turn]:
                timings[name][repeat].append(decoders[name](row, batch))
            progress(len(batch))
    return timings


def summarise(repeats: Sequence[Sequence[Timing]]) -> dict[str, Any]:
    """The figures of one decoder: sums over prompts and repeats first, quotients last."""
    every = [timing for repeat in repeats for timing in repeat]
    speeds = [_speed(repeat) for repeat in repeats]
    later = sum(t.tokens - t.first_tokens for t in every)
    later_seconds = sum(t.seconds - t.first_seconds for t in every)
    result: dict[str, Any] = {
        "tokens": sum(t.tokens for t in every),
        "seconds": sum(t.seconds for t in every),
        "tokens_per_second": _speed(every),
        "tokens_per_second_decode": later / later_seconds if later_seconds > 0 else 0.0,
        "time_to_first_token": sum(t.first_seconds for t in every) / len(every),
        "tokens_per_second_by_repeat": speeds,
        "spread": (max(speeds) - min(speeds)) / _speed(every) if _speed(every) else 0.0,
    }
    counted = [t.stats for t in every if t.stats is not None]
    if counted:
        stats = sum(counted[1:], counted[0])
        names = ("tau", "tau_without_loops", "accept_by_depth", "rounds", "phase_seconds")
        result |= {name: stats.to_dict()[name] for name in names}
    return result


class _FirstToken(StoppingCriteria):
    """Stops nothing; notes when ``generate`` asks for the first time, which is after its first token."""

    at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # type: ignore[override]
        self.at = self.at or now(input_ids.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _hf_settings(request: Request) -> dict[str, Any]:
    law = request.sampling
    shared = {
        "max_new_tokens": request.max_new_tokens,
        "eos_token_id": list(request.end_ids) or None,
        "pad_token_id": request.end_ids[0] if request.end_ids else 0,
        "repetition_penalty": law.repetition_penalty,
        "num_beams": 1,
        "use_cache": True,
    }
    if law.greedy:
        return {**shared, "do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    return {
        **shared,
        "do_sample": True,
        "temperature": law.temperature,
        "top_k": law.top_k,
        "top_p": law.top_p,
        "min_p": law.min_p or None,
    }


def _speed(timings: Sequence[Timing]) -> float:
    seconds = sum(t.seconds for t in timings)
    return sum(t.tokens for t in timings) / seconds if seconds else 0.0
