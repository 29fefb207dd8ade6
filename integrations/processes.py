"""Two processes for the scripts that shard a model. torchrun, `accelerate launch` and `deepspeed` may start more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from demo import Curve


def run_in_two_processes(function: Callable[..., int], *arguments: object) -> int:
    """Call `function` if a launcher has started this process, else start this script twice by torchrun.

    Returns:
        The exit status of `function`, or of torchrun: 0 if both processes end with 0.
    """
    if "RANK" in os.environ:
        return function(*arguments)
    import torch  # takes seconds; it is here so that --help is fast

    if torch.cuda.device_count() < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # NCCL needs one GPU for each process
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.call([*launcher, *sys.argv])


def average_over_processes(curve: Curve) -> Curve:
    """Return the mean losses of all processes. A step was fused if it was fused in every process."""
    import torch.distributed as dist

    curves: list[Curve] = [curve] * dist.get_world_size()
    dist.all_gather_object(curves, curve)
    losses = zip(*(each.losses for each in curves), strict=True)
    fused = zip(*(each.fused for each in curves), strict=True)
    return Curve([sum(values) / len(curves) for values in losses], [all(values) for values in fused])
