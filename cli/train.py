"""``treedraft train``: trains heads as a YAML file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Exit, Option

from .console import out, quiet_transformers
from .options import Json
from .report import write_json

EXAMPLE = "Example: treedraft train run.yaml optim.lr=3e-4 heads.num_heads=3"


def _show_keys(wanted: bool) -> None:
    if not wanted:
        return
    from ..train import config_keys

    table = Table(title="Keys of a training configuration")
    for title in ("key", "type", "default", "what it is"):
        table.add_column(title, overflow="fold")
    for key in config_keys():
        table.add_row(key.name, key.type, "required" if key.required else _yaml(key.default), key.description)
    out().print(table)
    raise Exit


def command(
    config: Annotated[Path, Argument(help="YAML file; see --keys for what it may hold.")],
    overrides: Annotated[list[str] | None, Argument(help="Values on top of the file: key.sub=value ...")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on from the newest whole checkpoint; start fresh if there is none.")
    ] = False,
    resume_from: Annotated[Path | None, Option(help="Go on from this checkpoint folder.")] = None,
    _keys: Annotated[
        bool, Option("--keys", callback=_show_keys, is_eager=True, help="List every key of a configuration and exit.")
    ] = False,
    json: Json = None,
) -> None:
    """Train draft heads on a frozen target. Evaluation during training decodes held-out prompts with the real tree, and
    best/ holds the heads with the largest mean accepted length τ. SIGTERM and ctrl-C save a checkpoint and stop; the
    same command with --resume goes on as if nothing had happened. Runs under accelerate launch too."""
    from ..train import leave_processes, load_config, train

    settings = load_config(config, overrides or [])
    quiet_transformers()
    try:
        result = train(settings, resume=resume_from or resume)
    finally:
        leave_processes()
    if json:
        content = {
            "step": result.step,
            "total_steps": result.total_steps,
            "stopped_by": None if result.stopped_by is None else result.stopped_by.name,
            "checkpoint": str(result.checkpoint),
            "heads": str(result.heads),
            "adapter": None if result.adapter is None else str(result.adapter),
            "best_tau": result.best_tau,
            "evaluation": result.evaluation,
        }
        write_json(content, json)
    if result.exit_code:
        raise Exit(result.exit_code)


def _yaml(value: Any) -> str:
    """A default as one would write it in the file."""
    import yaml

    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
    return text.removesuffix("...\n").strip()
