"""``python -m flce``: the command line."""

from flce.tools.cli import main

main()
