from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from treedraft.cli import bench_table
from treedraft.cli.profile import Machine
from treedraft.cli.speed import Timing, measure, padded_left, summarise, until_end
from treedraft.infer import Stats

from .conftest import Call


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_result_has_the_figures_of_all_modes_and_says_that_they_agree(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path, batch_size: int
):
    out = tmp_path / "bench.json"
    shown = call(
        "bench", "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "chain:2", "--json", out,
        "--max-new-tokens", 10, "--repeats", 2, "--dtype", "fp32", "--batch-size", batch_size,
    )  # fmt: skip
    assert shown.code == 0, shown.err
    result = json.loads(out.read_text())
    assert list(result["modes"]) == ["hf_generate", "plain", "tree"]
    for figures in result["modes"].values():
        assert figures["tokens"] == 3 * 10 * 2
        assert figures["tokens_per_second"] > 0
        assert figures["tokens_per_second_decode"] > 0
        assert len(figures["tokens_per_second_by_repeat"]) == 2
    assert result["modes"]["plain"]["tau"] == 1.0
    assert result["modes"]["tree"]["tau"] == pytest.approx(3.0)
    assert list(result["modes"]["tree"]["phase_seconds"]) == ["prefill", "draft", "forward", "verify", "commit", "rest"]
    speeds = {mode: figures["tokens_per_second"] for mode, figures in result["modes"].items()}
    assert result["ratio"] == {
        "tree_vs_hf_generate": speeds["tree"] / speeds["hf_generate"],
        "tree_vs_plain": speeds["tree"] / speeds["plain"],
    }
    assert result["identical"]["rows"] == result["identical"]["equal"] == 3
    assert result["identical"]["different"] == 0
    assert {"settings", "machine", "versions"} <= set(result)


def test_a_profile_says_where_the_time_of_a_round_goes(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path
):
    out = tmp_path / "bench.json"
    shown = call(
        "bench", "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "chain:2", "--json", out,
        "--max-new-tokens", 4, "--repeats", 1, "--dtype", "fp32", "--profile",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    found = json.loads(out.read_text())["profile"]
    assert list(found) == ["plain", "tree"]
    for figures in found.values():
        spent = figures["ms"]
        assert spent.pop("round") == pytest.approx(sum(spent.values()))
        assert min(spent["matrices"], spent["attention"], spent["draft"], spent["verify"]) > 0
        assert figures["floor_ms"] > 0
    assert found["tree"]["nodes"] == 3
    assert found["plain"]["ms"]["draft"] < found["tree"]["ms"]["draft"]
    assert "Milliseconds of a round" in shown.out


def test_a_profile_of_hugging_face_alone_is_empty(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "bench.json"
    asked = ("bench", "--target", ring, "--heads", "none", "--prompts", prompts, "--json", out, "--repeats", 1)
    shown = call(*asked, "--modes", "hf_generate", "--max-new-tokens", 4, "--profile")
    assert shown.code == 0, shown.err
    assert json.loads(out.read_text())["profile"] == {}


def test_the_floor_of_a_forward_is_its_weights_or_its_products():
    able = Machine(bytes_per_second=1e9, flops_per_second=1e12)
    assert able.floor(weights=4_000_000, parameters=1_000_000, nodes=1) == pytest.approx(4e-3)
    assert able.floor(weights=4_000_000, parameters=1_000_000, nodes=4000) == pytest.approx(8e-3)


def test_sampled_text_is_compared_without_hugging_face(call: Call, llama: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "bench.json"
    asked = ("bench", "--target", llama, "--heads", "none", "--prompts", prompts, "--json", out, "--repeats", 1)
    shown = call(
        *asked, "--modes", "plain", "--modes", "hf_generate", "--temperature", 1, "--top-p", 0.9, "--max-new-tokens", 4
    )
    assert shown.code == 0, shown.err
    result = json.loads(out.read_text())
    assert list(result["modes"]) == ["hf_generate", "plain"]
    assert (result["ratio"], result["identical"]["modes"]) == ({}, ["plain"])


def test_the_tree_is_not_measured_without_heads(call: Call, llama: Path, prompts: Path):
    shown = call("bench", "--target", llama, "--heads", "none", "--prompts", prompts)
    assert shown.code == 2
    assert "needs heads" in shown.err


def test_a_budget_beyond_the_context_is_refused(call: Call, llama: Path, prompts: Path):
    asked = ("bench", "--target", llama, "--heads", "none", "--modes", "plain", "--prompts", prompts)
    shown = call(*asked, "--max-new-tokens", 250)
    assert shown.code == 2
    assert "need 258 positions" in shown.err
    assert "lower --max-new-tokens to 248 or less" in shown.err


def test_an_answer_ends_with_its_end_token_and_batches_are_padded_on_the_left():
    tokens, seen = padded_left([[5, 6, 7], [8]], 3, torch.device("cpu"))
    assert tokens.tolist() == [[5, 6, 7], [3, 3, 8]]
    assert seen.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert until_end([9, 2, 3, 3], (2,)) == [9, 2]
    assert until_end([9, 4], (2,)) == [9, 4]


def test_decoders_take_turns_and_the_warm_up_is_left_out():
    calls: list[tuple[str, int]] = []

    def decoder(name: str):
        def decode(row: int, prompt: object) -> Timing:
            calls.append((name, row))
            return Timing([[1, 2]], 1.0, 0.5)

        return decode

    timings = measure({"a": decoder("a"), "b": decoder("b")}, [[0], [0]], repeats=2)
    assert calls[:2] == [("a", 0), ("b", 0)]
    assert calls[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]
    assert [len(repeat) for repeat in timings["a"]] == [2, 2]


def test_figures_are_sums_first_and_quotients_last():
    stats = Stats(prompts=1, tokens=7, rounds=2, kept=6)
    fast = Timing([list(range(7))], 1.0, 0.25, stats)
    slow = Timing([list(range(7))], 3.0, 0.75, stats)
    figures = summarise([[fast], [slow]])
    assert figures["tokens_per_second"] == 14 / 4
    assert figures["tokens_per_second_decode"] == 12 / 3
    assert figures["time_to_first_token"] == 0.5
    assert figures["tokens_per_second_by_repeat"] == [7, 7 / 3]
    assert figures["spread"] == pytest.approx((7 - 7 / 3) / 3.5)
    assert figures["tau"] == 3.0


def test_a_loss_of_speed_is_said_plainly(capsys: pytest.CaptureFixture[str]):
    figures = summarise([[Timing([[1, 2]], 1.0, 0.5)]])
    same = {"modes": ["tree"], "rows": 1, "equal": 0, "near_ties": 0, "different": 1}
    bench_table.show({"modes": {"tree": figures}, "ratio": {"tree_vs_plain": 0.8}, "identical": same})
    shown = capsys.readouterr().out
    assert "Drafting loses: 0.80 times the speed of treedraft without heads." in shown
    assert "different: 1." in shown
