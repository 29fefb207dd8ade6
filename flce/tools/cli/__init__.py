"""The command ``flce``, also ``python -m flce``: see `app`. A command is a function in a module of its own."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; it ends the process with an exit status.

    0: fine; 1: something was found wrong; 2: wrong usage, or a package that is missing.
    """
    try:
        from flce.tools.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"The command line of flce needs {package}: pip install 'flce[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app()
