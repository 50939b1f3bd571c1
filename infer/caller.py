"""What transformers' ``generate`` was asked and does not pass on to a callable ``custom_generate``.

Up to transformers 5.24 a callable gets neither ``streamer`` nor ``assistant_model``, and a folder's function is not
told which folder it came from. A streamer that nobody ends leaves its reader waiting for ever, so the arguments are
read where they are: among the locals of the ``generate`` that called.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import GenerationMixin

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__  # pyright: ignore[reportAttributeAccessIssue]


def generate_arguments() -> dict[str, Any]:
    """The locals of the innermost transformers ``generate`` that led here; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}
