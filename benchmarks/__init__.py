"""Measurements of the project itself, by what `flce.bench` has: `python -m benchmarks --help`."""
