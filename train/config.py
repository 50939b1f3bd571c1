"""What ``treedraft train`` is told: nested frozen dataclasses, each field described, each value checked.

Read from YAML with dotted overrides by :mod:`.settings`. Nothing here loads a model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _share_or_whole(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be a share below 1 or a whole number of rows")
    return value


HeldOut = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_share_or_whole)]


@dataclass(frozen=True, config=_STRICT)
class TargetConfig:
    """The frozen model that the heads are trained for."""

    spec: str = Field(description="hub id, local folder, or smollm2-135m")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="dtype of the target; auto is bf16 where the machine multiplies it, else fp32"
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto", description="attention implementation of the target; auto is what the model supports"
    )
    adapter: str | None = Field(
        default=None,
        description="folder of a LoRA adapter (PEFT) that is merged into the target and frozen with it: heads are "
        "trained on the adapted model",
    )


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Conversations to train on, and what is held out of them."""

    paths: tuple[str, ...] = Field(
        min_length=1, description="JSONL, JSON or Parquet files, datasets folders or hub ids, read in this order"
    )
    split: str | None = Field(default=None, description="split of a datasets folder or hub id")
    max_length: AtLeastOne = Field(default=2048, description="rows are cut to this many tokens")
    holdout: HeldOut = Field(
        default=0.0,
        description="rows kept from training for evaluation: a share if below 1, a number of rows from 1 on",
    )
    prompts: str | None = Field(
        default=None,
        description="prompts file (JSONL) to measure tau on; null uses the first prompts of the held-out rows",
    )
    turns: Literal["all", "last"] = Field(default="all", description="which assistant turns of a row are supervised")
    features: Literal["auto", "online", "memory", "store"] = Field(
        default="auto",
        description="target features: computed online, kept in memory, or read from the store, which is filled first; "
        "auto is the store if features_dir names one, else memory if they take at most features_gib",
    )
    features_gib: NotNegative = Field(
        default=4.0, description="most main memory (GiB per process) that features: auto may take"
    )
    features_dir: str | None = Field(
        default=None, description="folder of the feature store: computed once for a target, shared by runs"
    )
    features_dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="number format of the store")
    features_taps: tuple[AtLeastZero, ...] = Field(
        default=(), description="further tapped layers that a new store keeps, for heads to come"
    )


@dataclass(frozen=True, config=_STRICT)
class HeadsConfig:
    """The heads to train."""

    kind: Literal["medusa", "hydra", "eagle", "eagle3"] = Field(default="medusa", description="kind of head")
    num_heads: AtLeastOne = Field(default=4, description="medusa, hydra: K, heads: the deepest tree they can fill")
    num_layers: AtLeastOne = Field(default=1, description="medusa, hydra: residual blocks in each head")
    output: Literal["shared", "own"] = Field(
        default="shared",
        description="medusa, hydra: the target's output layer for all heads, or one trained for each, started from it",
    )
    prefix_layer: bool = Field(default=False, description="hydra: a decoder layer over the features first (Hydra++)")
    unroll: AtLeastOne | None = Field(
        default=None,
        description="eagle, eagle3: K, steps that training unrolls; null is 1 for eagle (more is HASS), 7 for eagle3",
    )
    tapped_layers: tuple[AtLeastZero, ...] | None = Field(
        default=None, description="eagle3: ids of the hidden states entering these layers; null is 2, L/2, L-3"
    )
    fc_norm: bool = Field(default=False, description="eagle3: a norm for each tapped feature (EAGLE-3.1)")
    norm_output: bool = Field(default=False, description="eagle3: the normed output is carried on (EAGLE-3.1)")
    draft_vocab_size: AtLeastOne | None = Field(
        default=None, description="W, most frequent tokens that can be drafted; null is the target's whole vocabulary"
    )
    start: Literal["fresh", "target"] = Field(
        default="fresh",
        description="random; or eagle3: the weights of the target's last layer; eagle: embedding and feature enter "
        "with one size",
    )
    resume_from: str | None = Field(
        default=None,
        description="folder of heads of the same shape to train on from; their draft vocabulary is kept, unless the "
        "output layer is the target's and draft_vocab_size asks for another",
    )


@dataclass(frozen=True, config=_STRICT)
class AdapterConfig:
    """Medusa-2: a LoRA adapter of the target that is trained together with Medusa heads."""

    enabled: bool = Field(
        default=False, description="train an adapter besides the heads; decoding is then that of the adapted target"
    )
    rank: AtLeastOne = Field(default=32, description="rank of the adapter's matrices")
    alpha: AtLeastOne = Field(default=16, description="what the adapter adds is scaled by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="dropout inside the adapter; above 0 a step depends on how it is cut into parts"
    )
    target_modules: tuple[str, ...] = Field(
        default=(), description="names of the linear layers to adapt, as PEFT has them; none: all but the output layer"
    )
    lr_scale: Positive = Field(default=0.25, description="the adapter's learning rate as a share of optim.lr")
    kl_weight: NotNegative = Field(
        default=1.0, description="weight of KL(unadapted || adapted) over the supervised tokens"
    )
    head_weight: Positive = Field(default=0.2, description="weight of the heads' losses beside it")


@dataclass(frozen=True, config=_STRICT)
class OptimConfig:
    """AdamW with linear warm-up and a cosine."""

    lr: Positive = Field(default=1e-3, description="learning rate at the end of the warm-up")
    weight_decay: NotNegative = Field(default=0.0, description="weight decay of matrices; vectors have none")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), description="AdamW's two decay rates")
    warmup: Share = Field(default=0.03, description="share of all steps in which the learning rate rises from 0")
    min_ratio: Share = Field(default=0.1, description="learning rate at the last step, as a share of lr")
    clip: Positive | None = Field(default=1.0, description="largest norm of the gradient; null does not clip")
    epochs: AtLeastOne = Field(default=1, description="passes over the rows")
    max_steps: AtLeastOne | None = Field(
        default=None, description="stop after this many optimiser steps; null runs all epochs"
    )


@dataclass(frozen=True, config=_STRICT)
class BatchConfig:
    """How many rows make a step, and how many fit at a time."""

    rows_per_step: AtLeastOne = Field(default=8, description="rows of one optimiser step, over all processes together")
    micro_rows: AtLeastOne = Field(default=8, description="rows that one process computes at a time; changes no result")


@dataclass(frozen=True, config=_STRICT)
class LossConfig:
    """Sum over heads of decay**k times the mean loss of head k over the supervised tokens of the step."""

    decay: Positive = Field(default=0.8, description="weight of head k is decay**k")
    teacher_weight: Share = Field(
        default=0.0, description="w in (1-w) CE(token) + w soft(target's law): how much the target's law counts"
    )
    soft: Literal["ce", "lk", "lk-hybrid"] = Field(
        default="ce",
        description="ce: cross-entropy to the law renormalised on the draft vocabulary; lk: -log sum min(p, q), the "
        "law as it is; lk-hybrid: v KL + (1-v) (1 - sum min(p, q)), v = exp(-3 sum min(p, q))",
    )
    token_weight: NotNegative = Field(default=1.0, description="weight of the losses on tokens")
    regression: NotNegative = Field(
        default=0.0, description="weight of SmoothL1 between a head's hidden rows and the target's final features"
    )
    noise: NotNegative = Field(
        default=0.0,
        description="features get uniform noise in [-noise, noise] in training, drawn by seed, step and row",
    )
    outside: Literal["count", "drop"] = Field(
        default="count",
        description="tokens outside the draft vocabulary have no loss; count: they stay in the number of tokens that "
        "the loss is divided by; drop: they leave it. Accuracies count them as misses either way",
    )
    chunk: AtLeastOne = Field(default=512, description="positions that the output layer is applied to at a time")


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    """Tree decoding on held-out prompts during training; best/ is the checkpoint with the largest tau."""

    every: AtLeastOne | None = Field(
        default=None, description="optimiser steps between evaluations; null: only at the end"
    )
    prompts: AtLeastOne = Field(default=64, description="most prompts that are decoded")
    max_new_tokens: AtLeastOne = Field(default=64, description="tokens to decode for each prompt")
    tree: str = Field(default="best:8", description="tree to decode with: chain:4, best:8 or a JSON file of rank paths")
    temperature: NotNegative = Field(default=0.0, description="sampling temperature; 0 is greedy")
    batch_size: AtLeastOne = Field(default=8, description="prompts decoded together")


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    """Folders step-000015 in ``out``, and best/."""

    out: str = Field(description="folder of the run")
    every: AtLeastOne | None = Field(
        default=None, description="optimiser steps between checkpoints; null: only at the end"
    )
    keep: AtLeastOne = Field(default=2, description="newest checkpoints that are kept; best/ is kept besides")


@dataclass(frozen=True, config=_STRICT)
class TrackerConfig:
    """Where metrics go besides the terminal."""

    kind: Literal["none", "wandb", "tensorboard"] = Field(
        default="none", description="tracker; wandb writes offline when nobody is logged in"
    )
    project: str = Field(default="treedraft", description="project name")
    run: str | None = Field(default=None, description="run name; null lets the tracker choose")


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """A training run."""

    target: TargetConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    heads: HeadsConfig = Field(default_factory=HeadsConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    tracker: TrackerConfig = Field(default_factory=TrackerConfig)
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="arithmetic of the heads; their weights and the optimiser's state are fp32 in both"
    )
    seed: int = Field(default=0, description="seed of row order, held-out rows and decoding")


# What may change between a run and its resumption. features and micro_rows change rounding at most.
FREE_ON_RESUME = (
    "batch.micro_rows",
    "checkpoint",
    "data.features",
    "data.features_dir",
    "data.features_gib",
    "data.features_taps",
    "data.prompts",
    "eval",
    "loss.chunk",
    "tracker",
)
