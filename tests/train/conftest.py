"""Training tests run on one thread, and none inherits Accelerate's process-wide state from another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from kit.training import tiny
from treedraft.infer import Target


@pytest.fixture(autouse=True)
def accelerate_from_scratch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def gqa() -> Target:
    return tiny("llama_gqa")
