"""The commands of ``flce``, each in a module. Their functions have the slow imports, so that ``--help`` is fast."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

import flce
from flce.tools.cli.check import check
from flce.tools.cli.info import info
from flce.tools.cli.plan import plan

app = typer.Typer(
    name="flce",
    help="The fused linear + cross-entropy loss: its backends, errors and memory on this machine.",
    no_args_is_help=True,
    # Boxes of a narrow terminal would cut the names of options.
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 80 else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        print(f"flce {flce.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(info)
app.command()(check)
app.command()(plan)
