"""``treedraft import``: heads that others published, as a heads folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from .console import note, out, quiet_transformers
from .options import DEFAULT_TARGET, Target

EXAMPLE = "Example: treedraft import published/eagle3 --target smollm2-135m --out runs/imported"


def command(
    folder: Annotated[Path, Argument(help="A published checkpoint: config.json and weights.", show_default=False)],
    out_folder: Annotated[Path, Option("--out", help="Where to write the heads folder.")],
    target: Target = DEFAULT_TARGET,
    allow_pickle: Annotated[
        bool,
        Option("--allow-pickle", help="Also read .pt and .bin files, tensors alone, by torch's weights-only loader."),
    ] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], Option("--dtype", help="Number format to keep them in.")
    ] = "fp32",
) -> None:
    """Read Medusa and EAGLE-1/2/3 heads that other programs wrote (the papers' repositories, vLLM, SGLang, SpecForge,
    speculators) and write them as a heads folder. Every tensor that is missing, unexpected or of another shape is
    named, all at once. No code of a checkpoint runs."""
    from ..heads import save_head
    from ..heads.formats import import_checkpoint, read_checkpoint
    from ..infer import load_target
    from ..infer.formats import DTYPES

    read = read_checkpoint(folder, allow_pickle)  # before the target, which may take long
    quiet_transformers()
    note(f"Loading {target} ...")
    loaded = load_target(target, dtype="fp32", device="cpu", pack=False, compile="off")
    imported = import_checkpoint(read, loaded.layers(), loaded.facts)
    for line in imported.notes:
        note(line)
    save_head(imported.head, out_folder, loaded.facts, DTYPES[dtype])
    out().print(f"{out_folder}: {imported.head.config.kind} heads of {len(read.tensors)} tensors")
