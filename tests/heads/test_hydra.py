"""Hydra and Hydra++: what a fresh head is, what each head reads, files, text and training; and the page's example."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kit import PlainScores, any_config, any_head, compare, target, tokenizer, trained_heads
from kit.training import config, forty_rows, record, tiny
from treedraft.heads import Accepted, HeadError, HydraConfig, LayerShape, build_head, load_head, save_head
from treedraft.infer import Sampling, Target, autoregressive, complete
from treedraft.train import Objective, StepReport, train, train_step
from treedraft.tree import DynamicTree, Shape, Tree

PAGE = Path(__file__).parents[2] / "docs" / "add-a-head.md"
HYDRAS = ("hydra", "hydra++")
PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]  # unequal on purpose
SHAPES: dict[str, Shape] = {
    "static": Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]),
    "dynamic": DynamicTree(12, 3, 4),
}
TOKENS = 16
LAYER = LayerShape(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def model() -> Target:
    return tiny("llama_gqa")


def text(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [2, 12, 64], the tokens one further [2, 12], and three marked rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(13, 96, (2, 12), generator=generator)
    rows = torch.zeros(2, 12, dtype=torch.bool)
    rows[0, 2], rows[0, 5], rows[1, 4] = True, True, True
    return torch.randn(2, 12, 64, generator=generator), tokens, rows


def given(features: Tensor, tokens: Tensor, counts: list[int]) -> Accepted:
    count = torch.tensor(counts)
    return Accepted(features, tokens, count, torch.zeros_like(count), max(counts))


@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("layer", [None, LAYER])
def test_fresh_heads_pass_a_quarter_of_the_feature(model: Target, layer: LayerShape | None, output: str) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 96, "num_target_layers": 4}
    head = build_head(HydraConfig(3, num_layers=2, output=output, layer=layer, **sizes), model.layers())  # type: ignore[arg-type]
    features, tokens, rows = text()
    assert torch.equal(head.predict(features, tokens, rows), 0.25 * features[rows].expand(3, -1, -1))
    drafter: Any = head.for_decoding(torch.float32)
    logits, _, _ = drafter.begin(given(features, tokens, [12, 7]), None)
    last = torch.stack([features[0, 11], features[1, 6]])
    torch.testing.assert_close(logits[:, 0], F.linear(0.25 * last, model.output_layer().weight), atol=1e-4, rtol=1e-4)


def test_every_block_has_weights_of_its_own(model: Target) -> None:
    head = build_head(HydraConfig(3, 64, 96, 4, num_layers=4), model.layers())
    weights = [p for n, p in head.named_parameters() if n.endswith("linear.weight")]
    assert [w.shape[1] for w in weights] == [128, 64, 64, 64, 192, 64, 64, 64, 256, 64, 64, 64]
    assert len({w.data_ptr() for w in weights}) == 12


@pytest.mark.parametrize("kind", HYDRAS)
def test_a_head_reads_the_tokens_before_its_own_and_no_later_one(model: Target, kind: str) -> None:
    head = any_head(model, kind, 4)
    features, tokens, _ = text()
    rows = torch.zeros_like(tokens, dtype=torch.bool)
    rows[0, 3] = True
    before = head.predict(features, tokens, rows)
    for place in range(12):  # tokens[:, place] is the token at place + 1
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] - 12) % 83 + 13
        after = head.predict(features, changed, rows)
        moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert moved == [3 <= place <= 3 + k for k in range(4)]


@pytest.mark.parametrize("kind", HYDRAS)
def test_hydra_reads_one_feature_and_the_prefix_layer_all_up_to_it(model: Target, kind: str) -> None:
    head = any_head(model, kind)
    features, tokens, _ = text()
    rows = torch.zeros_like(tokens, dtype=torch.bool)
    rows[0, 5] = True
    before = head.predict(features, tokens, rows)
    for place in range(12):
        changed = features.clone()
        changed[0, place] += 1.0
        moved = not torch.allclose(head.predict(changed, tokens, rows), before, atol=1e-5, rtol=0)
        assert moved == (place == 5 if kind == "hydra" else place <= 5)


@pytest.mark.parametrize("kind", HYDRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_output_layers_are_drafted_with_by_their_heads(model: Target, kind: str, dtype: torch.dtype) -> None:
    ids = torch.arange(1, 96, 2)
    layer = any_config(model, "hydra++").layer if kind == "hydra++" else None
    head: Any = build_head(HydraConfig(3, 64, 96, 4, 2, 48, "own", layer), model.layers(), ids)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    features, tokens, _ = text()
    rows = torch.zeros_like(tokens, dtype=torch.bool)
    rows[0, 5], rows[1, 3] = True, True
    hidden = head.predict(features, tokens, rows)
    expected = torch.stack([F.linear(hidden[k], head.output().of_head(k)[0]) for k in range(3)])  # [3, 2, W]
    drafter = head.for_decoding(dtype)
    logits, beam, _ = drafter.begin(given(features, tokens, [6, 4]), None)
    found, root = [logits[:, 0]], torch.zeros(2, 1, dtype=torch.int64)
    for k in (1, 2):
        follow = torch.stack([tokens[0, 5 + k], tokens[1, 3 + k]])[:, None]
        logits, beam = drafter.extend(beam, root, follow)
        found.append(logits[:, 0])
    assert logits.dtype == dtype
    size = expected.abs().max().item()
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(torch.stack(found).float(), expected, atol=close * size, rtol=0)


@pytest.mark.parametrize("kind", HYDRAS)
@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("width", [None, 40])
def test_heads_read_back_are_the_same_to_the_bit(
    tmp_path: Path, model: Target, kind: str, output: str, width: int | None
) -> None:
    ids = None if width is None else torch.arange(2, 82, 2)
    layer = any_config(model, "hydra++").layer if kind == "hydra++" else None
    made = build_head(HydraConfig(2, 64, 96, 4, 2, width, output, layer, 99), model.layers(), ids)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_head(made, tmp_path, model.facts)
    read = load_head(tmp_path, model.facts, model.layers())
    assert read.config == made.config
    assert list(read.state_dict()) == list(made.state_dict())
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in read.state_dict().items())
    assert any("own_output" in name for name in read.state_dict()) == (output == "own")
    assert any("prefix" in name for name in read.state_dict()) == (kind == "hydra++")
    assert torch.equal(read.predict(*text()), made.predict(*text()))


def test_nothing_of_the_target_is_trained_or_saved(model: Target) -> None:
    head = build_head(HydraConfig(2, 64, 96, 4), model.layers())
    assert sum(p.numel() for p in head.parameters()) == 64 + 2 * 64 + 2 * (2 + 3) * 64 * 64
    assert set(head.state_dict()) == {name for name, _ in head.named_parameters()}


def test_configurations_that_cannot_be_name_every_fault() -> None:
    layer = LayerShape(hidden_size=16, intermediate_size=8, num_attention_heads=3, num_key_value_heads=2, head_dim=8)
    with pytest.raises(HeadError) as error:
        HydraConfig(0, 8, 9, 1, num_layers=0, draft_vocab_size=10, output="none", layer=layer)  # type: ignore[arg-type]
    for fault in (
        "num_heads must be at least 1, got 0",
        "num_layers must be at least 1, got 0",
        "draft_vocab_size must lie in 1..9, got 10",
        "output must be shared or own, got 'none'",
        "layer.num_attention_heads (3) must be a multiple of layer.num_key_value_heads (2)",
        "layer.hidden_size is 16, the target's is 8",
    ):
        assert fault in str(error.value)


@lru_cache(maxsize=2)
def reference(temperature: float) -> list[list[int]]:
    """The answers of plain decoding, one prompt at a time."""
    plain, law = Target(target("llama_gqa"), tokenizer()), Sampling(temperature=temperature)
    answers: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in autoregressive(plain, PROMPTS, sampling=law, seed=3, max_new_tokens=TOKENS):
        answers[chunk.row] += chunk.ids
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", HYDRAS)
def test_the_text_of_an_unequal_batch_is_that_of_plain_decoding(kind: str, temperature: float) -> None:
    law, model = Sampling(temperature=temperature), Target(target("llama_gqa"), tokenizer(), pack=True)
    head = any_head(model, kind).for_decoding(torch.float32)
    for shape in SHAPES.values():
        done = complete(
            model, PROMPTS, head=head, tree=shape, sampling=law, seed=3, max_new_tokens=TOKENS, batch_size=5
        )
        for prompt, wanted, found in zip(PROMPTS, reference(temperature), done, strict=True):
            result = compare(model, prompt, wanted, found.ids, law, found.seed)
            assert result.equal or result.near_tie is not None


@pytest.mark.parametrize("kind", HYDRAS)
def test_a_step_without_marked_rows_leaves_zero_gradients(model: Target, kind: str) -> None:
    head = any_head(model, kind, 2)
    features, tokens, rows = text()
    loss, _ = train_step(head, features, None, tokens, torch.zeros_like(rows), torch.zeros(2), Objective())
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@lru_cache(maxsize=3)
def tau_on_the_ring(kind: str) -> float:
    """Mean accepted length of a chain of 3 after 30 steps."""
    ring = tiny("markov_ring")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the fresh weights
        head = trained_heads(ring, 3, 30, kind).for_decoding(torch.float32)
    prompts = [[16], [40, 41], [77]]
    done = complete(ring, prompts, head=head, tree=Tree.chain(3), max_new_tokens=25, end_ids=())
    return sum(c.stats.kept for c in done) / sum(c.stats.rounds for c in done)


@pytest.mark.parametrize("kind", HYDRAS)
def test_a_few_steps_teach_the_ring_where_medusa_has_not_learnt_it(kind: str) -> None:
    assert tau_on_the_ring(kind) > 2.5 > 1.5 > tau_on_the_ring("medusa")


@pytest.mark.parametrize("prefix", [False, True])
def test_a_run_of_the_trainer_writes_heads_that_load(tmp_path: Path, prefix: bool) -> None:
    chosen = tiny("llama_gqa")
    reports: list[StepReport] = []
    settings = config(
        forty_rows(tmp_path),
        tmp_path / "run",
        "heads={kind: hydra, num_heads: 2, num_layers: 2, output: own, draft_vocab_size: 40}",
        f"heads.prefix_layer={str(prefix).lower()}",
        "data.holdout=4",
        "optim.lr=0.01",
        "optim.epochs=2",
    )
    result = train(settings, chosen, on_step=record(reports))
    head = load_head(result.heads, chosen.facts, chosen.layers())
    assert (head.config.kind, head.config.num_layers, head.config.output) == ("hydra", 2, "own")
    assert (head.config.layer is not None) == prefix
    assert head.config.trained_length == 16  # <|start|> user w <|end|> <|start|> assistant, nine words, <|end|>
    assert reports[-1].loss < 0.7 * reports[0].loss
    assert result.best_tau is not None


def test_the_example_of_the_page_drafts_what_it_predicts_and_changes_no_token(model: Target) -> None:
    example: dict[str, Any] = {"__name__": "example"}
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code) == 1
    exec(compile(code[0], str(PAGE), "exec", dont_inherit=True), example)
    ids = torch.arange(13, 96)
    head = example["Echo"](example["EchoConfig"](3, 64, 96, 4, 83), model.layers(), ids)
    features, tokens, _ = text()
    rows = torch.zeros_like(tokens, dtype=torch.bool)
    rows[0, 5], rows[1, 3] = True, True
    expected = F.linear(head.predict(features, tokens, rows), head.output().weight)  # [3, 2, W]
    drafter = head.for_decoding(torch.float32)
    logits, beam, memory = drafter.begin(given(features, tokens, [6, 4]), None)
    found, root = [logits[:, 0]], torch.zeros(2, 1, dtype=torch.int64)
    for k in (1, 2):
        logits, beam = drafter.extend(beam, root, torch.stack([tokens[0, 5 + k], tokens[1, 3 + k]])[:, None])
        found.append(logits[:, 0])
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)
    draft, _ = drafter.propose(given(features, tokens, [6, 4]), memory, SHAPES["dynamic"], PlainScores())
    assert draft.tokens.shape == (2, 12)
    plain = complete(model, PROMPTS, max_new_tokens=16)
    drafted = complete(model, PROMPTS, head=drafter, tree=SHAPES["static"], max_new_tokens=16)
    for prompt, wanted, got in zip(PROMPTS, plain, drafted, strict=True):
        result = compare(model, prompt, wanted.ids, got.ids, Sampling(), got.seed)
        assert result.equal or result.near_tie is not None
    with pytest.raises(HeadError, match="steps must be at least 1, got 0"):
        example["EchoConfig"](0, 64, 96, 4)
