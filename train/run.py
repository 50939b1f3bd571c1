"""Everything a run needs, checked and put together before the first step; fresh or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from ..data import Encoded, draft_vocabulary
from ..heads import Medusa, MedusaConfig, build_head
from ..infer import Target
from ..tree import Tree, TreeError, parse_tree
from .checkpoint import Origin, Progress, check_same_run, load_heads, load_training_state, read_progress
from .config import OptimConfig, TrainConfig
from .features import TargetFeatures, choose_features
from .material import Material, TrainError, gather_material
from .rng import restore_rng, seed_everything
from .schedule import Plan
from .settings import ConfigError, flat_config
from .step import HeadsInTraining, Objective
from .tracking import tracker_fault


@dataclass(frozen=True)
class Run:
    """The parts of a training run."""

    config: TrainConfig
    out: Path
    accelerator: Accelerator
    target: Target
    tree: Tree
    material: Material
    features: TargetFeatures
    held_out: TargetFeatures
    head: Medusa
    model: nn.Module
    """The train step around ``head``, wrapped by Accelerate."""
    optimizer: torch.optim.Optimizer
    plan: Plan
    total_steps: int
    say: Callable[[str], None]

    @property
    def dtype(self) -> torch.dtype:
        """What the heads compute in."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    summed = accelerator.reduce(values, reduction="sum")
    assert isinstance(summed, Tensor)
    return summed


def check_config(config: TrainConfig) -> Tree:
    """The tree to evaluate with. Raises ConfigError with everything that can be told before a model is loaded."""
    faults = [fault for fault in [tracker_fault(config.tracker.kind)] if fault]
    tree = Tree.chain(0)
    try:
        tree = parse_tree(config.eval.tree, config.heads.num_heads)
        tree.check_fits(config.heads.num_heads, config.heads.draft_vocab_size or tree.width)
    except TreeError as error:
        faults.append(f"eval.tree: {error}")
    if faults:
        raise ConfigError("; ".join(faults))
    return tree


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Accelerate for one process or data-parallel ones. Raises TrainError for sharded or staged training."""
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=None if config.tracker.kind == "none" else config.tracker.kind,
        project_dir=config.checkpoint.out,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise TrainError(
            f"{launched} processes were launched, but accelerate sees {accelerator.num_processes}: they would "
            "overwrite each other. On the CPU set ACCELERATE_USE_CPU=true"
        )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU"):
        raise TrainError(f"training runs in one process or data-parallel, accelerate is configured for {kind}")
    return accelerator


def end_accelerator(accelerator: Accelerator) -> None:
    """Closes trackers. Of a single process the process-wide state goes too: the next run may differ in precision.

    Several processes keep their group: it cannot be made twice under one launch.
    """
    for tracker in accelerator.trackers:
        tracker.finish()
    if accelerator.num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def set_up(
    config: TrainConfig,
    tree: Tree,
    target: Target,
    accelerator: Accelerator,
    checkpoint: Path | None,
    say: Callable[[str], None],
) -> tuple[Run, Progress]:
    """The run and where it stands. Raises before anything is written if data, target or checkpoint do not fit."""
    seed_everything(config.seed)
    if config.loss.teacher_weight > 0:
        check_teacher(target)
    material = gather_material(config, target, say)
    origin = Origin(flat_config(config), material.fingerprint(), target.fingerprint())
    progress, head = _open_heads(config, target, material, checkpoint, origin, say)
    features, held_out = (
        TargetFeatures(target, rows, head.taps, config.loss.teacher_weight > 0)
        for rows in (material.rows, material.held_out)
    )
    mode = _keep_features(config, features, held_out, progress, accelerator, say)
    optimizer = make_optimizer(head.to(target.device), config.optim)
    plan = Plan(tuple(len(row.ids) for row in material.rows), config.batch.rows_per_step, config.seed)
    every_epoch = config.optim.epochs * plan.steps_per_epoch
    if checkpoint is not None:
        generators = load_training_state(checkpoint, optimizer)
        if accelerator.process_index < len(generators):
            restore_rng(generators[accelerator.process_index])
    run = Run(
        config=config,
        out=Path(config.checkpoint.out),
        accelerator=accelerator,
        target=target,
        tree=tree,
        material=material,
        features=features,
        held_out=held_out,
        head=head,
        model=accelerator.prepare_model(HeadsInTraining(head, _objective(config, target)), device_placement=False),
        optimizer=optimizer,
        plan=plan,
        total_steps=min(every_epoch, config.optim.max_steps or every_epoch),
        say=say,
    )
    return run, progress or Progress(0, 0, 0, None, mode, origin)


def _open_heads(
    config: TrainConfig,
    target: Target,
    material: Material,
    checkpoint: Path | None,
    origin: Origin,
    say: Callable[[str], None],
) -> tuple[Progress | None, Medusa]:
    """The heads of ``checkpoint`` and where its run stood, or None and fresh heads. Raises if it is another run's."""
    if checkpoint is None:
        return None, fresh_heads(config, target, material.rows, say)
    progress = read_progress(checkpoint)
    check_same_run(checkpoint, progress.origin, origin)
    return progress, load_heads(checkpoint, target.facts, target.output_layer())


def _objective(config: TrainConfig, target: Target) -> Objective:
    loss = config.loss
    teacher_output = target.output_layer() if loss.teacher_weight > 0 else None
    return Objective(loss.decay, loss.outside, loss.chunk, loss.teacher_weight, teacher_output)


def fresh_heads(config: TrainConfig, target: Target, rows: Sequence[Encoded], say: Callable[[str], None]) -> Medusa:
    """Untrained heads for the target, with the draft vocabulary of the training rows if one is asked for."""
    facts, heads = target.facts, config.heads
    ids = None
    if heads.draft_vocab_size is not None:
        vocabulary = draft_vocabulary(rows, facts.vocab_size, heads.draft_vocab_size, target.end_ids)
        ids = None if vocabulary.ids is None else vocabulary.ids.to(target.device)
        say(f"draft vocabulary: {heads.draft_vocab_size} ids cover {vocabulary.coverage:.2%} of supervised tokens")
    shape = MedusaConfig(
        heads.num_heads,
        facts.hidden_size,
        facts.vocab_size,
        facts.num_layers,
        heads.num_layers,
        None if ids is None else len(ids),
        heads.output,
    )
    return build_head(shape, target.output_layer(), ids)


def make_optimizer(head: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in the order of their names in the module; vectors are not decayed."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas)


@torch.no_grad()
def check_teacher(target: Target) -> None:
    """Raises TrainError if the target's logits are more than its output layer on its final features (caps, scales)."""
    tokens = torch.arange(4, device=target.device)[None] % target.vocab_size
    features = target.features(tokens, torch.tensor([4]), (target.num_layers,))
    weight, bias = target.output_layer().of_head(0)
    ours = nn.functional.linear(features, weight, bias).float()
    theirs = target.model(tokens).logits.float()
    gap, limit = (ours - theirs).abs().max().item(), 0.05 * max(theirs.abs().max().item(), 1.0)
    if not gap <= limit:
        raise TrainError(
            f"loss.teacher_weight needs the target's law, but the logits of {target.facts.name or 'the target'} are "
            f"not its output layer alone (off by {gap:.3g}): it scales or caps them. Train with loss.teacher_weight 0"
        )


def _keep_features(
    config: TrainConfig,
    features: TargetFeatures,
    held_out: TargetFeatures,
    progress: Progress | None,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> Literal["online", "memory"]:
    """Computes features now if they are to be kept; a resumed run does as before."""
    size = features.bytes_in_memory + held_out.bytes_in_memory
    wanted = config.data.features if progress is None else progress.features
    mode = choose_features(wanted, size, config.data.features_gib)
    place = "kept in memory" if mode == "memory" else "computed online"
    say(f"target features: {size / 2**30:.2f} GiB, {place}")
    if mode == "memory":
        for part in (features, held_out):
            part.keep_all(accelerator.is_main_process)
    return mode
