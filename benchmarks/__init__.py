"""Measurements of the project itself, by what `flce.tools.bench` has: `python -m benchmarks --help`."""
