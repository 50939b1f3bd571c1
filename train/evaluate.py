"""The measured acceptance: heads and tree decode prompts, and what was accepted is counted.

tau: the mean accepted length, tokens kept from decode rounds / decode rounds, summed over prompts, bonus token counted,
the prefill and its own token not (plain decoding = 1.00).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..heads import Drafter
from ..infer import Drafts, NamedRule, Run, Sampling, Stats, Target, complete, find_rule, machine, versions
from ..infer.stats import length_range, range_start
from ..tree import Shape

UNNAMED = "all"
"""The category of prompts that name none."""


@dataclass(frozen=True)
class Evaluation:
    """Counts of a decode run over prompts; they add up. ``settings`` is what it was run with."""

    by_category: Mapping[str, Stats]
    by_prompt_length: Mapping[int, Stats]
    """By the lower end of the range that the prompt's length falls into (``infer.stats.length_range``)."""
    settings: Mapping[str, Any]
    phase_seconds: Counter[str]
    """Of all categories together: prompts of several are decoded side by side."""

    @property
    def total(self) -> Stats:
        total = Stats(phase_seconds=Counter(self.phase_seconds))
        for stats in self.by_category.values():
            total.add(stats)
        return total

    @property
    def tau(self) -> float:
        """NaN if there was no decode round."""
        return self.total.tau

    def __add__(self, other: Evaluation) -> Evaluation:
        """The counts of two parts of one run."""
        return Evaluation(
            _merged(self.by_category, other.by_category),
            _merged(self.by_prompt_length, other.by_prompt_length),
            self.settings,
            self.phase_seconds + other.phase_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ratios and their counts, settings, machine and versions. A ratio without rounds is null."""
        return {
            **self.total.to_dict(),
            **_ratios("category", dict(sorted(self.by_category.items()))),
            **_ratios("prompt_length", {length_range(n): stats for n, stats in sorted(self.by_prompt_length.items())}),
            "settings": dict(self.settings),
            "machine": machine(),
            "versions": versions(),
        }


def _ratios(kind: str, parts: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """Both ratios of each part, under the names ``tau_by_KIND`` and ``tau_without_loops_by_KIND``."""
    counted = {name: stats.to_dict() for name, stats in parts.items()}
    ratios = ("tau", "tau_without_loops")
    return {f"{ratio}_by_{kind}": {name: part[ratio] for name, part in counted.items()} for ratio in ratios}


def evaluate(
    target: Target,
    head: Drafter | None,
    tree: Shape | None,
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str | None],
    sampling: Sampling,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    seed: int = 0,
    row_seeds: Sequence[int] | None = None,
    rule: str | NamedRule = "coupled",
    drafts: Drafts | None = None,
) -> Evaluation:
    """Decodes ``prompts`` (token ids) with the real tree decode and counts. No prompts give no counts.

    ``head`` is a drafter, trained heads being those made for decoding in the target's dtype; None is plain decoding.
    ``row_seeds`` names the seed of each prompt, for a share of the prompts of a run. ``rule`` and ``drafts`` are those
    of ``generate``. Raises GenerationError or TreeError before any work.
    """
    chosen, config = find_rule(rule), getattr(head, "config", None)
    settings = {
        "target": target.facts.name,
        "dtype": target.number_format,
        "forward": target.forward_name,
        "head": None if config is None else asdict(config),
        "tree": None if tree is None else tree.to_dict(),
        "sampling": asdict(sampling),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "rule": chosen.name,
        "lossless": chosen.lossless,
        "drafts": drafts or chosen.drafts,
    }
    run = Run()
    completions = complete(
        target,
        prompts,
        head=head,
        tree=tree,
        sampling=sampling,
        seed=seed,
        row_seeds=row_seeds,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        rule=chosen,
        drafts=drafts,
        run=run,
    )
    by_category: dict[str, Stats] = {}
    by_length: dict[int, Stats] = {}
    for prompt, category, done in zip(prompts, categories, completions, strict=True):
        by_category.setdefault(category or UNNAMED, Stats()).add(done.stats)
        by_length.setdefault(range_start(len(prompt)), Stats()).add(done.stats)
    return Evaluation(by_category, by_length, settings, run.stats.phase_seconds)


def _merged(some: Mapping[Any, Stats], others: Mapping[Any, Stats]) -> dict[Any, Stats]:
    return {name: some.get(name, Stats()) + others.get(name, Stats()) for name in sorted({*some, *others})}
