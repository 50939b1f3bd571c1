"""The compiled forward: a tree's nodes have the bits of plain decoding, in any batch; the switch does as told."""

import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from kit import MODELS, SIZES, build, tokenizer
from treedraft.heads import native
from treedraft.infer import Target, TargetError, load
from treedraft.infer.cache import KVCache
from treedraft.infer.masks import causal_ancestors
from treedraft.tree import Tree

pytestmark = pytest.mark.usefixtures("compiled_part")

TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
LENGTHS = torch.tensor([5, 19, 12])


@torch.inference_mode()
def prefilled(target: Target, rows: list[int]) -> KVCache:
    tokens = torch.randint(4, 96, (3, 19), generator=torch.Generator().manual_seed(1))[rows]
    counts = LENGTHS[rows]
    cache = target.new_cache(len(rows), 40)
    target.forward(
        tokens, torch.arange(19).expand(len(rows), -1), causal_ancestors(counts, 19), cache, keep=counts[:, None] - 1
    )
    cache.append(counts.tolist())
    return cache


@torch.inference_mode()
def over_tree(target: Target, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and logits of a tree behind some of the rows."""
    cache = prefilled(target, rows)
    tokens = torch.randint(4, 96, (3, TREE.size), generator=torch.Generator().manual_seed(2))[rows]
    draft = TREE.draft(tokens)
    return tokens, target.forward(tokens, cache.lengths[:, None] + draft.depth, draft.ancestors, cache).logits


@pytest.mark.parametrize("name", MODELS)
def test_every_node_of_a_ragged_tree_has_the_bits_of_plain_decoding(name: str) -> None:
    target = Target(build(MODELS[name]()), pack=True, compiled=True)
    assert target.forward_name == "compiled"
    tokens, found = over_tree(target, [0, 1, 2])
    for row in range(3):
        for node in range(TREE.size):
            path = [node]
            while path[0]:
                path.insert(0, TREE.parents[path[0]])
            cache = prefilled(target, [row])
            found_alone = torch.empty(0)
            for step in path:  # one token at a time, as without heads
                at, itself = cache.lengths[:, None], torch.ones(1, 1, 1, dtype=torch.bool)
                found_alone = target.forward(tokens[row, step].view(1, 1), at, itself, cache).logits[0, 0]
                cache.append([1])
            assert torch.equal(found_alone, found[row, node]), (row, node)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    target = Target(build(MODELS[name]()), pack=True, compiled=True)
    _, together = over_tree(target, [0, 1, 2])
    for rows in ([0], [1], [2], [2, 0]):
        assert torch.equal(over_tree(target, rows)[1], together[rows])


def test_an_activation_that_is_not_known_is_left_to_the_own_blocks() -> None:
    config = tf.LlamaConfig(**SIZES, hidden_act="relu")
    assert Target(build(config), pack=True, compiled=True).forward_name == "own blocks"


def saved(tmp_path: Any) -> str:
    build(MODELS["llama"]()).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_compile_off_stays_off_in_a_process_that_has_the_compiled_part(tmp_path: Any) -> None:
    spec = saved(tmp_path)
    assert load.load_target(spec, "fp32", compile="off").forward_name == "own blocks"
    assert load.load_target(spec, "fp32", compile="on").forward_name == "compiled"
    assert load.load_target(spec, "fp32").forward_name == "compiled"


def test_auto_compiles_for_enough_work_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []
    monkeypatch.setattr(native, "loaded", lambda: bool(compiled))
    monkeypatch.setattr(native, "is_built", lambda: False)
    monkeypatch.setattr(native, "load", lambda: compiled.append(True))
    here = torch.device("cpu")
    assert not load.compile_here("auto", load.WORTH_COMPILING - 1, here)
    assert not load.compile_here("off", 10**9, here)
    assert not load.compile_here("auto", 10**9, torch.device("meta"))
    assert load.compile_here("auto", load.WORTH_COMPILING, here)


def test_where_it_cannot_be_had_on_refuses_and_auto_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise native.NativeError("no C++ compiler was found")

    monkeypatch.setattr(native, "loaded", lambda: False)
    monkeypatch.setattr(native, "load", fails)
    with pytest.raises(TargetError, match=r"compile on: no C\+\+ compiler was found; use --compile off"):
        load.compile_here("on", 0, torch.device("cpu"))
    with pytest.raises(TargetError, match="it is for CPUs"):
        load.compile_here("on", 0, torch.device("meta"))
    with pytest.warns(UserWarning, match="slower: no C"):
        assert not load.compile_here("auto", 10**6, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load.compile_here("off", 10**6, torch.device("cpu"))


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(TargetError, match="compile must be auto, on, off, got 'yes'"):
        load.load_target("nowhere", compile="yes")  # type: ignore[arg-type]
