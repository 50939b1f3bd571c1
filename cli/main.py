"""The ``treedraft`` command: the table of commands, and how errors are told.

Commands import what is heavy when they run, so that ``--help`` and wrong options answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from . import bench, card, demo, distill, evaluate, export, generate, import_heads, prepare, train, tree, verify_export
from .console import show_error, show_our_warnings_only

USER_ERROR = 2

app = typer.Typer(
    name="treedraft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
NAMES = {import_heads: "import", verify_export: "verify-export"}
for module in (demo, prepare, distill, train, evaluate, generate, bench, export, import_heads, verify_export, card):
    paragraph = " ".join((module.command.__doc__ or "").split())
    app.command(
        name=NAMES.get(module, module.__name__.rpartition(".")[2]),
        help=paragraph,
        short_help=paragraph.partition(". ")[0].partition(": ")[0] + ".",
        epilog=module.EXAMPLE,
    )(module.command)
app.add_typer(tree.app, name="tree")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treedraft {version('treedraft')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the warnings of libraries.")] = False,
) -> None:
    """Train draft heads on a frozen language model and decode with trees of candidates: same seed, same text, fewer
    forwards."""
    if not debug:
        show_our_warnings_only()


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. A fault of the user's is one message on stderr and exit code 2; ctrl-C is 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="treedraft")
    except Exception as error:
        if "--debug" in given or not _is_users(error):
            raise
        show_error(_message(error))
        sys.exit(USER_ERROR)


def _is_users(error: Exception) -> bool:
    """Our own ValueErrors (DataError, HeadError, ConfigError ...) and files that are not there."""
    ours = isinstance(error, ValueError) and type(error).__module__.startswith("treedraft.")
    return ours or isinstance(error, FileNotFoundError)


def _message(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no such file or folder: {error.filename}"
    return str(error)


if __name__ == "__main__":
    run()
