"""Several processes that measure together: all take every step, by the clock of the first.

python -m torch.distributed.run --nproc-per-node 2 -m benchmarks split-head --preset h200
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.cases import Effort


def begin() -> torch.device:
    """Joins the others; returns this process's device."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return device


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Agreed(Effort):
    def expired(self) -> bool:
        return agreed(super().expired())

    def enough(self, spent: float) -> bool:
        return agreed(super().enough(spent))


def agreed(answer: bool) -> bool:
    """That of the first process."""
    answers = [answer]
    dist.broadcast_object_list(answers)
    return answers[0]
