"""Comparisons of pipelines, the last stage of which has a patched head, with stock."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("torch.distributed.pipelining")

from torch.distributed import pipelining

import flce
from flce.huggingface import MaterializedLogitsWarning
from tests.distributed.training import LastStage, V, batch, device, from_transformers, tiny_llama
from tests.helpers import skip_without_gradient_edges
from tests.processes import in_processes

SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)


@pytest.mark.parametrize("name", SCHEDULES)
@in_processes(2)
def test_schedules(name: str) -> None:
    """Compare schedules of ``torch.distributed.pipelining`` with a patched and a stock last stage."""
    if "ZeroBubble" in name:
        skip_without_gradient_edges()
    rank, size = dist.get_rank(), dist.get_world_size()
    has_several = name in SCHEDULES[2:]  # several stages in each process
    count = 2 * size if has_several else size
    places = {
        "ScheduleZBVZeroBubble": [rank, count - 1 - rank],
        "ScheduleInterleaved1F1B": [rank, rank + size],
        "ScheduleInterleavedZeroBubble": [rank, rank + size],
    }
    ids = torch.cat([batch(i, 0) for i in range(4)])
    results = []
    for patched in (False, True):
        torch.manual_seed(0)
        first, middle = nn.Embedding(V, 32), [nn.Linear(32, 32) for _ in range(count - 2)]
        modules = [*(nn.Sequential(layer, nn.Tanh()) for layer in (first, *middle)), LastStage()]
        if patched:
            flce.patch_model(modules[-1], on_materialize="raise")
        local_modules = [modules[i].to(device()) for i in places.get(name, [rank])]
        stages = [
            pipelining.PipelineStage(module, i, count, device())
            for module, i in zip(local_modules, places.get(name, [rank]), strict=True)
        ]
        kind = getattr(pipelining, name)
        schedule = kind(
            stages if has_several else stages[0],
            n_microbatches=4,
            loss_fn=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        )
        losses: list[Tensor] = []
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error", MaterializedLogitsWarning)
                schedule.step(*[ids] * (0 in places.get(name, [rank])), target=ids, losses=losses, return_outputs=False)
        results.append(([loss.detach() for loss in losses], [[p.grad for p in m.parameters()] for m in local_modules]))
        report = flce.report(modules[-1])
        # PyTorch may call the stage once more to infer shapes.
        assert report.fused >= 8 * (patched and modules[-1] in local_modules), report
        assert not report.stock, report
    torch.testing.assert_close(results[1], results[0])


def shifted_sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten(), reduction="sum") / 64


class Backbone(nn.Module):
    """Model that returns hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embedding(ids)).tanh()


@in_processes(2)
def test_exported() -> None:
    """Check a pipeline of ``pipeline()``, which exports modules: its last stage returns hidden states, and the loss
    function of the schedule calls the operator."""
    torch.manual_seed(0)
    rank, model, ids = dist.get_rank(), Backbone(), torch.cat([batch(i, 0) for i in range(2)]).cpu()
    weight = torch.randn(V, 32)
    whole, full_weight = copy.deepcopy(model), weight.clone().requires_grad_()
    shifted_sum(F.linear(whole(ids), full_weight), ids).backward()
    split = {"layer": pipelining.SplitPoint.BEGINNING}
    stage = pipelining.pipeline(model, mb_args=(ids[:1],), split_spec=split).build_stage(rank, torch.device("cpu"))
    weight.requires_grad_()

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return flce.fused_linear_cross_entropy(hidden, weight, target, shift=1, reduction="sum", num_items=64)

    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss, scale_grads=False)
    schedule.step(*[ids] * (rank == 0), target=ids, return_outputs=False)
    if rank == 1:
        torch.testing.assert_close(weight.grad, full_weight.grad)
    parameters = dict(whole.named_parameters())
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad)


@in_processes(2)
def test_of_transformers() -> None:
    """Check Transformers' pipeline, which only computes logits: it sends the logits of the last stage to all."""
    pytest.importorskip("transformers", minversion="5.20")
    stock, ids = tiny_llama(), batch(0, 0)
    model = flce.patch_model(from_transformers(stock, pp_size=2))
    expected = stock(input_ids=ids).logits
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, expected)
    with pytest.warns(MaterializedLogitsWarning) if dist.get_rank() == 1 else warnings.catch_warnings():
        torch.testing.assert_close(model.train()(input_ids=ids).logits + 0, expected)
