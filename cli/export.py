"""``treedraft export``: heads for serving engines, with what they will accept there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from typer import Option

from .console import note, out, quiet_transformers
from .options import DEFAULT_TARGET, Limit, MaxNewTokens, Target
from .report import write_json

if TYPE_CHECKING:
    from ..heads import Head

EXAMPLE = "Example: treedraft export --heads runs/demo/train/best/heads --to vllm --to sglang --out served"

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "tgi", "llamacpp", "speculators", "medusa", "eagle"]
ExportDType = Annotated[
    Literal["stored", "fp32", "bf16", "fp16"],
    Option("--dtype", help="Number format of the weights; stored keeps that of the heads folder."),
]


def command(
    heads: Annotated[Path, Option(help="Folder of trained heads.")],
    to: Annotated[list[str], Option("--to", help=f"One of {', '.join(get_args(EngineName))}; may be repeated.")],
    out_folder: Annotated[
        Path, Option("--out", help="Where to write; with several engines, one folder in it for each.")
    ],
    target: Target = DEFAULT_TARGET,
    served_as: Annotated[
        str | None, Option(help="What the engine will be told to serve: a hub id or a path; by default the target.")
    ] = None,
    dtype: ExportDType = "stored",
    prompts: Annotated[
        Path | None, Option(help="Prompts file on which to measure, by chain decoding, what the engine will accept.")
    ] = None,
    limit: Limit = 8,
    max_new_tokens: MaxNewTokens = 64,
) -> None:
    """Write heads as a serving engine reads them: configuration, tensors, a README with the command that serves them
    and export_report.json. What the engine cannot serve is refused before anything is written, and what is lost there
    is said; every folder is read back and checked as the engine would read it."""
    from ..heads import load_head
    from ..heads.formats import REPORT_FILE, check_served, export, import_checkpoint, launch, read_checkpoint
    from ..heads.formats.readme import readme
    from ..infer import load_target
    from ..infer.formats import DTYPES, dtype_name
    from ..infer.load import local_folder
    from ..tree import write_atomically

    quiet_transformers()
    note(f"Loading {target} ...")
    loaded = load_target(target, dtype="fp32", device="cpu", pack=False, compile="off")
    head = load_head(heads, loaded.facts, loaded.layers())
    engines = tuple(dict.fromkeys(to))
    check_served(head, engines)
    chosen = DTYPES[stored_dtype(heads) if dtype == "stored" else dtype]
    name = served_as or local_folder(target)
    whole = loaded.config.to_dict()
    for engine in engines:
        folder = out_folder if len(engines) == 1 else out_folder / engine
        report = export(head, engine, folder, loaded.layers(), loaded.facts, name, whole, chosen)
        report |= {"heads": str(heads.resolve()), "dtype": dtype_name(chosen)}
        if prompts is not None:
            served: Head = import_checkpoint(read_checkpoint(folder), loaded.layers(), loaded.facts).head
            report["expected"] = _expected(loaded, served, prompts, limit, max_new_tokens)
        write_json(report, folder / REPORT_FILE)
        text = readme(report, launch(head.config, engine, name))
        write_atomically(text, folder / "README.md")
        for lost in report["lost"]:
            note(f"{engine}: lost is {lost}")
        out().print(
            f"{folder}: {head.config.kind} heads for {engine}, {len(report['tensors'])} tensors, read back and checked"
        )


def stored_dtype(heads: Path) -> str:
    """The widest number format of a heads folder's weights."""
    from safetensors import safe_open

    from ..heads.files import WEIGHTS_FILE

    with safe_open(heads / WEIGHTS_FILE, "pt") as file:
        found = {file.get_slice(name).get_dtype() for name in file.keys()} - {"I64"}  # noqa: SIM118
    return {frozenset({"BF16"}): "bf16", frozenset({"F16"}): "fp16"}.get(frozenset(found), "fp32")


def _expected(target: Any, head: Any, prompts: Path, limit: int | None, max_new_tokens: int) -> dict[str, Any]:
    from ..heads.formats import steps_served
    from .chains import by_position, chain_rounds
    from .parts import prompt_ids, read_some_prompts

    asked = read_some_prompts(prompts, "first", limit)
    steps = steps_served(head.config)
    note(f"Decoding {len(asked)} prompts with chains of {steps} ...")
    rows = chain_rounds(target, head, prompt_ids(target, asked), steps, max_new_tokens)
    rounds, accepted = by_position([row.accepted for row in rows], steps)
    return {
        "prompts": [prompt.id for prompt in asked],
        "steps": steps,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "accepted_by_position": accepted,
    }
