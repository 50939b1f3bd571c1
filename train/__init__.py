"""Training of draft heads on a frozen target: configuration, loss, loop, checkpoints, evaluation by decoding."""

from .align import align, next_tokens
from .config import TrainConfig
from .evaluate import Evaluation, evaluate
from .folders import CheckpointError, CheckpointWarning
from .loop import Result, StepReport, leave_processes, train
from .losses import chunked_cross_entropy
from .material import TrainError
from .settings import ConfigError, Key, config_keys, load_config, parse_config
from .step import Counts, Objective, train_step

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "Counts",
    "Evaluation",
    "Key",
    "Objective",
    "Result",
    "StepReport",
    "TrainConfig",
    "TrainError",
    "align",
    "chunked_cross_entropy",
    "config_keys",
    "evaluate",
    "leave_processes",
    "load_config",
    "next_tokens",
    "parse_config",
    "train",
    "train_step",
]
