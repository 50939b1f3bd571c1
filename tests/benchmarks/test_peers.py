from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
import pytest
import typer
from peer_figures import summarise
from peer_report import draw, markdown
from peer_run import Book, PeerError, Process, interleave, turns

from kit import markov_ring, tokenizer

PROMPTS = [[1, 2], [3], [4, 5, 6]]

ECHO = """
import json, sys
print(json.dumps({"versions": {"echo": "1"}, "imports_mb": 10.0, "notes": ""}), flush=True)
for line in sys.stdin:
    ids = json.loads(line)["ids"]
    if ids == [3] and "fail" in sys.argv[1]:
        print("no memory left", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"ids": ids, "seconds": 1.0, "first_seconds": 0.5, "first_tokens": 1, "rounds": 1,
                      "peak_mb": 20.0}), flush=True)
"""


class Fake:
    """Answers with the same speed always, and notes when it was asked."""

    facts: dict[str, Any] = {"versions": {}, "imports_mb": 100.0}  # noqa: RUF012

    def __init__(self, name: str, asked: list[tuple[str, list[int]]], seconds: float = 1.0, fails_at: int = 99) -> None:
        self.name, self.asked, self.seconds, self.fails_at = name, asked, seconds, fails_at
        self.count = 0

    def ask(self, ids: Sequence[int]) -> dict[str, Any]:
        self.count += 1
        if self.count == self.fails_at:
            raise PeerError("it ran out of memory")
        self.asked.append((self.name, list(ids)))
        return answer([7, 8, 9, 10, 11], self.seconds)

    def close(self) -> None: ...


def answer(ids: list[int], seconds: float, rounds: int | None = 2) -> dict[str, Any]:
    first = {"first_seconds": 0.2 * seconds, "first_tokens": 1}
    return {"ids": ids, "seconds": seconds, **first, "rounds": rounds, "peak_mb": 350.0}


def line(peer: str, repeat: int, prompt: int, **of_answer: Any) -> dict[str, Any]:
    return {"peer": peer, "repeat": repeat, "prompt": prompt, **answer([7, 8, 9, 10, 11], 1.0), **of_answer}


def is_stopped_soon(pid: int) -> bool:
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "T":
            return True
        time.sleep(0.01)
    return False


def known(peer: str) -> dict[str, Any]:
    return {"peer": peer, "versions": {"engine": "1.0"}, "imports_mb": 100.0}


def result(lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    names = {"hf": "Hugging Face generate", "vllm": "vLLM", "eagle3": "treedraft, EAGLE-3"}
    settings = {"threads": 2, "target": "t", "dtype": "fp32", "prompts_decoded": 2, "prompts": "p", "max_new_tokens": 5}
    return {
        "peers": summarise(lines, weights_mb=250.0),
        "titles": names,
        "weights": dict.fromkeys(names, ""),
        "settings": settings,
        "machine": {"processor": "a processor", "cores": 2, "memory_gib": 8},
        "versions": {"torch": "2"},
        "gb_per_second": 25.0,
        "weights_mb": 250.0,
        **more,
    }


def test_every_prompt_goes_through_all_peers_and_each_begins_as_often():
    groups = list(turns(["a", "b", "c"], prompts=3, repeats=2))
    assert [{(repeat, prompt) for repeat, prompt, _ in group} for group in groups] == [
        {(repeat, prompt)} for repeat in range(2) for prompt in range(3)
    ]
    assert all(sorted(peer for *_, peer in group) == ["a", "b", "c"] for group in groups)
    assert sorted(group[0][2] for group in groups) == ["a", "a", "b", "b", "c", "c"]


def test_a_run_that_was_interrupted_goes_on_where_it_was(tmp_path: Path):
    asked: list[tuple[str, list[int]]] = []
    book = Book(tmp_path / "run.jsonl", {"threads": 2})

    class Interrupted(Exception): ...

    def interrupt() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        interleave({"a": Fake("a", asked), "b": Fake("b", asked)}, PROMPTS, 2, book, pause=interrupt)
    assert len(asked) == 2
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"peer": "a", "repeat": 0, "prom')  # cut off as it was written
    again = Book(tmp_path / "run.jsonl", {"threads": 2})
    interleave({"a": Fake("a", asked), "b": Fake("b", asked)}, PROMPTS, 2, again)
    wanted = sorted((peer, ids) for peer in "ab" for ids in PROMPTS for _ in range(2))
    assert sorted(asked) == wanted
    lines = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len([text for text in lines if "seconds" in text]) == 12


def test_a_run_with_other_settings_is_not_continued(tmp_path: Path):
    Book(tmp_path / "run.jsonl", {"threads": 2, "dtype": "fp32"})
    with pytest.raises(ValueError, match=r"other settings.*threads"):
        Book(tmp_path / "run.jsonl", {"threads": 4, "dtype": "fp32"})


def test_a_peer_that_fails_is_noted_with_its_reason_and_the_others_go_on(tmp_path: Path):
    asked: list[tuple[str, list[int]]] = []
    book = Book(tmp_path / "run.jsonl", {})
    for name in ("hf", "vllm"):
        book.write(known(name))
    interleave({"hf": Fake("hf", asked), "vllm": Fake("vllm", asked, fails_at=2)}, PROMPTS, 1, book)
    assert [peer for peer, _ in asked].count("hf") == 3
    text = markdown(result(book.lines))
    assert "Failed: vLLM: after 1 answers: it ran out of memory" in text
    assert "| Hugging Face generate |" in text
    assert "| vLLM |" in text


def test_figures_are_sums_divided_last():
    lines = [known("hf"), known("eagle3"), {"gb_per_second": 20.0}, {"gb_per_second": 25.0}]
    lines += [line("hf", 0, 0, seconds=2.0, first_seconds=0.4), line("hf", 0, 1, seconds=4.0, first_seconds=0.6)]
    lines += [line("eagle3", 0, 0), line("eagle3", 0, 1, ids=[7, 8, 9, 10, 12], rounds=4)]
    found = summarise(lines, weights_mb=250.0)
    assert found["hf"]["tokens_per_second"] == pytest.approx(10 / 6)
    assert found["hf"]["tokens_per_second_decode"] == pytest.approx(8 / 5)
    assert found["hf"]["times_generate"] == 1.0
    assert found["hf"]["equal_texts"] == 1.0
    assert found["eagle3"]["tokens_per_second"] == pytest.approx(5)
    assert found["eagle3"]["times_generate"] == pytest.approx(3)
    low, high = found["eagle3"]["times_generate_interval"]
    assert low == pytest.approx(2)  # the prompt on which generate is fast, drawn twice
    assert high == pytest.approx(4)
    assert found["eagle3"]["tau"] == pytest.approx(8 / 6)
    assert found["eagle3"]["equal_texts"] == 0.5
    assert found["eagle3"]["peak_over_imports_mb"] == 250.0
    assert found["eagle3"]["share_of_roofline"] == pytest.approx(8 / 1.6 / 100)


def test_first_tokens_that_a_prefill_drafts_do_not_count_as_rounds():
    lines = [known("hf"), line("hf", 0, 0, first_tokens=3, rounds=1)]
    figures = summarise(lines, weights_mb=1.0)["hf"]
    assert figures["tau"] == 2.0
    assert figures["tokens_per_second_decode"] == pytest.approx(2 / 0.8)


def test_an_engine_that_does_not_tell_its_rounds_has_no_tau():
    lines = [known("hf"), line("hf", 0, 0), known("vllm"), line("vllm", 0, 0, rounds=None)]
    assert summarise(lines, weights_mb=1.0)["vllm"]["tau"] is None
    assert " - |" in markdown(result(lines))


def test_a_turn_that_was_cut_off_does_not_count():
    lines = [known("hf"), known("vllm"), line("hf", 0, 0), line("vllm", 0, 0), line("hf", 0, 1, seconds=100.0)]
    assert summarise(lines, weights_mb=1.0)["hf"]["answers"] == 1


def test_a_peer_that_failed_once_and_was_started_again_counts():
    lines = [
        known("hf"),
        {"peer": "vllm", "error": "no such file"},
        known("vllm"),
        line("hf", 0, 0),
        line("vllm", 0, 0),
    ]
    assert "Failed" not in markdown(result(lines))


def test_the_chart_is_a_small_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    lines = [known(name) for name in ("hf", "vllm", "eagle3")]
    lines += [line(name, 0, prompt, seconds=1.0 + prompt) for name in ("hf", "vllm", "eagle3") for prompt in range(2)]
    draw(result(lines), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "peers.png").stat().st_size < 80_000


def test_a_worker_process_answers_is_stopped_between_turns_and_says_why_it_ended(tmp_path: Path):
    command = [sys.executable, "-c", ECHO]
    worker = Process.start(command, {"threads": 1, "fail": True}, tmp_path / "echo.log")
    try:
        assert worker.facts["versions"] == {"echo": "1"}
        assert worker.ask([1, 2])["ids"] == [1, 2]
        assert is_stopped_soon(worker.process.pid)
        with pytest.raises(PeerError, match="no memory left"):
            worker.ask([3])
    finally:
        worker.close()


@pytest.mark.slow
def test_real_engines_answer_and_one_that_is_not_there_is_a_line_of_the_table(tmp_path: Path):
    ring = tmp_path / "ring"
    markov_ring().save_pretrained(ring)
    tokenizer().save_pretrained(ring)
    rows = [{"id": "a", "prompt": "w1 w2 w5"}, {"id": "b", "prompt": "w30"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    peers.main(
        tmp_path / "prompts.jsonl", out=tmp_path / "run", peers="hf,hf-lookup,treedraft,vllm", environments=tmp_path,
        target=str(ring), dtype="fp32", max_new_tokens=12, repeats=1, threads=1,
    )  # fmt: skip
    found = json.loads((tmp_path / "run.json").read_text())["peers"]
    for name in ("hf", "hf-lookup", "treedraft"):
        assert found[name]["tokens"] == 2 * 12
        assert found[name]["equal_texts"] == 1.0
        assert found[name]["peak_over_imports_mb"] > 0
    assert found["hf"]["tau"] == found["treedraft"]["tau"] == 1.0
    assert "environments/" in found["vllm"]["error"]
    assert "Failed: vLLM:" in (tmp_path / "run.md").read_text()


def test_peers_that_are_not_known_and_heads_that_are_not_there_are_refused_at_once(tmp_path: Path):
    with pytest.raises(typer.BadParameter, match=r"'sglang'.*vllm-heads needs"):
        peers.main(tmp_path / "prompts.jsonl", peers="sglang,vllm-heads")


def test_an_environment_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(PeerError, match=r"nowhere/bin/python.*environments/"):
        Process.start([str(tmp_path / "nowhere/bin/python"), "x"], {"threads": 1}, tmp_path / "log")
