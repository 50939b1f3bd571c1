"""``treedraft verify-export``: does an engine read these heads as they were trained?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, BadParameter, Option

from .console import note, out, quiet_transformers
from .engine_run import judge, run_vllm, speculation, vllm_job
from .export import EngineName
from .options import DEFAULT_TARGET, Json, Limit, MaxNewTokens, Target
from .report import write_json

if TYPE_CHECKING:
    from ..heads import Head

EXAMPLE = (
    "Example: treedraft verify-export served/vllm --heads runs/demo/train/best/heads --prompts dev.jsonl "
    "--python /path/to/vllm/bin/python"
)
FAILED = 1


def command(
    folder: Annotated[Path, Argument(help="A folder that treedraft export wrote.", show_default=False)],
    engine: Annotated[
        EngineName | None, Option(help="The engine that is to read it; by default the one it was written for.")
    ] = None,
    heads: Annotated[
        Path | None, Option(help="The heads that were exported; by default those that export_report.json names.")
    ] = None,
    target: Target = DEFAULT_TARGET,
    prompts: Annotated[Path | None, Option(help="Also decode this prompts file in the engine itself (vllm).")] = None,
    python: Annotated[Path | None, Option(help="The Python of the environment that vLLM is installed in.")] = None,
    limit: Limit = 8,
    max_new_tokens: MaxNewTokens = 64,
    steps: Annotated[
        int | None, Option(min=1, help="Drafted tokens of a chain; by default as many as are served.")
    ] = None,
    json: Json = None,
) -> None:
    """Replay how an engine loads the folder: whatever it would drop, rename, leave at a default or fill with zeros is
    named. With --prompts also run the engine (vLLM, fp32) with and without the heads, and compare the tokens, and the
    acceptance by position with treedraft's own chain decoding of the same heads on the same prompts. Exit code 1 if
    anything fails."""
    from ..heads import HeadError
    from ..heads.formats import REPORT_FILE, check, import_checkpoint, read_checkpoint, read_json, rope_of
    from ..infer import load_target

    read = read_checkpoint(folder)
    report = read_json(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else {}
    named = engine or report.get("engine")
    if named is None:
        raise BadParameter(f"name the --engine: {folder} has no {REPORT_FILE}")
    if prompts is not None and (named != "vllm" or python is None):
        raise BadParameter("--prompts runs vllm alone, by the --python of the environment that it is installed in")
    quiet_transformers()
    note(f"Loading {target} ...")
    loaded = load_target(target, dtype="fp32", device="cpu", compile="off", pack=prompts is not None)
    faults = check(read, named, loaded.facts, loaded.layers(), rope_of(loaded.config.to_dict()), report or None)
    try:
        import_checkpoint(read, loaded.layers(), loaded.facts)
    except HeadError as error:
        faults.append(str(error))
    result: dict[str, Any] = {"folder": str(folder), "engine": named, "faults": faults}
    _print_faults(named, faults)
    passed = not faults
    if prompts is not None:
        assert python is not None
        known = heads or _recorded_heads(report)
        source = _served_heads(folder, known, loaded, named)
        compared = _compare(folder, source, loaded, target, prompts, python, limit, max_new_tokens, steps)
        result |= {"heads": None if known is None else str(known), **compared}
        _print_comparison(compared)
        passed = passed and compared["pass"]
    out().print("[bold green]Verdict: pass[/]" if passed else "[bold red]Verdict: fail[/]")
    result["pass"] = passed
    if json:
        write_json(result, json)
    if not passed:
        sys.exit(FAILED)


def _recorded_heads(report: Mapping[str, Any]) -> Path | None:
    recorded = report.get("heads")
    return Path(recorded) if isinstance(recorded, str) and Path(recorded).is_dir() else None


def _served_heads(folder: Path, heads: Path | None, target: Any, engine: str) -> Head:
    """The heads as the engine ought to have them: exported once more in memory, not read from the judged folder."""
    import torch

    from ..heads import load_head
    from ..heads.formats import import_checkpoint, read_checkpoint, to_checkpoint

    if heads is None:
        note(f"no --heads: {folder} is compared with itself as treedraft reads it, which sees no fault of the export")
        return import_checkpoint(read_checkpoint(folder), target.layers(), target.facts).head
    source = load_head(heads, target.facts, target.layers())
    made = to_checkpoint(source, engine, "target", target.config.to_dict(), torch.float32)
    return import_checkpoint(made, target.layers(), target.facts).head


def _compare(
    folder: Path,
    source: Head,
    loaded: Any,
    target: str,
    prompts: Path,
    python: Path,
    limit: int | None,
    max_new_tokens: int,
    steps: int | None,
) -> dict[str, Any]:
    """Decodes in vLLM without heads, with them, and here; counts what was equal."""
    from ..heads.formats import kind_of, read_checkpoint, steps_served
    from ..infer.load import local_folder
    from .chains import chain_rounds
    from .parts import prompt_ids, read_some_prompts

    asked = read_some_prompts(prompts, "first", limit)
    ids = prompt_ids(loaded, asked)
    drafted = steps or steps_served(source.config)
    job = vllm_job(local_folder(target), ids, loaded.end_ids, max_new_tokens)
    kind = kind_of(read_checkpoint(folder))
    note("Decoding here ...")
    ours = chain_rounds(loaded, source, ids, drafted, max_new_tokens)
    note("Decoding in vLLM without heads ...")
    plain = run_vllm(python, {**job, "speculative": None})
    note("Decoding in vLLM with heads ...")
    served = run_vllm(python, {**job, "speculative": speculation(kind, folder, drafted)})
    asked_for = {"prompts": [prompt.id for prompt in asked], "max_new_tokens": max_new_tokens, "steps": drafted}
    return {**asked_for, **judge(ours, plain, served, drafted)}


def _print_faults(engine: str, faults: Sequence[str]) -> None:
    if not faults:
        out().print(f"{engine} would load every tensor and every setting as it was meant.")
    for fault in faults:
        out().print(f"* {fault}", style="red", markup=False)


def _print_comparison(found: Mapping[str, Any]) -> None:
    console = out()
    equal, same = found["equal_with_and_without_heads"], found["equal_to_treedraft"]
    table = Table(title="Greedy tokens in fp32")
    for title in ("compared", "equal prompts"):
        table.add_column(title)
    table.add_row("vLLM with heads, vLLM without", f"{sum(equal)} of {len(equal)}")
    table.add_row("vLLM with heads, treedraft", f"{sum(same)} of {len(same)}")
    console.print(table)
    ours, theirs = found["treedraft"], found["engine"]
    table = Table(title="Acceptance by position, on the prompts with equal tokens")
    table.add_column("drafted token")
    for title in ("treedraft", "vLLM"):
        table.add_column(title, justify="right")
    table.add_row("rounds", str(ours["rounds"]), str(theirs["rounds"]), end_section=True)
    pairs = zip(ours["accepted_by_position"], theirs["accepted_by_position"], strict=True)
    for place, (a, b) in enumerate(pairs, 1):
        table.add_row(
            str(place), *(f"{n} ({n / max(1, r):.3f})" for n, r in ((a, ours["rounds"]), (b, theirs["rounds"])))
        )
    table.caption = f"last rounds left out; every round the same in {found['rounds_equal']} of {sum(same)} prompts"
    console.print(table)
