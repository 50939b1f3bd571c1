"""What the answers of a run of ``peers.py`` amount to, peer by peer.

Counts and times are summed over prompts and repeats first and divided last. Intervals are 95 % bootstrap intervals over
prompts, those of ratios paired: a prompt and all its repeats are drawn together for both sides.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BASELINE = "hf"
DRAWS = 1000

Answer = Mapping[str, Any]
Figure = Callable[[Sequence[Answer]], float]


def summarise(lines: Sequence[Mapping[str, Any]], weights_mb: float, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Figures by peer, of those that answered; ``error`` alone for one that failed before.

    lines: those of a run; turns that were cut off are left out. weights_mb: what one forward reads of the weights as
    the checkpoint has them; with the bandwidth that the run measured it gives ``share_of_roofline``: decoding speed
    (without the prefill) over the speed of a plain decoder that only read those weights once for each token.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "peer" in line:
            found.setdefault(line["peer"], {})
        if "imports_mb" in line:
            found[line["peer"]].pop("error", None)  # of an earlier start
            found[line["peer"]] |= {"versions": line["versions"], "imports_mb": line["imports_mb"]}
        if "error" in line:
            found[line["peer"]]["error"] = line["error"]
    answers = whole_turns(lines, [peer for peer, figures in found.items() if "error" not in figures])
    bandwidth = max((line["gb_per_second"] for line in lines if "gb_per_second" in line), default=float("nan"))
    baseline = answers.get(BASELINE, [])
    for peer, of_peer in answers.items():
        figures = found[peer]
        if "error" in figures:
            figures["error"] = f"after {len(of_peer)} answers: {figures['error']}"
        figures |= _figures(of_peer, random.Random(seed))
        figures["peak_over_imports_mb"] = max(a["peak_mb"] for a in of_peer) - figures["imports_mb"]
        figures["share_of_roofline"] = figures["tokens_per_second_decode"] * weights_mb / 1e3 / bandwidth
        figures["equal_texts"] = equal_share(of_peer, baseline)
        figures["times_generate"], figures["times_generate_interval"] = _ratio(of_peer, baseline, random.Random(seed))
    return found


def whole_turns(lines: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> dict[str, list[Answer]]:
    """The answers by peer, without those to turns (a prompt in a repeat) that not all of ``peers`` have had yet."""
    had: dict[tuple[int, int], set[str]] = defaultdict(set)
    for line in lines:
        if "seconds" in line:
            had[line["repeat"], line["prompt"]].add(line["peer"])
    answers: dict[str, list[Answer]] = defaultdict(list)
    for line in lines:
        if "seconds" in line and had[line["repeat"], line["prompt"]].issuperset(peers):
            answers[line["peer"]].append(line)
    return answers


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second, prefill included."""
    return sum(len(a["ids"]) for a in answers) / sum(a["seconds"] for a in answers)


def decode_speed(answers: Sequence[Answer]) -> float:
    """Tokens per second behind the prefill and what it gave."""
    tokens = sum(len(a["ids"]) - a["first_tokens"] for a in answers)
    return tokens / sum(a["seconds"] - a["first_seconds"] for a in answers)


def tau(answers: Sequence[Answer]) -> float | None:
    """Mean accepted length: tokens of a round behind the prefill, the bonus token counted; None if not reported."""
    if any(a["rounds"] is None for a in answers):
        return None
    rounds = sum(a["rounds"] for a in answers)
    return sum(len(a["ids"]) - a["first_tokens"] for a in answers) / rounds if rounds else None


def equal_share(answers: Sequence[Answer], baseline: Sequence[Answer]) -> float | None:
    """The share of answers whose tokens are those that the baseline first gave to the same prompt."""
    expected: dict[int, list[int]] = {}
    for answer in baseline:
        expected.setdefault(answer["prompt"], answer["ids"])
    compared = [a["ids"] == expected[a["prompt"]] for a in answers if a["prompt"] in expected]
    return sum(compared) / len(compared) if compared else None


def interval(answers: Sequence[Answer], figure: Figure, generator: random.Random) -> tuple[float, float]:
    """The 95 % bootstrap interval of a figure over prompts."""
    grouped = _by_prompt(answers)
    drawn = []
    for _ in range(DRAWS):
        picked = generator.choices(sorted(grouped), k=len(grouped))
        drawn.append(figure([answer for prompt in picked for answer in grouped[prompt]]))
    return _middle(drawn)


def _figures(answers: Sequence[Answer], generator: random.Random) -> dict[str, Any]:
    repeats = sorted({a["repeat"] for a in answers})
    return {
        "answers": len(answers),
        "prompts": len({a["prompt"] for a in answers}),
        "tokens": sum(len(a["ids"]) for a in answers),
        "seconds": sum(a["seconds"] for a in answers),
        "tokens_per_second": speed(answers),
        "tokens_per_second_interval": interval(answers, speed, generator),
        "tokens_per_second_by_repeat": [speed([a for a in answers if a["repeat"] == r]) for r in repeats],
        "tokens_per_second_decode": decode_speed(answers),
        "tokens_per_second_decode_interval": interval(answers, decode_speed, generator),
        "first_token_seconds": statistics.fmean(a["first_seconds"] for a in answers),
        "tau": tau(answers),
    }


def _ratio(
    answers: Sequence[Answer], baseline: Sequence[Answer], generator: random.Random
) -> tuple[float | None, tuple[float, float] | None]:
    """How many times the baseline's speed, prefill included, over the turns that both have, and its interval."""
    turns = {(a["repeat"], a["prompt"]) for a in answers} & {(a["repeat"], a["prompt"]) for a in baseline}
    if not turns:
        return None, None
    ours, theirs = (_by_prompt([a for a in s if (a["repeat"], a["prompt"]) in turns]) for s in (answers, baseline))
    drawn = []
    for _ in range(DRAWS):
        picked = generator.choices(sorted(ours), k=len(ours))
        drawn.append(_speed_of(ours, picked) / _speed_of(theirs, picked))
    return _speed_of(ours, sorted(ours)) / _speed_of(theirs, sorted(ours)), _middle(drawn)


def _speed_of(grouped: Mapping[int, Sequence[Answer]], prompts: Sequence[int]) -> float:
    return speed([answer for prompt in prompts for answer in grouped[prompt]])


def _by_prompt(answers: Sequence[Answer]) -> dict[int, list[Answer]]:
    grouped: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        grouped[answer["prompt"]].append(answer)
    return grouped


def _middle(drawn: Sequence[float]) -> tuple[float, float]:
    """The middle 95 %."""
    ordered = sorted(drawn)
    last = len(ordered) - 1
    return ordered[round(0.025 * last)], ordered[round(0.975 * last)]
