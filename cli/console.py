"""What the commands print with: results on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import sys
import warnings

from rich.console import Console
from rich.text import Text


def out(colour: bool = False) -> Console:
    """The console of results; ``colour`` keeps colours where stdout is no terminal."""
    return Console(highlight=False, force_terminal=colour or None)


def err() -> Console:
    """The console of messages and progress."""
    return Console(stderr=True, highlight=False)


def show_error(message: str) -> None:
    err().print(Text.assemble(("Error: ", "bold red"), (message, "red")), soft_wrap=True)


def note(message: str) -> None:
    """A line on what happens now."""
    err().print(Text(message, style="dim"), soft_wrap=True)


def show_our_warnings_only() -> None:
    """Warnings of treedraft become one yellow line each; those of libraries are for ``--debug``."""

    def show(message: Warning | str, *_: object) -> None:
        err().print(Text.assemble(("Warning: ", "bold yellow"), (str(message), "yellow")), soft_wrap=True)

    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", module=r"treedraft\.")
    warnings.showwarning = show  # type: ignore[assignment]


def quiet_transformers() -> None:
    """No loading bars and no advice from transformers; downloads keep their bars."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def interactive() -> bool:
    return sys.stdout.isatty()
