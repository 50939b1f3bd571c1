"""The chunked loss equals the plain one, and holds no more logits than a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treedraft.train.losses import Soft, Teacher, chunked_cross_entropy, plain_cross_entropy

M, H, V = 13, 8, 40


def problem(dtype: torch.dtype, width: int = V, with_bias: bool = True) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(width)
    made = {
        "hidden": torch.randn(M, H, generator=draw, dtype=dtype, requires_grad=True),
        "weight": torch.randn(width, H, generator=draw, dtype=dtype, requires_grad=True),
        "bias": torch.randn(width, generator=draw, dtype=dtype, requires_grad=True) if with_bias else None,
    }
    return {**made, "labels": torch.randint(0, width, (M,), generator=draw)}


def teacher(dtype: torch.dtype, width: int, share: float) -> Teacher:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=draw)[:width].sort().values if width < V else None
    return Teacher(
        torch.randn(M, H, generator=draw, dtype=dtype),
        torch.randn(V, H, generator=draw, dtype=dtype),
        torch.randn(V, generator=draw, dtype=dtype),
        ids,
        share,
    )


def gradients(loss: Tensor, made: dict[str, Any]) -> list[Tensor]:
    return list(torch.autograd.grad(3.0 * loss, [t for t in made.values() if t is not None and t.requires_grad]))


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("width", [V, 17])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_hits_and_gradients_equal_the_plain_loss(chunk: int, width: int, share: float | None, with_bias: bool):
    made = problem(torch.float64, width, with_bias)
    law = None if share is None else teacher(torch.float64, width, share)
    loss, hits = chunked_cross_entropy(**made, chunk=chunk, teacher=law)
    plain, plain_hits = plain_cross_entropy(**made, teacher=law)
    torch.testing.assert_close(loss, plain)
    assert hits == plain_hits
    for ours, theirs in zip(gradients(loss, made), gradients(plain, made), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("soft", ["lk", "lk-hybrid"])
@pytest.mark.parametrize("width", [V, 17])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_acceptance_losses_equal_the_plain_ones_by_value_and_gradient(soft: Soft, width: int, share: float):
    made = problem(torch.float64, width)
    law = replace(teacher(torch.float64, width, share), soft=soft)
    loss, _ = chunked_cross_entropy(**made, chunk=5, teacher=law)
    plain, _ = plain_cross_entropy(**made, teacher=law)
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients(loss, made), gradients(plain, made), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_lk_loss_is_zero_where_the_draft_has_the_targets_law():
    made = problem(torch.float64)
    same = Teacher(made["hidden"].detach(), made["weight"].detach(), made["bias"].detach(), None, 1.0, "lk")
    loss, _ = chunked_cross_entropy(**made, chunk=4, teacher=same)
    assert loss.abs() < 1e-9


@pytest.mark.parametrize("soft", ["ce"])
def test_a_teacher_cut_to_the_draft_vocabulary_gives_the_renormalised_law(soft: Soft):
    law = replace(teacher(torch.float64, 17, 1.0), soft=soft)
    assert law.bias is not None
    cut = replace(law, weight=law.weight[law.ids], bias=law.bias[law.ids])
    torch.testing.assert_close(cut.law(slice(0, 5)), law.law(slice(0, 5)))


def test_fp32_rows_equal_the_plain_loss_to_rounding():
    made = problem(torch.float32)
    loss, _ = chunked_cross_entropy(**made, chunk=4)
    plain, _ = plain_cross_entropy(**made)
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(loss, made), gradients(plain, made), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_bf16_rows_give_an_fp32_loss_and_fp32_gradients_of_an_fp32_layer():
    made = problem(torch.float32)
    rows = made["hidden"].detach().bfloat16().requires_grad_()
    loss, _ = chunked_cross_entropy(rows, made["weight"], made["bias"], made["labels"], 4)
    plain, _ = plain_cross_entropy(**made)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.0)
    grads = torch.autograd.grad(loss, [rows, made["weight"], made["bias"]])
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


def test_autocast_outside_does_not_change_the_dtype_of_the_product():
    made = problem(torch.float32)
    bare, _ = chunked_cross_entropy(**made, chunk=4)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = chunked_cross_entropy(**made, chunk=4)
    assert torch.equal(bare, inside)


def test_no_rows_give_zero_loss_and_zero_gradients():
    made = problem(torch.float32)
    empty = made["hidden"][:0]
    loss, hits = chunked_cross_entropy(empty, made["weight"], made["bias"], made["labels"][:0], 4)
    assert (loss.item(), hits.item()) == (0.0, 0)
    for grad in torch.autograd.grad(loss, [made["hidden"], made["weight"], made["bias"]]):
        assert not grad.any()


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any floating-point tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("share", [None, 0.5])
def test_no_tensor_is_larger_than_a_chunk_of_logits(share: float | None):
    rows, width, chunk = 500, 1000, 10
    hidden = torch.randn(rows, H, requires_grad=True)
    weight = torch.randn(width, H)
    law = None if share is None else Teacher(torch.randn(rows, H), weight, None, None, share)
    with LargestTensor() as largest:
        loss, _ = chunked_cross_entropy(hidden, weight, None, torch.randint(0, width, (rows,)), chunk, law)
        loss.backward()
    assert largest.numel == chunk * width
    with LargestTensor() as largest:
        plain_cross_entropy(hidden, weight, None, torch.randint(0, width, (rows,)))
    assert largest.numel == rows * width
