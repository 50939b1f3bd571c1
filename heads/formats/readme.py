"""The README of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def readme(report: Mapping[str, Any], launch: str) -> str:
    """What the folder is, how it is served, what is lost and what is to be expected, from the export's report."""
    target = report["target"]
    lines = [
        f"# {report['kind']} heads of {target['name'] or 'a target'} for {report['engine']}",
        "",
        f"Draft heads for `{target['served_as']}` (hidden size {target['hidden_size']}, vocabulary "
        f"{target['vocab_size']:,}, {target['num_layers']} layers), written by treedraft in {report['dtype']}. With "
        "greedy decoding they change the speed and never the text, up to near-ties in half precision.",
        "",
        "```",
        launch,
        "```",
        "",
        "`DIR` is this folder.",
    ]
    if report["lost"]:
        lines += ["", "Lost in this engine:", "", *(f"* {lost}" for lost in report["lost"])]
    expected = report.get("expected")
    if expected and expected["rounds"]:
        lines += ["", "## Expected acceptance", ""]
        lines += [
            f"{expected['rounds']} rounds of chains of {expected['steps']} in treedraft, greedy, fp32, last rounds of "
            f"prompts left out; prompts {', '.join(expected['prompts'])}, at most "
            f"{expected['max_new_tokens']} tokens each."
        ]
        lines += ["", "| drafted token | accepted | share of rounds |", "|---|---|---|"]
        for place, accepted in enumerate(expected["accepted_by_position"], 1):
            lines.append(f"| {place} | {accepted} | {accepted / expected['rounds']:.3f} |")
        total = 1 + sum(expected["accepted_by_position"]) / expected["rounds"]
        lines += ["", f"Mean accepted length, the target's own token included: {total:.2f}."]
    lines += ["", "`export_report.json` has names, shapes and hashes of all tensors.", ""]
    return "\n".join(lines)
