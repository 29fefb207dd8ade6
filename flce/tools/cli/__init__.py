"""The command ``flce``, also ``python -m flce``. `app` lists its commands; each has a module."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from flce.core.project import COMMAND_LINE_PACKAGES

T = TypeVar("T")
INTERRUPTED, CLOSED_PIPE = 130, 141  # the exit statuses that shells give to Ctrl-C, and to `flce info | head -1`


def main() -> None:
    """Run the command line and end the process with an exit status.

    0: no fault; 1: a fault was found; 2: wrong usage or a missing package; 130: Ctrl-C; 141: the reader of the output
    has closed it.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    sys.stdout = _Output(sys.stdout)
    try:
        _run()
    except BaseException:  # libraries raise other errors if an import is interrupted
        if not interrupted:
            raise
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)


class _Output:
    """stdout of the commands. It ends the process if the reader has closed the pipe: click would end it with 1."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._until_closed(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._until_closed(self._stream.flush)

    def _until_closed(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # Python flushes stdout at its end
            raise SystemExit(CLOSED_PIPE) from None


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
