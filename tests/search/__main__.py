"""Random calls and programs, compared with float64 or with stock PyTorch.

    python -m tests.search --minutes 10 --device cpu --seed 0 [--only operator]

A call that fails is shrunk, printed as a command that runs it again, and kept in tests/regressions.txt. At the end the
table has, for each result, error / bound: the 99.9th percentile, which should be 0.25 or more, and the maximum.
"""

from __future__ import annotations

import argparse
import sys
import warnings


def main() -> int:
    from tests.search import driver, kinds

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="processes with other seeds draw other calls")
    parser.add_argument("--only", default="", help="kinds, separated by commas")
    parser.add_argument("--count", type=int, default=None, help="calls, instead of minutes")
    parser.add_argument("--shrink", type=float, default=driver.SHRINKING_SECONDS, help="seconds to shrink a call")
    parser.add_argument("--again", default="", metavar="LINE", help="run one call")
    arguments = parser.parse_args()

    driver.SHRINKING_SECONDS = arguments.shrink
    kinds.prepare(arguments.device)
    warnings.simplefilter("ignore")
    known = kinds.load()
    names = [name for name in arguments.only.split(",") if name] or [
        name for name, kind in known.items() if arguments.device == "cpu" or name not in kinds.ONLY_ON_CPU
    ]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown kinds {', '.join(unknown)}: expected {', '.join(known)}")
    search = driver.Search({name: known[name] for name in names}, arguments.device)
    if arguments.again:
        name, call = driver.parse(arguments.again)
        failure = search.try_call(known[name], call)
        print(failure or ("refused" if search.refused else "passes"))
        return int(failure is not None)
    seconds = float("inf") if arguments.count is not None else 60.0 * arguments.minutes
    search.run(arguments.seed, seconds, arguments.count)
    print("\n".join(search.errors.table()))
    print(f"{search.calls} calls, {search.refused} refused, {len(search.failures)} failed", flush=True)
    return int(bool(search.failures))


if __name__ == "__main__":
    sys.exit(main())
