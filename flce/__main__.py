"""The command ``flce``, also ``python -m flce``. `flce.tools.cli` has its commands."""

from __future__ import annotations

import signal
import sys

COMMAND_LINE_PACKAGES = "matplotlib numpy rich typer"  # by their names on PyPI
INTERRUPTED = 130  # the exit status that shells give to Ctrl-C


def main() -> None:
    """Run the command line and end the process with an exit status.

    0: no fault; 1: a fault was found; 2: wrong usage or a missing package; 130: Ctrl-C.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if hasattr(signal, "SIGPIPE"):
        # If the reader of the output closes the pipe, the signal ends the process. Click would end it with status 1.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    except BaseException:  # libraries raise other errors if an import is interrupted
        if not interrupted:
            raise
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _run() -> None:
    try:
        from flce.tools.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"The command line of flce needs {package}: pip install {COMMAND_LINE_PACKAGES}", file=sys.stderr)
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
