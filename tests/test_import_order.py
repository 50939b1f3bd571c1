"""Which part may import which, and that decoding needs no training package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "tree": set(),
    "data": set(),
    "heads": {"tree"},
    "infer": {"heads", "tree"},
    "train": {"tree", "heads", "data", "infer"},
    "cli": {"tree", "heads", "data", "infer", "train"},
}
NOT_NEEDED_TO_DECODE = ("datasets", "wandb", "tensorboard", "peft")

# A None in sys.modules is an absent package: importing it fails, and asking whether it is there says no.
BLOCK = """
import sys

for name in {names!r}:
    sys.modules[name] = None
import treedraft.{part}
"""


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_the_parts_below_it(part: str):
    wrong = []
    for file in sorted((ROOT / part).rglob("*.py")):
        for line, module in _ours(file, part):
            if module != part and module not in MAY_IMPORT[part]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_inside_the_parts_our_own_imports_are_relative(part: str):
    absolute = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("treedraft"))
        or (isinstance(node, ast.Import) and any(name.name.startswith("treedraft") for name in node.names))
    ]
    assert not absolute


@pytest.mark.parametrize("part", ["tree", "heads", "infer"])
def test_decoding_imports_without_the_packages_that_only_training_needs(part: str):
    code = BLOCK.format(names=NOT_NEEDED_TO_DECODE, part=part)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_block_used_above_really_blocks():
    code = BLOCK.format(names=("torch",), part="tree")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "import of torch halted" in result.stderr


def _ours(file: Path, part: str) -> list[tuple[int, str]]:
    """(line, part) of every relative import of ``file``; ``from . import x`` is the part itself."""
    depth = len(file.relative_to(ROOT / part).parts)  # 1 for part/x.py: one dot is the part, two dots are treedraft
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        if node.level <= depth:
            found.append((node.lineno, part))
        elif node.module:
            found.append((node.lineno, node.module.partition(".")[0]))
        else:
            found += [(node.lineno, name.name) for name in node.names]
    return found
