"""Peers in turns: each a process of its own that stays loaded, and only the one whose turn it is may run.

A run is a JSONL file: a first line with the settings, then one line for every answer, machine or failure, written as it
happens. So it can be interrupted and goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LOAD_SECONDS = 900
ANSWER_SECONDS = 300

Turn = tuple[int, int, str]
"""(repeat, number of the prompt, name of the peer)."""


class PeerError(Exception):
    """A peer did not start or did not answer; the others go on."""


class Worker(Protocol):
    """What answers: see ``workers/worker.py``."""

    facts: dict[str, Any]

    def ask(self, ids: Sequence[int]) -> dict[str, Any]:
        """The fields of an answer. Raises PeerError."""
        ...

    def close(self) -> None: ...


@dataclass
class Process:
    """A worker process, stopped (SIGSTOP) whenever it is not asked: engines poll and spin while they wait."""

    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, command: Sequence[str], settings: Mapping[str, Any], log: Path) -> Process:
        """Starts ``command`` with the settings as its last argument and waits until it is loaded. Raises PeerError."""
        threads = str(settings["threads"])
        surroundings = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        surroundings.pop("PYTHONSAFEPATH", None)  # workers import what lies beside them
        try:
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [*command, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=surroundings,
                    start_new_session=True,
                )
        except OSError as error:
            raise PeerError(f"{command[0]} could not be started: {error}; see environments/") from error
        worker = cls(process, log)
        try:
            worker.facts = worker._read(LOAD_SECONDS)
        except PeerError:
            worker.close()
            raise
        worker._signal(signal.SIGSTOP)
        return worker

    def ask(self, ids: Sequence[int]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"ids": list(ids)}) + "\n")
            self.process.stdin.flush()
            return self._read(ANSWER_SECONDS)
        except OSError as error:
            raise PeerError(self._last_words()) from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        alarm = threading.Timer(seconds, self._signal, (signal.SIGKILL,))
        alarm.start()
        try:
            line = self.process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise PeerError(self._last_words())
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300] if lines else 'it said nothing'} (log: {self.log})"


def turns(peers: Sequence[str], prompts: int, repeats: int) -> Iterator[list[Turn]]:
    """All peers on one prompt, prompt by prompt, repeat by repeat; each time another peer begins.

    >>> [[peer for *_, peer in group] for group in turns(["a", "b", "c"], prompts=2, repeats=1)]
    [['a', 'b', 'c'], ['b', 'c', 'a']]
    """
    for repeat in range(repeats):
        for prompt in range(prompts):
            first = (repeat + prompt) % len(peers)
            yield [(repeat, prompt, peer) for peer in [*peers[first:], *peers[:first]]]


def interleave(
    workers: Mapping[str, Worker],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    book: Book,
    pause: Callable[[], None] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Lets every worker answer every prompt ``repeats`` times, in turns; what the book has already is left out.

    A worker that fails is noted and asked no more. ``pause`` is called after the peers have all had a prompt.
    """
    able = {name: worker for name, worker in workers.items()}
    for group in turns(list(workers), len(prompts), repeats):
        due = [turn for turn in group if turn not in book.done]
        for repeat, prompt, peer in due:
            if peer not in able:
                continue
            try:
                answer = able[peer].ask(prompts[prompt])
            except PeerError as error:
                del able[peer]
                book.write({"peer": peer, "error": str(error)})
                continue
            book.write({"peer": peer, "repeat": repeat, "prompt": prompt, **answer})
        if due:
            pause()
        progress()


class Book:
    """The JSONL file of a run. Raises ValueError for a file that another run with other settings wrote."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.lines = read_lines(path) if path.exists() else []
        if self.lines:
            old = self.lines[0].get("settings", {})
            other = [key for key in settings if old.get(key) != settings[key]]
            if other:
                raise ValueError(
                    f"{path} was measured with other settings ({', '.join(other)}): name another file, or delete it"
                )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.write({"settings": dict(settings)})
        self.done = {(line["repeat"], line["prompt"], line["peer"]) for line in self.lines if "seconds" in line}

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line; it is in the file when this returns."""
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; a last one that was cut off is dropped, from the file too."""
    lines = []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    for line in whole.splitlines():
        lines.append(json.loads(line))
    return lines


class Locks:
    """Files whose locks are held while something is timed, for machines that several people share."""

    def __init__(self, paths: Sequence[Path], most_seconds: float) -> None:
        self._paths = paths
        self._most = most_seconds
        self._since = 0.0
        self._files: list[Any] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        self._take()
        try:
            yield
        finally:
            self._free()

    def breathe(self) -> None:
        """Lets others in if the locks were held for ``most_seconds``."""
        if self._paths and time.monotonic() - self._since > self._most:
            self._free()
            time.sleep(3)
            self._take()

    def _take(self) -> None:
        for path in self._paths:
            file = path.open("a")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._files.append(file)
        self._since = time.monotonic()

    def _free(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
