"""What --heads and --tree name: trained heads, drafters that need no training, and both on one tree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kit import tokenizer
from treedraft.cli.drafters import DrafterName, build_drafter, parse_drafters, read_corpus, tree_for
from treedraft.cli.options import DEFAULT_TREE
from treedraft.data import DataError
from treedraft.heads import Drafter, HeadError, Hybrid
from treedraft.infer import Target
from treedraft.tree import DynamicTree, Shape, Tree, TreeError, default_tree

from .conftest import ANSWER, Call


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(ANSWER)
    return file


@pytest.fixture(scope="module")
def ring_target(ring: Path) -> Target:
    from treedraft.infer import load_target

    return load_target(str(ring))


def built(name: str, target: Target, tree: str = DEFAULT_TREE) -> tuple[Drafter, Shape]:
    names = parse_drafters(name)
    drafter = build_drafter(names, target)
    assert drafter is not None
    return drafter, tree_for(names, tree, drafter)


def test_names_are_read_into_drafters(heads: Path, corpus: Path) -> None:
    assert parse_drafters("none") == ()
    assert parse_drafters("ngram") == (DrafterName("ngram"),)
    assert parse_drafters("recycling") == (DrafterName("recycling"),)
    assert parse_drafters("suffix") == (DrafterName("suffix"),)
    assert parse_drafters(f"suffix:{corpus}") == (DrafterName("suffix", str(corpus)),)
    assert parse_drafters("model:owner/small") == (DrafterName("model", "owner/small"),)
    folder = DrafterName("folder", str(heads))
    assert parse_drafters(str(heads)) == (folder,)
    assert parse_drafters(f"{heads}+suffix:{corpus}") == (folder, DrafterName("suffix", str(corpus)))
    assert parse_drafters("model:owner/small+ngram") == (DrafterName("model", "owner/small"), DrafterName("ngram"))


def test_a_folder_whose_name_has_a_plus_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run+suffix"
    folder.mkdir()
    assert parse_drafters(str(folder)) == (DrafterName("folder", str(folder)),)
    assert parse_drafters(f"{folder}+suffix") == (DrafterName("folder", str(folder)), DrafterName("suffix"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("bush", "no heads at bush"),
        ("suffix:", "no heads at suffix:"),
        ("model:", "no heads at model:"),
        ("suffix:nowhere.txt", "no corpus at nowhere.txt"),
        ("ngram+suffix", "ngram cannot stand before +"),
        ("none+suffix", "no heads at none"),
        ("bush+suffix:nowhere.txt", "no heads at bush; no corpus at nowhere.txt"),
        ("suffix+bush", "no heads at suffix+bush"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str, fault: str) -> None:
    with pytest.raises(HeadError) as error:
        parse_drafters(name)
    assert str(error.value).startswith(fault)
    for form in ("none", "ngram", "suffix:FILE", "recycling", "model:SPEC", "runs/x/heads+suffix"):
        assert form in str(error.value)


def test_the_default_tree_suits_the_drafter(heads: Path, ring_target: Target, tmp_path: Path) -> None:
    assert built("ngram", ring_target)[1] == Tree.chain(10)
    assert built("suffix", ring_target)[1] == DynamicTree(16, 15, 15)
    assert built("recycling", ring_target)[1] == DynamicTree(16, 15, 15)
    assert built(str(heads), ring_target)[1] == default_tree(2, 8)
    joined, shape = built(f"{heads}+suffix", ring_target)
    assert isinstance(joined, Hybrid)
    assert shape == DynamicTree(16, 15, 8)

    own = tmp_path / "heads"
    shutil.copytree(heads, own)
    (own / "tree.json").write_text('{"paths": [[0], [0, 0], [5]]}')
    assert built(str(own), ring_target)[1] == Tree.from_paths([[0], [0, 0], [5]])
    assert built(f"{own}+suffix", ring_target)[1] == DynamicTree(16, 15, 8)
    assert built(str(own), ring_target, "chain:1")[1] == Tree.chain(1)


def test_a_model_drafts_a_chain_unless_told_otherwise(ring: Path, ring_target: Target) -> None:
    assert built(f"model:{ring}", ring_target)[1] == Tree.chain(4)
    assert built(f"model:{ring}+suffix", ring_target)[1] == DynamicTree(16, 15, 8)


def test_named_trees_are_kept_as_they_are_named(heads: Path, ring_target: Target) -> None:
    assert built("suffix", ring_target, "best:8")[1] == default_tree(8, 8)
    assert built("suffix", ring_target, "dynamic:8:3:2")[1] == DynamicTree(8, 3, 2)
    assert built("suffix", ring_target, "dynamic:200")[1] == DynamicTree(200, 64, 199)
    assert built(f"{heads}+ngram", ring_target, "dynamic:8:3")[1] == DynamicTree(8, 3, 7)
    assert built(str(heads), ring_target, "dynamic:8")[1] == DynamicTree(8, 2, 7)


def test_a_fixed_tree_for_joined_drafters_is_refused(heads: Path, ring_target: Target) -> None:
    with pytest.raises(HeadError, match="needs a tree that grows, got a fixed one of 5 nodes: choose dynamic:5"):
        built(f"{heads}+suffix", ring_target, "chain:4")
    with pytest.raises(TreeError, match="no tree called 'bush'"):
        built("suffix", ring_target, "bush")
    with pytest.raises(TreeError, match="100 deep, but there are 64 heads"):
        built("ngram", ring_target, "chain:100")


@pytest.mark.parametrize("name", ["ngram", "suffix", "recycling", "{heads}+suffix", "suffix:{corpus}", "model:{ring}"])
def test_drafters_change_the_rounds_and_not_the_text(
    call: Call, ring: Path, heads: Path, corpus: Path, name: str
) -> None:
    words = " ".join(f"w{i}" for i in range(12))
    asked = ("generate", "--target", ring, "--prompt", words, "--max-new-tokens", 12)
    plain = call(*asked)
    drafted = call(*asked, "--heads", name.format(heads=heads, corpus=corpus, ring=ring))
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert "over 11 rounds" in plain.err
    rounds = int(drafted.err.partition("over ")[2].split()[0])
    assert rounds <= 4


def test_the_report_of_an_evaluation_names_the_drafter(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    asked = ("evaluate", "--target", ring, "--prompts", prompts, "--max-new-tokens", 6, "--json", out)
    assert call(*asked, "--heads", f"{heads}+suffix").code == 0
    result = json.loads(out.read_text())
    assert result["settings"]["head"]["kind"] == "hybrid"
    assert result["settings"]["head"]["drafter"]["kind"] == "suffix"
    assert result["tau"] > 1.0


def test_faults_are_told_before_the_target_is_loaded(call: Call, tmp_path: Path) -> None:
    shown = call("generate", "--target", "a/b", "--heads", "suffix:nowhere.txt", "--prompt", "w1")
    assert shown.code == 2
    assert "no corpus at nowhere.txt" in shown.err
    assert "Loading" not in shown.err


def words_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


def test_the_documents_of_a_corpus_end_with_the_end_token(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("w1 w2")
    assert words_of(read_corpus(text, tokenizer())) == "w1 w2 <|end|>"

    rows = [
        {"id": "w80", "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]},
        {"turns": ["w4", "w5"], "category": "w81"},
        {"prompt": "w6", "response": "w7"},
        {"text": "w8"},
        {"text": ""},
    ]
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole.write_text(json.dumps(rows))
    expected = " <|end|> ".join(["w1", "w2 w3", "w4", "w5", "w6", "w7", "w8"]) + " <|end|>"
    assert words_of(read_corpus(lines, tokenizer())) == words_of(read_corpus(whole, tokenizer())) == expected


def test_a_corpus_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, fault: str) -> None:
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(DataError, match=fault):
            read_corpus(file, tokenizer())

    refused("empty.txt", b"", "empty.txt has no text")
    refused("bytes.txt", b"\xff\xfe", "bytes.txt is not UTF-8 text")
    refused("none.jsonl", b'{"number": 1}\n', "none.jsonl has no text")
    refused("odd.jsonl", b'{"text": "w1"}\n{"messages": "w1"}\n', "odd.jsonl: record 2: messages must be a list")
    refused("broken.jsonl", b"{\n", "broken.jsonl:1: not JSON")
