"""The target: any Hugging Face causal language model behind one ``forward(tokens, positions, mask, cache)``.

B batch rows   T text positions   N tree nodes   n new positions of a row   k rows of logits that are read
S cache slots   L layers   F feature width   V vocabulary

The model's public forward does all the work: an own cache, explicit positions, a 4-D additive mask (one for each kind
of layer), hidden states by hooks on the tapped layers, logits only where they are read. Nothing is kept on the model or
on the target between requests, so two generators can interleave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..heads import Output, PackedLinear, PackedPart, TargetFacts, TargetLayers, can_pack, pack_linears, pack_sides
from .arguments import Arguments, RecordingCache
from .blocks import Blocks, blocks_of, read_logits, run_layers
from .blocks import forward as blocks_forward
from .cache import KVCache, LayerSizes
from .capability import TargetError, check_config
from .compiled import Compiled, compiled_of
from .fingerprint import facts_of, model_hash
from .formats import INT8, dtype_name
from .masks import additive, causal_ancestors, visible_slots
from .quantize import is_int8
from .taps import Tapped, tapped


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, k, V] of the positions asked for; features: [B, n, F] of all of them (F = 0 if none is tapped)."""

    logits: Tensor
    features: Tensor


class Target:
    """A frozen causal language model that verifies trees.

    ``pack`` packs the linear layers of a CPU model in place (see heads/linear.py), which leaves it fit for inference
    alone; ``compiled`` runs packed layers in the compiled part, None wherever this process has it (heads/native).
    Models of Llama's family run through their blocks written out (blocks.py), compared here with the model's own
    forward, which any other model uses; ``own_blocks=False`` asks for it. ``adapter_hash`` names the adapter that was
    merged into the model, if one was. Raises TargetError, naming the cause, for models whose attention cannot follow a
    tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str = "",
        pack: bool = False,
        own_blocks: bool = True,
        compiled: bool | None = None,
        adapter_hash: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.dtype, self.device = model.dtype, model.device
        self.num_layers: int = self.config.num_hidden_layers
        self._layers = _decoder_layers(model, self.num_layers)
        self._arguments = Arguments.of(model)
        self._output = _output_layer(model)
        weight = self._output.weight
        self.facts: TargetFacts = facts_of(model, tokenizer, weight, self.num_layers, name, adapter_hash)
        self.context: int = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        self.end_ids = _end_ids(model, tokenizer)
        self.sliding_window = check_config(self.config, self.facts.name)
        self._blocks: Blocks | None = None
        self._compiled: Compiled | None = None
        self.cache_layers = self._probe(blocks_of(model) if own_blocks else None)
        if pack and can_pack(self.dtype, self.device):
            if self._blocks is not None:
                pack_sides(self._layers, compiled)
            pack_linears(model, compiled)
            if self._blocks is not None and compiled is not False:
                self._compiled = compiled_of(self._blocks, self.sliding_window)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the model's output layer: it may exceed the tokenizer's vocabulary."""
        return self.facts.vocab_size

    @property
    def forward_name(self) -> str:
        """What computes a forward: ``compiled``, ``own blocks``, or ``transformers`` for families not written out."""
        if self._compiled is not None:
            return "compiled"
        return "transformers" if self._blocks is None else "own blocks"

    @property
    def number_format(self) -> str:
        """The ``dtype`` that ``load_target`` takes for it: int8 for weights that were rounded to 8 bits."""
        return INT8 if is_int8(self._output.weight) else dtype_name(self.dtype)

    @property
    def cache_argument(self) -> str:
        """What this version of the model calls its cache in ``forward``."""
        return self._arguments.cache

    def new_cache(self, batch: int, slots: int, places: int = 0) -> KVCache:
        return KVCache(self.cache_layers, batch, slots, self.dtype, self.device, places)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        ancestors: Tensor,
        cache: KVCache,
        taps: Sequence[int] = (),
        keep: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over n new positions of every row; the cache grows from T to T + n until it is committed.

        tokens, positions: [B, n]; ancestors: [B, n, n] bool, which of the new positions each one sees besides the
        cache; keep: [B, k] the positions whose logits are read, all n if None.
        """
        slots = cache.begin(tokens.shape[1])
        rotary = positions.clamp(max=self.context - 1)  # beyond the context stand only nodes that are never kept
        if self._compiled is not None:
            states = self._compiled.run_layers(tokens, positions, rotary, ancestors, cache, taps)
            logits = read_logits(self._compiled.blocks, states[self.num_layers], keep)
            return TargetOutput(logits, Tapped(states).features(taps, tokens, self.dtype))
        mask = self._mask(visible_slots(cache.lengths, ancestors, slots), positions, cache)
        if self._blocks is not None:
            logits, states = blocks_forward(self._blocks, tokens, rotary, mask, cache, taps, keep)
            return TargetOutput(logits, Tapped(states).features(taps, tokens, self.dtype))
        arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": rotary, "use_cache": True}
        arguments[self._arguments.cache] = cache
        with tapped(self.model.base_model, self._layers, taps) as states:
            logits = self._arguments.logits(self.model, tokens, keep, arguments)
        return TargetOutput(logits, states.features(taps, tokens, self.dtype))

    @torch.no_grad()
    def features(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Tensor:
        """Features [B, T, F] of texts [B, T] padded on the right to any value: what heads are trained on.

        Raises TargetError naming layer, dtype and rows if a real position's features are not finite.
        """
        return self._features(tokens, lengths, taps, self._blocks)

    def features_with_gradient(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Tensor:
        """``features`` that lead back to what can be trained inside the model: an adapter that it carries."""
        return self._features(tokens, lengths, taps, None)

    def _features(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int], blocks: Blocks | None) -> Tensor:
        batch, width = tokens.shape
        tokens = tokens.to(self.device)
        lengths = lengths.to(self.device)
        positions = torch.arange(width, device=self.device).expand(batch, -1)
        causal = causal_ancestors(torch.full_like(lengths, width), width)
        mask = self._mask(causal, positions, None)
        if blocks is not None:
            states = Tapped(run_layers(blocks, tokens, positions, mask, None, taps))
        else:
            body: Any = self.model.base_model
            with tapped(body, self._layers, taps) as states:
                body(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        features = states.features(taps, tokens, self.dtype)
        real = positions < lengths[:, None]
        broken = (~torch.isfinite(features).all(-1) & real).any(-1)
        if broken.any():
            raise TargetError(
                f"non-finite features of the target in {str(self.dtype).removeprefix('torch.')} "
                f"(tapped layers {list(taps)} of {self.num_layers}) in batch rows {broken.nonzero()[:, 0].tolist()}: "
                "an activation overflows; run the target in fp32 or bf16"
            )
        return features

    def output_layer(self) -> Output:
        """The effective output embedding [V, H] (the input's where they are tied) and bias, without gradient."""
        return self._output

    def layers(self) -> TargetLayers:
        """What heads borrow: output layer and input embedding, without gradient."""
        embedding: Any = self.model.get_input_embeddings()
        return TargetLayers(self._output, embedding.weight.detach())

    def weights_read(self) -> tuple[int, int]:
        """What a forward reads of the weights, in bytes and in numbers: of an embedding that is no output, nothing."""
        embedding: Any = self.model.get_input_embeddings()
        output: Any = self.model.get_output_embeddings()
        rows_alone = embedding.weight is not getattr(output, "weight", None)
        whole: list[Tensor] = [w for w in self.model.parameters() if not (rows_alone and w is embedding.weight)]
        modules = self.model.modules()
        packed = {
            m.whole if isinstance(m, PackedPart) else m for m in modules if isinstance(m, PackedLinear | PackedPart)
        }
        whole += [layer.bias for layer in packed if layer.bias is not None]
        numbers = sum(w.numel() for w in whole) + sum(layer.in_features * layer.out_features for layer in packed)
        return sum(w.nbytes for w in whole) + sum(layer.weight_bytes for layer in packed), numbers

    def fingerprint(self) -> str:
        """A hash over the bytes of all weights, packed ones unpacked: equal before and after training."""
        return model_hash(self.model)

    def _mask(self, seen: Tensor, positions: Tensor, cache: KVCache | None) -> Any:
        """The additive mask [B, 1, n, S], or a dict of masks where layers of two kinds are mixed."""
        if self.sliding_window is None:
            return additive(seen, self.dtype)
        slot_positions = positions if cache is None else cache.slot_positions(positions, seen.shape[-1])
        near = positions[:, :, None] - slot_positions[:, None, :] < self.sliding_window.size
        windowed = additive(seen & near, self.dtype)
        if not self.sliding_window.mixed:
            return windowed
        return {"full_attention": additive(seen, self.dtype), "sliding_attention": windowed}

    @torch.inference_mode()
    def _probe(self, blocks: Blocks | None) -> dict[int, LayerSizes]:
        """Asks the model, once, what its layers store and whether its attention follows a tree.

        Three tokens, the third a sibling of the second, must give the logits of their own paths. Takes ``blocks`` for
        the forward if they give the same logits.
        """
        recorder = RecordingCache()
        first = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            arguments: dict[str, Any] = {"use_cache": True, self._arguments.cache: recorder}
            self.model(first, **arguments)
            sizes = recorder.sizes
            tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
            tokens = torch.tensor([[0, 1, 2]], device=self.device) % self.vocab_size
            positions = torch.tensor([[0, 1, 1]], device=self.device)

            def logits(nodes: slice) -> Tensor:
                n = len(range(3)[nodes])
                cache = KVCache(sizes, 1, n, self.dtype, self.device)
                return self.forward(tokens[:, nodes], positions[:, nodes], tree[:, nodes, nodes], cache).logits[0]

            whole, alone = logits(slice(None)), logits(slice(None, None, 2))
        except (TypeError, ValueError, NotImplementedError, RuntimeError, KeyError) as error:
            raise TargetError(f"{self.facts.name}: the model's forward does not take a tree: {error}") from error
        scale = 1e-3 if self.dtype == torch.float32 else 5e-2
        gap, limit = (whole[2] - alone[1]).abs().max().item(), scale * max(alone.abs().max().item(), 1.0)
        if gap > limit:  # NaN passes: overflow is reported by the run that meets it
            raise TargetError(
                f"{self.facts.name}: the attention does not follow a tree of candidates (logits of a branch are off by "
                f"{gap:.3g}, at most {limit:.3g} expected); it takes positions or masks from elsewhere"
            )
        self._blocks = blocks
        if blocks is not None and not (logits(slice(None)) - whole).abs().max().item() <= limit:
            self._blocks = None  # a model of the family that differs in something
        return sizes


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TargetError(f"{type(model).__name__}: found no list of {count} decoder layers to tap")


def _output_layer(model: PreTrainedModel) -> Output:
    layer: Any = model.get_output_embeddings()
    if isinstance(layer, PackedLinear):
        raise TargetError("this model was packed by another Target already; load it anew")
    if layer is None or getattr(layer, "weight", None) is None or layer.weight.is_meta or layer.weight.numel() == 0:
        raise TargetError(f"{type(model).__name__}: the output embedding is missing or not materialised")
    bias = getattr(layer, "bias", None)
    return Output(layer.weight.detach(), None if bias is None else bias.detach())


def _end_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens that Hugging Face ``generate`` stops at, else the tokenizer's."""
    generation: Any = model.generation_config
    ends = generation.eos_token_id if generation is not None else None
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)
