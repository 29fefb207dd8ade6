"""Measurements of the fused loss, the bare matrix products, PyTorch and other libraries: `python -m benchmarks`."""

import os

# The profiler measures memory on a CPU. By default it writes two lines for every use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
