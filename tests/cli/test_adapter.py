"""A LoRA adapter on the command line: the text, the reference and the counts are the adapted target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from kit import target, tokenizer
from treedraft.data import render_prompt
from treedraft.infer import complete, load_target

from .conftest import Call


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of ``llama_gqa`` that changes its text."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = get_peft_model(target("llama_gqa"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(str(folder))
    return folder


def written(call: Call, llama: Path, prompts: Path, out: Path, *more: object) -> list[list[int]]:
    asked = ("generate", "--target", llama, "--prompts", prompts, "--max-new-tokens", 12, "--out", out)
    assert call(*asked, *more).code == 0
    return [json.loads(line)["ids"] for line in out.read_text().splitlines()]


def test_the_text_is_the_adapted_targets(call: Call, llama: Path, adapter: Path, prompts: Path, tmp_path: Path):
    plain = written(call, llama, prompts, tmp_path / "a.jsonl")
    adapted = written(call, llama, prompts, tmp_path / "b.jsonl", "--adapter", adapter)
    drafted = written(call, llama, prompts, tmp_path / "c.jsonl", "--adapter", adapter, "--heads", "suffix")
    assert plain != adapted == drafted
    model = load_target(str(llama), "fp32", adapter=adapter)
    ids = render_prompt(tokenizer(), [{"role": "user", "content": "w1 w2 w5"}])
    assert complete(model, [ids], max_new_tokens=12)[0].ids == adapted[0]


def test_bench_compares_with_the_adapted_model(call: Call, llama: Path, adapter: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "bench.json"
    shown = call(
        "bench", "--target", llama, "--adapter", adapter, "--heads", "ngram", "--prompts", prompts, "--json", out,
        "--max-new-tokens", 8, "--repeats", 1,
    )  # fmt: skip
    assert shown.code == 0
    result = json.loads(out.read_text())
    assert result["identical"]["different"] == 0
    assert "hf_generate" in result["identical"]["modes"]
    assert result["settings"]["adapter"] == str(adapter)


def test_a_folder_without_an_adapter_is_refused(call: Call, llama: Path, prompts: Path, tmp_path: Path):
    shown = call("evaluate", "--target", llama, "--adapter", tmp_path, "--heads", "none", "--prompts", prompts)
    assert shown.code != 0
    assert str(tmp_path) in shown.err
