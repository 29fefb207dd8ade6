"""The command ``flce info``: versions, devices and backends of this machine."""

from __future__ import annotations

import itertools
import os
import shutil
from typing import Any

from rich.table import Table

from flce.core.project import locate_page
from flce.core.sizes import size_text
from flce.tools.cli.output import Json, print_json, print_table, stdout


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
    console = stdout()
    print_table(console, _versions(facts))
    for device in facts["devices"]:
        print_table(console, _device(device))
    console.print("Known problems: none." if not problems else "Known problems:")
    for problem in problems:
        console.print(f"* {problem}", soft_wrap=True)


def _versions(facts: dict[str, Any]) -> Table:
    table = Table("", "version", "tested with", title="flce", title_justify="left")
    for name in ("flce", "python", "platform", "cuda"):
        table.add_row(name, facts[name] or "none")
    for name, found in facts["packages"].items():
        tested, by_hand = " to ".join(facts["tested"].get(name, ())), facts["by_hand"].get(name)
        table.add_row(name, found or "not installed", f"{tested}; by hand {by_hand}" if by_hand else tested)
    for name, value in facts["variables"].items():
        table.add_row(name, value)
    return table


def _device(facts: dict[str, Any]) -> Table:
    rows = {"name": facts["name"]}
    if "memory" in facts:
        rows |= {"memory": size_text(facts["memory"]), "compute capability": facts["capability"]}
    else:
        rows["cores"] = str(facts["cores"])
    rows["backend"] = f"{facts['backend'] or 'none'}: {facts['why']}"
    if facts["backend"] is not None:
        reason = "no: its kernels are for NVIDIA GPUs of capability 9, unless a profile switches them off"
        rows["logits in registers"] = "yes" if facts["logits_in_registers"] else reason
        if facts["profile"]:
            rows["profile"] = facts["profile"]
    table = Table("", facts["device"])
    for row in rows.items():
        table.add_row(*row)
    return table


def known_problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each problem in the facts of `flce.tools.machine.environment`."""
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    installed = {name: _numbers(found) for name, found in facts["packages"].items() if found is not None}
    found = [f"{device['device']}: {device['why']}" for device in facts["devices"] if device["backend"] is None]
    for name, (oldest, _newest) in facts["tested"].items():
        if name in installed and installed[name][:2] < _numbers(oldest)[:2]:
            found.append(
                f"{name} {facts['packages'][name]} is older than flce supports: install {name} "
                f"{oldest.rpartition('.')[0]} or newer."
            )
    interpreted = facts["variables"].get("TRITON_INTERPRET") == "1"
    old_triton = installed.get("triton", (3, 7)) < (3, 7)
    others = {
        "A GPU runs PyTorch's operators instead of the Triton kernels, which is slower: see the reason above.": any(
            device["backend"] == "torch" for device in gpus
        ),
        "The kernels that keep logits in registers are for compute capability 9 (H100, H200). Other GPUs store "
        "the logits of a chunk in memory: exact, but slower.": any(
            device["backend"] == "triton" and not device["logits_in_registers"] for device in gpus
        ),
        "TRITON_INTERPRET=1 is for tests: kernels take a thousand times longer.": interpreted,
        "The interpreter of Triton before 3.7 does not work with NumPy 2.4 or newer: install numpy<2.4.": (
            interpreted and old_triton and installed.get("numpy", (0,)) >= (2, 4)
        ),
        "Triton before 3.7 needs a C compiler for its first launch, and none was found: install gcc.": (
            gpus and old_triton and not _has_c_compiler()
        ),
        "The trainers of TRL 1.16 and newer do not use a patched head, unless you call "
        f"flce.huggingface.trl.install() before you create a trainer: see {locate_page('trainers.md')}.": (
            installed.get("trl", (0,)) >= (1, 16)
        ),
    }
    return [*found, *facts["lacking"], *(problem for problem, is_there in others.items() if is_there)]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 11, 0) of "2.11.0+cu130"."""
    parts = version.partition("+")[0].split(".")
    return tuple(map(int, itertools.takewhile(str.isdigit, parts)))


def _has_c_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
