"""Two processes for the scripts that shard a model; torchrun, `accelerate launch` and `deepspeed` start more."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

from demo import Curve


def in_two_processes(function: Callable[..., int], *arguments: object) -> int:
    """Calls `function` in two processes, and returns the larger of its two results.

    A process that a launcher has started calls it itself. The processes get what torchrun would give them: the
    environment that a process group is made of, and one thread each. They see the GPUs where there are two or more.

    Args:
        function: of a module, so that the processes find it. It returns an exit status.
        arguments: its arguments. They are pickled.
    """
    if "RANK" in os.environ:
        return function(*arguments)
    # These take seconds to import: here, so that --help does not wait for them.
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.cuda.device_count() < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # NCCL wants one for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # of a free port
        max_restarts=0,
        start_method="spawn",
    )
    return max(elastic_launch(config, function)(*arguments).values())


def of_all_processes(curve: Curve) -> Curve:
    """The mean of the processes' losses at each step, which was fused where it was in every process."""
    import torch.distributed as dist

    curves: list[Curve] = [curve] * dist.get_world_size()
    dist.all_gather_object(curves, curve)
    losses = zip(*(each.losses for each in curves), strict=True)
    fused = zip(*(each.fused for each in curves), strict=True)
    return Curve([sum(values) / len(curves) for values in losses], [all(values) for values in fused])
