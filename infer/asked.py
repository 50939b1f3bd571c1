"""What transformers' ``generate`` asks of a ``custom_generate``, in treedraft's terms, or refused by name.

B batch rows   T text positions, padding included   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessor, MaxLengthCriteria

from .processors import OnRow, split_law, unknown_processors
from .sampling import GenerationError, Sampling

MODES = ("greedy_search", "sample")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CACHES = ("cache", "past_key_values")
UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "synced_gpus", "return_dict", *CACHES)
LOSSY_CACHES = ("quantized",)


@dataclass(frozen=True)
class Asked:
    """A call of ``generate`` that can be honoured.

    ids: [B, T] as given; starts: for each row the padding before its first token; budget: new tokens a row may have
    processors: what stands before the law of ``sampling``, reading the text before the token
    criteria: what may end a row besides its budget and ``end_ids``; padding: what stands behind a row that has ended
    """

    ids: Tensor
    starts: list[int]
    budget: int
    end_ids: tuple[int, ...]
    sampling: Sampling
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[Any]
    padding: int
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.ids.tolist()
        object.__setattr__(self, "prompts", [row[start:] for row, start in zip(rows, self.starts, strict=True)])

    @property
    def groups(self) -> list[list[int]]:
        """The rows that are decoded together: processors count padding and rows, so with them each row is alone."""
        rows = list(range(len(self.starts)))
        return [[row] for row in rows] if self.processors else [rows]

    def processors_of(self, row: int) -> list[LogitsProcessor]:
        return [OnRow(p, row, self.ids[row, : self.starts[row]]) for p in self.processors]

    def stops(self, row: int, new: Sequence[int]) -> bool:
        """Whether a criterion ends the row after its ``new`` tokens; it sees the row as plain ``generate`` shows it."""
        text = torch.cat([self.ids[row], torch.tensor(new, device=self.ids.device)])[None]
        return any(bool(torch.as_tensor(criterion(text, None)).all()) for criterion in self.criteria)

    @property
    def stopper(self) -> Callable[[int, Sequence[int]], bool] | None:
        return self.stops if self.criteria else None

    def sequences(self, answers: Sequence[Sequence[int]]) -> Tensor:
        """[B, T + longest answer]: what plain ``generate`` returns."""
        new = torch.full((len(answers), max(map(len, answers))), self.padding, device=self.ids.device)
        for row, answer in enumerate(answers):
            new[row, : len(answer)] = torch.tensor(answer)
        return torch.cat([self.ids, new.to(self.ids.dtype)], 1)


def read_asked(
    model: Any,
    ids: Tensor,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[Any],
    config: Any,
    others: dict[str, Any],
    context: int,
    stateless: Collection[type],
) -> Asked:
    """The call, checked. others: everything else that ``generate`` was given or made; context: the model's.

    stateless: classes of processors that the caller vouches for. Raises GenerationError with all that is not honoured.
    """
    faults = [*_mode_faults(model, config, others), *unknown_processors(processors, stateless)]
    mask, starts = others.get("attention_mask"), [0] * len(ids)
    if ids.dim() != 2 or ids.shape[1] == 0:
        faults.append(f"input_ids must be [rows, tokens] with at least one token, got {tuple(ids.shape)}")
    elif mask is not None and (mask.shape != ids.shape or bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any())):
        faults.append("the attention mask is not that of left padding; use padding_side='left'")
    elif mask is not None:
        starts = (mask == 0).sum(1).tolist()
        faults += [f"row {row} is all padding" for row, start in enumerate(starts) if start == ids.shape[1]]
    positions = others.get("position_ids")
    if positions is not None and not faults and not _counted(positions, starts, ids.shape[1]):
        faults.append("position_ids that do not count the tokens of each row: leave them out")
    ends = [c for c in criteria if type(c) is EosTokenCriteria]
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    further = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    if further and len(ids) > 1 and not any(hasattr(c, "eos_token_id") for c in criteria):
        faults.append(
            "stopping criteria for several rows without an end token: rows that have ended write on there until the "
            "last one ends; set eos_token_id and pad_token_id, or generate row by row"
        )
    if others.get("streamer") is not None and len(ids) > 1:
        faults.append(f"a streamer for {len(ids)} rows, which advance unevenly: stream one row")
    if faults:
        raise GenerationError("custom_generate with treedraft does not take " + "; nor ".join(faults))
    before, sampling = split_law(processors, bool(config.do_sample))
    budget = max(1, min(lengths, default=context) - ids.shape[1])
    end_ids = tuple(int(i) for c in ends for i in c.eos_token_id.reshape(-1).tolist())
    padding = getattr(config, "_pad_token_tensor", None)
    padding = int(padding) if padding is not None else end_ids[0] if end_ids else 0
    return Asked(ids, starts, budget, end_ids, sampling, before, further, padding)


def _mode_faults(model: Any, config: Any, others: dict[str, Any]) -> list[str]:
    """Ways to decode, outputs and inputs that are not honoured, in words."""
    faults = []
    if model.config.is_encoder_decoder:
        faults.append("encoder-decoder models")
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if others.get("assistant_model") is not None:
        faults.append("assistant_model: the heads draft already")
    elif mode not in MODES:
        faults.append(f"{mode.replace('_', ' ')} (num_beams={config.num_beams}): only greedy decoding and sampling")
    faults += [f"{name}: tokens are verified many at a time" for name in OUTPUTS if getattr(config, name, None)]
    if config.cache_implementation in LOSSY_CACHES:
        faults.append(f"cache_implementation={config.cache_implementation!r}: it would change the text")
    if others.get("synced_gpus"):
        faults.append("synced_gpus: weights must lie on one device")
    for name in CACHES:
        cache = others.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            faults.append(f"{name} of your own: leave it out, prompts are read anew")
    known = (*UNDERSTOOD, "streamer", "assistant_model")
    faults += [f"{name}" for name, value in others.items() if name not in known and value is not None]
    return faults


def _counted(positions: Tensor, starts: Sequence[int], length: int) -> bool:
    """Whether every token stands at its own count, padding aside."""
    if positions.dim() != 2 or positions.shape[1] != length:
        return False
    rows = positions.expand(len(starts), -1).tolist()
    return all(row[start:] == list(range(length - start)) for row, start in zip(rows, starts, strict=True))
