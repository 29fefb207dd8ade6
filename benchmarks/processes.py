"""Several processes that measure together: all execute the same steps, by the clock of the first process.

python -m torch.distributed.run --nproc-per-node 2 -m benchmarks split-head --preset h200
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.cases import Effort


def begin() -> torch.device:
    """Initialize the process group. Return the device of this process."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return device


class Agreed(Effort):
    """An effort whose answers are the answers of the first process."""

    def expired(self) -> bool:
        return broadcast(super().expired())

    def enough(self, spent: float) -> bool:
        return broadcast(super().enough(spent))


def broadcast(answer: bool) -> bool:
    answers = [answer]
    dist.broadcast_object_list(answers)
    return answers[0]
