"""The far end of ``peers.py``: one engine, loaded once, that answers requests line by line.

Runs in the engine's own environment, so nothing of treedraft is imported here. JSON over stdin and stdout:

    settings   argv[1]: what ``peers.py`` chose: model, dtype, threads, mode, max_new_tokens, longest, ...
    ready      {"versions": {...}, "imports_mb": ..., "notes": ...}
    request    {"ids": [...]} -> answer: the fields of Answer, and "peak_mb"
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A prompt answered once; times in seconds."""

    ids: list[int]
    seconds: float
    first_seconds: float
    """Time to the first token or, where the prefill already drafts, to the first tokens."""
    first_tokens: int = 1
    rounds: int | None = None
    """Forwards of the target behind the prefill, where the engine tells."""


Decode = Callable[[Sequence[int]], Answer]
Load = Callable[[dict[str, Any]], Decode]


def serve(load: Load, packages: Sequence[str], notes: str = "") -> None:
    """Loads the engine and answers until stdin ends. To be called once everything is imported.

    What engines print goes to stderr: stdout belongs to the answers alone.
    """
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    imports = memory_mb("VmRSS")
    decode = load(settings)
    found = {package: version(package) for package in packages}
    print(json.dumps({"versions": found, "imports_mb": imports, "notes": notes}), file=answers)
    for line in sys.stdin:
        answer = decode(json.loads(line)["ids"])
        print(json.dumps({**asdict(answer), "peak_mb": memory_mb("VmHWM")}), file=answers)


def memory_mb(field: str) -> float:
    """VmRSS or VmHWM, the peak, of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else float("nan")
