"""The command ``flce``, also ``python -m flce``. `flce.tools.cli` has its commands."""

from __future__ import annotations

import signal
import sys

COMMAND_LINE_PACKAGES = "matplotlib numpy peft rich typer"  # by their names on PyPI


def main() -> None:
    """Run the command line and end the process with an exit status.

    0: no fault; 1: a fault was found; 2: wrong usage or a missing package; 130: Ctrl-C.
    """
    if hasattr(signal, "SIGPIPE"):
        # If the reader of the output closes the pipe, the signal ends the process. Click would end it with status 1.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
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
