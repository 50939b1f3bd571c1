"""What the examples ship: recipes that are read, heads that are strict, small and tell where they come from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from kit import target, tokenizer
from kit.heads import any_head
from kit.training import chat, write_rows
from treedraft.heads import load_head, save_head
from treedraft.infer import load_target
from treedraft.train import load_config
from treedraft.tree import DynamicTree, load_tree

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = sorted(EXAMPLES.glob("*/*/train-*.yaml"))
SHIPPED = sorted(path.parent for path in EXAMPLES.glob("*/*/heads.safetensors"))
MOST_BYTES = 60e6


def shipper() -> Any:
    spec = importlib.util.spec_from_file_location("ship", EXAMPLES / "ship.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_is_read_and_says_what_its_folder_is_called(recipe: Path) -> None:
    config = load_config(recipe, [])
    assert config.heads.kind == recipe.parent.name
    assert config.target.spec == "smollm2-135m"


def test_what_is_shipped_fits_its_limit_and_has_a_card_and_a_recipe() -> None:
    assert [folder.name for folder in SHIPPED] == ["eagle", "eagle3", "hydra", "medusa"]
    assert sum(file.stat().st_size for folder in SHIPPED for file in folder.iterdir()) < MOST_BYTES
    for folder in SHIPPED:
        config = json.loads((folder / "config.json").read_text())
        assert config["target"] | {"hidden_size": 576, "vocab_size": 49152, "num_layers": 30} == config["target"]
        assert config["target"]["name"] == "smollm2-135m"
        card = (folder / "README.md").read_text()
        assert f"examples/smollm2-135m/{folder.name}" in card
        assert "80 prompts x 128 tokens" in card
        assert f"treedraft train examples/smollm2-135m/{folder.name}/train-1.yaml" in card


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    target("llama_gqa").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_shipping_keeps_weights_in_bf16_and_the_most_frequent_tokens(kind: str, model: Path, tmp_path: Path) -> None:
    loaded = load_target(str(model), dtype="fp32", pack=False)
    rows = write_rows(tmp_path / "answers.jsonl", [chat(20, 6), chat(30, 6)])
    head = any_head(loaded, kind, draft_ids=torch.arange(50))
    save_head(head, tmp_path / "trained", loaded.facts)
    out = tmp_path / "shipped"
    shipper().main(
        tmp_path / "trained", out, notes="Two rows.", target=str(model), tree="dynamic:6:2:2", keep=20, answers=rows
    )
    found: Any = load_head(out, loaded.facts, loaded.layers())
    assert load_tree(out / "tree.json") == DynamicTree(6, 2, 2)
    assert "Two rows." in (out / "README.md").read_text()
    words = loaded.tokenizer(" ".join(f"w{i}" for i in range(21, 27)), add_special_tokens=False)["input_ids"]
    assert set(words) & set(range(50)) <= set(found.draft_ids.tolist())
    assert len(found.draft_ids) == 20
    for name, weight in found.state_dict().items():
        before = head.state_dict()[name]
        expected = before[found.draft_ids] if len(before) == 50 else before
        torch.testing.assert_close(weight, expected.bfloat16().float())


@pytest.mark.parametrize("given", [{"keep": 20}, {"answers": Path("answers.jsonl")}])
def test_tokens_are_not_kept_without_answers_to_count_them_in(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--keep counts tokens in --answers"):
        shipper().main(tmp_path / "trained", tmp_path / "out", notes="", **given)
    assert not (tmp_path / "out").exists()
