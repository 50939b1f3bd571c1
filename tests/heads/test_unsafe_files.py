"""Checkpoints come from strangers: nothing of them runs, nothing outside is read, every fault has a name."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from kit import any_head, target, tokenizer
from treedraft.heads import HeadError
from treedraft.heads.formats import check, import_checkpoint, read_checkpoint, rope_of, to_checkpoint, write_checkpoint
from treedraft.heads.formats.files import MOST_CONFIG, read_safetensors
from treedraft.infer import Target

EXAMPLES = int(os.environ.get("TREEDRAFT_FUZZ", "60"))
"""Inputs of each fuzzed reader; ``make fuzz`` tries many more."""
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW, database=None)
CONFIG = {"medusa_num_heads": 1, "medusa_num_layers": 1}


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer(), name="llama_gqa")


def folder(path: Path, config: object = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickle_that_would_run_code_never_does(tmp_path: Path) -> None:
    made = folder(tmp_path / "published")
    (made / "medusa_lm_head.pt").write_bytes(pickle.dumps(Marker(tmp_path / "ran")))
    with pytest.raises(HeadError, match=r"is a pickle and is not read.*--allow-pickle"):
        read_checkpoint(made)
    with pytest.raises(HeadError, match="holds more than plain tensors, or is broken, and was not read"):
        read_checkpoint(made, allow_pickle=True)
    torch.save({"0.0.linear.weight": Marker(tmp_path / "ran")}, made / "medusa_lm_head.pt")
    with pytest.raises(HeadError, match="holds more than plain tensors"):
        read_checkpoint(made, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_plain_tensors_of_a_pickle_are_read_on_request(tmp_path: Path) -> None:
    made = folder(tmp_path / "published")
    torch.save({"0.0.linear.weight": torch.eye(3)}, made / "medusa_lm_head.pt")
    assert torch.equal(read_checkpoint(made, allow_pickle=True).tensors["0.0.linear.weight"], torch.eye(3))
    torch.save([torch.eye(3)], made / "medusa_lm_head.pt")
    with pytest.raises(HeadError, match="expected tensors by name"):
        read_checkpoint(made, allow_pickle=True)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", "sub\\x.safetensors", "x.bin"],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    made = folder(tmp_path / "published")
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(HeadError, match="names files outside its folder or of another kind"):
        read_checkpoint(made)


def test_a_link_out_of_the_folder_is_refused_too(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    made = folder(tmp_path / "published")
    (made / "inside.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "inside.safetensors"}}))
    with pytest.raises(HeadError, match="names files outside its folder"):
        read_checkpoint(made)


def test_an_index_that_lies_about_its_files_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path / "published")
    save_file({"x": torch.zeros(1), "y": torch.zeros(1)}, made / "a.safetensors")
    index = made / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "z": "a.safetensors"}}))
    with pytest.raises(HeadError, match=r"z is not in a\.safetensors; y of a\.safetensors is not listed"):
        read_checkpoint(made)
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    with pytest.raises(HeadError, match=r"files that are not there: b\.safetensors"):
        read_checkpoint(made)


@pytest.mark.parametrize("length", [0, 5, 2**40, 2**63])
def test_a_header_larger_than_its_file_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    made = folder(tmp_path / "published")
    content = b"\0" * length if length < 8 else struct.pack("<Q", length) + b"{}"
    (made / "model.safetensors").write_bytes(content)
    with pytest.raises(HeadError, match="cannot be read"):
        read_checkpoint(made)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    made = folder(tmp_path / "published")
    save_file({"0.0.linear.weight": torch.full((3, 3), value)}, made / "model.safetensors")
    with pytest.raises(HeadError, match=r"non-finite values in 0\.0\.linear\.weight"):
        read_checkpoint(made)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (MOST_CONFIG + 1)])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    made = folder(tmp_path / "published")
    (made / "config.json").write_bytes(content)
    with pytest.raises(HeadError, match=r"config\.json"):
        read_checkpoint(made)


@fuzzed
@given(data=st.data())
def test_broken_weight_files_are_refused_and_nothing_else_happens(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(save({"a": torch.ones(3, 2), "d2t": torch.arange(4)}))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.write_bytes(bytes(whole[:cut]) + data.draw(st.binary(max_size=40)))
    try:
        tensors = read_safetensors(file)
    except HeadError:
        return
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@fuzzed
@given(data=st.data())
def test_any_configuration_and_names_are_read_or_refused(model: Target, data: st.DataObject) -> None:
    """Known keys with wild values, tensors renamed, reshaped and retyped: heads or a HeadError, faults in words."""
    kind, engine = data.draw(st.sampled_from([("medusa", "vllm"), ("medusa", "tgi"), ("eagle", "sglang"), *THREE]))
    head = any_head(model, kind, steps=2, draft_ids=torch.arange(1, 90, 2))
    made = to_checkpoint(head, engine, "t", model.config.to_dict(), torch.float32)
    config: dict[str, Any] = dict(made.config)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(json_values)
    tensors = dict(made.tensors)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        value = tensors.pop(name)
        change = data.draw(st.sampled_from(["drop", "rename", "reshape", "retype"]))
        if change == "rename":
            tensors[data.draw(st.text(max_size=8))] = value
        elif change == "reshape":
            tensors[name] = value.reshape(-1)[: data.draw(st.integers(0, 3))]
        elif change == "retype":
            tensors[name] = value.to(data.draw(st.sampled_from([torch.int32, torch.bool, torch.float16])))
    rope = rope_of(model.config.to_dict())
    read = type(made)(config, tensors, made.weights_file)
    assert all(isinstance(fault, str) for fault in check(read, engine, model.facts, model.layers(), rope))
    try:
        import_checkpoint(read, model.layers(), model.facts)
    except HeadError:
        return
    assert set(made.tensors) >= {"fc.weight"} or kind == "medusa"


THREE = [("eagle3", engine) for engine in ("vllm", "speculators", "eagle")]


def test_what_was_written_is_read(tmp_path: Path, model: Target) -> None:
    made = to_checkpoint(any_head(model, "eagle"), "vllm", "t", model.config.to_dict(), torch.float32)
    write_checkpoint(made, tmp_path)
    assert read_checkpoint(tmp_path).tensors.keys() == made.tensors.keys()
