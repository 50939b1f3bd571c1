"""An int8 target is an ordinary model whose weights are whole multiples of a scale, and is kept in 8 bits."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit import MODELS, any_head, build, compare, target, tokenizer
from treedraft.heads import PackedLinear, int8_parts
from treedraft.infer import Sampling, Target, TargetError, complete, load_model, load_target
from treedraft.infer.quantize import quantize_int8, rounded
from treedraft.tree import DynamicTree

PROMPTS = [[1, 5, 30, 40], [20] * 17, [50, 51]]
compiled = pytest.mark.usefixtures("compiled_part")


def weights(rows: int, inner: int, scale: float) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)) * scale


@pytest.mark.parametrize("scale", [1e-30, 3e-4, 1.0, 7e5])
def test_rounding_is_to_the_nearest_of_255_steps_and_can_be_read_back(scale: float) -> None:
    weight = weights(300, 70, scale)
    weight[17] = 0.0
    made = rounded(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((made - weight).abs() <= 0.76 * step).all()  # half a step, and what the scale's own rounding moves
    assert 0.24 < ((made - weight).abs() / step).nan_to_num(0.25).mean() < 0.26
    found = int8_parts(made)
    assert found is not None
    numbers, scales = found
    assert torch.equal(numbers * scales[:, None], made)
    assert numbers.abs().amax(1).tolist() == [0 if row == 17 else 127 for row in range(300)]
    assert torch.equal(rounded(made), made)


def test_weights_that_were_not_rounded_are_not_taken_for_it() -> None:
    weight = weights(30, 70, 1.0)
    assert int8_parts(weight) is None
    assert int8_parts(weight.bfloat16().float()) is None
    made = rounded(weight)
    made[3, 5] += made[3].abs().max() / 300
    assert int8_parts(made) is None
    assert int8_parts(made.bfloat16()) is None
    signed = rounded(weight)
    signed[3, 5] = -0.0  # 8 bits would lose its sign
    assert int8_parts(signed) is None


@compiled
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_packed_model_computes_what_the_rounded_hugging_face_model_does(name: str) -> None:
    model = build(MODELS[name]())
    quantize_int8(model)
    packed = Target(deepcopy(model), pack=True)
    layers = [m for m in packed.model.modules() if isinstance(m, PackedLinear)]
    assert layers
    assert all(layer._packed.dtype == torch.int8 for layer in layers)
    assert packed.number_format == "int8"
    assert packed.fingerprint() == Target(deepcopy(model)).fingerprint()
    for prompt in PROMPTS:
        ids = torch.tensor([[i % packed.vocab_size for i in prompt]])
        expected = model(ids).logits
        with torch.inference_mode():
            cache = packed.new_cache(1, 40)
            seen = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            found = packed.forward(ids, torch.arange(ids.shape[1])[None], seen, cache).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_drafting_never_changes_the_text_of_the_quantised_target(kind: str) -> None:
    model = target("llama_gqa")
    quantize_int8(model)
    quantised = Target(model, tokenizer(), pack=True)
    head = any_head(quantised, kind).for_decoding(torch.float32)
    for law in (Sampling(), Sampling(temperature=1.0)):
        asked: dict[str, Any] = {"sampling": law, "seed": 2, "max_new_tokens": 20, "batch_size": 3}
        plain = complete(quantised, PROMPTS, **asked)
        drafted = complete(quantised, PROMPTS, head=head, tree=DynamicTree(7, 3, 3), **asked)
        for prompt, expected, found in zip(PROMPTS, plain, drafted, strict=True):
            result = compare(quantised, prompt, expected.ids, found.ids, law, found.seed)
            assert result.equal or result.near_tie is not None


def test_it_is_asked_for_as_a_dtype_and_says_so(tmp_path: Path) -> None:
    target("llama_gqa").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="int8")
    assert (loaded.number_format, loaded.dtype) == ("int8", torch.float32)
    assert load_target(str(tmp_path), dtype="fp32").number_format == "fp32"
    model = load_model(str(tmp_path), "int8")[0]
    assert all(int8_parts(m.weight) is not None for m in model.modules() if isinstance(m, nn.Linear))
    with pytest.raises(TargetError, match="int8 is for CPUs, the target is on meta"):
        load_model(str(tmp_path), "int8", "meta")
    with pytest.raises(TargetError, match="bf16, fp16 or int8, got 'int4'"):
        load_model(str(tmp_path), "int4")
