"""Packed layers compute what plain ones do, keep the bits they were given, and halve only what fp16 holds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.heads import (
    PackedLinear,
    PackedPart,
    can_halve,
    can_pack,
    cpu_multiplies_bf16,
    pack_linears,
    pack_sides,
)
from treedraft.heads.layer import DraftLayer, LayerShape
from treedraft.infer.formats import pick_dtype

HALVES = torch.backends.quantized.engine in ("x86", "fbgemm")
"""fp16 weights are multiplied on x86 alone."""


def born_in(dtype: torch.dtype, *sizes: int) -> Tensor:
    """fp32 weights as a checkpoint of another dtype gives them, some of them tiny, as training leaves them."""
    generator = torch.Generator().manual_seed(sum(sizes))
    weight = torch.randn(*sizes, generator=generator) / 8
    if dtype == torch.bfloat16:
        weight[::3, ::7] *= 1e-6
    return weight.to(dtype).float()


WEIGHTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 33])
@pytest.mark.parametrize("born", WEIGHTS)
def test_a_packed_layer_equals_the_plain_one(born: str, rows: int, bias: bool) -> None:
    assert can_pack(torch.float32, torch.device("cpu"))
    plain = nn.Linear(48, 80, bias=bias)
    plain.weight.data = born_in(WEIGHTS[born], 80, 48)
    model = nn.Sequential(nn.Sequential(plain), nn.SiLU())
    x = torch.randn(2, rows, 48)
    expected, weight = model(x), plain.weight.detach().clone()
    pack_linears(model)
    packed = model[0][0]  # type: ignore[index]
    assert isinstance(packed, PackedLinear)
    assert packed.halved == (HALVES and born != "fp32")
    assert not list(model.parameters())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.dense_weight(), weight)


@pytest.mark.skipif(not HALVES, reason="this CPU does not multiply by fp16 weights")
def test_what_halving_loses_is_below_the_rounding_of_fp32() -> None:
    weight, x = born_in(torch.bfloat16, 96, 512), torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    half, packed = weight.half().float(), PackedLinear(weight)
    assert packed.halved
    assert not torch.equal(half, weight)
    exact, held = (F.linear(x.double(), w.double()) for w in (weight, half))
    assert (held - exact).abs().max() < (F.linear(x, weight).double() - exact).abs().max() / 4
    torch.testing.assert_close(packed(x).double(), exact, atol=1e-4, rtol=1e-5)
    assert torch.equal(packed.dense_weight(), weight)


@pytest.mark.parametrize("number", [1.0 + 2**-12, 1e5, -1e5, float("inf"), float("nan")])
def test_one_number_that_fp16_does_not_hold_keeps_the_matrix_whole(number: float) -> None:
    weight = born_in(torch.bfloat16, 16, 32)
    assert can_halve(weight) == HALVES
    weight[5, 7] = number
    assert not can_halve(weight)
    assert torch.equal(PackedLinear(weight).dense_weight().nan_to_num(), weight.nan_to_num())


def test_a_row_of_numbers_that_are_all_tiny_keeps_the_matrix_whole() -> None:
    weight = born_in(torch.bfloat16, 16, 32)
    weight[3] *= 1e-6
    assert not can_halve(weight)


def test_a_row_of_zeros_is_held() -> None:
    assert can_halve(torch.zeros(4, 8)) == HALVES


@pytest.mark.parametrize("born", WEIGHTS)
def test_layers_packed_side_by_side_give_what_each_gives_alone(born: str) -> None:
    shape = LayerShape(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    layer: Any = DraftLayer(shape, 64)
    for weight in layer.parameters():
        if weight.dim() == 2:
            weight.data = born_in(WEIGHTS[born], *weight.shape)
    x, state, positions = torch.randn(2, 5, 64), torch.randn(2, 5, 32), torch.arange(10).view(2, 5)
    apart = (layer.queries(x, positions), *layer.keys_values(x, positions), layer.mlp(state))
    pack_sides([layer])
    pack_linears(layer)
    assert isinstance(layer.self_attn.q_proj, PackedPart)
    assert layer.self_attn.q_proj.whole is layer.self_attn.v_proj.whole
    assert layer.mlp.gate_proj.whole is layer.mlp.up_proj.whole
    for together, alone in zip((*layer.read(x, positions), layer.mlp(state)), apart, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has", ["nothing", "avx512_bf16", "amx_tile"])
def test_bf16_is_chosen_only_where_the_processor_multiplies_it_itself(
    monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    """oneDNN claims bf16 on every processor with AVX-512, and widens each number."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has == "avx512_bf16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has == "amx_tile")
    cpu = torch.device("cpu")
    assert cpu_multiplies_bf16() == can_pack(torch.bfloat16, cpu) == (has != "nothing")
    assert pick_dtype("auto", cpu) == (torch.float32 if has == "nothing" else torch.bfloat16)
