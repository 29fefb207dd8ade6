"""Benchmarks of flce beside its peers: `python -m benchmarks --help`."""

import os

# The profiler, which measures memory on a CPU, otherwise writes two lines for every use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
