"""``python -m flce``: the command line."""

from flce.cli import main

main()
