"""Faults of the user's: one clear message, a non-zero exit before anything long starts, and nothing destroyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from kit import target, tokenizer

from .conftest import Call, Outcome


def assert_refused(shown: Outcome, *parts: str) -> None:
    assert shown.code == 2
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert shown.err.count("Error: ") == 1
    for part in parts:
        assert part in shown.err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def config(ring: Path, chats: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    content = {
        "target": {"spec": str(ring), "dtype": "fp32"},
        "data": {"paths": [str(chats)]},
        "checkpoint": {"out": str(tmp_path / "out")},
        "heads": {"num_heads": 2},
        "eval": {"tree": "chain:2"},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_prompt_longer_than_the_context(call: Call, llama: Path, tmp_path: Path):
    prompts, out = tmp_path / "long.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": "short", "prompt": "w1"}, {"id": "long", "prompt": " ".join(["w1"] * 300)}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = call("generate", "--target", llama, "--prompts", prompts, "--out", out)
    assert_refused(shown, "long has 305 tokens", "context of 256")
    assert not out.exists()
    asked = ("bench", "--target", llama, "--heads", "none", "--prompts", prompts, "--modes", "plain", "--json", out)
    assert_refused(call(*asked), "long has 305 tokens")
    assert not out.exists()


def test_an_unknown_key_of_the_configuration(call: Call, config: Path, tmp_path: Path):
    shown = call("train", config, "optim.learning_rate=1", "heads.num_head=3")
    assert_refused(shown, "unknown key optim.learning_rate", "heads.num_head; did you mean heads.num_heads?")
    assert not (tmp_path / "out").exists()


def test_a_configuration_that_is_not_there(call: Call, tmp_path: Path):
    assert_refused(call("train", tmp_path / "none.yaml"), "none.yaml")


def test_heads_of_a_target_of_other_sizes(call: Call, llama: Path, heads: Path, prompts: Path):
    before = snapshot(heads)
    for command in ("generate", "evaluate", "bench"):
        shown = call(command, "--target", llama, "--heads", heads, "--prompts", prompts)
        assert_refused(shown, "hidden size 96, the target has 64")
    assert snapshot(heads) == before


def test_heads_of_a_target_of_another_vocabulary(call: Call, heads: Path, prompts: Path, tmp_path: Path):
    model = target("llama_pad128")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    shown = call("evaluate", "--target", tmp_path, "--heads", heads, "--prompts", prompts)
    assert_refused(shown, "vocabulary 96, the target has 128", "hidden size 96, the target has 64")


def test_heads_of_other_weights_warn_once_and_do_not_change_the_text(
    call: Call, heads: Path, ring: Path, prompts: Path, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ring)
    model.lm_head.weight.data = model.lm_head.weight.data.roll(7, 0)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    asked = ("generate", "--target", tmp_path, "--prompts", prompts, "--max-new-tokens", 8)
    plain, drafted = call(*asked), call(*asked, "--heads", heads, "--tree", "chain:2")
    assert drafted.code == 0
    assert drafted.err.count("Warning: ") == 1
    assert "another output embedding" in drafted.err
    assert drafted.out == plain.out


def test_a_half_written_checkpoint(call: Call, config: Path, heads: Path, ring: Path, prompts: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(heads, broken)
    whole = (broken / "heads.safetensors").read_bytes()
    (broken / "heads.safetensors").write_bytes(whole[: len(whole) // 2])
    shown = call("evaluate", "--target", ring, "--heads", broken, "--prompts", prompts)
    assert_refused(shown, "heads.safetensors", "half written")

    assert call("train", config, "optim.max_steps=1").code == 0
    (tmp_path / "out" / "step-000001" / "training.pt").write_bytes(b"half")
    before = snapshot(tmp_path / "out")
    shown = call("train", config, "optim.max_steps=1", "--resume-from", tmp_path / "out" / "step-000001")
    assert_refused(shown, "training.pt")
    assert snapshot(tmp_path / "out") == before


def test_heads_that_are_not_there(call: Call, prompts: Path):
    shown = call("generate", "--target", "a/b", "--heads", "nowhere", "--prompts", prompts)
    assert_refused(shown, "no heads at nowhere")


def test_an_empty_data_file(call: Call, config: Path, ring: Path, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert_refused(call("prepare", "--data", empty, "--target", ring), "empty.jsonl has no rows")
    assert_refused(call("train", config, f"data.paths=[{empty}]"), "empty.jsonl has no rows")
    assert not list(tmp_path.glob("out/step-*"))


def test_an_empty_or_missing_prompts_file(call: Call, ring: Path, heads: Path, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for command in ("generate", "evaluate", "bench"):
        asked = (command, "--target", ring, "--heads", heads, "--prompts")
        assert_refused(call(*asked, empty), "empty.jsonl has no prompts")
        assert_refused(call(*asked, tmp_path / "none.jsonl"), "none.jsonl")


def test_a_tree_deeper_than_the_heads(call: Call, config: Path, ring: Path, heads: Path, prompts: Path):
    for command in ("generate", "evaluate", "bench"):
        shown = call(command, "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "chain:3")
        assert_refused(shown, "path [0, 0, 0] is 3 deep, but there are 2 heads")
    assert_refused(call("train", config, "eval.tree=chain:3"), "3 deep, but there are 2 heads")


def test_a_tree_that_is_no_tree(call: Call, ring: Path, heads: Path, prompts: Path):
    shown = call("evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "bush")
    assert_refused(shown, "no tree called 'bush'", "chain:LENGTH")


def test_sampling_that_cannot_be_names_every_fault(call: Call, ring: Path):
    shown = call("generate", "--target", ring, "--prompt", "w1", "--temperature", "-1", "--top-p", "2")
    assert_refused(shown, "temperature must be", "top_p must lie in")


def test_a_target_that_is_not_there(call: Call, tmp_path: Path):
    shown = call("generate", "--target", tmp_path, "--prompt", "w1")
    assert_refused(shown, f"no target at '{tmp_path}'")


def test_an_output_file_that_holds_something_else_is_kept(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "notes.jsonl"
    out.write_text('{"note": "keep me"}\n')
    shown = call("distill", "--target", ring, "--prompts", prompts, "--out", out)
    assert_refused(shown, "holds something else")
    assert out.read_text() == '{"note": "keep me"}\n'
