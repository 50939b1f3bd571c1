"""Medusa-2: an adapter of the target trained with the heads, and heads for a target that carries one already."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit import any_head, target, tokenizer
from kit.training import Killed, config, forty_rows, killed_at, record, tiny
from treedraft.data import Encoded
from treedraft.heads import HeadWarning, load_head
from treedraft.infer import Sampling, Target, TargetError, adapter_hash, complete, load_target
from treedraft.train import ConfigError, StepReport, TrainError, evaluate, train
from treedraft.train.adapter import Adapter, adapter_on, save_adapter
from treedraft.train.config import AdapterConfig
from treedraft.train.features import TargetFeatures
from treedraft.train.joint import AdaptedFeatures, JointInTraining, kl_to_unadapted, loss_weights, split_counts
from treedraft.train.material import gather_material
from treedraft.train.step import Objective, step_totals, train_step
from treedraft.tree import Tree

pytest.importorskip("peft")

JOINT = ("adapter={enabled: true, rank: 4, alpha: 8, lr_scale: 1.0}", "optim.lr=0.02")
MEASURED = (*JOINT, "data.holdout=6", "optim.epochs=3", "eval={tree: 'chain:2', max_new_tokens: 24}")
PROMPTS = [[13, 40], [20] * 9, [50, 51, 52]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target on disk."""
    place = tmp_path_factory.mktemp("target")
    target("llama_gqa").save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[tuple[Any, list[StepReport]]]:
    """A joint run on the target on disk."""
    out, reports = tmp_path_factory.mktemp("joint"), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = config(forty_rows(out), out / "run", f"target.spec={folder}", *MEASURED)
    yield train(settings, on_step=record(reports)), reports
    torch.set_num_threads(threads)


@pytest.fixture
def adapter() -> Iterator[Adapter]:
    """An adapter that adds something, on a target of its own."""
    with adapter_on(tiny("llama_gqa"), AdapterConfig(enabled=True, rank=4, alpha=8), None) as made:
        disturb(made)
        yield made


def disturb(adapter: Adapter, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    heads = load_file(checkpoint / "heads" / "heads.safetensors")
    return heads | load_file(checkpoint / "adapter" / "adapter_model.safetensors")


def test_the_joint_loss_and_its_gradient_are_the_plain_ones(adapter: Adapter):
    torch.manual_seed(0)
    tokens, mask = torch.randint(13, 96, (2, 12)), torch.zeros(2, 12, dtype=torch.int64)
    mask[0, 4:], mask[1, 3:9] = 1, 1
    lengths, head, objective = torch.tensor([12, 9]), any_head(adapter.target, "medusa", 2), Objective(chunk=5)
    model: Any = adapter.target.model
    with torch.no_grad(), adapter.off():
        plain_p = model(tokens).logits.log_softmax(-1)
    out = model(tokens, output_hidden_states=True)
    spoken = F.pad(mask[:, 1:], (0, 1)).bool()
    kl = F.kl_div(out.logits.log_softmax(-1)[spoken], plain_p[spoken], reduction="sum", log_target=True)
    totals = step_totals(tokens, mask, 2, None, "count")
    heads, _ = train_step(head, out.hidden_states[-1], None, tokens, mask, totals, objective)
    expected = 0.2 * heads + 1.0 * kl / spoken.sum()
    names, parameters = zip(*adapter.named_parameters(), *head.named_parameters(), strict=True)
    wanted = torch.autograd.grad(expected, parameters)

    features, unadapted = model_features(adapter, tokens, lengths)
    every = torch.cat([totals, spoken.sum()[None].double()])
    loss, packed = JointInTraining(head, objective, adapter)(features, unadapted, tokens, mask, every)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # a double that fp32 rows were added up to
    for name, ours, theirs in zip(names, torch.autograd.grad(loss, parameters), wanted, strict=True):
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(ours, theirs, msg=name)
    weights = torch.tensor(loss_weights(objective, 2, adapter)).double()
    assert (weights * packed[0] / every).sum().item() == pytest.approx(loss.item(), rel=1e-6)
    counts, drift = split_counts(packed, 2)
    assert drift is not None
    assert drift.kl == pytest.approx(kl.item() / spoken.sum().item(), rel=1e-5)
    same = (out.logits.argmax(-1) == plain_p.argmax(-1))[spoken].float().mean().item()
    assert drift.same_top == pytest.approx(same)
    assert len(counts.loss) == 2


def model_features(adapter: Adapter, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    final = (adapter.target.num_layers,)
    with adapter.off():
        unadapted = adapter.target.features(tokens, lengths, final)
    return adapter.target.features_with_gradient(tokens, lengths, final), unadapted


def test_the_kl_of_no_rows_is_nothing_and_chunks_change_nothing(adapter: Adapter):
    output, rows = adapter.target.output_layer(), torch.randn(7, 64, requires_grad=True)
    others = torch.randn(7, 64)
    whole, cut = kl_to_unadapted(others, rows, output, 100), kl_to_unadapted(others, rows, output, 3)
    torch.testing.assert_close(whole, cut)
    assert whole[0] > 1
    assert kl_to_unadapted(rows.detach(), rows, output, 3)[0].item() == pytest.approx(0.0, abs=1e-5)
    assert [part.item() for part in kl_to_unadapted(others[:0], rows[:0], output, 3)] == [0.0, 0]


def test_dropout_is_on_while_gradients_are_and_off_in_decoding():
    settings = AdapterConfig(enabled=True, rank=4, alpha=8, dropout=0.5)
    with adapter_on(tiny("llama_gqa"), settings, None) as adapter:
        disturb(adapter)
        features = AdaptedFeatures(two_rows(adapter.target), adapter)
        batch = features.batch([0, 1])
        drawn = [features.of([0, 1], batch)[0] for _ in range(2)]
        assert not torch.equal(*drawn)
        with torch.no_grad():
            still = [features.of([0, 1], batch)[0] for _ in range(2)]
        assert torch.equal(*still)
        assert complete(adapter.target, PROMPTS)[0].ids == complete(adapter.target, PROMPTS)[0].ids


def two_rows(model: Target) -> TargetFeatures:
    rows = [Encoded(f"r{i}", [20 + i, 21, 22, 23], [0, 1, 1, 1], False) for i in range(2)]
    return TargetFeatures(model, rows, (model.num_layers,), False)


def test_a_joint_run_learns_and_leaves_the_target_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, reports = tiny("llama_gqa"), []
    before = copy.deepcopy(model.model.state_dict())
    fingerprint, text = model.fingerprint(), complete(model, PROMPTS)
    settings = config(forty_rows(tmp_path), tmp_path / "run", *JOINT, "optim.epochs=4")
    result = train(settings, model, on_step=record(reports))
    assert sum(r.loss for r in reports[-5:]) < 0.8 * sum(r.loss for r in reports[:5])
    assert reports[0].drift is not None
    assert reports[0].drift.kl == pytest.approx(0.0, abs=1e-6)  # a fresh adapter adds nothing
    assert max(r.drift.kl for r in reports if r.drift) > 1e-3
    assert model.fingerprint() == fingerprint
    after = model.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [c.ids for c in complete(model, PROMPTS)] == [c.ids for c in text]
    assert not any("lora" in name for name, _ in model.model.named_modules())
    said = capsys.readouterr().err
    assert "0 bytes of the target changed" in said
    assert "adapter: KL to the unadapted target" in said
    assert result.adapter == result.checkpoint / "adapter"


def test_the_adapter_is_saved_by_itself_beside_the_heads(trained: tuple[Any, list[StepReport]]):
    result, _ = trained
    for place in (result.checkpoint, result.heads.parent):
        held = load_file(place / "adapter" / "adapter_model.safetensors")
        assert held
        assert all("lora_A" in name or "lora_B" in name for name in held)
        assert sorted(path.name for path in (place / "adapter").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        known = json.loads((place / "heads" / "config.json").read_text())["target"]["adapter_hash"]
        assert known == adapter_hash(place / "adapter") != ""
    manifest = json.loads((result.checkpoint / "manifest.json").read_text())["files"]
    assert "adapter/adapter_model.safetensors" in manifest
    assert (result.heads.parent.name, result.adapter) == ("best", result.heads.parent / "adapter")


@pytest.mark.parametrize("law", [Sampling(), Sampling(temperature=1.0)])
def test_heads_and_adapter_write_the_text_of_the_adapted_target(
    trained: tuple[Any, list[StepReport]], folder: Path, law: Sampling
):
    from peft import PeftModel

    result, _ = trained
    adapted = load_target(str(folder), adapter=result.adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        head = load_head(result.heads, adapted.facts, adapted.layers()).for_decoding(adapted.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock: Any = PeftModel.from_pretrained(target("llama_gqa"), str(result.adapter)).merge_and_unload()
    plain = complete(Target(stock, tokenizer()), PROMPTS, sampling=law, seed=5, max_new_tokens=30)
    drafted = complete(
        adapted, PROMPTS, head=head, tree=Tree.from_paths([[0], [1], [0, 0]]), sampling=law, seed=5, max_new_tokens=30
    )
    assert [c.ids for c in drafted] == [c.ids for c in plain]
    original = complete(Target(target("llama_gqa"), tokenizer()), PROMPTS, sampling=law, seed=5, max_new_tokens=30)
    assert [c.ids for c in plain] != [c.ids for c in original]  # the adapter matters here


def test_evaluation_in_training_is_that_of_the_adapted_target(trained: tuple[Any, list[StepReport]], folder: Path):
    result, _ = trained
    measured = json.loads((result.heads.parent / "evaluation.json").read_text())
    settings = config(result.heads.parents[2] / "rows.jsonl", Path("unused"), *MEASURED)
    counts = {}
    for name, adapter in (("adapted", result.adapter), ("original", None)):
        model = load_target(str(folder), adapter=adapter)
        material = gather_material(settings, model, lambda line: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadWarning)
            head: Any = load_head(result.heads, model.facts, model.layers()).for_decoding(model.dtype)
        found = evaluate(
            model,
            head,
            Tree.chain(2),
            material.prompts,
            material.categories,
            Sampling(),
            max_new_tokens=24,
            seed=1,
        ).to_dict()
        counts[name] = (found["tokens"], found["rounds"], found["accepted_by_depth"])
        assert found["settings"]["target"] == model.facts.name
    assert str(result.adapter) in load_target(str(folder), adapter=result.adapter).facts.name
    assert (measured["tokens"], measured["rounds"], measured["accepted_by_depth"]) == counts["adapted"]
    assert counts["adapted"] != counts["original"]


def test_without_its_adapter_heads_are_warned_about_by_the_adapters_name(
    trained: tuple[Any, list[StepReport]], folder: Path
):
    result, _ = trained
    original = load_target(str(folder))
    known = adapter_hash(result.adapter)
    with pytest.warns(HeadWarning, match=rf"another adapter \({known} expected, none found\)"):
        head = load_head(result.heads, original.facts, original.layers()).for_decoding(original.dtype)
    drafted = complete(original, PROMPTS, head=head, tree=Tree.chain(2))
    assert [c.ids for c in drafted] == [c.ids for c in complete(original, PROMPTS)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_joint_run_killed_and_resumed_equals_the_uninterrupted_one(tmp_path: Path, gqa: Target, dropout: float):
    rows = forty_rows(tmp_path)
    options = (*JOINT, f"adapter.dropout={dropout}", "optim.epochs=2", "checkpoint.every=5", "data.holdout=4")
    whole: list[StepReport] = []
    train(config(rows, tmp_path / "whole", *options), gqa, on_step=record(whole))
    with pytest.raises(Killed):
        train(config(rows, tmp_path / "cut", *options), gqa, on_step=killed_at(8))
    rest: list[StepReport] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        train(config(rows, tmp_path / "cut", *options), gqa, resume=True, on_step=record(rest))
    assert [r.step for r in rest] == list(range(6, 19))
    assert [(r.loss, r.drift) for r in rest] == [(r.loss, r.drift) for r in whole[5:]]
    ours, theirs = (weights_in(tmp_path / name / "step-000018") for name in ("cut", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_accumulated_parts_and_the_adapters_own_rate(tmp_path: Path, gqa: Target):
    rows = forty_rows(tmp_path)
    options = ("adapter={enabled: true, rank: 4, alpha: 8, lr_scale: 0.1}", "optim={lr: 0.01, warmup: 0, max_steps: 1}")
    states = []
    for micro in (4, 1):
        out = tmp_path / str(micro)
        train(config(rows, out, *options, f"batch.micro_rows={micro}"), gqa)
        states.append(torch.load(out / "step-000001" / "training.pt", weights_only=True)["optimizer"])
    assert [group["lr"] for group in states[0]["param_groups"]] == pytest.approx([0.01, 0.01, 0.001])
    for one, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        torch.testing.assert_close(one["exp_avg"], other["exp_avg"], rtol=1e-4, atol=1e-7)


def test_the_heads_other_losses_take_the_adapted_target_as_teacher_in_any_precision(tmp_path: Path, gqa: Target):
    losses = {}
    for precision in ("fp32", "bf16"):
        reports: list[StepReport] = []
        options = ("loss={teacher_weight: 0.5, regression: 0.1}", f"precision={precision}", "optim.max_steps=3")
        train(config(forty_rows(tmp_path), tmp_path / precision, *JOINT, *options), gqa, on_step=record(reports))
        losses[precision] = [r.loss for r in reports]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.slow
def test_a_joint_step_is_the_same_over_two_processes(tmp_path: Path, gqa: Target):
    rows = forty_rows(tmp_path)
    options = [*JOINT, "batch={rows_per_step: 8, micro_rows: 4}", "optim={max_steps: 1, clip: null, warmup: 0}"]
    train(config(rows, tmp_path / "one", *options), gqa)
    jobs = [{"target": "llama_gqa", "rows": str(rows), "out": str(tmp_path / "two"), "overrides": options}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--module"]
    command = [sys.executable, *launch, "kit.training", "here", str(tmp_path / "jobs.json")]
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True) as running:
        try:
            assert running.wait(timeout=150) == 0
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    one, two = (
        torch.load(tmp_path / name / "step-000001" / "training.pt", weights_only=True) for name in ("one", "two")
    )
    assert len(two["generators"]) == 2
    for ours, theirs in zip(one["optimizer"]["state"].values(), two["optimizer"]["state"].values(), strict=True):
        torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("heads={kind: eagle3}", r"adapter\.enabled trains medusa heads, not eagle3: their one feature"),
        ("data.features=memory", r"data\.features memory keeps what adapter\.enabled changes"),
        ("loss.noise=0.1", r"loss\.noise disturbs the features"),
        ("target.adapter=somewhere", r"adapter\.enabled and target\.adapter are two adapters"),
    ],
)
def test_what_cannot_go_with_a_trained_adapter_is_refused_before_anything_is_loaded(
    tmp_path: Path, override: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path / "absent.jsonl", tmp_path / "run", *JOINT, override))


def test_a_missing_peft_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ConfigError, match=r"peft is not installed: pip install 'treedraft\[lora\]'"):
        train(config(tmp_path / "absent.jsonl", tmp_path / "run", *JOINT))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("[lm_head, q_proj]", r"adapter\.target_modules names the output embedding"),
        ("[embed_tokens]", r"adapter\.target_modules names the input embedding"),
        ("[qkv]", r"adapter\.target_modules does not fit llama_gqa: .*qkv"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused_and_the_target_is_as_before(
    tmp_path: Path, modules: str, message: str
):
    model = tiny("llama_gqa")
    before = model.fingerprint()
    settings = config(forty_rows(tmp_path), tmp_path / "run", *JOINT, f"adapter.target_modules={modules}")
    with pytest.raises(TrainError, match=message):
        train(settings, model)
    assert model.fingerprint() == before


def test_a_packed_target_cannot_carry_an_adapter(tmp_path: Path):
    packed = Target(target("llama_gqa"), tokenizer(), name="packed", pack=True)
    with pytest.raises(TrainError, match="packed for decoding"):
        train(config(forty_rows(tmp_path), tmp_path / "run", *JOINT), packed)


def test_heads_on_a_target_that_already_carries_an_adapter(tmp_path: Path, folder: Path, adapter: Adapter):
    known = save_adapter(adapter, tmp_path / "lora")
    own = f"target={{spec: {folder}, adapter: {tmp_path / 'lora'}}}"
    result = train(config(forty_rows(tmp_path), tmp_path / "run", own, "optim.max_steps=3"))
    assert result.adapter is None
    assert not (result.checkpoint / "adapter").exists()
    recorded = json.loads((result.heads / "config.json").read_text())["target"]
    assert recorded["adapter_hash"] == known
    adapted, original = load_target(str(folder), adapter=tmp_path / "lora"), load_target(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        head = load_head(result.heads, adapted.facts, adapted.layers()).for_decoding(adapted.dtype)
    with pytest.warns(HeadWarning, match=rf"adapter \({known} expected, none found\)"):
        load_head(result.heads, original.facts, original.layers())
    assert adapted.fingerprint() != original.fingerprint()
    live = complete(adapter.target, PROMPTS)  # the adapter as it was put on, not merged
    assert [c.ids for c in complete(adapted, PROMPTS, head=head, tree=Tree.chain(2))] == [c.ids for c in live]
    tokens, lengths = torch.tensor([[20, 21, 22, 23]]), torch.tensor([4])
    torch.testing.assert_close(adapted.features(tokens, lengths, (4,)), adapter.target.features(tokens, lengths, (4,)))


def test_an_adapter_is_known_by_what_it_does_and_not_by_its_place(tmp_path: Path, adapter: Adapter):
    first = save_adapter(adapter, tmp_path / "a")
    adapter.wrapped.peft_config["default"].base_model_name_or_path = "elsewhere"
    assert save_adapter(adapter, tmp_path / "b") == first
    assert save_adapter(adapter, tmp_path / "a") == first  # written over
    disturb(adapter, 1)
    assert save_adapter(adapter, tmp_path / "c") != first


def test_adapters_that_cannot_be_merged_are_refused_by_name(tmp_path: Path, folder: Path, adapter: Adapter):
    with pytest.raises(
        TargetError, match=r"no adapter at .*nowhere: expected .* adapter_config\.json and adapter_model"
    ):
        load_target(str(folder), adapter=tmp_path / "nowhere")
    place = tmp_path / "lora"
    save_adapter(adapter, place)
    other = tmp_path / "other"
    target("llama_3layers").save_pretrained(other)
    tokenizer().save_pretrained(other)
    with pytest.raises(TargetError, match=r"lora cannot be merged into .*other: 0 weights missing, 14 without a place"):
        load_target(str(other), adapter=place)
    held = load_file(place / "adapter_model.safetensors")
    save_file(dict(list(held.items())[:-1]), place / "adapter_model.safetensors")
    with pytest.raises(TargetError, match="1 weights missing"):
        load_target(str(folder), adapter=place)
    (place / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(TargetError, match="lora cannot be merged"):
        load_target(str(folder), adapter=place)
