"""Export, import and verify-export on heads that are exact on the ring, the engine being a stand-in."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treedraft.cli.chains import ChainRow
from treedraft.cli.engine_run import EngineError, judge, run_vllm

from .conftest import Call

STAND_IN = """#!{python}
import json, sys
job = json.load(open(sys.argv[2]))
grows = {grows} if job["speculative"] else 1
rows = []
for prompt in job["prompts"]:
    ids, steps = [13], [1]  # w0, which the prefill gives
    while len(ids) < job["max_new_tokens"]:
        more = min(grows, job["max_new_tokens"] - len(ids))
        ids += [13 + (len(ids) + i) % 83 for i in range(more)]
        steps.append(more)
    rows.append({{"ids": ids, "steps": steps, "seconds": 1.0}})
json.dump({{"version": "stand-in", "rows": rows}}, open(sys.argv[3], "w"))
"""


@pytest.fixture
def exported(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path) -> Path:
    asked = ["--prompts", prompts, "--max-new-tokens", 20]
    done = call("export", "--heads", heads, "--target", ring, "--to", "vllm", "--out", tmp_path / "out", *asked)
    assert done.code == 0, done.err
    return tmp_path / "out"


def engine(folder: Path, grows: int) -> Path:
    script = folder / f"engine{grows}"
    script.write_text(STAND_IN.format(python=sys.executable, grows=grows))
    script.chmod(0o755)
    return script


def test_an_export_says_how_it_is_served_and_what_is_to_be_expected(exported: Path, ring: Path) -> None:
    report = json.loads((exported / "export_report.json").read_text())
    assert report["expected"]["rounds"] == 18  # of three prompts: 1 token, 6 rounds of 3, one cut round
    assert report["expected"]["accepted_by_position"] == [18, 18]
    assert report["tensors"]["blocks.0.layers.0.weight"]["shape"] == [96, 96]
    readme = (exported / "README.md").read_text()
    speculative = '\'{"method": "medusa", "model": "DIR", "num_speculative_tokens": 2}\''
    assert f"vllm serve {ring} --speculative-config {speculative}" in readme
    assert "| 2 | 18 | 1.000 |" in readme
    assert "trees, and what they accept beyond a chain, are lost" in readme


def test_several_engines_are_written_at_once(call: Call, ring: Path, heads: Path, tmp_path: Path) -> None:
    done = call("export", "--heads", heads, "--target", ring, "--to", "tgi", "--to", "medusa", "--out", tmp_path)
    assert done.code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["medusa", "tgi"]


def test_what_cannot_be_served_is_refused_and_nothing_written(
    call: Call, ring: Path, heads: Path, tmp_path: Path
) -> None:
    done = call("export", "--heads", heads, "--target", ring, "--to", "vllm", "--to", "sglang", "--out", tmp_path / "o")
    assert done.code == 2
    assert "sglang cannot serve medusa heads" in done.err
    assert not (tmp_path / "o").exists()
    assert (
        "triton: unknown engine"
        in call("export", "--heads", heads, "--target", ring, "--to", "triton", "--out", tmp_path / "o").err
    )


def test_imported_heads_decode_as_those_that_were_exported(
    call: Call, exported: Path, ring: Path, heads: Path, prompts: Path, tmp_path: Path
) -> None:
    assert call("import", exported, "--target", ring, "--out", tmp_path / "again").code == 0
    assert load_file(tmp_path / "again" / "heads.safetensors").keys() == load_file(heads / "heads.safetensors").keys()
    shown = call(
        "evaluate",
        "--heads",
        tmp_path / "again",
        "--target",
        ring,
        "--prompts",
        prompts,
        "--tree",
        "chain:2",
        "--max-new-tokens",
        20,
    )
    assert "60 tokens, 21 rounds" in shown.out  # three tokens a round, and a last one that the end of the text cuts


def test_the_verdict_follows_the_engine(call: Call, exported: Path, ring: Path, prompts: Path, tmp_path: Path) -> None:
    asked = ["verify-export", exported, "--target", ring, "--prompts", prompts, "--max-new-tokens", 20]
    good = call(*asked, "--python", engine(tmp_path, 3), "--json", tmp_path / "found.json")
    assert good.code == 0, good.err
    assert "Verdict: pass" in good.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["treedraft"] == found["engine"] == {"rounds": 18, "accepted_by_position": [18, 18]}
    bad = call(*asked, "--python", engine(tmp_path, 1))
    assert bad.code == 1
    assert "Verdict: fail" in bad.out


def test_a_folder_that_was_changed_fails_without_an_engine(call: Call, exported: Path, ring: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    tensors["blocks.0.layers.0.bias"] = tensors["blocks.0.layers.0.bias"] + 1
    save_file(tensors, exported / "model.safetensors")
    done = call("verify-export", exported, "--target", ring)
    assert done.code == 1
    assert "blocks.0.layers.0.bias was changed after the export" in done.out


def test_an_engine_that_stops_is_an_error_with_its_last_words(
    call: Call, exported: Path, ring: Path, prompts: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "engine"
    broken.write_text("#!/bin/sh\necho no such architecture >&2\nexit 3\n")
    broken.chmod(0o755)
    done = call("verify-export", exported, "--target", ring, "--prompts", prompts, "--python", broken)
    assert done.code == 2
    assert "vLLM stopped with code 3" in done.err
    assert "no such architecture" in done.err


def test_the_judge_allows_two_tokens_and_no_other_text() -> None:
    def run(accepted: list[int], ids: list[int]) -> dict:
        return {"version": "v", "rows": [{"ids": ids, "steps": [1, *(a + 1 for a in accepted), 1], "seconds": 1.0}]}

    text = list(range(30))
    ours = [ChainRow(text, [1] * 20)]
    plain = {"rows": [{"ids": text, "seconds": 1.0}]}
    assert judge(ours, plain, run([1] * 18 + [0, 0], text), 1)["pass"]
    assert not judge(ours, plain, run([1] * 17 + [0, 0, 0], text), 1)["pass"]
    assert not judge(ours, plain, run([1] * 20, [*text[:-1], 99]), 1)["pass"]


def test_pickles_are_read_on_request_alone(call: Call, ring: Path, heads: Path, tmp_path: Path) -> None:
    call("export", "--heads", heads, "--target", ring, "--to", "medusa", "--out", tmp_path / "m")
    (tmp_path / "m" / "medusa_lm_head.safetensors").unlink()
    asked = ["import", tmp_path / "m", "--target", ring, "--out", tmp_path / "i"]
    refused = call(*asked)
    assert refused.code == 2
    assert "is a pickle and is not read" in refused.err
    assert call(*asked, "--allow-pickle").code == 0
    one, other = (load_file(folder / "heads.safetensors") for folder in (heads, tmp_path / "i"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_worker_sees_no_module_of_ours(tmp_path: Path) -> None:
    """Beside the commands stands a profile.py, which Python's own cProfile would import."""
    python = tmp_path / "python"
    listing = "print(sorted(os.listdir(os.path.dirname(sys.argv[1]))))"
    python.write_text(f"#!{sys.executable}\nimport os, sys\n{listing}\nsys.exit(1)\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"\['job\.json', 'vllm_worker\.py'\]"):
        run_vllm(python, {})
