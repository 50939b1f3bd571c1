"""Number formats of a target by the names that ``--dtype`` takes."""

from __future__ import annotations

import torch

from ..heads import cpu_multiplies_bf16
from .capability import TargetError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INT8 = "int8"
"""Weights of linear layers in 8 bits, everything else in fp32: see quantize.py."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of one of DTYPES."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the machine multiplies it natively: a CPU that does not pays for every node of a tree."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return torch.bfloat16 if cpu_multiplies_bf16() else torch.float32
    if dtype == INT8:
        if device.type != "cpu":
            raise TargetError(
                f"dtype int8 is for CPUs, the target is on {device.type}; choose auto, {', '.join(DTYPES)}"
            )
        return torch.float32
    if dtype not in DTYPES:
        raise TargetError(f"dtype must be auto, {', '.join(DTYPES)} or int8, got {dtype!r}")
    return DTYPES[dtype]
