"""The target: any Hugging Face causal language model behind one ``forward(tokens, positions, mask, cache)``.

B batch rows   T text positions   N tree nodes   n new positions of a row   k rows of logits that are read
S cache slots   L layers   F feature width   V vocabulary

The model's public forward does all the work: an own cache, explicit positions, a 4-D additive mask (one for each kind
of layer), hidden states by hooks on the tapped layers, logits only where they are read. Nothing is kept on the model or
on the target between requests, so two generators can interleave.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..heads import Output, PackedLinear, TargetFacts, can_pack, pack_linears
from .cache import KVCache, LayerSizes
from .fingerprint import facts_of, model_hash
from .masks import additive, causal_ancestors, visible_slots


class TargetError(ValueError):
    """A model that cannot be a target, or a run that it cannot make: the message names what and why."""


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, k, V] of the positions asked for; features: [B, n, F] of all of them (F = 0 if none is tapped)."""

    logits: Tensor
    features: Tensor


class Target:
    """A frozen causal language model that verifies trees.

    ``pack`` packs the linear layers of a CPU model in place (see heads/linear.py), which leaves it fit for inference
    alone. Raises TargetError, naming the cause, for models whose attention cannot follow a tree.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", pack: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.dtype, self.device = model.dtype, model.device
        self.num_layers: int = self.config.num_hidden_layers
        self._layers = _decoder_layers(model, self.num_layers)
        self._arguments = _Arguments.of(model)
        self._output = _output_layer(model)
        self.facts: TargetFacts = facts_of(model, tokenizer, self._output.weight, self.num_layers, name)
        self.context: int = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        self.end_ids = _end_ids(model, tokenizer)
        self.sliding_window = _check_config(self.config, self.facts.name)
        if pack and can_pack(self.dtype, self.device):
            pack_linears(model)
        self.cache_layers = self._probe()

    @property
    def vocab_size(self) -> int:
        """V, the rows of the model's output layer: it may exceed the tokenizer's vocabulary."""
        return self.facts.vocab_size

    @property
    def cache_argument(self) -> str:
        """What this version of the model calls its cache in ``forward``."""
        return self._arguments.cache

    def new_cache(self, batch: int, slots: int) -> KVCache:
        return KVCache(self.cache_layers, batch, slots, self.dtype, self.device)

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
        mask = self._mask(visible_slots(cache.lengths, ancestors, slots), positions, cache, ancestors)
        positions = positions.clamp(max=self.context - 1)  # beyond the context stand only nodes that are never kept
        arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        arguments[self._arguments.cache] = cache
        with self._tapped(taps) as tapped:
            logits = self._arguments.logits(self.model, tokens, keep, arguments)
        return TargetOutput(logits, tapped.features(taps, tokens, self.dtype))

    @torch.no_grad()
    def features(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Tensor:
        """Features [B, T, F] of texts [B, T] padded on the right to any value: what heads are trained on.

        Raises TargetError naming layer, dtype and rows if a real position's features are not finite.
        """
        batch, width = tokens.shape
        tokens = tokens.to(self.device)
        lengths = lengths.to(self.device)
        positions = torch.arange(width, device=self.device).expand(batch, -1)
        causal = causal_ancestors(torch.full_like(lengths, width), width)
        mask = self._mask(causal, positions, None, causal)
        body: Any = self.model.base_model
        with self._tapped(taps) as tapped:
            body(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        features = tapped.features(taps, tokens, self.dtype)
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

    def fingerprint(self) -> str:
        """A hash over the bytes of all weights, packed ones unpacked: equal before and after training."""
        return model_hash(self.model)

    def _mask(self, seen: Tensor, positions: Tensor, cache: KVCache | None, ancestors: Tensor) -> Any:
        """The additive mask [B, 1, n, S], or a dict of masks where layers of two kinds are mixed."""
        full = additive(seen, self.dtype)
        if self.sliding_window is None:
            return full
        slot_positions = positions if cache is None else cache.slot_positions(positions, seen.shape[-1])
        near = positions[:, :, None] - slot_positions[:, None, :] < self.sliding_window.size
        windowed = additive(seen & near, self.dtype)
        return {"full_attention": full, "sliding_attention": windowed} if self.sliding_window.mixed else windowed

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[_Tapped]:
        """Hooks on the tapped layers for the length of one forward."""
        tapped = _Tapped({})
        handles = []
        for tap in taps:
            if tap == self.num_layers:
                handles.append(self.model.base_model.register_forward_hook(tapped.after_norm(tap)))
            else:
                handles.append(self._layers[tap].register_forward_pre_hook(tapped.entering(tap), with_kwargs=True))
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def _probe(self) -> dict[int, LayerSizes]:
        """Asks the model, once, what its layers store and whether its attention follows a tree.

        Three tokens, the third a sibling of the second, must give the logits of their own paths.
        """
        recorder = _RecordingCache()
        first = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            arguments: dict[str, Any] = {"use_cache": True, self._arguments.cache: recorder}
            self.model(first, **arguments)
            sizes = recorder.sizes
            tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
            tokens = torch.tensor([[0, 1, 2]], device=self.device) % self.vocab_size
            cache = KVCache(sizes, 1, 3, self.dtype, self.device)
            positions = torch.tensor([[0, 1, 1]], device=self.device)
            sibling = self.forward(tokens, positions, tree, cache).logits[0, 2]
            cache = KVCache(sizes, 1, 2, self.dtype, self.device)
            alone = self.forward(tokens[:, ::2], positions[:, :2], tree[:, :2, :2], cache).logits[0, 1]
        except (TypeError, ValueError, NotImplementedError, RuntimeError, KeyError) as error:
            raise TargetError(f"{self.facts.name}: the model's forward does not take a tree: {error}") from error
        scale = 1e-3 if self.dtype == torch.float32 else 5e-2
        gap, limit = (sibling - alone).abs().max().item(), scale * max(alone.abs().max().item(), 1.0)
        if gap > limit:  # NaN passes: overflow is reported by the run that meets it
            raise TargetError(
                f"{self.facts.name}: the attention does not follow a tree of candidates (logits of a branch are off by "
                f"{gap:.3g}, at most {limit:.3g} expected); it takes positions or masks from elsewhere"
            )
        return sizes


@dataclass(frozen=True)
class _Arguments:
    """How this version of the model's forward spells the cache and the choice of logits: asked of its signature."""

    cache: str
    keeps_logits: bool

    @staticmethod
    def of(model: PreTrainedModel) -> _Arguments:
        names = inspect.signature(model.forward).parameters
        cache = next((name for name in ("cache", "past_key_values") if name in names), None)
        missing = [name for name in ("attention_mask", "position_ids") if name not in names]
        if cache is None or missing:
            lacks = [*([] if cache else ["cache"]), *missing]
            raise TargetError(f"{type(model).__name__}.forward takes no {', '.join(lacks)}: it cannot verify a tree")
        return _Arguments(cache, "logits_to_keep" in names)

    def logits(self, model: nn.Module, tokens: Tensor, keep: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        """Logits [B, k, V]. In some versions all rows must read the same positions, so the union is asked for."""
        if keep is None:
            return model(tokens, **arguments).logits
        columns, places = keep.unique(return_inverse=True)  # [u], [B, k]
        if self.keeps_logits:
            logits = model(tokens, logits_to_keep=columns, **arguments).logits  # [B, u, V]
        else:
            logits = model(tokens, **arguments).logits[:, columns]
        return logits[torch.arange(len(tokens), device=tokens.device)[:, None], places]


@dataclass(frozen=True)
class _Tapped:
    """Hidden states of one forward by layer id."""

    states: dict[int, Tensor]

    def entering(self, tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after_norm(self, tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.states[tap] = output[0]

        return hook

    def features(self, taps: Sequence[int], tokens: Tensor, dtype: torch.dtype) -> Tensor:
        if not taps:
            return torch.empty(*tokens.shape, 0, dtype=dtype, device=tokens.device)
        return self.states[taps[0]] if len(taps) == 1 else torch.cat([self.states[tap] for tap in taps], -1)


class _RecordingCache(Cache):
    """Notes what each layer stores, for one forward."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sizes: dict[int, LayerSizes] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sizes[layer_idx] = LayerSizes(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return int(query_length), 0


@dataclass(frozen=True)
class _Window:
    """A sliding window of ``size`` positions, on all layers or mixed with full attention."""

    size: int
    mixed: bool


def _check_config(config: Any, name: str) -> _Window | None:
    """The sliding window, if there is one. Refuses by name what a tree cannot be verified with."""
    kinds = set(getattr(config, "layer_types", None) or [])
    faults = [f"layers of kind {kind}" for kind in sorted(kinds - {"full_attention", "sliding_attention"})]
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        faults.append("ALiBi positions, which follow slots and not positions")
    if faults:
        raise TargetError(f"{name} cannot verify a tree: it has {'; '.join(faults)}")
    size = getattr(config, "sliding_window", None)
    unused = kinds and "sliding_attention" not in kinds
    if size is None or unused or getattr(config, "use_sliding_window", True) is False:
        return None
    return _Window(int(size), mixed="full_attention" in kinds)


def check_rope(config: Any, name: str, longest: int) -> None:
    """Raises TargetError if the run could cross the length at which this model's rotary frequencies change.

    ``dynamic`` and ``longrope`` scaling take them from the longest position in the batch, so a row's keys would depend
    on its neighbours.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        scaling = kind.get("rope_type", kind.get("type", "default"))
        original = (
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if scaling in ("dynamic", "longrope") and longest > original:
            raise TargetError(
                f"{name} scales its rotary positions by {scaling!r} beyond {original} positions, and this run could "
                f"reach {longest}: its keys would change with the batch. Keep prompt and budget within {original}"
            )


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
