"""A target made of somebody else's loaded model, which stays as it was and goes on being theirs.

The copy has modules of its own around the same weights: freezing, evaluation mode and packed layers (heads/linear.py)
stand in the copy alone. Nothing is stored twice, except what is packed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .capability import TargetError


def borrow(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A frozen copy of the modules of ``model`` on its own weights, or on weights turned to ``dtype``.

    Raises TargetError, naming what is wrong, if the weights do not lie on one device.
    """
    places = sorted({str(weight.device) for weight in model.parameters()})
    if len(places) != 1 or places == ["meta"]:
        raise TargetError(
            f"the model's weights lie on {', '.join(places)}: a target needs them on one device; load the model "
            "without offloading, on a device that holds all of it"
        )
    return copy.deepcopy(model, {id(t): _share(t, dtype) for t in (*model.parameters(), *model.buffers())}).eval()


def weights_state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Compares equal as long as no weight was replaced or written to: packed layers hold weights as they were then."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return tuple((name, t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for name, t in named)


def has_hooks(model: PreTrainedModel) -> bool:
    """Whether somebody hooked into its modules: transformers' own recording of hidden states does not count."""
    return any(
        hasattr(module, "_hf_hook") or any(not _is_transformers(hook) for hook in _hooks(module))
        for module in model.modules()
    )


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_transformers(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


def _share(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The same storage, without gradient; quantised parameters of other classes as they are."""
    if type(tensor) not in (nn.Parameter, Tensor):
        return tensor
    values = tensor.detach()
    if dtype is not None and values.is_floating_point() and isinstance(tensor, nn.Parameter):
        values = values.to(dtype)
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
