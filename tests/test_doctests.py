"""Examples in docstrings are run, module by module, under the names they are installed as."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

# treedraft is a namespace without a path of its own under an editable install: its parts are named.
PARTS = ("cli", "data", "heads", "infer", "train", "tree")


def modules() -> list[str]:
    names = []
    for part in PARTS:
        package = importlib.import_module(f"treedraft.{part}")
        names.append(package.__name__)
        names += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_give_what_they_show(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples_to_run():
    assert doctest.testmod(importlib.import_module("treedraft.tree.topology")).attempted > 0
