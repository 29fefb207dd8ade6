"""Measures the fused loss beside the bare matrix products, PyTorch and other libraries: `python -m benchmarks`."""

import os

# The profiler, which measures memory on a CPU, otherwise writes two lines for every use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
