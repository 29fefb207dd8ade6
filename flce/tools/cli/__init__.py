"""The commands of ``flce``, and `info`. Their functions have the slow imports, so that ``--help`` is fast."""

from __future__ import annotations

import itertools
import shutil
from typing import Annotated, Any

import typer

import flce
from flce.core.sizes import locate_page
from flce.tools.cli.check import check as check_command
from flce.tools.cli.output import Json, machine_lines, print_json
from flce.tools.cli.plan import plan as plan_command

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


@app.command()
def info(json: Json = False) -> None:
    """Print versions, devices, the backend of each device and the reason, and known problems of this combination.

    Example: flce info
    """
    from flce.core import private
    from flce.tools.machine import BY_HAND, TESTED, environment

    missing_names = [private.describe_missing(entry, paths) for entry, paths in private.incomplete_entries()]
    tested = {name: list(ends) for name, ends in TESTED.items()}
    facts = {**environment(), "tested": tested, "by_hand": BY_HAND, "lacking": missing_names}
    problems = known_problems(facts)
    if json:
        print_json({**facts, "known_problems": problems})
        return
    tests = [
        f"{name} {' to '.join(ends)}" + (f" (by hand {BY_HAND[name]})" if name in BY_HAND else "")
        for name, ends in tested.items()
    ]
    print("\n".join([*machine_lines(facts), f"Tested with {', '.join(tests)}"]))
    print("\n* ".join(["Known problems:", *problems]) if problems else "Known problems: none.")


def known_problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each problem in the facts of `info`."""
    found = []
    installed = {name: _numbers(version) for name, version in facts["packages"].items() if version is not None}
    for name, (oldest, _newest) in facts["tested"].items():
        if name in installed and installed[name][:2] < _numbers(oldest)[:2]:
            least = oldest.rpartition(".")[0]
            found.append(
                f"{name} {facts['packages'][name]} is older than flce supports: install {name} {least} or newer."
            )
    if installed.get("trl", (0,)) >= (1, 16):
        found.append(
            "The trainers of TRL 1.16 and newer do not use a patched head, unless you call "
            f"flce.huggingface.trl.install() before you create a trainer: see {locate_page('trainers.md')}."
        )
    return found + facts["lacking"]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 11, 0) of "2.11.0+cu130"."""
    parts = version.partition("+")[0].split(".")
    return tuple(map(int, itertools.takewhile(str.isdigit, parts)))


app.command()(check_command)
app.command()(plan_command)
