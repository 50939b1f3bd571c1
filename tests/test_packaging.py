"""What is installed: treedraft.<folder> and nothing else, from the wheel and from the checkout."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PARTS = ("cli", "data", "heads", "infer", "train", "tree")


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of what the checkout holds, so that no stale build folder gets in."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in _package_files():
        place = copy / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_holds_only_the_six_packages_and_their_metadata(wheel: list[str]):
    folders = {"/".join(name.split("/")[:2]) for name in wheel if not name.split("/")[0].endswith(".dist-info")}
    assert folders == {f"treedraft/{part}" for part in PARTS}


def test_the_wheel_holds_every_module_type_marker_and_the_licence(wheel: list[str]):
    missing = {f"treedraft/{path.as_posix()}" for path in _package_files()} - set(wheel)
    assert not missing
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_every_part_has_a_type_marker_and_an_entry_in_the_links_for_the_checker():
    for part in PARTS:
        assert (ROOT / part / "py.typed").is_file()
        assert (ROOT / "typings" / "treedraft" / part).resolve() == ROOT / part


@pytest.mark.parametrize("part", PARTS)
def test_an_editable_install_resolves_to_the_checkout(part: str):
    file = importlib.import_module(f"treedraft.{part}").__file__
    assert file is not None
    if "site-packages" in file:
        pytest.skip("treedraft is installed from a wheel")
    assert Path(file).resolve() == ROOT / part / "__init__.py"


def test_every_folder_with_modules_is_listed_so_that_the_wheel_has_it(project: dict):
    folders = {path.parent.as_posix().replace("/", ".") for path in _package_files() if path.suffix == ".py"}
    assert {f"treedraft.{folder}" for folder in folders} == set(project["tool"]["setuptools"]["packages"])


def test_the_tested_pins_lie_within_the_ranges_and_name_every_dependency(project: dict):
    pins = _pins()
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    faults = []
    for requirement in map(Requirement, wanted):
        pin = pins.get(_normal(requirement.name))
        if pin is None:
            faults.append(f"{requirement.name} has no pin")
        elif not requirement.specifier.contains(pin):
            faults.append(f"{requirement.name}=={pin} is outside {requirement.specifier}")
    assert not faults


# Imported, and never without the package that requires it.
BROUGHT_ALONG = {
    "huggingface_hub": "transformers",
    "numpy": "transformers",
    "packaging": "transformers",
    "pyarrow": "datasets",
    "pydantic_core": "pydantic",
    "tokenizers": "transformers",
}


def test_every_imported_package_is_a_declared_dependency(project: dict, tracked: list[str]):
    needed = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        needed += extra
    declared = {_normal(Requirement(line).name) for line in needed}
    owners = packages_distributions()
    missing = []
    engines = (
        "benchmarks/workers/",
        "benchmarks/environments/",
        "cli/vllm_worker.py",
    )  # these run in others' environments
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for name in (name for name in tracked if name.endswith(".py") and not name.startswith(engines)):
        beside = {file.stem for file in (ROOT / name).parent.glob("*.py")}
        for module in (
            _absolute_imports(ROOT / name) - {"treedraft", "kit"} - beside - scripts - sys.stdlib_module_names
        ):
            possible = [BROUGHT_ALONG[module]] if module in BROUGHT_ALONG else owners.get(module, [module])
            if not declared & {_normal(owner) for owner in possible}:
                missing.append(f"{name} imports {module}")
    assert not missing


def test_no_tracked_file_points_outside_the_checkout(tracked: list[str]):
    outside = ("../" + "shared", "/" + "work/")
    found = []
    for name in tracked:
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{name}: {word}" for word in outside if word in text]
    assert not found


def _absolute_imports(file: Path) -> set[str]:
    """Top-level names of the packages that ``file`` imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _package_files() -> list[Path]:
    """Modules and type markers of the six folders, relative to the root."""
    files = (path for part in PARTS for path in (ROOT / part).rglob("*"))
    kept = (path for path in files if path.suffix == ".py" or path.name == "py.typed")
    return sorted(path.relative_to(ROOT) for path in kept)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {_normal(name): pin for name, _, pin in (line.partition("==") for line in lines if "==" in line)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
