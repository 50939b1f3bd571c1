"""Heads on disk are read strictly: whatever does not belong is refused by name."""

import dataclasses
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit import medusa_config, random_heads, target, tokenizer
from treedraft.heads import HeadError, HeadWarning, build_head, load_head, save_head
from treedraft.infer import Target, complete


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer(), name="llama_gqa")


@pytest.fixture
def folder(tmp_path: Path, model: Target) -> Path:
    save_head(random_heads(model), tmp_path / "heads", model.facts)
    return tmp_path / "heads"


def load(folder: Path, model: Target) -> Any:
    return load_head(folder, model.facts, model.layers())


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "heads.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "heads.safetensors")


def change_config(folder: Path, part: str, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    content[part].update(changes)
    (folder / "config.json").write_text(json.dumps(content))


def test_heads_read_back_draft_the_same(folder: Path, model: Target) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = load(folder, model)
    for name, value in random_heads(model).state_dict().items():
        assert torch.equal(read.state_dict()[name], value)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "heads.safetensors"]


@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("width", [None, 40])
def test_every_layout_reads_back(tmp_path: Path, model: Target, output: str, width: int | None) -> None:
    ids = None if width is None else torch.arange(2, 82, 2)
    made = build_head(medusa_config(model, output=output, draft_vocab_size=width), model.layers(), ids)
    save_head(made, tmp_path, model.facts)
    read = load(tmp_path, model)
    assert read.config == made.config
    assert (read.draft_ids is None) == (ids is None)
    assert ids is None or torch.equal(read.output().ids, ids)  # type: ignore[arg-type]
    names = set(load_file(tmp_path / "heads.safetensors"))
    assert ("draft_ids" in names) == (width is not None)
    assert any("own_output" in n for n in names) == (output == "own")
    features = torch.randn(1, 5, 64)
    everywhere = torch.ones(1, 5, dtype=torch.bool)
    tokens = torch.zeros(1, 5)
    assert torch.equal(read.predict(features, tokens, everywhere), made.predict(features, tokens, everywhere))


def test_all_tensor_faults_are_listed_at_once(folder: Path, model: Target) -> None:
    change_tensors(
        folder,
        **{"blocks.0.0.linear.weight": None, "surprise": torch.zeros(2), "blocks.1.0.linear.bias": torch.zeros(3)},
    )
    with pytest.raises(HeadError) as error:
        load(folder, model)
    message = str(error.value)
    assert "blocks.0.0.linear.weight missing" in message
    assert "surprise unexpected" in message
    assert "blocks.1.0.linear.bias has shape (3,), expected (64,)" in message


def test_a_half_written_weights_file_is_refused_by_its_name(folder: Path, model: Target) -> None:
    whole = (folder / "heads.safetensors").read_bytes()
    (folder / "heads.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadError, match=r"heads\.safetensors cannot be read"):
        load(folder, model)


def test_non_finite_weights_are_neither_saved_nor_loaded(folder: Path, model: Target, tmp_path: Path) -> None:
    head = random_heads(model)
    with torch.no_grad():
        next(head.parameters()).fill_(float("nan"))
    with pytest.raises(HeadError, match=r"non-finite values in blocks.0.0.linear.weight"):
        save_head(head, tmp_path / "other", model.facts)
    change_tensors(folder, **{"blocks.0.0.linear.bias": torch.full((64,), float("inf"))})
    with pytest.raises(HeadError, match=r"blocks.0.0.linear.bias has non-finite values"):
        load(folder, model)


def test_heads_of_another_size_are_refused_naming_both_numbers(folder: Path, model: Target) -> None:
    facts = dataclasses.replace(model.facts, hidden_size=48, vocab_size=80)
    with pytest.raises(HeadError) as error:
        load_head(folder, facts, model.layers())
    assert "hidden size 64, the target has 48" in str(error.value)
    assert "vocabulary 96, the target has 80" in str(error.value)


def test_heads_of_a_stranger_of_the_same_size_warn_and_stay_lossless(folder: Path) -> None:
    stranger = Target(target("llama_mha_tied"), tokenizer(), name="stranger")
    with pytest.warns(HeadWarning, match="was trained for llama_gqa.*another output embedding"):
        head = load(folder, stranger)
    prompt = [20, 30, 40]
    drafted = complete(stranger, [prompt], head=head.for_decoding(torch.float32), max_new_tokens=30)[0]
    assert drafted.ids == complete(stranger, [prompt], max_new_tokens=30)[0].ids


def test_another_tokenizer_or_template_is_warned_about(folder: Path) -> None:
    other = Target(target("llama_gqa"), tokenizer("strict"), name="llama_gqa")
    with pytest.warns(HeadWarning, match="another chat template"):
        load(folder, other)


@pytest.mark.parametrize("part", ["head", "target"])
def test_an_unknown_configuration_key_is_refused(folder: Path, model: Target, part: str) -> None:
    change_config(folder, part, num_headz=4)
    with pytest.raises(HeadError, match="unknown keys num_headz; known are"):
        load(folder, model)


def test_a_kind_or_format_of_another_version_is_refused(folder: Path, model: Target) -> None:
    content = json.loads((folder / "config.json").read_text())
    for change in ({"format": 99}, {"kind": "oracle"}):
        (folder / "config.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(HeadError, match="this version reads format 1"):
            load(folder, model)


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_with_advice_and_never_run(tmp_path: Path, model: Target) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(HeadError, match=r"medusa_lm_head\.pt is a pickle and is not read"):
        load(folder, model)
    assert not marker.exists()


def test_a_missing_folder_is_named(tmp_path: Path, model: Target) -> None:
    with pytest.raises(HeadError, match=r"no heads at .*nowhere"):
        load(tmp_path / "nowhere", model)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        (torch.tensor([0, 5, 5]), "must ascend without repeats"),
        (torch.tensor([0, 5, 96]), r"must lie in 0\.\.95"),
        (torch.tensor([0, 5]), "has 2 ids, the configuration says 3"),
        (torch.tensor([0, 5, 6], dtype=torch.int32), "must be a list of int64"),
        (None, "draft vocabulary of 3, but no draft_ids"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(model: Target, ids: torch.Tensor | None, fault: str) -> None:
    with pytest.raises(HeadError, match=fault):
        build_head(medusa_config(model, draft_vocab_size=3), model.layers(), ids)
