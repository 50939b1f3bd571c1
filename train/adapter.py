"""The LoRA adapter that Medusa-2 trains: put on the target, read, written by itself, and taken off again.

The target's own weights are never written: PEFT puts the adapter's matrices beside them, and taking it off gives back
the model as it was. Needs the package peft, which nothing else here imports.
"""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..heads import PackedLinear
from ..infer import Target, adapter_hash
from ..infer.adapter import MISSING, WEIGHTS_FILE
from .config import AdapterConfig, TrainConfig
from .material import TrainError


@dataclass(frozen=True)
class Adapter:
    """An adapter that ``target`` carries while it is being trained: all forwards of the target are adapted ones."""

    target: Target
    settings: AdapterConfig
    wrapped: Any
    """PEFT's view of the same model."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, in the order of the layers."""
        return [(name, p) for name, p in self.wrapped.named_parameters() if ".lora_" in name]

    def off(self) -> AbstractContextManager[None]:
        """Inside, the target is as if it carried none."""
        return self.wrapped.disable_adapter()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, the adapter's dropout is on while gradients are; the target's own layers never drop anything."""
        layers = [m for name, m in self.wrapped.named_modules() if name.endswith(".lora_dropout")]
        try:
            for layer in layers:
                layer.train(torch.is_grad_enabled())
            yield
        finally:
            for layer in layers:
                layer.eval()


def adapter_faults(config: TrainConfig) -> list[str]:
    """Settings that cannot go with an adapter that is trained, as far as can be told before a model is loaded."""
    if not config.adapter.enabled:
        return []
    faults = []
    if config.heads.kind != "medusa":
        faults.append(
            f"adapter.enabled trains medusa heads, not {config.heads.kind}: their one feature is the target's final "
            "output, which the KL to the unadapted target is taken on; others read features that are kept or unrolled"
        )
    if config.data.features in ("memory", "store"):
        faults.append(
            f"data.features {config.data.features} keeps what adapter.enabled changes at every step: use auto or online"
        )
    if config.loss.noise > 0:
        faults.append("loss.noise disturbs the features that adapter.enabled takes the KL on: set it to 0")
    if config.target.adapter is not None:
        faults.append(
            "adapter.enabled and target.adapter are two adapters on one target: merge the one that is there into a "
            "model of its own first"
        )
    if importlib.util.find_spec("peft") is None:
        faults.append(f"adapter.enabled: {MISSING}")
    return faults


@contextmanager
def adapter_on(target: Target, settings: AdapterConfig, folder: Path | None) -> Iterator[Adapter]:
    """Puts an adapter on the target, fresh or from ``folder``, and takes it off at the end.

    Raises TrainError for a target that cannot carry it.
    """
    if any(isinstance(module, PackedLinear) for module in target.model.modules()):
        raise TrainError("the target's layers are packed for decoding, no adapter can be trained on them: pack=False")
    wrapped = _wrap(target, settings)
    try:
        _check_embeddings(target)
        if folder is not None:
            _read(wrapped, folder)
        yield Adapter(target, settings, wrapped)
    finally:
        wrapped.unload()


def save_adapter(adapter: Adapter, folder: Path) -> str:
    """Writes the adapter's settings and weights, nothing of the target, as PEFT reads them; returns the hash."""
    from peft import get_peft_model_state_dict

    held: dict[str, Any] = get_peft_model_state_dict(adapter.wrapped, save_embedding_layers=False)
    tensors = {name: value.detach().cpu().contiguous() for name, value in held.items()}
    bad = sorted(name for name, value in tensors.items() if not value.isfinite().all())
    if bad:
        raise TrainError(f"the adapter is not saved: non-finite values in {', '.join(bad)}")
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(tensors, aside / WEIGHTS_FILE, metadata={"format": "pt"})
    adapter.wrapped.peft_config["default"].save_pretrained(str(aside))
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
    return adapter_hash(folder)


def _wrap(target: Target, settings: AdapterConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(target.model, config)
    except ValueError as error:
        raise TrainError(f"adapter.target_modules does not fit {target.facts.name or 'the target'}: {error}") from error
    wrapped.peft_config["default"].base_model_name_or_path = target.facts.name
    return wrapped


def _check_embeddings(target: Target) -> None:
    """Heads and KL use the target's output layer as it is, and the input embedding may be the same tensor."""
    model: Any = target.model
    touched = [
        name
        for name, layer in (("output", model.get_output_embeddings()), ("input", model.get_input_embeddings()))
        if any(".lora_" in f".{part}" for part, _ in layer.named_parameters())
    ]
    if touched:
        raise TrainError(
            f"adapter.target_modules names the {' and '.join(touched)} embedding, which must stay as it is"
        )


def _read(wrapped: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tensors = load_file(folder / WEIGHTS_FILE)
    wanted: dict[str, Any] = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    if {n: v.shape for n, v in tensors.items()} != {n: v.shape for n, v in wanted.items()}:
        raise TrainError(f"{folder} holds another adapter than the one that is trained")
    set_peft_model_state_dict(wrapped, tensors)
