"""Every kind of head through the whole loop: it learns, is measured by its own tree decode, resumes, reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.training import Killed, assert_same_weights, config, forty_rows, killed_at, record, ring_text, tiny, write_rows
from treedraft.data import Encoded
from treedraft.heads import load_head
from treedraft.infer import Target
from treedraft.train import ConfigError, train
from treedraft.train.fresh import fresh_heads
from treedraft.train.store import StoreError

RECIPES = {
    "hydra": "kind=hydra num_heads=3",
    "hydra++": "kind=hydra num_heads=3 prefix_layer=true loss.teacher_weight=1",
    "eagle": "kind=eagle loss.teacher_weight=1 loss.token_weight=0.1 loss.regression=1 loss.noise=0.05",
    "hass": "kind=eagle unroll=3 loss.teacher_weight=0.5 loss.regression=0.1",
    "eagle from the target": "kind=eagle start=target loss.teacher_weight=1",
    "eagle3": "kind=eagle3 unroll=3 tapped_layers=[1,2,3] loss.teacher_weight=1",
    "eagle3.1": "kind=eagle3 unroll=3 fc_norm=true norm_output=true loss.teacher_weight=0.7 loss.soft=lk",
    "eagle3 from the target": "kind=eagle3 unroll=2 start=target loss.teacher_weight=1 loss.soft=lk-hybrid",
}


def recipe(name: str) -> list[str]:
    """Overrides; the kit's own ``num_heads`` goes back to its default for kinds that have none."""
    settings = [part if "." in part else f"heads.{part}" for part in RECIPES[name].split()]
    return settings if "num_heads" in RECIPES[name] else [*settings, "heads.num_heads=4"]


@pytest.fixture(scope="module")
def gqa() -> Target:
    return tiny("llama_gqa")


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_falls_and_the_heads_read_back(name: str, tmp_path: Path, gqa: Target) -> None:
    reports: list[Any] = []
    before = gqa.fingerprint()
    settings = config(
        forty_rows(tmp_path),
        tmp_path / "run",
        *recipe(name),
        "optim.epochs=4",
        "optim.lr=5e-3",
        "heads.draft_vocab_size=60",
    )
    result = train(settings, gqa, on_step=record(reports))
    first, last = (sum(r.loss for r in part) / 5 for part in (reports[:5], reports[-5:]))
    assert last < 0.9 * first
    assert gqa.fingerprint() == before
    head = load_head(result.heads, gqa.facts, gqa.layers())
    assert head.draft_ids is not None and len(head.draft_ids) == 60  # noqa: PT018
    if name not in ("hydra",):
        assert head.config.trained_length > 0


def test_a_step_wise_head_learns_the_ring_and_is_measured_deep(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ring_text(start, 24) for start in range(0, 83, 3)])
    settings = config(
        rows, tmp_path / "run", *recipe("eagle3"), "optim.epochs=10", "optim.lr=3e-3",
        "data.holdout=4", "eval={tree: 'dynamic:8:5:2', max_new_tokens: 25}",
    )  # fmt: skip
    result = train(settings, tiny("markov_ring"))
    assert result.best_tau is not None
    assert result.best_tau > 3.5  # deeper than the three steps that were trained


def test_stored_features_give_the_losses_of_computed_ones(tmp_path: Path, gqa: Target) -> None:
    losses = {}
    for mode, more in {
        "online": [],
        "memory": [],
        "store": [f"data.features_dir={tmp_path / 'fp32'}", "data.features_dtype=fp32"],
        "again": [f"data.features_dir={tmp_path / 'fp32'}", "data.features_dtype=fp32"],
    }.items():
        reports: list[Any] = []
        kind = "store" if mode == "again" else mode
        settings = config(forty_rows(tmp_path), tmp_path / mode, *recipe("eagle3"), f"data.features={kind}", *more)
        train(settings, gqa, on_step=record(reports))
        losses[mode] = torch.tensor([r.loss for r in reports])
    torch.testing.assert_close(losses["memory"], losses["online"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses["store"], losses["memory"], atol=0, rtol=0)
    assert torch.equal(losses["again"], losses["store"])


def test_one_store_serves_several_kinds_and_new_rows(tmp_path: Path, gqa: Target) -> None:
    shared = ["data.features=store", f"data.features_dir={tmp_path / 'store'}", "data.features_taps=[1,2,3,4]"]
    train(config(forty_rows(tmp_path), tmp_path / "a", *recipe("eagle3"), *shared), gqa)
    size = (tmp_path / "store" / "tap-4.bin").stat().st_size
    train(config(forty_rows(tmp_path), tmp_path / "b", *recipe("hydra"), *shared), gqa)
    assert (tmp_path / "store" / "tap-4.bin").stat().st_size == size
    with pytest.raises(StoreError, match="holds other features: target"):
        train(config(forty_rows(tmp_path), tmp_path / "c", *recipe("hydra"), *shared), tiny("llama_mha_tied"))


@pytest.mark.parametrize("name", ["eagle", "hydra++"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path, gqa: Target) -> None:
    def settings(out: str, every: str = "checkpoint.every=3") -> Any:
        return config(forty_rows(tmp_path), tmp_path / out, *recipe(name), "optim.max_steps=8", every)

    whole = train(settings("whole"), gqa)
    with pytest.raises(Killed):
        train(settings("cut"), gqa, on_step=killed_at(5))
    resumed = train(settings("cut"), gqa, resume=True)
    assert_same_weights(resumed.checkpoint, whole.checkpoint)


@pytest.mark.parametrize("name", ["eagle", "hydra++", "eagle3"])
def test_four_rows_at_once_step_like_one_at_a_time(name: str, tmp_path: Path, gqa: Target) -> None:
    runs = {
        micro: train(
            config(
                forty_rows(tmp_path), tmp_path / micro, *recipe(name), "optim.max_steps=2", f"batch.micro_rows={micro}"
            ),
            gqa,
        )
        for micro in ("4", "1")
    }
    assert_same_weights(runs["1"].checkpoint, runs["4"].checkpoint, atol=1e-4)


def test_training_goes_on_from_earlier_heads_of_the_same_shape(tmp_path: Path, gqa: Target) -> None:
    first = train(config(forty_rows(tmp_path), tmp_path / "a", *recipe("eagle3"), "heads.draft_vocab_size=50"), gqa)
    again = [*recipe("eagle3"), "heads.draft_vocab_size=50", f"heads.resume_from={first.heads}", "heads.unroll=2"]
    reports: list[Any] = []
    second = train(config(forty_rows(tmp_path), tmp_path / "b", *again), gqa, on_step=record(reports))
    assert load_head(second.heads, gqa.facts, gqa.layers()).steps == 2
    fresh: list[Any] = []
    train(config(forty_rows(tmp_path), tmp_path / "c", *again[:-2], "heads.unroll=2"), gqa, on_step=record(fresh))
    assert reports[0].loss < fresh[0].loss
    with pytest.raises(Exception, match="holds other heads than heads asks for"):
        train(config(forty_rows(tmp_path), tmp_path / "d", *again, "heads.norm_output=true"), gqa)


@pytest.mark.parametrize("name", ["eagle", "hydra"])
def test_heads_that_share_the_targets_output_go_on_with_another_draft_vocabulary(
    name: str, tmp_path: Path, gqa: Target
) -> None:
    first = train(config(forty_rows(tmp_path), tmp_path / "a", *recipe(name), "heads.draft_vocab_size=40"), gqa)
    again = [*recipe(name), f"heads.resume_from={first.heads}", "optim.max_steps=1", "optim.lr=1e-9"]
    second = train(config(forty_rows(tmp_path), tmp_path / "b", *again, "heads.draft_vocab_size=70"), gqa)
    before, after = (load_head(run.heads, gqa.facts, gqa.layers()) for run in (first, second))
    assert after.draft_ids is not None
    assert len(after.draft_ids) == 70
    for weight, kept in zip(after.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(weight, kept)


def test_heads_with_their_own_output_keep_their_draft_vocabulary(tmp_path: Path, gqa: Target) -> None:
    first = train(config(forty_rows(tmp_path), tmp_path / "a", *recipe("eagle3"), "heads.draft_vocab_size=40"), gqa)
    again = [*recipe("eagle3"), f"heads.resume_from={first.heads}", "heads.draft_vocab_size=70", "optim.max_steps=1"]
    second = train(config(forty_rows(tmp_path), tmp_path / "b", *again), gqa)
    assert load_head(second.heads, gqa.facts, gqa.layers()).candidates == 40


def test_a_balanced_start_lets_embedding_and_feature_enter_with_one_size(tmp_path: Path, gqa: Target) -> None:
    settings = config(forty_rows(tmp_path), tmp_path / "run", *recipe("eagle from the target"))
    row = Encoded("a", [7, 20, 33, 41, 60], [0, 0, 1, 1, 1], False)
    head: Any = fresh_heads(settings, gqa, [row], print)
    features = gqa.features(torch.tensor([row.ids]), torch.tensor([5]), head.taps)[0]
    embeddings = gqa.layers().embedding
    entering = [embeddings @ head.fc.weight[:, :64].T, features @ head.fc.weight[:, 64:].T]
    sizes = [part.pow(2).mean().sqrt().item() for part in entering]
    assert sizes == pytest.approx([0.5**0.5] * 2, rel=0.15)


def test_settings_of_another_kind_are_all_named(tmp_path: Path, gqa: Target) -> None:
    wrong = ["heads.kind=medusa", "heads.unroll=3", "heads.fc_norm=true"]
    with pytest.raises(ConfigError, match=r"heads.fc_norm does not apply to medusa heads.*heads.unroll does not apply"):
        train(config(forty_rows(tmp_path), tmp_path / "run", *wrong), gqa)
