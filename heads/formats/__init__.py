"""Heads in the layouts of serving engines and of published checkpoints."""

from .conformance import check, kind_of
from .engines import ENGINES, SERVED, EngineName, check_served, launch, losses, refusals, steps_served
from .exporting import REPORT_FILE, export, rope_of, to_checkpoint
from .files import Checkpoint, read_checkpoint, read_json, write_checkpoint
from .filling import Imported
from .importing import import_checkpoint

__all__ = [
    "ENGINES",
    "REPORT_FILE",
    "SERVED",
    "Checkpoint",
    "EngineName",
    "Imported",
    "check",
    "check_served",
    "export",
    "import_checkpoint",
    "kind_of",
    "launch",
    "losses",
    "read_checkpoint",
    "read_json",
    "refusals",
    "rope_of",
    "steps_served",
    "to_checkpoint",
    "write_checkpoint",
]
