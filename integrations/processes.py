"""Two processes for the scripts that shard a model. torchrun, `accelerate launch` and `deepspeed` may start more."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

from demo import Curve


def run_in_two_processes(function: Callable[..., int], *arguments: object) -> int:
    """Call `function` in two processes, and return the larger of the two results.

    If a launcher has started this process, `function` is called here. The two processes have the environment that
    torchrun sets for a process group, and one thread each. They use GPUs if there are two or more.

    Args:
        function: a function of a module, so that the processes can import it. It returns an exit status.
        arguments: the arguments of `function`. They are pickled.
    """
    if "RANK" in os.environ:
        return function(*arguments)
    # These imports take seconds. They are here so that --help is fast.
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.cuda.device_count() < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # NCCL needs one GPU for each process
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        max_restarts=0,
        start_method="spawn",
    )
    return max(elastic_launch(config, function)(*arguments).values())


def average_over_processes(curve: Curve) -> Curve:
    """Return the mean losses of all processes. A step was fused if it was fused in every process."""
    import torch.distributed as dist

    curves: list[Curve] = [curve] * dist.get_world_size()
    dist.all_gather_object(curves, curve)
    losses = zip(*(each.losses for each in curves), strict=True)
    fused = zip(*(each.fused for each in curves), strict=True)
    return Curve([sum(values) / len(curves) for values in losses], [all(values) for values in fused])
