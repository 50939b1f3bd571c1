"""The compiled part: packed matrix products and decoder layers for the CPU, built here once and kept.

There is one C++ file and no binary in the package: it is compiled for this processor and this torch by the system's
compiler, in half a minute, into $TREEDRAFT_CACHE or ~/.cache/treedraft. Without a compiler everything runs on torch
alone, slower.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE / "decoder.cpp"

_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (
        *("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}
"""What torch itself is compiled with for a processor of this name: its vectors are used."""


class NativeError(RuntimeError):
    """The compiled part cannot be had here; the message says why."""


def cache_folder() -> Path:
    """Where what is fetched or built once is kept: $TREEDRAFT_CACHE or ~/.cache/treedraft."""
    return Path(os.environ.get("TREEDRAFT_CACHE") or Path.home() / ".cache" / "treedraft")


def loaded() -> bool:
    """Whether this process has the compiled part."""
    return hasattr(torch.ops.treedraft, "linear")


def runs_on(x: torch.Tensor) -> bool:
    """Whether the compiled part is there and can take ``x``, of which no gradient is asked."""
    return loaded() and x.device.type == "cpu" and not (x.requires_grad and torch.is_grad_enabled())


def is_built() -> bool:
    """Whether it was compiled for this processor, torch and source before."""
    return _flags() is not None and _library().is_file()


def load(build: bool = True) -> None:
    """Gives this process the compiled part, compiling it if it never was and ``build``. Raises NativeError."""
    if loaded():
        return
    if _flags() is None:
        raise NativeError(
            f"the compiled forward knows AVX2 and AVX512 processors, this one is {_capability()} ({platform.machine()})"
        )
    library = _library()
    if not library.is_file():
        if not build:
            raise NativeError("it was not compiled on this machine yet")
        _build(library)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NativeError(f"{library} cannot be loaded: {error}; delete it to compile it anew") from error


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _flags() -> tuple[str, ...] | None:
    return _FLAGS.get(_capability())


def _library() -> Path:
    sources = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h", ".py")]
    known = [*sources, str(_flags()).encode(), torch.__version__.encode(), platform.machine().encode()]
    name = hashlib.sha256(b"\0".join(known)).hexdigest()[:16]
    return cache_folder() / "native" / f"treedraft-{name}.so"


def _build(library: Path) -> None:
    """Compiles to a file of its own and moves it into place; a second process waits for the first."""
    from torch.utils.cpp_extension import include_paths

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeError("no C++ compiler was found (c++, g++, clang++ or $CXX)")
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.is_file():
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            compiled, made = Path(work) / "decoder.o", Path(work) / library.name
            flags = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", *(_flags() or ())]
            includes = [f"-I{path}" for path in include_paths()]
            _call(compiler, *flags, *includes, "-c", str(SOURCE), "-o", str(compiled))
            # Linked without OpenMP: the symbols are those of the runtime that torch brings, and its threads are used.
            libraries = Path(torch.__file__).parent / "lib"
            _call(compiler, "-shared", str(compiled), f"-L{libraries}", "-ltorch_cpu", "-lc10", "-o", str(made))
            made.replace(library)


def _call(compiler: str, *arguments: str) -> None:
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.splitlines()
        faults = [line for line in said if "error" in line] or said
        raise NativeError(f"{compiler} could not compile {SOURCE}: " + "; ".join(faults[:3]))
