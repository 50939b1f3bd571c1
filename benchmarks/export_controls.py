"""Negative controls of the export: folders broken on purpose, and who notices.

    python benchmarks/export_controls.py --heads examples/smollm2-135m --out controls.json \
        --prompts dev.jsonl --python /path/to/vllm/bin/python

Detectors: the static check of the folder alone; the same with export_report.json; the verdict of vLLM against chain
decoding of the heads that were exported (with --prompts and --python). Each control must be caught by one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treedraft.cli.chains import chain_rounds
from treedraft.cli.engine_run import EngineError, judge, run_vllm, speculation, vllm_job
from treedraft.cli.parts import prompt_ids, read_some_prompts
from treedraft.heads import load_head
from treedraft.heads.formats import (
    Checkpoint,
    check,
    export,
    import_checkpoint,
    read_checkpoint,
    rope_of,
    write_checkpoint,
)
from treedraft.infer import load_target
from treedraft.infer.load import local_folder

TAPS = "eagle_aux_hidden_state_layer_ids"


def with_tensors(read: Checkpoint, **changes: torch.Tensor) -> Checkpoint:
    return dataclasses.replace(read, tensors={**read.tensors, **{k.replace("__", "."): v for k, v in changes.items()}})


def zeroed_fc(read: Checkpoint) -> Checkpoint:
    return with_tensors(read, fc__weight=torch.zeros_like(read.tensors["fc.weight"]))


def shifted_d2t(read: Checkpoint) -> Checkpoint:
    return with_tensors(read, d2t=read.tensors["d2t"] + 1)


def shifted_both(read: Checkpoint) -> Checkpoint:
    """The table and the marks agree with each other."""
    return with_tensors(read, d2t=read.tensors["d2t"] + 1, t2d=read.tensors["t2d"].roll(1))


def layers_off_by_one(read: Checkpoint) -> Checkpoint:
    return dataclasses.replace(read, config={**read.config, TAPS: [k + 1 for k in read.config[TAPS]]})


def layers_off_by_one_both(read: Checkpoint) -> Checkpoint:
    """Both countings agree with each other."""
    ids = [k + 1 for k in read.config[TAPS]]
    nested = {**read.config["eagle_config"], TAPS: [k - 1 for k in ids]}
    return dataclasses.replace(read, config={**read.config, TAPS: ids, "eagle_config": nested})


def biases_off(read: Checkpoint) -> Checkpoint:
    return dataclasses.replace(read, config={**read.config, "medusa_fc_bias": False})


def biases_gone(read: Checkpoint) -> Checkpoint:
    """Neither the tensors nor the setting speak of them."""
    kept = {name: value for name, value in read.tensors.items() if not name.endswith(".bias")}
    return dataclasses.replace(biases_off(read), tensors=kept)


CONTROLS: dict[str, list[Callable[[Checkpoint], Checkpoint]]] = {
    "eagle3": [zeroed_fc, shifted_d2t, shifted_both, layers_off_by_one, layers_off_by_one_both],
    "medusa": [biases_off, biases_gone],
    "eagle": [zeroed_fc],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=Path, required=True, help="folder with eagle3, eagle and medusa heads folders")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="*", default=list(CONTROLS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    target = load_target(given.target, dtype="fp32", device="cpu", compile="off")
    found: dict[str, Any] = {}
    plain, ids, job = None, [], {}
    if given.prompts and given.python:
        ids = prompt_ids(target, read_some_prompts(given.prompts, "first", given.limit))
        job = vllm_job(local_folder(given.target), ids, target.end_ids, given.max_new_tokens)
        plain = run_vllm(given.python, {**job, "speculative": None})
    print("| heads | control | static check | with the report | vLLM, accepted by position (here) |")
    print("|---|---|---|---|---|")
    for kind in given.kinds:
        source = load_head(given.heads / kind, target.facts, target.layers())
        config = target.config.to_dict()
        with tempfile.TemporaryDirectory() as work:
            whole = Path(work) / "whole"
            report = export(source, "vllm", whole, target.layers(), target.facts, "t", config, torch.float32)
            read = read_checkpoint(whole)
            served = import_checkpoint(read, target.layers(), target.facts).head
            steps = getattr(source.config, "num_heads", 3)
            ours = chain_rounds(target, served, ids, steps, given.max_new_tokens) if plain else []
            for control in [lambda same: same, *CONTROLS[kind]]:
                broken = control(read)
                name = getattr(control, "__name__", "").replace("<lambda>", "untouched").replace("_", " ")
                facts, rope = target.facts, rope_of(config)
                alone = check(broken, "vllm", facts, target.layers(), rope)
                reported = check(broken, "vllm", facts, target.layers(), rope, report)
                row: dict[str, Any] = {"static": alone, "report": reported}
                if plain:
                    folder = Path(work) / name.replace(" ", "_")
                    write_checkpoint(broken, folder)
                    try:
                        run = run_vllm(given.python, {**job, "speculative": speculation(kind, folder, steps)})
                        row["vllm"] = judge(ours, plain, run, steps)
                    except EngineError as error:
                        row["vllm"] = {"pass": False, "stopped": str(error).strip().splitlines()[-1]}
                found[f"{kind}: {name}"] = row
                print(
                    f"| {kind} | {name} | {said(alone)} | {said(reported)} | {verdict(row.get('vllm'))} |", flush=True
                )
                if given.out:
                    given.out.write_text(json.dumps(found, indent=2) + "\n")


def said(faults: list[str]) -> str:
    return "caught" if faults else "passes"


def verdict(judged: dict[str, Any] | None) -> str:
    if judged is None:
        return "not run"
    if "stopped" in judged:
        return "caught: stops at load"
    theirs, ours = judged["engine"], judged["treedraft"]
    counts = (
        f"{theirs['accepted_by_position']} of {theirs['rounds']} ({ours['accepted_by_position']} of {ours['rounds']})"
    )
    return f"{'passes' if judged['pass'] else 'caught'}: {counts}"


if __name__ == "__main__":
    main()
