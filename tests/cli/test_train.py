from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from treedraft.train import config_keys

from .conftest import Call


@pytest.fixture
def config(ring: Path, chats: Path, prompts: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    content = {
        "target": {"spec": str(ring), "dtype": "fp32"},
        "data": {"paths": [str(chats)], "prompts": str(prompts)},
        "checkpoint": {"out": str(tmp_path / "out")},
        "heads": {"num_heads": 2},
        "eval": {"tree": "chain:2", "max_new_tokens": 4},
        "optim": {"epochs": 2},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_keys_lists_every_key_with_its_default(call: Call):
    shown = call("train", "--keys")
    assert shown.code == 0
    for key in config_keys():
        assert f"│ {key.name} " in shown.out
    line = next(line for line in shown.out.splitlines() if "optim.betas" in line)
    assert "[0.9, 0.95]" in line


def test_the_configuration_and_its_overrides_are_trained(call: Call, config: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    shown = call("train", config, "optim.max_steps=2", "batch.rows_per_step=4", "--json", out)
    assert shown.code == 0, shown.err
    assert "0 bytes of the target changed" in shown.err
    result = json.loads(out.read_text())
    assert (result["step"], result["total_steps"]) == (2, 2)
    assert (Path(result["heads"]) / "heads.safetensors").is_file()


def test_a_second_run_in_the_folder_is_refused_and_resume_goes_on(call: Call, config: Path):
    assert call("train", config).code == 0
    refused = call("train", config)
    assert refused.code == 2
    assert "--resume" in refused.err
    resumed = call("train", config, "--resume")
    assert resumed.code == 0
    assert "nothing left to do" in resumed.err
