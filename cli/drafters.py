"""What ``--heads`` names, and the tree that goes with it: trained heads, and drafters that need no training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .console import note
from .options import DEFAULT_TREE, NO_HEADS

if TYPE_CHECKING:
    from ..heads import Drafter
    from ..infer import Target
    from ..tree import Shape

FORMS = (
    "none, a folder that treedraft train wrote or its hub id (org/name), ngram, suffix, suffix:FILE (with a corpus), "
    "recycling, model:SPEC (a small draft model), or two joined by +, a folder or model:SPEC first "
    "(runs/x/heads+suffix)"
)

TREES = {
    "folder": "best:8",
    "model": "chain:4",
    "ngram": "chain:10",
    "suffix": "dynamic:16",
    "recycling": "dynamic:16",
}
JOINED_TREE = "dynamic:16"
"""The trees of DEFAULT_TREE."""

_JOINED = re.compile(r"(?P<first>.+?)\+(?P<second>ngram|recycling|suffix(:.+)?)")
_TABLES = ("ngram", "suffix", "recycling")


@dataclass(frozen=True)
class DrafterName:
    """One drafter; ``argument`` is the folder, the corpus file (or "") or the model."""

    kind: Literal["folder", "model", "ngram", "suffix", "recycling"]
    argument: str = ""


def parse_drafters(name: str) -> tuple[DrafterName, ...]:
    """The drafters that ``--heads`` names: none, one, or a head and what it is joined with.

    Raises HeadError with the accepted forms, also if a folder or file is not there.
    """
    from ..heads import HeadError

    if name == NO_HEADS:
        return ()
    joined = None if Path(name).is_dir() else _JOINED.fullmatch(name)
    parts = [name] if joined is None else [joined["first"], joined["second"]]
    found = [_found(_parse(part)) for part in parts]
    drafters = tuple(drafter for drafter, _ in found)
    faults = [fault for _, fault in found if fault]
    if joined is not None and drafters[0].kind in _TABLES:
        faults = [f"{parts[0]} cannot stand before +"]
    if faults:
        raise HeadError(f"{'; '.join(faults)}: expected {FORMS}")
    return drafters


def build_drafter(names: tuple[DrafterName, ...], target: Target) -> Drafter | None:
    """What the names stand for, ready to draft for ``target``. Raises HeadError, TargetError or DataError."""
    from ..heads import Hybrid

    built = [_build(name, target) for name in names]
    if not built:
        return None
    return built[0] if len(built) == 1 else Hybrid(built[0], built[1])


def tree_for(names: tuple[DrafterName, ...], tree: str, drafter: Drafter) -> Shape:
    """The tree that ``--tree`` names for these drafters, DEFAULT_TREE the one that suits them.

    Raises TreeError for a name that is none or a tree that they cannot fill, HeadError for a fixed tree of joined ones.
    """
    from ..heads import only_dynamic
    from ..tree import parse_tree

    shape = parse_tree(_deepened(names, _default_tree(names) if tree == DEFAULT_TREE else tree), drafter.depth)
    shape.check_fits(drafter.depth, drafter.candidates)
    return only_dynamic(shape) if len(names) == 2 else shape


def read_corpus(file: Path, tokenizer: Any) -> list[int]:
    """The token ids of a corpus, its documents closed by the end token where the tokenizer has one.

    A .jsonl or .json file has a document in every text of its rows, any other file is one. Raises DataError.
    """
    from ..data import DataError

    ids: list[int] = []
    end = getattr(tokenizer, "eos_token_id", None)
    for text in _documents(file):
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += [*found, end] if found and end is not None else found
    if not ids:
        raise DataError(f"{file} has no text: a corpus is a text file, or rows with messages, turns, prompt or text")
    return ids


def _parse(name: str) -> DrafterName:
    kind, colon, argument = name.partition(":")
    if kind == "model" and argument:
        return DrafterName("model", argument)
    if kind == "suffix" and bool(colon) == bool(argument):
        return DrafterName("suffix", argument)
    if name == "ngram":
        return DrafterName("ngram")
    if name == "recycling":
        return DrafterName("recycling")
    return DrafterName("folder", name)


def _found(drafter: DrafterName) -> tuple[DrafterName, str]:
    """The drafter with the folder that a hub id stands for, and what is missing of it, in words."""
    from ..heads import HeadError, find_heads, is_hub_id

    if drafter.kind == "folder":
        if not Path(drafter.argument).is_dir() and not is_hub_id(drafter.argument):
            return drafter, f"no heads at {drafter.argument}"
        try:
            return DrafterName("folder", str(find_heads(drafter.argument))), ""
        except HeadError as error:
            return drafter, str(error)
    lost = drafter.kind == "suffix" and drafter.argument and not Path(drafter.argument).is_file()
    return drafter, f"no corpus at {drafter.argument}" if lost else ""


def _build(name: DrafterName, target: Target) -> Drafter:
    from ..heads import NGram, Recycling, RecyclingConfig, load_head

    if name.kind == "ngram":
        return NGram()
    if name.kind == "suffix":
        return _suffix(name.argument, target)
    if name.kind == "recycling":
        return Recycling(RecyclingConfig(target.num_layers), target.layers())
    if name.kind == "model":
        return _model(name.argument, target)
    return load_head(name.argument, target.facts, target.layers()).for_decoding(target.dtype)


def _suffix(corpus: str, target: Target) -> Drafter:
    from ..heads import HeadError, Suffix, SuffixConfig, index_corpus

    if not corpus:
        return Suffix()
    if target.tokenizer is None:
        raise HeadError(f"{target.facts.name or 'the target'} has no tokenizer: a corpus cannot be read")
    from tqdm import tqdm

    note(f"Reading {corpus} ...")
    ids = read_corpus(Path(corpus), target.tokenizer)
    with tqdm(ids, desc="corpus", unit="token", unit_scale=True, disable=None) as bar:
        return Suffix(SuffixConfig(corpus=corpus), index_corpus(bar))


def _model(spec: str, target: Target) -> Drafter:
    from ..infer import load_target
    from ..infer.draft_model import fit_draft_model

    note(f"Loading {spec} ...")
    return fit_draft_model(load_target(spec, target.number_format, target.device.type), target)


def _default_tree(names: tuple[DrafterName, ...]) -> str:
    from ..heads import shipped_tree

    if len(names) == 2:
        return JOINED_TREE
    own = shipped_tree(names[0].argument) if names[0].kind == "folder" else None
    return TREES[names[0].kind] if own is None else str(own)


def _deepened(names: tuple[DrafterName, ...], tree: str) -> str:
    """``dynamic:N`` as deep as its nodes allow, and as wide if no head is asked: levels of a table cost very little."""
    from ..heads.source import MOST_LEVELS

    nodes = re.fullmatch(r"dynamic:(\d+)", tree)
    if nodes is None or names[-1].kind not in _TABLES:
        return tree
    most = max(1, int(nodes[1]) - 1)
    deep = f"{tree}:{min(most, MOST_LEVELS)}"
    return f"{deep}:{most}" if len(names) == 1 else deep


def _documents(file: Path) -> Iterator[str]:
    from ..data import DataError, read_rows
    from ..data.records import Unusable

    if file.suffix not in (".jsonl", ".json"):
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error}") from error
        return
    for number, row in enumerate(read_rows(file), 1):
        try:
            yield from _texts(row)
        except Unusable as fault:
            raise DataError(f"{file}: record {number}: {fault}") from fault


def _texts(row: dict[str, Any]) -> Iterator[str]:
    """The texts of a row in any of the forms that the other commands read, or under ``text``."""
    from ..data.conversations import MESSAGE_COLUMNS, PROMPT_COLUMNS, RESPONSE_COLUMNS, SYSTEM_COLUMNS, read_messages

    for column in MESSAGE_COLUMNS:
        if row.get(column) is not None:
            yield from (message["content"] for message in read_messages(row[column]))
    for column in ("text", *SYSTEM_COLUMNS, *PROMPT_COLUMNS, "input", *RESPONSE_COLUMNS):
        if isinstance(row.get(column), str):
            yield row[column]
    turns = row.get("turns")
    yield from (turn for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, str))
