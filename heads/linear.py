"""Linear layers with weights packed once: what a CPU needs for a few rows at a time.

An ordinary ``F.linear`` lays the weight out anew for every product of 2 to 32 rows. Packed once, a forward over 8
nodes costs little more than one over a single node, which is what makes a small tree pay on a CPU.

A product of few rows waits for its weights to come from memory. Models are published in bf16 or fp16: a matrix of fp32
that bf16 or fp16 holds is kept in that, half the bytes, and multiplied in fp32; one that was quantised, in 8 bits. The
compiled part (native/) multiplies any of them, and gives a row the same bits alone and beside others. Without it,
torch's FBGEMM multiplies fp16 (which holds bf16 weights too, but for numbers so small that they do not count), and
oneDNN everything else.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import native

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
"""Layers of one input in a decoder layer of Llama's family, and in a head's."""


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU, equal to ``F.linear`` to rounding. Holds no Parameter.

    compiled: whether fp32 is multiplied by the compiled part; None is wherever this process has it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, compiled: bool | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        self._bias = None if bias is None else bias.detach().contiguous()
        self.compiled = weight.dtype == torch.float32 and (native.loaded() if compiled is None else compiled)
        """Whether the compiled part multiplies it."""
        self._scale: Tensor | None = None
        quantized = int8_parts(weight) if self.compiled else None
        if quantized is not None:
            weight, self._scale = quantized
        exact = self.compiled and self._scale is None and torch.equal(weight.bfloat16().float(), weight)
        self.halved = self._scale is None and (exact or can_halve(weight, self.compiled))
        """Whether the weight is kept in 16 bits."""
        self._lost: Any = None
        if self.halved and not exact:
            half = weight.half().float()
            self._lost = (half != weight).nonzero(as_tuple=True)
            self._true = weight[self._lost]
            weight = half
        if self.compiled:
            kept = torch.bfloat16 if exact else torch.float16 if self.halved else weight.dtype
            self._packed: Any = in_panels(weight.to(kept))
        elif self.halved:
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, self._bias)
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.compiled:
            return torch.ops.treedraft.linear(x, self._packed, self._scale, self._bias, self.out_features)
        if self.halved:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def dense_weight(self) -> Tensor:
        """The weight [out, in] in its ordinary layout, the bits that were given."""
        if self.compiled:
            weight = out_of_panels(self._packed)[: self.out_features].float()
            weight = weight if self._scale is None else weight * self._scale[:, None]
        elif self.halved:
            weight = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        else:
            weight = self._packed.to_dense()
        return weight if self._lost is None else weight.index_put_(self._lost, self._true)

    def add_to(self, layers: Any) -> None:
        """Hands itself to the compiled part's stack of layers, as the next linear layer."""
        assert self.compiled or not self.halved
        layers.add_linear(self._packed, self._scale, self._bias, self.out_features if self.compiled else 0)

    @property
    def weight_bytes(self) -> int:
        """What the packed weight holds."""
        scales = 0 if self._scale is None else self._scale.nbytes
        return self.in_features * self.out_features * (2 if self.halved else self._packed.element_size()) + scales

    @property
    def bias(self) -> Tensor | None:
        return self._bias


def int8_parts(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """q [N, K] int8 and s [N] of an fp32 weight [N, K] that is q * s to the bit, its scales being numbers of bf16 and
    127 the largest |q| of each row that is not zero; None for any other.

    >>> q, s = int8_parts(torch.tensor([[127.0, -3.0], [0.0, 0.0], [0.5, -63.5]]))
    >>> q.tolist(), s.tolist(), int8_parts(torch.tensor([[0.3, 0.1]]))
    ([[127, -3], [0, 0], [1, -127]], [1.0, 1.0, 0.5], None)
    """
    if weight.dtype != torch.float32:
        return None
    if len(weight) > 1 and int8_parts(weight[:1]) is None:
        return None  # one row tells of nearly any other weight, without reading all of it at each load
    largest = weight.abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    if not torch.equal(scale.bfloat16().float(), scale):
        return None
    numbers = (weight / scale[:, None]).round().to(torch.int8)
    same = torch.equal((numbers.float() * scale[:, None]).view(torch.int32), weight.contiguous().view(torch.int32))
    return (numbers, scale) if same else None


def in_panels(weight: Tensor) -> Tensor:
    """[N, K] as panels [N / P, K, P] of P outputs each (native/matrix.h), the last one filled up with zeros.

    The outputs of a panel's two vectors lie in turns in bf16, one after the other in other dtypes.
    """
    width = torch.ops.treedraft.panel()
    outputs, inner = weight.shape
    filled = nn.functional.pad(weight, (0, 0, 0, -outputs % width)).view(-1, 2, width // 2, inner)
    in_turns = weight.dtype == torch.bfloat16
    order = (0, 3, 2, 1) if in_turns else (0, 3, 1, 2)
    return filled.permute(order).flatten(2).contiguous()


def out_of_panels(panels: Tensor) -> Tensor:
    """What ``in_panels`` packed, zeros at the end included."""
    in_turns = panels.dtype == torch.bfloat16
    parts = panels.unflatten(2, (-1, 2)).transpose(2, 3) if in_turns else panels.unflatten(2, (2, -1))
    return parts.permute(0, 2, 3, 1).flatten(0, 2)


class PackedPart(nn.Module):
    """The outputs ``start`` to ``end`` of a PackedLinear that several layers of one input share.

    A caller that knows the others multiplies by ``whole`` once; on its own a part computes the whole and keeps its own.
    """

    def __init__(self, whole: PackedLinear, start: int, end: int) -> None:
        super().__init__()
        self._whole = (whole,)  # a tuple: the shared layer is no module of any one part
        self._range = slice(start, end)

    @property
    def whole(self) -> PackedLinear:
        return self._whole[0]

    @property
    def width(self) -> int:
        """Its own outputs."""
        return self._range.stop - self._range.start

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., end - start]."""
        return self.whole(x)[..., self._range]

    def dense_weight(self, whole: Tensor | None = None) -> Tensor:
        """Its rows of the unpacked whole, which a caller may have at hand."""
        return (self.whole.dense_weight() if whole is None else whole)[self._range]

    @property
    def bias(self) -> Tensor | None:
        return None if self.whole.bias is None else self.whole.bias[self._range]


def pack_together(linears: Sequence[nn.Linear], compiled: bool | None = None) -> list[PackedPart]:
    """Linear layers of one input, all with biases or all without, packed as one; a part for each, in their order."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    weight = torch.cat([linear.weight for linear in linears])
    whole = PackedLinear(weight, torch.cat(biases) if biases else None, compiled)
    ends = torch.tensor([linear.out_features for linear in linears]).cumsum(0).tolist()
    return [PackedPart(whole, end - linear.out_features, end) for linear, end in zip(linears, ends, strict=True)]


def pack_sides(layers: Iterable[Any], compiled: bool | None = None) -> None:
    """Packs the linear layers that stand side by side in decoder layers together, in place.

    Each has ``self_attn`` and ``mlp`` with the names of Llama's family; what is no plain ``nn.Linear`` is left alone.
    """
    for layer in layers:
        for module, names in ((layer.self_attn, QKV), (layer.mlp, GATE_UP)):
            linears = [getattr(module, name) for name in names]
            if all(type(linear) is nn.Linear for linear in linears):
                for name, part in zip(names, pack_together(linears, compiled), strict=True):
                    setattr(module, name, part)


def can_halve(weight: Tensor, compiled: bool | None = None) -> bool:
    """Whether this CPU multiplies fp32 by fp16 weights, and fp16 is as good as fp32 for these [out, in].

    compiled: as in PackedLinear.

    What is lost of a row, at most 2^-25 of a small number, must be below the rounding of fp32 itself: 2^-24 of the
    row's sum of magnitudes.

    >>> can_halve(torch.tensor([[1.0 + 2**-12]])), can_halve(torch.tensor([[1e5]]))
    (False, False)
    """
    compiled = native.loaded() if compiled is None else compiled
    if weight.dtype != torch.float32 or not (compiled or torch.backends.quantized.engine in ("x86", "fbgemm")):
        return False
    lost = (weight.half().float() - weight).abs().sum(1)  # infinite for numbers out of range
    return bool((lost <= 2**-24 * weight.abs().sum(1)).all())


def side_by_side(module: nn.Module, names: Sequence[str], x: Tensor) -> Sequence[Tensor]:
    """What the module's layers of these names make of the same rows: one product where they are packed together."""
    layers: list[Any] = [getattr(module, name) for name in names]
    if not all(isinstance(layer, PackedPart) for layer in layers):
        return [layer(x) for layer in layers]
    return layers[0].whole(x).split([layer.width for layer in layers], -1)


def stack_layers(layers: Iterable[tuple[Any, ...]]) -> Any | None:
    """The compiled part's stack of decoder layers (native/decoder.cpp), or None where it cannot run them.

    Of each: attention and MLP modules with the names of Llama's family, and the other arguments of ``add_layer``.
    """
    if not native.loaded():
        return None
    stack = torch.classes.treedraft.Layers()
    for attention, mlp, *rest in layers:
        linears = [attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj]
        sides = [getattr(attention, name) for name in QKV], [getattr(mlp, name) for name in GATE_UP]
        if not all(isinstance(part, PackedPart) and part.whole is side[0].whole for side in sides for part in side):
            return None
        wholes = [linear.whole if isinstance(linear, PackedPart) else linear for linear in linears]
        if not all(isinstance(whole, PackedLinear) and (whole.compiled or not whole.halved) for whole in wholes):
            return None
        for whole in wholes:
            whole.add_to(stack)
        stack.add_layer(*rest)
    return stack


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU multiplies packed weights of ``dtype``: fp32 always, bf16 where the processor knows it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_multiplies_bf16())


def cpu_multiplies_bf16() -> bool:
    """Whether the processor has instructions for products of bf16.

    oneDNN says that it supports bf16 on any AVX-512 processor, where it widens every number first: a forward over one
    token then takes several times as long as in fp32.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(module: nn.Module, compiled: bool | None = None) -> None:
    """Replaces every ``nn.Linear`` below ``module`` (subclasses excepted) by a PackedLinear, one after the other."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias, compiled))
        else:
            pack_linears(child, compiled)
