"""``flce info``: what this machine has, and what flce does with it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from flce.cli.environment import environment, known_problems
from flce.cli.output import Json, print_json, stdout


def info(json: Json = False) -> None:
    """Versions, devices, the backend of each and why, and known problems of this combination.

    Example: flce info
    """
    facts = environment()
    problems = known_problems(facts)
    if json:
        print_json({**facts, "known_problems": problems})
        return
    console = stdout()
    console.print(_versions(facts))
    for device in facts["devices"]:
        console.print(_device(device))
    console.print("Known problems: none." if not problems else "Known problems:")
    for problem in problems:
        console.print(f"* {problem}", soft_wrap=True)


def _versions(facts: dict[str, Any]) -> Table:
    table = Table("", "version", title="flce", title_justify="left")
    for name in ("flce", "python", "platform", "cuda"):
        table.add_row(name, facts[name] or "none")
    for name, found in facts["packages"].items():
        table.add_row(name, found or "not installed")
    for name, value in facts["variables"].items():
        table.add_row(name, value)
    return table


def _device(facts: dict[str, Any]) -> Table:
    table = Table("", facts["device"])
    table.add_row("name", facts["name"])
    if "memory" in facts:
        table.add_row("memory", f"{facts['memory'] / 2**30:.1f} GiB")
        table.add_row("compute capability", facts["capability"])
    else:
        table.add_row("cores", str(facts["cores"]))
    if facts["backend"] is None:
        table.add_row("backend", f"none: {facts['why']}")
        return table
    table.add_row("backend", f"{facts['backend']}: {facts['why']}")
    in_registers = "yes" if facts["logits_in_registers"] else "no: its kernels are for NVIDIA GPUs of capability 9"
    table.add_row("logits in registers", in_registers)
    return table
