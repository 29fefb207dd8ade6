"""Mutation tests of a fixed sample of cosmic-ray's mutants of the modules of mutants.toml: `make mutants`.

Each worker mutates a copy of the repository. A mutant that survives its tests gets a test, or an entry in mutants.txt:
a line with the reason, then the lines of the change as this program prints them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tomllib
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "mutants"
EXPLAINED = ROOT / "scripts" / "mutants.txt"
# A mutant counts as found after this multiple of the time of its tests, plus these seconds.
SLOWER, GRACE = 4, 60


def mutants(files: list[Path], left_out: list[str]) -> list[Any]:
    """Return all mutations of these files, in a fixed order."""
    session = CACHE / "session.sqlite"
    session.unlink(missing_ok=True)
    with use_db(str(session), WorkDB.Mode.create) as database:
        init(files, database, {})
        found = [mutation for item in database.work_items for mutation in item.mutations]
    found = [m for m in found if not m.operator_name.partition("/")[2].startswith(tuple(left_out))]
    return sorted(found, key=lambda m: (str(m.module_path), m.operator_name, m.occurrence))


def place_in_sample(mutation: Any, seed: int) -> str:
    """Return a random number of the mutated line, so that other changes of the code leave it in the sample."""
    line = (ROOT / mutation.module_path).read_text().splitlines()[mutation.start_pos[0] - 1]
    text = f"{seed} {mutation.module_path} {mutation.operator_name} {line} {mutation.start_pos[1]}"
    return hashlib.sha256(text.encode()).hexdigest()


def copy_repository() -> None:
    """Create a copy for this worker, in which the tests run."""
    folder = CACHE / f"copy-{os.getpid()}"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    os.chdir(folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def seconds(command: str) -> float:
    """Return the time of the tests without a mutation. Exit if they fail."""
    started = time.monotonic()
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} fails without a mutation:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return time.monotonic() - started


def outcome_of(mutation: Any, command: str, limit: float) -> tuple[str, str]:
    """Return "survived" or "found", and the change of the mutant."""
    result = mutate_and_test([mutation], command, limit)
    lines = [line for line in (result.diff or "").splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    outcome = "survived" if result.test_outcome == TestOutcome.SURVIVED else "found"
    return outcome, "\n".join([f"{mutation.module_path}", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants of all modules together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="only modules whose path contains this text")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the tests")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    config = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())
    tests = {
        module["file"]: f"{options.python} -m pytest -x -q -p no:cacheprovider {module['tests']}"
        for module in config["module"]
    }
    every = mutants([Path(file) for file in tests], config["leave-out"])
    sample = sorted(every, key=lambda mutation: place_in_sample(mutation, options.seed))[: options.count]
    sample = [mutation for mutation in sample if options.only in str(mutation.module_path)]
    print(f"{len(sample)} of {len(every)} mutants", flush=True)
    explained, survivors = EXPLAINED.read_text() if EXPLAINED.exists() else "", []
    with ProcessPoolExecutor(options.workers, initializer=copy_repository) as pool:
        paths = [str(mutation.module_path) for mutation in sample]
        files = dict.fromkeys(paths)
        times = dict(zip(files, pool.map(seconds, [tests[file] for file in files]), strict=True))
        for file, time_of in times.items():
            print(f"{file}: its tests take {time_of:.0f} s", flush=True)
        limits = [SLOWER * times[path] + GRACE for path in paths]
        commands = [tests[path] for path in paths]
        for number, (outcome, change) in enumerate(pool.map(outcome_of, sample, commands, limits), 1):
            print(f"{number}: {outcome}: {change}", flush=True)
            if outcome == "survived" and change not in explained:
                survivors.append(change)
    for copy in CACHE.glob("copy-*"):
        shutil.rmtree(copy)
    (CACHE / "survivors.txt").write_text("".join(f"REASON\n{change}\n\n" for change in survivors))
    print(f"{len(survivors)} survivors without a test or a reason: {CACHE / 'survivors.txt'}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
