"""Measures the fused loss beside the bare matrix products, PyTorch and other libraries: what ``flce bench`` runs.

`comparison` measures a case of `problem` with the contenders of `contenders`. What it uses knows nothing of the loss:
`cases` (who is measured on what), `measure` (time and memory, in turn), `results`, `tables`, `plots`.
"""

import os

# The profiler, which measures memory on a CPU, otherwise writes two lines for every use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
