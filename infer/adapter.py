"""A LoRA adapter as a part of the target: a folder that PEFT writes, merged into the weights and known by its hash."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .capability import TargetError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

MISSING = "the package peft is not installed: pip install 'treedraft[lora]'"

# What says where an adapter comes from and how it is used, and not what it does.
_ORIGIN = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")


def adapter_hash(folder: str | Path) -> str:
    """Hash of an adapter's weights and settings, whatever folder it lies in and model it names. Raises TargetError."""
    path = _checked(folder)
    settings = {key: value for key, value in _settings(path).items() if key not in _ORIGIN}
    for key, value in settings.items():
        if isinstance(value, list):  # sets, written in any order
            settings[key] = sorted(value, key=str)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update((path / WEIGHTS_FILE).read_bytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """The model with the adapter added to its weights, in place and in its dtype.

    Raises TargetError if the folder holds no adapter, one that cannot be merged, or another model's.
    """
    path = _checked(folder)
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise TargetError(f"the adapter {path} cannot be read: {MISSING}") from error
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is an error here
            adapted: Any = PeftModel.from_pretrained(model, str(path), torch_device=str(model.device))
        wanted, found = (
            set(get_peft_model_state_dict(adapted, save_embedding_layers=False)),
            set(load_file(path / WEIGHTS_FILE)),
        )
        if wanted != found:
            raise ValueError(
                f"{len(wanted - found)} weights missing, {len(found - wanted)} without a place, for example "
                f"{sorted(wanted ^ found)[0]}"
            )
        return adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise TargetError(
            f"the adapter {path} cannot be merged into {model.config.name_or_path or type(model).__name__}: {error}"
        ) from error


def _checked(folder: str | Path) -> Path:
    path = Path(folder)
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (path / name).is_file()]
    if missing:
        raise TargetError(
            f"no adapter at {path}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, "
            f"{' and '.join(missing)} missing"
        )
    return path


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / CONFIG_FILE).read_text())
    except json.JSONDecodeError as error:
        raise TargetError(f"{path / CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TargetError(f"{path / CONFIG_FILE}: expected keys, got {type(content).__name__}")
    return content
