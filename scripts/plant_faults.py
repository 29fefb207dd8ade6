"""Plants known faults in a copy of the project, one at a time, and tells which test finds each.

    python scripts/plant_faults.py                    # all of tests/faults.toml; the exit status is 1 if one survives
    python scripts/plant_faults.py planning sums-     # those whose name matches one of these regular expressions
    python scripts/plant_faults.py --check            # only whether each can be planted

Every test that is named has to pass without a fault: run `make test` before. `--tree` and `--list` are for the faults
of another version.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "faults.toml"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*_cache", "*.egg-info", "build", "dist", "site")
SECONDS = 900  # for the tests of one line
FAILED = 1  # pytest's exit status where a test failed; others say that it could not run


@dataclass(frozen=True)
class Fault:
    """A mistake in one place of a file, and the tests that are to find it.

    Args:
        name: what it is called in the table.
        file: within the tree.
        find: a text that is in the file exactly once.
        replace: what stands there instead.
        tests: arguments for pytest, a line for each run. The first run that fails has found the fault.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


def read(file: Path) -> list[Fault]:
    """The faults of a list.

    Raises:
        ValueError: two have one name.
    """
    entries = tomllib.loads(file.read_text())["fault"]
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    names = [fault.name for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{file} has two faults of the name {', '.join(twice)}")
    return faults


def obstacles(faults: Sequence[Fault], tree: Path) -> list[str]:
    """A sentence for each fault that cannot be planted in the tree, or whose tests are not there."""
    found = []
    for fault in faults:
        file = tree / fault.file
        count = file.read_text().count(fault.find) if file.is_file() else 0
        if count != 1 or fault.find == fault.replace:
            found.append(f"{fault.name}: {fault.file} has the text {count} times, expected once, to be changed")
        named = [word.partition("::")[0] for line in fault.tests for word in shlex.split(line)]
        missing = [path for path in named if path.startswith("tests/") and not (tree / path).exists()]
        if missing or not fault.tests:
            found.append(f"{fault.name}: there are no tests {', '.join(missing)}".rstrip())
    return found


def found_by(fault: Fault, tree: Path) -> str | None:
    """The first test that fails while the fault is in the tree; None: none does.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    file = tree / fault.file
    right = file.read_text()
    file.write_text(right.replace(fault.find, fault.replace))
    try:
        for line in fault.tests:
            failure = _failure(shlex.split(line), tree)
            if failure is not None:
                return failure
    finally:
        file.write_text(right)
    return None


def _failure(arguments: Sequence[str], tree: Path) -> str | None:
    # Without byte code: a file that is changed twice within a second might be taken for the same.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if run.returncode == 0:
        return None
    if run.returncode != FAILED:
        raise RuntimeError(f"pytest could not run {shlex.join(arguments)}:\n{(run.stdout + run.stderr)[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return failed[1] if failed else shlex.join(arguments)


def plant(faults: Sequence[Fault], tree: Path) -> list[str]:
    """Plants the faults in a copy of the tree, and prints a line for each. Returns the names of those that survive."""
    survivors = []
    width = max(len(fault.name) for fault in faults)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, ignore=NOT_COPIED, symlinks=True)
        for fault in faults:
            began = time.monotonic()
            try:
                found = found_by(fault, copy)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found = None
                print(f"{fault.name}: {error}", file=sys.stderr)
            if found is None:
                survivors.append(fault.name)
            print(f"{fault.name:{width}}  {time.monotonic() - began:5.0f} s  {found or 'SURVIVED'}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants known faults one at a time, and tells which test finds each.")
    parser.add_argument("names", nargs="*", help="regular expressions; without one all faults are planted")
    parser.add_argument("--list", type=Path, default=LIST, help="the faults")
    parser.add_argument("--tree", type=Path, default=ROOT, help="what they are planted in, that is in a copy of it")
    parser.add_argument("--check", action="store_true", help="only look whether each can be planted")
    given = parser.parse_args()
    faults = read(given.list)
    if given.names:
        faults = [fault for fault in faults if any(re.search(name, fault.name) for name in given.names)]
    wrong = obstacles(faults, given.tree)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if wrong or given.check or not faults:
        return 1 if wrong or not faults else 0
    survivors = plant(faults, given.tree.resolve())
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults are found.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
