"""treedraft beside the engines that people use instead: one run, in turns, on the same prompts, threads and arithmetic.

    python benchmarks/peers.py --prompts spec_bench_dev.jsonl --every 12 --environments DIR --out runs/peers

Every peer is a process of its own, loaded once, in an environment that a script of ``environments/`` makes below DIR
(vllm, openvino, llamacpp); ``hf`` and ``treedraft`` use this one. All get the same token ids of the chat template,
decode greedily, and write exactly ``--max-new-tokens``: end tokens do not end a text. A prompt goes through all peers
before the next one comes, each time another begins, and a peer whose turn it is not is stopped. The answers are
written to OUT.jsonl as they come: interrupted, the same command goes on. OUT.md and OUT.json have the figures, --chart
draws them. A peer that fails is in the table with its reason.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_figures import summarise
from peer_report import draw, markdown
from peer_run import Book, Locks, PeerError, Process, interleave
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from treedraft.cli.parts import read_some_prompts
from treedraft.data import render_prompt
from treedraft.infer import machine, versions
from treedraft.infer.formats import dtype_name, pick_dtype
from treedraft.infer.load import load_tokenizer, local_folder, pick_device

HERE = Path(__file__).parent
HEADS = HERE.parent / "examples" / "smollm2-135m"
ENVIRONMENTS = Path.home() / ".cache" / "treedraft" / "peers"
LEAST_FREE_MB = 2500
"""Memory that must be free before another peer is loaded."""


@dataclass(frozen=True)
class Peer:
    """environment: a folder below --environments, "" for this Python. weights: what it multiplies by."""

    title: str
    worker: str
    environment: str = ""
    weights: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def _treedraft(title: str, heads: str, tree: str = "auto") -> Peer:
    return Peer(title, "on_treedraft.py", weights="bf16", settings={"heads": heads, "tree": tree})


def _treedraft_int8(title: str, heads: str, tree: str = "auto") -> Peer:
    return Peer(title, "on_treedraft.py", "", "int8", {"heads": heads, "tree": tree, "dtype": "int8"})


def _openvino(title: str, weights: str, mode: str) -> Peer:
    return Peer(title, "on_openvino.py", "openvino", weights, {"mode": mode, "export": f"models/{weights}"})


def _llamacpp(title: str, weights: str, mode: str) -> Peer:
    return Peer(title, "on_llamacpp.mjs", "llamacpp", weights, {"mode": mode, "gguf": f"{weights.lower()}.gguf"})


def _same(title: str, worker: str, environment: str, mode: str) -> Peer:
    return Peer(title, worker, environment, settings={"mode": mode})


PEERS = {
    "hf": _same("Hugging Face generate", "on_huggingface.py", "", "eager"),
    "hf-compiled": _same("Hugging Face generate, static cache, compiled", "on_huggingface.py", "", "compiled"),
    "hf-lookup": _same("Hugging Face generate, prompt lookup", "on_huggingface.py", "", "lookup"),
    "vllm": _same("vLLM", "on_vllm.py", "vllm", "plain"),
    "vllm-lookup": _same("vLLM, n-gram", "on_vllm.py", "vllm", "lookup"),
    "vllm-heads": _same("vLLM, exported heads", "on_vllm.py", "vllm", "heads"),
    "openvino-fp32": _openvino("OpenVINO GenAI, fp32 weights", "fp32", "plain"),
    "openvino": _openvino("OpenVINO GenAI", "fp16", "plain"),
    "openvino-lookup": _openvino("OpenVINO GenAI, prompt lookup", "fp16", "lookup"),
    "openvino-int8": _openvino("OpenVINO GenAI, int8 weights", "int8", "plain"),
    "openvino-int8-lookup": _openvino("OpenVINO GenAI, int8 weights, prompt lookup", "int8", "lookup"),
    "llamacpp": _llamacpp("llama.cpp", "BF16", "plain"),
    "llamacpp-lookup": _llamacpp("llama.cpp, input lookup", "BF16", "lookup"),
    "llamacpp-q4": _llamacpp("llama.cpp, Q4_1 weights", "Q4_1", "plain"),
    "treedraft": _treedraft("treedraft, no heads", "none"),
    "medusa": _treedraft("treedraft, Medusa", str(HEADS / "medusa")),
    "hydra": _treedraft("treedraft, Hydra", str(HEADS / "hydra")),
    "eagle": _treedraft("treedraft, EAGLE", str(HEADS / "eagle")),
    "eagle3": _treedraft("treedraft, EAGLE-3", str(HEADS / "eagle3")),
    "eagle3+suffix": _treedraft("treedraft, EAGLE-3 + suffix", f"{HEADS / 'eagle3'}+suffix", "dynamic:4:2:2"),
    "treedraft-int8": _treedraft_int8("treedraft, int8 weights, no heads", "none"),
    "eagle3-int8": _treedraft_int8("treedraft, int8 weights, EAGLE-3", str(HEADS / "eagle3")),
}
"""By the name that --peers takes; hf is what the others are compared with."""
NOT_BY_DEFAULT = ("vllm-heads", "openvino-fp32", "openvino-int8-lookup")


def main(
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")],
    out: Annotated[Path, typer.Option(help="Results go to OUT.jsonl, OUT.json and OUT.md.")] = Path("runs/peers"),
    peers: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PEERS)}.")] = "",
    environments: Annotated[Path, typer.Option(help="Folder with vllm, openvino and llamacpp.")] = ENVIRONMENTS,
    target: Annotated[str, typer.Option(help="Local folder or smollm2-135m.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: auto, fp32, bf16 or fp16.")] = "auto",
    every: Annotated[int, typer.Option(min=1, help="Take every n-th prompt.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Take the first of those.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every peer answers every prompt.")] = 3,
    threads: Annotated[int, typer.Option(help="Of every peer.")] = os.cpu_count() or 1,
    lookup_tokens: Annotated[int, typer.Option(help="Drafts of a prompt lookup.")] = 5,
    compile: Annotated[str, typer.Option(help="treedraft's compiled part: auto, on or off.")] = "auto",
    vllm_heads: Annotated[Path | None, typer.Option(help="Folder that treedraft export wrote for vLLM.")] = None,
    vllm_method: Annotated[str, typer.Option(help="medusa, eagle or eagle3.")] = "eagle3",
    vllm_tokens: Annotated[int, typer.Option(help="Drafts of vLLM with those heads.")] = 3,
    lock: Annotated[list[Path] | None, typer.Option(help="Files to lock while timing; repeatable.")] = None,
    hold: Annotated[float, typer.Option(help="Seconds after which the locks are let go for a moment.")] = 300,
    chart: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Measure nothing, use what OUT.jsonl has.")
    ] = False,
) -> None:
    """Measures the peers in turns and writes their figures."""
    names = _names(peers, vllm_heads)
    device = pick_device("cpu")
    folder = Path(local_folder(target)).resolve()
    tokenizer = load_tokenizer(target)
    rows = read_some_prompts(prompts, "first", limit, every)
    ids = [render_prompt(tokenizer, row.messages) for row in rows]
    shared = {
        "model": str(folder),
        "dtype": dtype_name(pick_dtype(dtype, device)),
        "threads": threads,
        "max_new_tokens": max_new_tokens,
        "longest": max(len(prompt) for prompt in ids),
        "lookup_tokens": lookup_tokens,
        "compile": compile,
    }
    facts = {"target": target, "prompts": f"{prompts.name}, every {every}", "prompts_decoded": len(ids), **shared}
    try:
        book = Book(out.with_suffix(".jsonl"), {key: value for key, value in facts.items() if key != "model"})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not report_only:
        heads = {"method": vllm_method, "model": str(vllm_heads), "num_speculative_tokens": vllm_tokens}
        commands = {name: _command(PEERS[name], environments, {**shared, "vllm_heads": heads}) for name in names}
        _measure(commands, ids, repeats, book, Locks(lock or [], hold))
    _write(book, folder, out, chart)


def _names(peers: str, vllm_heads: Path | None) -> list[str]:
    names = peers.split(",") if peers else [name for name in PEERS if name not in NOT_BY_DEFAULT]
    if vllm_heads is not None and "vllm-heads" not in names:
        names.append("vllm-heads")
    faults = [f"no peer is called {name!r}, there are {', '.join(PEERS)}" for name in names if name not in PEERS]
    if "vllm-heads" in names and (vllm_heads is None or not vllm_heads.is_dir()):
        faults.append(f"vllm-heads needs the folder of exported heads: --vllm-heads DIR, got {vllm_heads}")
    if faults:
        raise typer.BadParameter("; ".join(faults))
    return names


def _command(peer: Peer, environments: Path, shared: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What to start and the settings to give it."""
    place = environments.absolute() / peer.environment
    settings = {**shared, **peer.settings, "environment": str(place)}
    for file in ("export", "gguf"):
        if file in settings:
            settings[file] = str(place / settings[file])
    worker = str(HERE / "workers" / peer.worker)
    if peer.worker.endswith(".mjs"):
        return ["node", worker], settings
    return [str(place / "bin" / "python") if peer.environment else sys.executable, worker], settings


def _measure(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]],
    ids: Sequence[Sequence[int]],
    repeats: int,
    book: Book,
    locks: Locks,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # workers are ended and locks let go on the way out
    console = Console(stderr=True)
    logs = book.path.with_suffix("")
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(locks.held())
        book.write(_machine_speed(book.lines[0]["settings"]["dtype"]))
        workers = {}
        longest = max(ids, key=len)
        for name, (command, settings) in commands.items():
            console.print(f"Loading {name} ...")
            try:
                _check_memory()
                worker = Process.start(command, settings, logs / f"{name}.log")
                stack.callback(worker.close)
                worker.ask(longest)  # what an engine compiles or allocates at first is not timed
            except PeerError as error:
                console.print(f"{name}: {error}")
                book.write({"peer": name, "error": str(error)})
                continue
            book.write({"peer": name, **worker.facts})
            workers[name] = worker
            locks.breathe()
        if not workers:
            raise PeerError("none of the peers could be started, see above")
        with tqdm(total=len(ids) * repeats, desc="peers", unit="prompt", disable=None) as bar:
            interleave(workers, ids, repeats, book, locks.breathe, bar.update)
        book.write(_machine_speed(book.lines[0]["settings"]["dtype"]))


def _machine_speed(dtype: str) -> dict[str, float]:
    from treedraft.cli.profile import measure_machine

    able = measure_machine(pick_dtype(dtype, pick_device("cpu")), pick_device("cpu"))
    return {"gb_per_second": able.bytes_per_second / 1e9, "gflops_per_second": able.flops_per_second / 1e9}


def _check_memory() -> None:
    """Raises PeerError instead of letting the machine run out of memory: all peers stay loaded."""
    file = Path("/proc/meminfo")
    free = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    if free and int(free[1]) / 1000 < LEAST_FREE_MB:
        raise PeerError(f"{int(free[1]) / 1000:.0f} MB are free, {LEAST_FREE_MB} wanted: measure fewer --peers at once")


def _write(book: Book, folder: Path, out: Path, chart: Path | None) -> None:
    weights_mb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    result = {
        "peers": summarise(book.lines, weights_mb),
        "titles": {name: peer.title for name, peer in PEERS.items()},
        "weights": {name: peer.weights for name, peer in PEERS.items()},
        "settings": book.lines[0]["settings"],
        "weights_mb": weights_mb,
        "gb_per_second": max((line["gb_per_second"] for line in book.lines if "gb_per_second" in line), default=None),
        "machine": machine(),
        "versions": versions(),
    }
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    out.with_suffix(".md").write_text(text)
    Console(width=160).print(Markdown(text))
    if chart is not None:
        draw(result, chart)


if __name__ == "__main__":
    typer.run(main)
