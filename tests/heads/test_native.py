"""The compiled part: its products and decoder layers equal torch's, a row's bits depend on that row alone, and where it
cannot be had that is said."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treedraft.heads import PackedLinear, native
from treedraft.heads.layer import DraftLayer, LayerShape, Sight, pack_head
from treedraft.heads.linear import in_panels, out_of_panels

compiled = pytest.mark.usefixtures("compiled_part")
SHAPE = LayerShape(48, 80, 6, 2, 24)


def numbers(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@compiled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (37, 100), (64, 16), (130, 33)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8"])
def test_a_product_equals_torchs_for_any_number_of_rows(kind: str, inner: int, outputs: int, bias: bool) -> None:
    weight, scale = numbers(outputs, inner), None
    if kind in ("fp16", "bf16"):
        weight = weight.half() if kind == "fp16" else weight.bfloat16()
    if kind == "int8":
        scale = weight.abs().amax(1) / 127
        weight = (weight / scale[:, None]).round().to(torch.int8)
    added = numbers(outputs) if bias else None
    assert torch.equal(out_of_panels(in_panels(weight))[:outputs], weight)
    plain = weight.float() if scale is None else weight.float() * scale[:, None]
    for rows in (*range(1, 20), 96, 97, 200):
        x = numbers(rows, inner)
        found = torch.ops.treedraft.linear(x, in_panels(weight), scale, added, outputs)
        torch.testing.assert_close(found, F.linear(x, plain, added), atol=1e-4, rtol=1e-5)


@compiled
@pytest.mark.parametrize("born", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_alone_and_beside_any_others(born: torch.dtype) -> None:
    layer = PackedLinear(numbers(70, 300).to(born).float(), numbers(70), compiled=True)
    x = numbers(120, 300)
    whole = layer(x)
    for rows in (*range(1, 34), 100, 119):
        for start in (0, 1, 120 - rows):
            assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows]), rows
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(threads)


@compiled
def test_shapes_that_do_not_fit_are_refused() -> None:
    panels = in_panels(numbers(40, 8))
    with pytest.raises(RuntimeError, match="rows of 9 numbers"):
        torch.ops.treedraft.linear(numbers(2, 9), panels, None, None, 40)
    with pytest.raises(RuntimeError, match="panels of shape"):
        torch.ops.treedraft.linear(numbers(2, 8), panels, None, None, 400)
    with pytest.raises(RuntimeError, match="one number for each output"):
        torch.ops.treedraft.linear(numbers(2, 8), panels, None, numbers(41), 40)


@compiled
@pytest.mark.parametrize("size", [1, 7, 16, 1000, 49_152])
def test_the_largest_is_torchs_ties_going_to_the_first_and_nan_showing(size: int) -> None:
    x = (numbers(2, 3, size) * 4).round()  # many ties
    values, places = torch.ops.treedraft.largest(x)
    assert torch.equal(values, x.amax(-1))
    assert torch.equal(places, (x == values[..., None]).int().argmax(-1))
    for wrong in (float("nan"), float("inf")):
        for place in {0, size // 2, size - 1}:
            broken = x.clone()
            broken[1, 2, place] = wrong
            values, _ = torch.ops.treedraft.largest(broken)
            assert torch.isfinite(values).tolist() == [[True, True, True], [True, True, False]]


def draft_layer(packed: bool) -> DraftLayer:
    torch.manual_seed(3)
    layer = DraftLayer(SHAPE, 96)
    torch.nn.init.normal_(layer.post_attention_layernorm.weight)
    if packed:
        pack_head(layer, torch.float32, torch.device("cpu"))
    return layer.eval().requires_grad_(False)


@compiled
def test_a_draft_layer_over_any_slots_is_the_same_compiled_and_not() -> None:
    layers = {packed: draft_layer(packed) for packed in (False, True)}
    assert layers[True].compiled
    assert not layers[False].compiled
    generator = torch.Generator().manual_seed(0)
    for new, drafted in ((1, 1), (3, 3), (4, 9)):
        ancestors = torch.rand(2, new, drafted, generator=generator) < 0.5
        ancestors[:, torch.arange(new), torch.arange(drafted - new, drafted)] = True
        sight = Sight(torch.tensor([5, 0]), torch.tensor([7, 3]), ancestors)
        x, residual, positions = numbers(2, new, 96), numbers(2, new, 48), torch.tensor([[9], [4]]).expand(-1, new)
        held = numbers(2, 2, 2, 20, 24)
        found = {}
        for packed, layer in layers.items():
            keys, values = held.clone()
            found[packed] = layer.over(x, residual, positions, keys, values, sight), keys, values
        for ours, theirs in zip(found[True], found[False], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        for row, start in enumerate((7, 3)):
            written = (found[True][1][row] != held[0, row]).any(-1).any(0).nonzero()[:, 0].tolist()
            assert written == list(range(start + drafted - new, start + drafted))


@compiled
def test_a_cache_that_is_too_short_is_refused_and_not_written_beyond() -> None:
    layer = draft_layer(True)
    sight = Sight(torch.tensor([4]), torch.tensor([4]), torch.ones(1, 2, 2, dtype=torch.bool))
    keys, values = torch.zeros(2, 1, 2, 5, 24)
    with pytest.raises(RuntimeError, match="6 slots are needed, got 5"):
        layer.over(numbers(1, 2, 96), numbers(1, 2, 48), torch.tensor([[4, 5]]), keys, values, sight)


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "loaded", lambda: False)
    monkeypatch.setattr(native, "_capability", lambda: "AVX2")
    assert not native.is_built()
    with pytest.raises(native.NativeError, match=r"no C\+\+ compiler"):
        native.load()
    with pytest.raises(native.NativeError, match="not compiled on this machine yet"):
        native.load(build=False)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'decoder.cpp:1: fatal error: it is Monday' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "loaded", lambda: False)
    monkeypatch.setattr(native, "_capability", lambda: "AVX2")
    with pytest.raises(native.NativeError, match="it is Monday"):
        native.load()
    assert [path.name for path in (tmp_path / "cache" / "native").iterdir()] == ["lock"]


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda: False)
    monkeypatch.setattr(native, "_capability", lambda: "SVE256")
    assert not native.is_built()
    with pytest.raises(native.NativeError, match="SVE256"):
        native.load()


@compiled
@pytest.mark.parametrize("size", [1, 40, 576])
def test_the_norm_is_torchs(size: int) -> None:
    x, weight = numbers(2, 3, size), numbers(size)
    expected = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
    torch.testing.assert_close(torch.ops.treedraft.rms_norm(x, weight, 1e-5), expected)
    torch.testing.assert_close(torch.ops.treedraft.rms_norm(x.transpose(0, 1), weight, 1e-5), expected.transpose(0, 1))
    with pytest.raises(RuntimeError, match="a weight of their length"):
        torch.ops.treedraft.rms_norm(x, numbers(size + 1), 1e-5)
