"""Reading a training configuration: all faults at once, and every key described."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from treedraft.train.settings import ConfigError, changed_keys, config_keys, flat_config, load_config, parse_config

MINIMAL = {"target": {"spec": "somewhere"}, "data": {"paths": ["rows.jsonl"]}, "checkpoint": {"out": "runs/one"}}


def test_a_file_with_overrides_gives_the_configuration(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**MINIMAL, "optim": {"lr": 0.01, "epochs": 2}}))
    config = load_config(
        file, ["optim.lr=3e-4", "data.paths=[a.jsonl, b.jsonl]", "tracker.run=null", "heads.output=own"]
    )
    assert config.optim.lr == 3e-4
    assert config.optim.epochs == 2
    assert config.data.paths == ("a.jsonl", "b.jsonl")
    assert config.heads.output == "own"
    assert config.loss.decay == 0.8


def test_all_faults_are_listed_at_once_with_the_nearest_known_key():
    content = {
        **MINIMAL,
        "data": {"paths": [], "max_len": 5, "holdout": 2.5},
        "optm": {"lr": 1.0},
        "loss": {"lr": 2},
        "heads": 3,
        "precision": "fp16",
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(content, ["optim.epochs=many", "nothing", "optim.clip=-1"], source="run.yaml")
    message = str(caught.value)
    for part in (
        "run.yaml: 10 faults",
        "unknown key data.max_len; did you mean data.max_length?",
        "unknown key optm; did you mean optim?",
        "unknown key loss.lr; did you mean optim.lr?",
        "heads must hold keys, got 3",
        "data.paths",
        "'fp32' or 'bf16', got 'fp16'",
        "optim.epochs: Input should be a valid integer",
        "optim.clip: Input should be greater than 0, got -1",
        "override 'nothing': expected key=value",
    ):
        assert part in message


def test_missing_settings_are_named():
    with pytest.raises(ConfigError, match=r"target is missing(.|\n)*data is missing(.|\n)*checkpoint is missing"):
        parse_config({})


def test_a_held_out_number_of_rows_is_whole():
    with pytest.raises(ConfigError, match=r"data\.holdout: .*whole number of rows, got 2\.5"):
        parse_config({**MINIMAL, "data": {"paths": ["a"], "holdout": 2.5}})


@pytest.mark.parametrize(("text", "fault"), [("a: [", "is not YAML"), ("- 1\n", "expected keys")])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, fault: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml.*{fault}"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_every_key_has_a_type_and_a_description():
    keys = {key.name: key for key in config_keys()}
    assert all(key.type and key.description for key in keys.values())
    assert keys["optim.lr"].default == 1e-3
    assert (keys["data.split"].type, keys["precision"].type, keys["data.paths"].type) == (
        "str | null",
        "fp32 | bf16",
        "tuple of str",
    )
    assert keys["checkpoint.out"].required
    assert not keys["seed"].required


def test_flat_values_lead_back_to_the_same_configuration():
    config = parse_config(MINIMAL, ["optim.betas=[0.9, 0.99]"])
    flat = flat_config(config)
    assert (
        parse_config({}, [f"{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in flat.items()])
        == config
    )


def test_the_configuration_cannot_be_changed():
    config = parse_config(MINIMAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_changes_that_alter_training_are_named_and_others_are_not():
    old = flat_config(parse_config(MINIMAL))
    new = flat_config(
        parse_config(MINIMAL, ["optim.lr=1", "checkpoint.keep=5", "eval.tree=chain:2", "batch.micro_rows=1"])
    )
    assert changed_keys(old, new) == ["optim.lr: 0.001 -> 1.0"]
