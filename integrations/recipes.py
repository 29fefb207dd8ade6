"""Runs every script of this folder that compares stock with flce, in full and one after the other: `make recipes`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import typer

FOLDER = Path(__file__).resolve().parent
# Options that show something else; each script runs without any, too.
OPTIONS = {
    "deepspeed_zero3.py": [["--stage=2"]],
    "qlora.py": [["--adapt-head"]],
    "trainer.py": [["--gradient-accumulation=4", "--label-smoothing=0.1", "--checkpointing"]],
    "trl_sft.py": [["--lora"], ["--trl-kernel"]],
}


def scripts(folder: Path) -> list[Path]:
    """Those that can be started and that compare."""
    return [
        path
        for path in sorted(folder.glob("*.py"))
        if "\nfrom compare import " in (text := path.read_text(encoding="utf-8")) and "\n    typer.run(main)" in text
    ]


def commands(folder: Path) -> list[list[str]]:
    """Each script with its options, as arguments of Python."""
    return [[str(path), *options] for path in scripts(folder) for options in ([], *OPTIONS.get(path.name, []))]


@dataclass(frozen=True)
class ScriptOutcome:
    """How a command ended.

    Attributes:
        command: the script's name and its options.
        verdict: "ok", "FAILED", or why the script cannot run on this machine.
        seconds: that it took.
    """

    command: str
    verdict: str
    seconds: float


def run(command: list[str]) -> ScriptOutcome:
    """Runs a script, whose output goes where this one's goes.

    A script that cannot run here says so and ends with status 2 (`compare.cannot_run`). Status 2 alone is wrong usage,
    and a failure.
    """
    name = " ".join([Path(command[0]).name, *command[1:]])
    typer.echo(f"== {name}")
    begin = time.monotonic()
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            typer.echo(line, err=True, nl=False)
            last = line.strip() or last
    seconds = time.monotonic() - begin
    _, refuses, reason = last.partition(" cannot run here: ")
    if process.returncode == 2 and refuses:
        return ScriptOutcome(name, f"cannot run here: {reason}", seconds)
    return ScriptOutcome(name, "FAILED" if process.returncode else "ok", seconds)


def run_all(every: Iterable[list[str]]) -> int:
    """Runs commands, prints how each ended, and returns 1 if one failed, else 0."""
    outcomes = [run(command) for command in every]
    width = max((len(outcome.command) for outcome in outcomes), default=0)
    typer.echo("")
    for outcome in outcomes:
        typer.echo(f"{outcome.command:{width}}  {outcome.seconds:4.0f} s  {outcome.verdict}")
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


def main() -> None:
    """Run all scripts that compare stock with flce; the exit status is 1 if one of them failed."""
    raise typer.Exit(run_all(commands(FOLDER)))


if __name__ == "__main__":
    typer.run(main)
