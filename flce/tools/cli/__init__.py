"""The command ``flce``, also ``python -m flce``: see `app`. A command is a function in a module of its own."""

from __future__ import annotations

import signal
import sys

from flce.core.project import COMMAND_LINE_PACKAGES

INTERRUPTED = 130  # the exit status that shells give to Ctrl-C


def main() -> None:
    """Run the command line; it ends the process with an exit status.

    0: fine; 1: something was found wrong; 2: wrong usage, or a package that is missing; 130: Ctrl-C.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    except BaseException:  # libraries make other errors of an interrupted import
        if not interrupted:
            raise
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _run() -> None:
    try:
        from flce.tools.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"The command line of flce needs {package}: pip install {COMMAND_LINE_PACKAGES}", file=sys.stderr)
        raise SystemExit(2) from None
    app()
