"""Everything a run needs, checked and put together before the first step; fresh or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from ..heads import DEEPEST, Head, Output
from ..infer import Target
from ..tree import Shape, Tree, TreeError, parse_tree
from .adapter import Adapter, adapter_faults, adapter_on
from .checkpoint import ADAPTER_FOLDER, Origin, Progress, check_same_run, load_heads, load_training_state, read_progress
from .config import OptimConfig, TrainConfig
from .features import TargetFeatures, Where, choose_features
from .fresh import fresh_heads, heads_faults
from .joint import AdaptedFeatures, JointInTraining, loss_weights
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
    tree: Shape
    material: Material
    features: TargetFeatures | AdaptedFeatures
    held_out: TargetFeatures | AdaptedFeatures
    head: Head
    adapter: Adapter | None
    """What of the target is trained besides the heads; it is taken off when the run ends."""
    model: nn.Module
    """The train step around ``head`` and adapter, wrapped by Accelerate."""
    weights: list[float]
    """Of the terms of the loss: one for each head, and one for the KL of the adapter."""
    optimizer: torch.optim.Optimizer
    plan: Plan
    total_steps: int
    say: Callable[[str], None]

    @property
    def dtype(self) -> torch.dtype:
        """What the heads compute in."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Everything that has a gradient, by name."""
        heads = [(name, p) for name, p in self.head.named_parameters() if p.requires_grad]
        return heads if self.adapter is None else heads + self.adapter.named_parameters()


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    summed = accelerator.reduce(values, reduction="sum")
    assert isinstance(summed, Tensor)
    return summed


def check_config(config: TrainConfig) -> Shape:
    """The tree to evaluate with. Raises ConfigError with everything that can be told before a model is loaded."""
    faults = [fault for fault in [tracker_fault(config.tracker.kind)] if fault]
    if config.data.features == "store" and config.data.features_dir is None:
        faults.append("data.features: store needs a folder, data.features_dir")
    faults += heads_faults(config.heads) + adapter_faults(config)
    tree: Shape = Tree.chain(0)
    deepest = config.heads.num_heads if config.heads.kind in ("medusa", "hydra") else DEEPEST
    try:
        tree = parse_tree(config.eval.tree, deepest)
        tree.check_fits(deepest, config.heads.draft_vocab_size or tree.width)
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
    tree: Shape,
    target: Target,
    accelerator: Accelerator,
    checkpoint: Path | None,
    say: Callable[[str], None],
    ending: ExitStack,
) -> tuple[Run, Progress]:
    """The run and where it stands. Raises before anything is written if data, target or checkpoint do not fit.

    ``ending`` is told what must be undone at the end: an adapter that the target carries is taken off.
    """
    seed_everything(config.seed)
    for setting, needed in (
        ("loss.teacher_weight", config.loss.teacher_weight > 0),
        ("adapter.enabled", config.adapter.enabled),
    ):
        if needed:
            check_teacher(target, setting)
    material = gather_material(config, target, say)
    origin = Origin(flat_config(config), material.fingerprint(), target.fingerprint())
    progress, head = _open_heads(config, target, material, checkpoint, origin, say)
    objective = _objective(config, target, head)
    adapter = _adapter(config, target, checkpoint, ending, say)
    plain, plain_held = (
        TargetFeatures(target, rows, head.taps, objective.needs_final) for rows in (material.rows, material.held_out)
    )
    mode = _keep_features(config, plain, plain_held, progress, accelerator, say)
    features, held_out = (f if adapter is None else AdaptedFeatures(f, adapter) for f in (plain, plain_held))
    optimizer = make_optimizer(head.to(target.device), config.optim, adapter)
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
        adapter=adapter,
        model=accelerator.prepare_model(
            HeadsInTraining(head, objective) if adapter is None else JointInTraining(head, objective, adapter),
            device_placement=False,
        ),
        weights=loss_weights(objective, head.steps, adapter),
        optimizer=optimizer,
        plan=plan,
        total_steps=min(every_epoch, config.optim.max_steps or every_epoch),
        say=say,
    )
    return run, progress or Progress(0, 0, 0, None, mode, origin)


def _adapter(
    config: TrainConfig, target: Target, checkpoint: Path | None, ending: ExitStack, say: Callable[[str], None]
) -> Adapter | None:
    """The adapter that is trained with the heads, on the target until ``ending``; None if the target stays as it is."""
    if not config.adapter.enabled:
        return None
    kept = None if checkpoint is None else checkpoint / ADAPTER_FOLDER
    adapter = ending.enter_context(adapter_on(target, config.adapter, kept))
    say(f"adapter: {sum(p.numel() for _, p in adapter.named_parameters())} weights, trained with the heads")
    return adapter


def _open_heads(
    config: TrainConfig,
    target: Target,
    material: Material,
    checkpoint: Path | None,
    origin: Origin,
    say: Callable[[str], None],
) -> tuple[Progress | None, Head]:
    """The heads of ``checkpoint`` and where its run stood, or None and fresh heads. Raises if it is another run's."""
    if checkpoint is None:
        return None, fresh_heads(config, target, material.rows, say)
    progress = read_progress(checkpoint)
    check_same_run(checkpoint, progress.origin, origin)
    return progress, load_heads(checkpoint, target.facts, target.layers())


def _objective(config: TrainConfig, target: Target, head: Head) -> Objective:
    loss = config.loss
    return Objective(
        decay=loss.decay,
        outside=loss.outside,
        chunk=loss.chunk,
        teacher_weight=loss.teacher_weight,
        soft=loss.soft,
        token_weight=loss.token_weight,
        regression=loss.regression,
        teacher_output=_teacher_output(target, head.draft_ids, loss.soft) if loss.teacher_weight > 0 else None,
    )


def _teacher_output(target: Target, ids: Tensor | None, soft: str) -> Output:
    """The output layer that gives the teacher's law: only the draft vocabulary's rows if it is renormalised on them."""
    output = target.output_layer()
    if ids is None or soft != "ce":
        return output
    return Output(output.weight[ids], None if output.bias is None else output.bias[ids])


def make_optimizer(head: Head, optim: OptimConfig, adapter: Adapter | None = None) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in the order of their names in the module; vectors are not decayed.

    Groups with ``lr_scale`` learn at that share of the rate.
    """
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if adapter is not None:
        weights = [p for _, p in adapter.named_parameters()]
        groups.append({"params": weights, "weight_decay": optim.weight_decay, "lr_scale": adapter.settings.lr_scale})
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas)


@torch.no_grad()
def check_teacher(target: Target, setting: str) -> None:
    """Raises TrainError if the target's logits are more than its output layer on its final features (caps, scales).

    ``setting`` is what needs them to be no more.
    """
    tokens = torch.arange(4, device=target.device)[None] % target.vocab_size
    features = target.features(tokens, torch.tensor([4]), (target.num_layers,))
    weight, bias = target.output_layer().of_head(0)
    ours = nn.functional.linear(features, weight, bias).float()
    theirs = target.model(tokens).logits.float()
    gap, limit = (ours - theirs).abs().max().item(), 0.05 * max(theirs.abs().max().item(), 1.0)
    if not gap <= limit:
        raise TrainError(
            f"{setting} needs the target's law, but the logits of {target.facts.name or 'the target'} are "
            f"not its output layer alone (off by {gap:.3g}): it scales or caps them. Train without {setting}"
        )


def _keep_features(
    config: TrainConfig,
    features: TargetFeatures,
    held_out: TargetFeatures,
    progress: Progress | None,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> Where:
    """Computes features now if they are to be kept; a resumed run does as before."""
    data, size = config.data, features.bytes_in_memory + held_out.bytes_in_memory
    wanted = data.features if progress is None else progress.features
    wanted = "online" if config.adapter.enabled else wanted  # they change at every step
    mode = choose_features(wanted, size, data.features_gib, data.features_dir)
    place = {"memory": "kept in memory", "online": "computed online", "store": f"in the store {data.features_dir}"}
    say(f"target features: {size / 2**30:.2f} GiB, {place[mode]}")
    for part in (features, held_out):
        if mode == "memory":
            part.keep_all(accelerator.is_main_process)
        elif mode == "store":
            assert data.features_dir is not None
            with accelerator.main_process_first():
                dtype = torch.bfloat16 if data.features_dtype == "bf16" else torch.float32
                part.fill_store(Path(data.features_dir), data.features_taps, dtype, accelerator.is_main_process)
    return mode
