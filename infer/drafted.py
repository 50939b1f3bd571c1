"""Draft heads inside Hugging Face ``generate``: ``model.generate(..., custom_generate=drafted(HEADS))``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..heads import Drafter, NoHead, can_pack, find_heads, load_head, shipped_tree
from ..tree import Shape, default_tree, parse_tree
from .asked import Asked, read_asked
from .borrow import borrow, has_hooks, weights_state
from .caller import generate_arguments
from .capability import TargetError
from .formats import DTYPES
from .generate import Run, generate
from .load import Compile, compile_here
from .noise import row_seed
from .sampling import GenerationError
from .stats import Stats
from .target import Target

Heads = str | Path | Drafter | Callable[[Target], Drafter] | None


@dataclass
class DraftedOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate`` gives. ``seeds`` are those of the rows, ``stats`` counts rounds and tokens."""

    stats: Stats | None = None
    seeds: list[int] | None = None


@dataclass(frozen=True)
class _Wrapped:
    """A model as a target, with what drafts for it; ``state`` is that of the weights that were wrapped."""

    target: Target
    head: Drafter | None
    tree: Shape | None
    state: tuple[Any, ...]


class Drafted:
    """A ``custom_generate`` for transformers, see ``drafted``.

    It keeps what it made of a model as long as that model lives, and makes it anew when weights were changed.
    """

    def __init__(
        self,
        heads: Heads,
        tree: str | Path | Shape | None,
        seed: int | None,
        dtype: str | None,
        pack: bool,
        compile: Compile,
        stateless: Collection[type],
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise TargetError(f"dtype must be None (the model's own) or {', '.join(DTYPES)}, got {dtype!r}")
        self._heads: Heads = find_heads(heads) if isinstance(heads, str | Path) else heads
        self._tree, self._seed, self._stateless = tree, seed, tuple(stateless)
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._pack = pack
        self._compile: Compile = compile
        self._wrapped: WeakKeyDictionary[PreTrainedModel, _Wrapped] = WeakKeyDictionary()
        self._lock = threading.Lock()  # streamers are read while generate runs in a thread

    def target(self, model: PreTrainedModel, work: int = 0) -> Target:
        """The target that ``model`` is for these heads; ``work``, the tokens to decode, may pay for compiling."""
        return self._wrap(model, work).target

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | DraftedOutput:
        """What transformers calls. ids [B, T + new], or a ``DraftedOutput`` of them with ``return_dict_in_generate``.

        Raises GenerationError naming all that was asked of ``generate`` and is not honoured.
        """
        config = generation_config if generation_config is not None else model.generation_config
        outer = generate_arguments()
        others = {name: outer.get(name) for name in ("streamer", "assistant_model", "synced_gpus")} | model_kwargs
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1
        asked = read_asked(
            model, input_ids, logits_processor, stopping_criteria, config, others, context, self._stateless
        )
        wrapped = self._wrap(model, asked.budget * len(input_ids))
        _warn_beyond(asked, context)
        seeds = [0] * len(input_ids) if asked.sampling.greedy else self._seeds(len(input_ids))
        run = Run()
        answers = _decode(wrapped, asked, seeds, run, others["streamer"])
        sequences = asked.sequences(answers)
        if not config.return_dict_in_generate:
            return sequences
        return DraftedOutput(sequences=sequences, stats=run.stats, seeds=seeds)  # type: ignore[arg-type]

    def generate(self, model: Any, **arguments: Any) -> Any:
        """``model.generate(**arguments)`` with these heads, for functions that transformers calls in its place.

        Takes ``stop_strings`` with ``tokenizer`` too, which transformers does not pass to a callable.
        """
        return model.generate(**_with_stop_strings(model, arguments), custom_generate=self)

    def _seeds(self, rows: int) -> list[int]:
        seed = int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed
        return [row_seed(seed, row) for row in range(rows)]

    def _wrap(self, model: PreTrainedModel, work: int) -> _Wrapped:
        with self._lock:
            state, known = weights_state(model), self._wrapped.get(model)
            if known is None or known.state != state:
                self._wrapped.pop(model, None)  # before the next one is made: both would take memory
                known = self._wrapped[model] = self._make(model, state, work)
            return known

    def _make(self, model: PreTrainedModel, state: tuple[Any, ...], work: int) -> _Wrapped:
        hooked = has_hooks(model)  # hooks are called by the model's own forward alone
        pack = self._pack and not hooked
        dtype = model.dtype if self._dtype is None else self._dtype
        if pack and model.device.type == "cpu" and not can_pack(dtype, model.device):
            warnings.warn(
                f"this processor does not multiply {str(dtype).removeprefix('torch.')}: drafts will hardly pay. Load "
                "the model with dtype=torch.float32, or decode its weights with drafted(..., dtype='fp32')",
                stacklevel=5,
            )
        compiled = pack and compile_here(self._compile, work, model.device)
        target = Target(borrow(model, self._dtype), pack=pack, compiled=compiled, own_blocks=not hooked)
        head = self._head(target)
        return _Wrapped(target, head, None if head is None else self._shape(head), state)

    def _head(self, target: Target) -> Drafter | None:
        heads: Any = self._heads
        if isinstance(heads, Path):
            return load_head(heads, target.facts, target.layers()).for_decoding(target.dtype)
        if heads is None or hasattr(heads, "propose"):
            return heads
        return heads(target)

    def _shape(self, head: Drafter) -> Shape | None:
        tree = self._tree
        if tree is None and isinstance(self._heads, Path):
            tree = shipped_tree(self._heads)
        if isinstance(head, NoHead):
            return None
        if tree is None:
            return default_tree(head.depth)
        return parse_tree(str(tree), head.depth) if isinstance(tree, str | Path) else tree


def drafted(
    heads: Heads,
    *,
    tree: str | Path | Shape | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    pack: bool = True,
    compile: Compile = "auto",
    stateless: Collection[type] = (),
) -> Drafted:
    """Heads for ``model.generate(..., custom_generate=drafted(heads))``: the same text in fewer forwards.

    Make it once and pass it to every call: it keeps the heads and the packed weights. The model itself is not changed.

    heads: a folder of trained heads, a hub id (``org/name`` or ``org/name@revision``), any drafter, a function that
    makes one for a target, or None for plain decoding.
    tree: as ``--tree`` has it, or a tree; None is the folder's own tree.json, or a general-purpose one.
    seed: of the text at temperature > 0; None draws one for each call from torch's global CPU generator, so that
    ``torch.manual_seed`` repeats it. Row i has ``row_seed(seed, i)``. The text is that of treedraft's plain decoding
    with this seed, which is another draw from the same law than plain ``generate`` makes.
    dtype: fp32, bf16 or fp16 to decode in, None for the model's own.
    pack: keep packed linear layers beside the model's on a CPU (heads/linear.py); False takes no memory, and is slower.
    compile: as in ``load_target``.
    stateless: classes of logits processors whose scores follow from (input_ids, scores) of one row alone, besides those
    of transformers.

    Raises HeadError if heads cannot be found or read, TargetError if the model cannot be a target.
    """
    return Drafted(heads, tree, seed, dtype, pack, compile, stateless)


def _decode(wrapped: _Wrapped, asked: Asked, seeds: Sequence[int], run: Run, streamer: Any) -> list[list[int]]:
    """The new ids of every row; a streamer gets them one by one."""
    answers: list[list[int]] = [[] for _ in asked.prompts]
    for group in asked.groups:
        stopper = asked.stopper
        chunks = generate(
            wrapped.target,
            [asked.prompts[row] for row in group],
            head=wrapped.head,
            tree=wrapped.tree,
            sampling=asked.sampling,
            logits_processor=asked.processors_of(group[0]),
            row_seeds=[seeds[row] for row in group],
            max_new_tokens=asked.budget,
            end_ids=asked.end_ids,
            stop_after=None if stopper is None else lambda i, new, rows=group: asked.stops(rows[i], new),
            batch_size=len(group),
            run=run,
        )
        for chunk in chunks:
            answers[group[chunk.row]] += chunk.ids
            if streamer is not None:
                for token in chunk.ids:
                    streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return answers


def _warn_beyond(asked: Asked, context: int) -> None:
    longest = max(map(len, asked.prompts)) + asked.budget
    if longest > context:
        warnings.warn(
            f"the text may reach {longest} tokens, the model's context holds {context}: it will be cut there, where "
            "plain generate would write on",
            stacklevel=4,
        )


def _with_stop_strings(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their stop strings as a criterion."""
    given = dict(arguments)
    config = given.get("generation_config")
    tokenizer = given.pop("tokenizer", None)
    named = (given.pop("stop_strings", None), getattr(config or model.generation_config, "stop_strings", None))
    stops = next((stops for stops in named if stops is not None), None)
    if stops is None:
        return given
    if tokenizer is None:
        raise GenerationError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
    if config is not None:
        given["generation_config"] = _without_stop_strings(config)
    criteria = given.get("stopping_criteria") or []
    return {**given, "stopping_criteria": [*criteria, StopStringCriteria(tokenizer, stops)]}


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    copied = GenerationConfig.from_dict(config.to_dict())
    copied.stop_strings = None
    return copied


class FolderDrafting:
    """What ``custom_generate/generate.py`` of a heads folder is: heads by their folder or hub id, read once each."""

    def __init__(self) -> None:
        self._drafted: dict[str, Drafted] = {}

    def __call__(self, model: Any, heads: str | None = None, **arguments: Any) -> Any:
        """``model.generate(**arguments)`` with the heads that ``custom_generate`` named, or with ``heads``."""
        outer = generate_arguments()
        name = heads if heads is not None else outer.get("custom_generate")
        if not isinstance(name, str):
            raise GenerationError("name the heads: generate(..., custom_generate=FOLDER, trust_remote_code=True)")
        if name not in self._drafted:
            self._drafted[name] = drafted(name)
        return self._drafted[name].generate(model, **arguments)
